"""The Helm chart, rendered by Helm's own library: valid for Kubernetes and consistent with the code."""

from __future__ import annotations

import json
import re
import tomllib

import deployment
import images
import kubernetes_validate
import pytest
import yaml
from helm_chart import (
    CHART,
    CUSTOM,
    FULL,
    KUBERNETES,
    PLAIN,
    VALUES,
    container,
    helm,
    of_kind,
    pods,
    render,
    service_options,
)
from images import COMMANDS


@pytest.fixture(scope="module", params=VALUES)
def manifests(request: pytest.FixtureRequest) -> list[dict]:
    return render(VALUES[request.param])


def manifests_are_full(manifests: list[dict]) -> bool:
    return any(manifest["kind"] == "GRPCRoute" for manifest in manifests)


def test_helm_finds_nothing_to_warn_of():
    report = helm.lint(CHART, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(manifests, version):
    own = [manifest for manifest in manifests if manifest["apiVersion"] not in CUSTOM]
    for manifest in own:
        kubernetes_validate.validate(manifest, version, strict=True)
    kinds = {manifest["kind"] for manifest in own}
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds


def test_all_options_together_render_every_kind():
    assert {manifest["kind"] for manifest in render(FULL)} == {
        "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "PodMonitor",
        "PrometheusRule", "ServiceAccount", "GRPCRoute",
    }  # fmt: skip


def test_selectors_match_the_pods_of_their_service_alone(manifests):
    labels = {name: pod["metadata"]["labels"].items() for name, pod in pods(manifests).items()}
    assert labels.keys() == COMMANDS.keys()
    monitors = ["PodMonitor"] if of_kind(manifests, "PodMonitor") else []
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", *monitors):
        found = of_kind(manifests, kind)
        assert found.keys() == labels.keys()
        for name, manifest in found.items():
            spec = manifest["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            selected = selector.get("matchLabels", selector).items()
            assert [other for other in labels if selected <= labels[other]] == [name]


def test_named_ports_exist(manifests):
    named = {
        name: {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        for name, pod in pods(manifests).items()
    }
    for name, service in of_kind(manifests, "Service").items():
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["grpc"]
        assert named[name]["grpc"] == int(service_options(manifests, name)["listen"].split(":")[1])
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        used = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert used == named[name].keys() - {"health"}  # network policies do not apply to the kubelet of a pod's node


def test_services_understand_their_arguments(manifests):
    for name in COMMANDS:
        read = service_options(manifests, name)
        mounts = [mount["mountPath"] for mount in container(pods(manifests)[name])["volumeMounts"]]
        files = [str(value) for key, value in read.items() if key in ("head", "target") or "tls" in key if value]
        assert files
        assert all(any(file.startswith(mount + "/") for mount in mounts) for file in files)


def test_verifiers_find_drafters_through_a_headless_service(manifests):
    service = of_kind(manifests, "Service")["drafter"]
    assert service["spec"]["clusterIP"] == "None"
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert service_options(manifests, "verifier")["drafters"] == f"{name}.prod.svc:{port}"


def test_probes_ask_the_health_service_without_certificates(manifests):
    for name, pod in pods(manifests).items():
        (port,) = (port["containerPort"] for port in container(pod)["ports"] if port["name"] == "health")
        assert service_options(manifests, name)["health_listen"] == f"0.0.0.0:{port}"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container(pod)[kind]
            assert probe["grpc"] == {"port": port}
            assert "exec" not in probe


def test_a_pod_has_time_to_drain(manifests):
    for name, pod in pods(manifests).items():
        hooks = container(pod).get("lifecycle", {"preStop": {"exec": {"command": ["sleep", "0"]}}})
        _, hook_s = hooks["preStop"]["exec"]["command"]
        drain_s = service_options(manifests, name)["drain_timeout"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= int(hook_s) + drain_s + 5


def test_plain_text_is_asked_for_and_never_beside_tls():
    for values, is_plain in ((PLAIN, True), (FULL, False)):
        for name in COMMANDS:
            read = service_options(render(values), name)
            assert read["insecure"] == is_plain
            assert bool(read["tls_cert"] and read["tls_key"] and read["tls_client_ca"]) != is_plain


def secrets_of(manifests: list[dict], name: str) -> dict[str, str]:
    """Return the secrets that a service's pods mount, by volume name."""
    volumes = pods(manifests)[name]["spec"]["volumes"]
    return {volume["name"]: volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def test_drafters_trust_an_authority_of_their_own():
    manifests = render({"tls": {"clientCertificates": True}})
    drafter, verifier = (service_options(manifests, name) for name in ("drafter", "verifier"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container(pods(manifests)["verifier"])["volumeMounts"]}
    shown = [verifier[f"drafter_tls_{file}"] for file in ("ca", "cert", "key")]
    assert {str(file.parent) for file in shown} == {mounts["drafter-client-tls"]}
    assert str(verifier["tls_client_ca"].parent) == str(verifier["tls_cert"].parent) == mounts["verifier-tls"]
    assert str(drafter["tls_client_ca"].parent) == mounts["verifier-tls"]
    names = [*secrets_of(manifests, "drafter").values(), *secrets_of(manifests, "verifier").values()]
    assert len(names) == len(set(names))


def test_metrics_are_scraped_as_they_are_served():
    for enabled in (True, False):
        values = {"tls": {"enabled": enabled}, "metrics": {"podMonitor": {"enabled": True}}}
        manifests = render(values)
        monitors = of_kind(manifests, "PodMonitor")
        assert monitors.keys() == COMMANDS.keys()
        for name, monitor in monitors.items():
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            assert (service_options(manifests, name)["tls_cert"] is not None) == enabled
            assert endpoint.get("scheme", "http") == ("https" if enabled else "http")
            assert ("tlsConfig" in endpoint) == enabled
            if enabled:
                tls = endpoint["tlsConfig"]
                shown = {tls["ca"]["secret"]["name"], tls["cert"]["secret"]["name"], tls["keySecret"]["name"]}
                # A drafter's metrics need the verifiers' client certificate, a verifier's metrics its own certificate.
                volume = {"drafter": "drafter-client-tls", "verifier": "verifier-tls"}[name]
                assert shown == {secrets_of(manifests, "verifier")[volume]}


def test_alerts_look_for_the_jobs_that_pods_are_scraped_as():
    manifests = render(FULL)
    (rule,) = (manifest for manifest in manifests if manifest["kind"] == "PrometheusRule")
    assert rule["spec"] == deployment.read("prometheus/alerts.yml")
    asked = set(re.findall(r'\bjob="(\w+)"', str(rule["spec"])))
    scraped = {
        pods(manifests)[name]["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        for name, monitor in of_kind(manifests, "PodMonitor").items()
    }
    compose = {job["job_name"] for job in deployment.read("prometheus/prometheus.yml")["scrape_configs"]}
    assert asked == scraped == compose - {"gateway"}  # smg's metrics have no alerts


def test_pods_are_locked_down(manifests):
    locked = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for name, pod in pods(manifests).items():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == security["fsGroup"] == images.USER
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["spec"]["automountServiceAccountToken"]
        downloads = [each for each in pod["spec"].get("initContainers", []) if each["name"].startswith("download-")]
        assert [each["securityContext"] for each in [container(pod), *downloads]] == [locked] * (1 + len(downloads))
        writable = {mount["mountPath"] for mount in container(pod)["volumeMounts"] if not mount.get("readOnly")}
        asked = {"/scratch", "/run/draftwire"} if manifests_are_full(manifests) else set()
        assert writable == {"/tmp", "/var/cache/draftwire"} | ({"/dev/shm"} if name == "verifier" else set()) | asked


def test_drafters_are_reached_by_verifiers_alone():
    manifests = render(PLAIN)
    policy = of_kind(manifests, "NetworkPolicy")["drafter"]["spec"]
    verifiers = of_kind(manifests, "Deployment")["verifier"]["spec"]["selector"]
    assert policy["ingress"] == [{"from": [{"podSelector": verifiers}], "ports": [{"port": "grpc"}]}]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy


def test_autoscalers_read_metrics_made_from_exported_ones():
    sources = "".join(path.read_text() for path in deployment.ROOT.glob("*_service/**/*metrics.py"))
    exported = set(re.findall(r'"(draftwire_\w+)"', sources))
    rules = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    made = set()
    for rule in rules:
        series = re.findall(r"draftwire_\w+", rule["seriesQuery"] + rule["metricsQuery"])
        assert {re.sub(r"_(sum|count)$", "", name) for name in series} <= exported
        rename = rule.get("name", {"matches": "^(.*)$", "as": "${1}"})
        for name in re.findall(r"draftwire_\w+", rule["seriesQuery"]):
            made.add(rename["as"].replace("${1}", re.match(rename["matches"], name)[1]))
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind(render(FULL), "HorizontalPodAutoscaler").values()
        for metric in scaler["spec"]["metrics"]
    }
    assert asked == made


def test_autoscaled_deployments_name_no_number_of_replicas():
    manifests = render(FULL)
    for name, scaler in of_kind(manifests, "HorizontalPodAutoscaler").items():
        deployment = of_kind(manifests, "Deployment")[name]
        assert "replicas" not in deployment["spec"]
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_a_speculative_config_reaches_the_verifier():
    read = service_options(render(FULL), "verifier")
    assert json.loads(read["speculative_config"]) == FULL["verifier"]["speculativeConfig"]


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((deployment.ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
