"""Values of the chart: one pod for both services, downloads, caches, gateways, and refused values."""

from __future__ import annotations

import subprocess
import sys

import images
import kubernetes_validate
import pytest
from deployment import services
from helm_chart import CHART, CUSTOM, FULL, KUBERNETES, container, helm, of_kind, pods, render, service_options
from images import options

from draftwire.model.checkpoints import MODEL_FILES
from verifier_service.cli import verifier

COLOCATED = {
    **FULL,
    "drafter": {**FULL["drafter"], "colocated": True, "autoscaling": {"enabled": False}},
    "rendezvous": {"hostPath": ""},
}


@pytest.fixture(scope="module")
def colocated() -> list[dict]:
    return render(COLOCATED)


@pytest.fixture(scope="module")
def full() -> list[dict]:
    return render(FULL)


def containers(manifests: list[dict]) -> dict[str, dict]:
    """Return the containers of both services in the only pod."""
    (pod,) = pods(manifests).values()
    return {each["name"]: each for each in pod["spec"]["containers"]}


def colocated_options(manifests: list[dict], name: str) -> dict:
    return images.service_options(name, containers(manifests)[name]["args"])


@pytest.mark.parametrize("version", KUBERNETES)
def test_a_pod_of_both_services_is_valid(colocated, version):
    for manifest in colocated:
        if manifest["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_colocated_drafter_is_in_the_pod_of_its_verifier(colocated):
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler"):
        assert of_kind(colocated, kind).keys() == {"verifier"}
    assert containers(colocated).keys() == {"drafter", "verifier"}
    # Containers of a pod share its network namespace, and with it the sockets of the rendezvous.
    address = colocated_options(colocated, "drafter")["listen"]
    assert address.startswith("127.0.0.1:")
    assert colocated_options(colocated, "verifier")["drafters"] == address
    assert colocated_options(colocated, "drafter")["rendezvous_dir"] is None


def test_containers_of_a_pod_share_no_port(colocated):
    ports = [port for each in containers(colocated).values() for port in each["ports"]]
    assert len({port["containerPort"] for port in ports}) == len({port["name"] for port in ports}) == len(ports) == 6
    for name, each in containers(colocated).items():
        read = colocated_options(colocated, name)
        served = {read[f"{key}listen"].split(":")[1] for key in ("", "health_", "metrics_")}
        assert served == {str(port["containerPort"]) for port in each["ports"]}


def test_a_colocated_drafter_keeps_no_verifier_from_clients(colocated):
    drafter = containers(colocated)["drafter"]
    assert not {"startupProbe", "readinessProbe"} & drafter.keys()
    assert drafter["livenessProbe"]["initialDelaySeconds"] == 600
    port = int(colocated_options(colocated, "drafter")["health_listen"].split(":")[1])
    assert drafter["livenessProbe"]["grpc"] == {"port": port}


def test_mounts_of_a_shared_pod_have_volumes(colocated):
    (pod,) = pods(colocated).values()
    names = [volume["name"] for volume in pod["spec"]["volumes"]]
    assert len(names) == len(set(names))
    every = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    assert {mount["name"] for each in every for mount in each.get("volumeMounts", [])} == set(names)
    secrets = {
        volume["name"]: volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in containers(colocated)["drafter"]["volumeMounts"]}
    assert secrets["drafter-tls"] == "draftwire-drafter-tls"
    assert mounted["drafter-tls"] == "/run/tls"


def test_both_services_of_a_pod_are_scraped(colocated):
    monitors = of_kind(colocated, "PodMonitor")
    (pod,) = pods(colocated).values()
    ports = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
    for name, monitor in monitors.items():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports
        job = pod["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        for rule in endpoint.get("relabelings", []):
            assert rule.keys() == {"targetLabel", "replacement"}
            job = rule["replacement"]
        assert job == name
    (policy,) = of_kind(colocated, "NetworkPolicy").values()
    open_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert open_ports == {"grpc", "metrics", "drafter-metrics"}


def test_compiled_code_is_kept_where_compose_keeps_it(full):
    (environment,) = {tuple(sorted(service["environment"].items())) for service in services("gpu").values()}
    for manifests, volume in ((full, "persistentVolumeClaim"), (render({}), "emptyDir")):
        for pod in pods(manifests).values():
            given = {each["name"]: each.get("value") for each in container(pod)["env"]}
            assert dict(environment).items() <= given.items()
            (kept,) = (each for each in pod["spec"]["volumes"] if each["name"] == "compile-cache")
            assert volume in kept
            mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
            assert all(path.startswith(mounts["compile-cache"]) for _, path in environment)


def test_shared_memory_is_for_the_processes_of_a_split_target():
    (shm,) = (each for each in pods(render({}))["verifier"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    for pod in pods(render({"verifier": {"shmSizeLimit": ""}})).values():
        assert "shm" not in {volume["name"] for volume in pod["spec"]["volumes"]}
        assert "/dev/shm" not in {mount["mountPath"] for mount in container(pod)["volumeMounts"]}


def test_models_are_downloaded_where_the_services_look(full):
    wanted = {"drafter": {"target", "head"}, "verifier": {"target"}}
    for name, pod in pods(full).items():
        downloads = [each for each in pod["spec"]["initContainers"] if each["name"].startswith("download-")]
        assert {each["name"].removeprefix("download-") for each in downloads} == wanted[name]
        read = service_options(full, name)
        for each in downloads:
            program, command, model, *given = each["command"]
            assert (program, command) == ("hf", "download")
            assert model == FULL["models"][each["name"].removeprefix("download-")]
            assert f"--local-dir={read[each['name'].removeprefix('download-')]}" in given
            assert [part for part in given if "--include" in part] == [f"--include={each}" for each in MODEL_FILES]
            (mount,) = (mount for mount in each["volumeMounts"] if mount["name"] == "models")
            assert not mount.get("readOnly")


def test_the_services_never_have_the_token_of_the_hub(full):
    for pod in pods(full).values():
        named = {each["name"]: each for each in pod["spec"]["initContainers"][0]["env"]}
        assert named["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        given = {each["name"]: each.get("value") for each in container(pod)["env"]}
        assert "HF_TOKEN" not in given
        assert given["HF_HUB_OFFLINE"] == "1"


def test_downloads_reach_the_hub_and_other_pods_do_not():
    for download, is_open in (({}, False), (FULL["models"], True)):
        for policy in of_kind(render({"models": download}), "NetworkPolicy").values():
            ports = {port["port"] for rule in policy["spec"].get("egress", []) for port in rule["ports"]}
            assert (443 in ports) == is_open
            assert 53 in ports or not is_open


def test_pods_have_a_volume_of_their_own_without_a_claim():
    models = {"claim": "", "target": "o/target", "head": "o/head", "download": {"enabled": True}}
    for pod in pods(render({"models": models})).values():
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "models")
        assert volume == {"name": "models", "emptyDir": {}}


@pytest.mark.parametrize(
    ("models", "is_read_only"),
    [
        ({}, True),
        ({"readOnly": False}, False),
        ({"target": "o/target", "head": "o/head", "download": {"enabled": True}}, False),
    ],
)
def test_a_claim_is_writable_for_who_fills_it_alone(models, is_read_only):
    for pod in pods(render({"models": models})).values():
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "models")
        assert volume["persistentVolumeClaim"]["readOnly"] == is_read_only
        (mount,) = (each for each in container(pod)["volumeMounts"] if each["name"] == "models")
        assert mount["readOnly"]


def test_own_variables_replace_those_of_the_chart():
    values = {name: {"env": {"TRITON_CACHE_DIR": "/scratch"}} for name in ("drafter", "verifier")}
    for pod in pods(render(values)).values():
        given = [each["name"] for each in container(pod)["env"]]
        assert len(given) == len(set(given))
        assert {"name": "TRITON_CACHE_DIR", "value": "/scratch"} in container(pod)["env"]


def test_extra_objects_are_in_the_pods(full):
    for name, pod in pods(full).items():
        assert container(pod)["envFrom"] == FULL[name]["envFrom"]
        assert FULL[name]["extraVolumes"][0] in pod["spec"]["volumes"]
        assert FULL[name]["extraVolumeMounts"][0] in container(pod)["volumeMounts"]
        assert pod["spec"]["initContainers"][-1] == FULL[name]["initContainers"][0]
        source = {"name": "PASSWORD", "valueFrom": FULL[name]["env"]["PASSWORD"]}
        assert source in container(pod)["env"]


def test_pods_of_one_node_share_memory_by_a_directory(full):
    for name, pod in pods(full).items():
        given = {each["name"]: each.get("value") for each in container(pod)["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        assert given["DRAFTWIRE_RENDEZVOUS_DIR"] == mounts["rendezvous"], name


def test_a_service_account_is_made_or_named(full):
    (account,) = (manifest for manifest in full if manifest["kind"] == "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "reader"}
    cases = (
        (full, account["metadata"]["name"]),
        (render({"serviceAccount": {"name": "own"}}), "own"),
        (render({}), None),
    )
    for manifests, name in cases:
        assert {pod["spec"].get("serviceAccountName") for pod in pods(manifests).values()} == {name}
        assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(manifests).values())


def test_verifiers_scale_by_what_is_asked_for():
    def asked(scaling: dict) -> dict[str, str]:
        manifests = render({"verifier": {"autoscaling": {"enabled": True, **scaling}}})
        (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler").values()
        metrics = [metric["pods"] for metric in scaler["spec"]["metrics"]]
        return {metric["metric"]["name"]: metric["target"]["averageValue"] for metric in metrics}

    waiting, running, cache = (
        *("draftwire_num_requests_waiting", "draftwire_num_requests_running"),
        "draftwire_kv_cache_usage_perc",
    )
    assert asked({}) == {waiting: "4", running: "48", cache: "0.8"}
    assert asked({"targetRequestsWaiting": "", "targetRequestsRunning": ""}) == {cache: "0.8"}
    most = options(verifier, ["--target=x"])["max_num_seqs"]
    assert int(asked({})[running]) == 0.75 * most


def test_a_headless_service_leads_to_the_pods():
    service = of_kind(render({"verifier": {"service": {"headless": True}}}), "Service")["verifier"]
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert port["port"] == 50051
    assert "clusterIP" not in of_kind(render({}), "Service")["verifier"]["spec"]


def test_a_route_leads_from_a_gateway_to_the_verifiers(full):
    """The route is a GRPCRoute of Gateway API 1.1; Kubernetes' schemas do not include it."""
    (route,) = (manifest for manifest in full if manifest["kind"] == "GRPCRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["metadata"]["annotations"] == {"team": "inference"}
    spec = route["spec"]
    assert spec.keys() == {"parentRefs", "hostnames", "rules"}
    assert spec["parentRefs"] == FULL["verifier"]["grpcRoute"]["parentRefs"]
    assert spec["hostnames"] == ["generate.example.com"]
    service = of_kind(full, "Service")["verifier"]
    backend = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert spec["rules"] == [{"backendRefs": [backend]}]
    assert route["metadata"]["namespace"] == service["metadata"]["namespace"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"drafter": {"replica": 3}}, "replica"),
        ({"verifier": {"replicas": -1}}, "replicas"),
        ({"tls": {"enabled": "no"}}, "enabled"),
        ({"drafter": {"autoscaling": {"targetStepSeconds": "5 ms"}}}, "targetStepSeconds"),
        ({"verifier": {"autoscaling": {"targetCacheUsage": "80 %"}}}, "targetCacheUsage"),
        ({"verifier": {"shmSizeLimit": "1 GB"}}, "shmSizeLimit"),
        ({"verifier": {"env": {"PASSWORD": {"secretRef": {"name": "proxy"}}}}}, "PASSWORD"),
        ({"drafter": {"extraVolumeMounts": [{"name": "scratch"}]}}, "mountPath"),
        ({"compileCache": {"hostPath": "var/cache"}}, "hostPath"),
        ({"serviceAccount": {"token": True}}, "token"),
        ({"models": {"download": {"enabled": "yes"}}}, "enabled"),
    ],
)
def test_wrong_values_are_refused_by_name(values, field):
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=field):
        chart.validate_schema(chart.merge_values(values))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"models": {"claim": ""}}, "models.claim: give a claim or models.hostPath"),
        ({"models": {"download": {"enabled": True}}}, 'models.target = "target": .* must be a hub id'),
        ({"drafter": {"colocated": True, "autoscaling": {"enabled": True}}}, "must be false with drafter.colocated"),
        ({"verifier": {"service": {"headless": True, "type": "NodePort"}}}, "needs verifier.service.type ClusterIP"),
        ({"verifier": {"service": {"headless": True, "port": 443}}}, "needs verifier.service.port 50051"),
        ({"verifier": {"grpcRoute": {"enabled": True}}}, "verifier.grpcRoute.parentRefs: give the Gateway"),
        (
            {
                "verifier": {
                    "autoscaling": {
                        **{"enabled": True, "targetRequestsWaiting": ""},
                        **{"targetRequestsRunning": "", "targetCacheUsage": ""},
                    }
                }
            },
            "give at least one of",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(values, text):
    with pytest.raises(helm.HelmError, match=text):
        render(values)


@pytest.mark.full
def test_the_program_that_downloads_knows_its_options():
    program = "from huggingface_hub.cli.hf import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", program, "download", "--help"], capture_output=True, text=True, check=True
    )
    assert all(option in shown.stdout for option in ("--revision", "--local-dir", "--include"))
