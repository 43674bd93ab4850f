"""The files of deploy/ agree with the code."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess

import images
import pytest
from deployment import DEPLOY, ROOT, arguments, read, services

from draftwire.cli.health import health

METRIC_SOURCES = ("verifier_service/metrics.py", "verifier_service/request_metrics.py", "drafter_service/metrics.py")


def load_generator():
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana" / "make_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def test_the_dashboard_is_what_its_generator_writes():
    committed = json.loads((DEPLOY / "grafana" / "dashboards" / "draftwire.json").read_text())
    assert committed == GENERATOR.dashboard()


EXPORTED = set(re.findall(r'"(draftwire_\w+)"', "".join((ROOT / path).read_text() for path in METRIC_SOURCES)))
ALERTS = read("prometheus/alerts.yml")["groups"][0]["rules"]
PROMTOOL = (
    "check config prometheus.yml",
    "check config --syntax-only prometheus-tls.yml",
    "check rules alerts.yml",
    "test rules alerts_test.yml",
)


def metrics_of(query: str) -> set[str]:
    """Metrics that a query asks for, as the services define them."""
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"draftwire_\w+", query)}


def test_every_metric_of_the_dashboard_is_exported():
    asked = [metrics_of(query) for _, _, queries in GENERATOR.PANELS for _, query in queries]
    assert all(asked)
    assert set().union(*asked) <= EXPORTED


def test_every_metric_of_an_alert_is_exported():
    asked = set().union(*(metrics_of(alert["expr"]) for alert in ALERTS))
    assert asked
    assert asked <= EXPORTED


def test_every_metric_and_alert_is_documented_and_no_other():
    metrics = (ROOT / "docs" / "deploy.md").read_text()
    assert {name for name in EXPORTED if name not in metrics} == set()
    documented = set(re.findall(r"^\| `(Draftwire\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    assert documented == {alert["alert"] for alert in ALERTS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not on the PATH")
@pytest.mark.parametrize("arguments", PROMTOOL)
def test_prometheus_takes_its_configuration_and_the_alerts_fire_when_they_should(arguments):
    subprocess.run(["promtool", *arguments.split()], cwd=DEPLOY / "prometheus", check=True)


def test_prometheus_scrapes_the_same_with_tls_and_files_that_it_has():
    plain, tls = read("prometheus/prometheus.yml"), read("prometheus/prometheus-tls.yml")
    files = set()
    for job in tls["scrape_configs"]:
        assert job.pop("scheme") == "https"
        files |= {value for key, value in job.pop("tls_config").items() if key.endswith("_file")}
    assert files == {f"/run/secrets/{secret}" for secret in services("monitoring-tls")["prometheus"]["secrets"]}
    assert tls == plain


@pytest.mark.parametrize("name", ["gpu", "tls", "monitoring", "monitoring-tls"])
def test_overlays_name_services_of_the_compose_file(name):
    assert {"drafter", "verifier"} <= services("docker-compose").keys()
    own = {"monitoring": {"prometheus", "grafana"}, "monitoring-tls": {"prometheus"}}
    assert services(name).keys() == own.get(name, {"drafter", "verifier"})


@pytest.mark.parametrize("name", ["docker-compose", "tls"])
def test_services_understand_their_commands(name):
    for service in ("drafter", "verifier"):
        described = services(name)[service]
        options = images.service_options(service, arguments(described["command"]))
        assert options["insecure"] == (options["tls_cert"] is None)
        assert options["metrics_listen"].endswith(":9090")
        files = {str(value) for key, value in options.items() if value and ("tls" in key or key == "token_file")}
        assert files == {f"/run/secrets/{secret}" for secret in described.get("secrets", [])}


@pytest.mark.parametrize("name", ["docker-compose", "monitoring"])
def test_plain_text_is_published_on_loopback_alone(name):
    published = [port for service in services(name).values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for text in published for port in arguments(text))


def test_health_checks_ask_the_port_that_is_served():
    for name, service in services("tls").items():
        marker, program, command, *given = service["healthcheck"]["test"]
        assert (marker, program, command) == ("CMD", "draftwire", "health")
        asked = images.options(health, given)
        served = images.service_options(name, arguments(service["command"]))
        assert asked["server"].split(":")[1] == served["listen"].split(":")[1]
        files = ("tls_cert", "tls_key")
        assert [asked[file] for file in files] == [served[file] for file in files]
        assert asked["tls_ca"] == served["tls_client_ca"]


def test_containers_are_stopped_after_their_drain():
    for name, service in services("docker-compose").items():
        (grace,) = arguments(service["stop_grace_period"])
        options = images.service_options(name, arguments(service["command"]))
        assert float(grace.removesuffix("s")) >= options["drain_timeout"] + 5
