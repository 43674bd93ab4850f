"""The Helm chart, rendered by Helm's own library: valid for Kubernetes, and in agreement with the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import deployment
import images
import kubernetes_validate
import pytest
import yaml
from images import COMMANDS

from draftwire_cli.health import health

helm = pytest.importorskip("helm_python", reason="its wheels are for Linux on x86-64")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "draftwire"
KUBERNETES = ("1.27", kubernetes_validate.latest_version())
# The least that asks for no secrets, and everything at once.
PLAIN = {"tls": {"enabled": False}, "tokens": {"secret": ""}, "metrics": {"enabled": False}}
FULL = {
    "models": {"hostPath": "/srv/models"},
    "tls": {"clientCertificates": True},
    "metrics": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "egress": [{"to": [{"namespaceSelector": {"matchLabels": {"name": "tracing"}}}], "ports": [{"port": 4317}]}],
    },
    "imagePullSecrets": ["registry"],
    **{
        name: {
            "args": ["--max-num-seqs=128"],
            "env": {"OMP_NUM_THREADS": "4"},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "autoscaling": {"enabled": True},
            "runtimeClassName": "nvidia",
            "priorityClassName": "serving",
            "podAnnotations": {"team": "inference"},
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        }
        for name in COMMANDS
    },
}
FULL["verifier"]["speculativeConfig"] = {"num_speculative_tokens": 3, "draft_sample_method": "gumbel"}
FULL["verifier"]["service"] = {"type": "LoadBalancer", "annotations": {"internal": "true"}}
VALUES = {"defaults": {}, "plain": PLAIN, "full": FULL}


def render(values: dict) -> list[dict]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    manifests = (part for path, text in files.items() if path.endswith(".yaml") for part in yaml.safe_load_all(text))
    return [manifest for manifest in manifests if manifest]


@pytest.fixture(scope="module", params=VALUES)
def manifests(request: pytest.FixtureRequest) -> list[dict]:
    return render(VALUES[request.param])


def of_kind(manifests: list[dict], kind: str) -> dict[str, dict]:
    """Manifests by the service that they belong to."""
    return {m["metadata"]["labels"]["app.kubernetes.io/component"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[dict]) -> dict[str, dict]:
    return {name: deployment["spec"]["template"] for name, deployment in of_kind(manifests, "Deployment").items()}


def container(pod: dict) -> dict:
    (only,) = pod["spec"]["containers"]
    return only


def service_options(manifests: list[dict], name: str) -> dict:
    """What the service of a pod reads from its arguments."""
    return images.service_options(name, container(pods(manifests)[name])["args"])


def test_helm_finds_nothing_to_warn_of():
    report = helm.lint(CHART, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(manifests, version):
    # The custom resources come with Prometheus Operator.
    own = [manifest for manifest in manifests if manifest["apiVersion"] != "monitoring.coreos.com/v1"]
    for manifest in own:
        kubernetes_validate.validate(manifest, version, strict=True)
    kinds = {manifest["kind"] for manifest in own}
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds


def test_all_options_together_render_every_kind():
    assert {manifest["kind"] for manifest in render(FULL)} == {
        "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "PodMonitor",
        "PrometheusRule",
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
        assert used == named[name].keys()


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


def test_probes_ask_the_port_that_is_served(manifests):
    for pod in pods(manifests).values():
        (port,) = (port["containerPort"] for port in container(pod)["ports"] if port["name"] == "grpc")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container(pod)[kind]
            if "grpc" in probe:
                assert probe["grpc"]["port"] == port
                continue
            program, command, *given = probe["exec"]["command"]
            assert (program, command) == ("draftwire", "health")
            read = images.options(health, given)
            assert read["server"] == f"127.0.0.1:{port}"
            assert read["timeout"] < probe["timeoutSeconds"]


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
    """Secrets that a service's pods mount, by the name of the volume."""
    volumes = pods(manifests)[name]["spec"]["volumes"]
    return {volume["name"]: volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def test_drafters_trust_an_authority_of_their_own():
    manifests = render({"tls": {"clientCertificates": True}})
    drafter, verifier = (service_options(manifests, name) for name in ("drafter", "verifier"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container(pods(manifests)["verifier"])["volumeMounts"]}
    shown = [verifier[f"drafter_tls_{file}"] for file in ("ca", "cert", "key")]
    assert {str(file.parent) for file in shown} == {mounts["drafter-tls"]}
    assert str(verifier["tls_client_ca"].parent) == str(verifier["tls_cert"].parent) == mounts["tls"]
    assert str(drafter["tls_client_ca"].parent) == mounts["tls"]
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
                # What verifiers show drafters, and their own certificate at their own port.
                assert shown == {secrets_of(manifests, "verifier")[{"drafter": "drafter-tls", "verifier": "tls"}[name]]}


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
    assert asked == scraped == compose


def test_pods_are_locked_down(manifests):
    for pod in pods(manifests).values():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == security["fsGroup"] == images.USER
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["spec"]["automountServiceAccountToken"]
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = [mount["mountPath"] for mount in container(pod)["volumeMounts"] if not mount.get("readOnly")]
        assert writable == ["/tmp"]


def test_drafters_are_reached_by_verifiers_alone():
    manifests = render(PLAIN)
    policy = of_kind(manifests, "NetworkPolicy")["drafter"]["spec"]
    verifiers = of_kind(manifests, "Deployment")["verifier"]["spec"]["selector"]
    assert policy["ingress"] == [{"from": [{"podSelector": verifiers}], "ports": [{"port": "grpc"}]}]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy


def test_autoscalers_read_metrics_made_from_exported_ones():
    sources = "".join(path.read_text() for path in ROOT.glob("*_service/*metrics.py"))
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


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"drafter": {"replica": 3}}, "replica"),
        ({"verifier": {"replicas": -1}}, "replicas"),
        ({"models": {"claim": ""}}, "claim"),
        ({"tls": {"enabled": "no"}}, "enabled"),
        ({"drafter": {"autoscaling": {"targetStepSeconds": "5 ms"}}}, "targetStepSeconds"),
    ],
)
def test_wrong_values_are_refused_by_name(values, field):
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=field):
        chart.validate_schema(chart.merge_values(values))


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
