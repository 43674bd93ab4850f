"""The Helm chart as Helm's own library renders it."""

from __future__ import annotations

from pathlib import Path

import images
import kubernetes_validate
import pytest
import yaml
from images import COMMANDS

helm = pytest.importorskip("helm_python", reason="its wheels are for Linux on x86-64")

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "draftwire"
KUBERNETES = ("1.27", kubernetes_validate.latest_version())
# Minimal values that need no secrets, and values that enable everything.
PLAIN = {"tls": {"enabled": False}, "tokens": {"secret": ""}, "metrics": {"enabled": False}}
FULL = {
    "models": {
        "hostPath": "/srv/models",
        "target": "meta-llama/Llama-3.1-8B-Instruct",
        "head": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "download": {
            "enabled": True,
            "tokenSecret": "hub",
            "env": {"HF_ENDPOINT": "https://hub.example.com"},
            "resources": {"limits": {"memory": "2Gi"}},
        },
    },
    "compileCache": {"claim": "compiled"},
    "rendezvous": {"hostPath": "/run/draftwire"},
    "serviceAccount": {"create": True, "annotations": {"role": "reader"}},
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
            "env": {"OMP_NUM_THREADS": "4", "PASSWORD": {"secretKeyRef": {"name": "proxy", "key": "password"}}},
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "extraVolumes": [{"name": f"{name}-scratch", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": f"{name}-scratch", "mountPath": "/scratch"}],
            "initContainers": [{"name": f"{name}-prepare", "image": "busybox", "command": ["true"]}],
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
FULL["verifier"]["grpcRoute"] = {
    "enabled": True,
    "parentRefs": [{"name": "gateway", "namespace": "gateways", "sectionName": "grpc"}],
    "hostnames": ["generate.example.com"],
    "annotations": {"team": "inference"},
}
VALUES = {"defaults": {}, "plain": PLAIN, "full": FULL}
# API versions whose schemas come with Prometheus Operator and with the Gateway API, not with Kubernetes.
CUSTOM = ("monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1")


def render(values: dict) -> list[dict]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    manifests = (part for path, text in files.items() if path.endswith(".yaml") for part in yaml.safe_load_all(text))
    return [manifest for manifest in manifests if manifest]


def of_kind(manifests: list[dict], kind: str) -> dict[str, dict]:
    """Return the manifests of a kind by the service that they belong to."""
    return {m["metadata"]["labels"]["app.kubernetes.io/component"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[dict]) -> dict[str, dict]:
    return {name: deployment["spec"]["template"] for name, deployment in of_kind(manifests, "Deployment").items()}


def container(pod: dict) -> dict:
    (only,) = pod["spec"]["containers"]
    return only


def service_options(manifests: list[dict], name: str) -> dict:
    """Return the options of a pod's service, parsed from its arguments."""
    return images.service_options(name, container(pods(manifests)[name])["args"])
