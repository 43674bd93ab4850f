"""The chart's gateway: smg finds the verifiers' pods, and no other pod reaches them."""

from __future__ import annotations

import subprocess
import sys

import kubernetes_validate
import pytest
from helm_chart import CUSTOM, KUBERNETES, PLAIN, container, of_kind, pods, render, service_options

GATEWAY = {
    **PLAIN,
    "metrics": {"enabled": True, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "gateway": {"enabled": True, "apiKeySecret": "gateway-key", "args": ["--tool-call-parser=json"]},
}


@pytest.fixture(scope="module")
def manifests() -> list[dict]:
    return render(GATEWAY)


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(manifests, version):
    for manifest in manifests:
        if manifest["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)
    own = {m["kind"] for m in manifests if m["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"}
    assert own == {"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "PodMonitor"}


def test_without_the_option_there_is_none():
    assert "gateway" not in pods(render(PLAIN))


def arguments(manifests: list[dict]) -> dict[str, list[str]]:
    """Return the options of smg, each with its values."""
    given: dict[str, list[str]] = {}
    for argument in container(pods(manifests)["gateway"])["args"]:
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            given[name] = [value] if value else []
        else:
            given[name].append(argument)
    return given


def test_the_selector_is_that_of_the_verifiers_pods_alone(manifests):
    given = arguments(manifests)
    wanted = dict(label.split("=") for label in given["--selector"]).items()
    found = [name for name, pod in pods(manifests).items() if wanted <= pod["metadata"]["labels"].items()]
    assert found == ["verifier"]
    ports = {port["name"]: port["containerPort"] for port in container(pods(manifests)["verifier"])["ports"]}
    assert given["--service-discovery-port"] == [str(ports["grpc"])]
    assert given["--service-discovery-namespace"] == ["prod"]


def test_smg_knows_every_option(manifests):
    pytest.importorskip("smg", reason="needs the gateway: pip install '.[gateway]'")
    command = [sys.executable, "-m", "smg", "launch", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [name for name in arguments(manifests) if name not in printed] == []


def test_ports_are_those_that_smg_opens(manifests):
    given = arguments(manifests)
    ports = {port["name"]: str(port["containerPort"]) for port in container(pods(manifests)["gateway"])["ports"]}
    options = {"http": "--port", "health": "--health-check-port", "metrics": "--prometheus-port"}
    assert {name: [port] for name, port in ports.items()} == {name: given[one] for name, one in options.items()}
    (port,) = of_kind(manifests, "Service")["gateway"]["spec"]["ports"]
    assert port["targetPort"] in ports


def test_the_gateway_may_read_pods_and_nothing_else(manifests):
    rules = of_kind(manifests, "Role")["gateway"]["rules"]
    assert rules == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    account = of_kind(manifests, "ServiceAccount")["gateway"]["metadata"]["name"]
    assert pods(manifests)["gateway"]["spec"]["serviceAccountName"] == account
    (subject,) = of_kind(manifests, "RoleBinding")["gateway"]["subjects"]
    assert (subject["name"], subject["namespace"]) == (account, "prod")


def test_verifiers_tell_the_gateway_what_they_have_cached(manifests):
    assert service_options(manifests, "verifier")["kv_events"]
    assert not service_options(render(PLAIN), "verifier")["kv_events"]


def test_verifiers_are_reached_by_the_gateway_alone(manifests):
    ingress = of_kind(manifests, "NetworkPolicy")["verifier"]["spec"]["ingress"][0]
    (peer,) = ingress["from"]
    labels = pods(manifests)["gateway"]["metadata"]["labels"].items()
    assert peer["podSelector"]["matchLabels"].items() <= labels


@pytest.mark.parametrize("values", [{"tls": {"enabled": True}}, {"tokens": {"secret": "draftwire-tokens"}}])
def test_tls_and_tokens_are_refused_with_the_gateway(values):
    with pytest.raises(Exception, match="smg calls verifiers in plain text and without tokens"):
        render({**GATEWAY, **values})
