"""The files of deploy/ agree with the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import images
import pytest
from deployment import DEPLOY, ROOT, arguments, read, script, services

from deploy.stack import Secrets, compose_command
from draftwire_cli.health import health

METRIC_SOURCES = (
    "verifier_service/host/metrics.py",
    "verifier_service/engine/request_metrics.py",
    "drafter_service/server/metrics.py",
    *("draftwire/server/step_histogram.py", "draftwire/transport/traffic.py"),
)
GENERATOR = script("grafana/make_dashboard.py")
BOTH, OVERLAYS = ("drafter", "verifier"), ("gpu", "tls")


def test_the_dashboard_is_what_its_generator_writes():
    committed = json.loads((DEPLOY / "grafana" / "dashboards" / "draftwire.json").read_text())
    assert committed == GENERATOR.dashboard()


SOURCE = "".join((ROOT / path).read_text() for path in METRIC_SOURCES)
EXPORTED = set(re.findall(r'"(draftwire_\w+)"', SOURCE))
# Suffixes of a metric's samples, by the function that makes the metric; docs/operations.md lists the first suffix.
HISTOGRAM = ("", "_bucket", "_sum", "_count")
SAMPLES = {
    "GaugeMetricFamily": ("",),
    **dict.fromkeys(("CounterMetricFamily", "_by_position"), ("_total",)),
    **dict.fromkeys(("HistogramMetricFamily", "Histogram"), HISTOGRAM),
}
ALERTS = read("prometheus/alerts.yml")["groups"][0]["rules"]
PROMTOOL = (
    "check config prometheus.yml",
    "check config --syntax-only prometheus-tls.yml",
    "check rules alerts.yml",
    "test rules alerts_test.yml",
)


def metrics_of(query: str) -> set[str]:
    """Return the metrics that a query uses, by their names in the services' code."""
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"draftwire_\w+", query)}


def test_every_metric_of_the_dashboard_is_exported():
    asked = [metrics_of(query) for _, _, queries in GENERATOR.PANELS for _, query in queries]
    assert all(asked)
    assert set().union(*asked) <= EXPORTED


def test_every_metric_of_an_alert_is_exported():
    asked = set().union(*(metrics_of(alert["expr"]) for alert in ALERTS))
    assert asked
    assert asked <= EXPORTED


def derived_metrics() -> set[str]:
    """Return the metrics that prometheus-adapter derives from Draftwire's under new names."""
    derived = set()
    for rule in read("helm/prometheus-adapter.yaml")["rules"]["custom"]:
        if "name" in rule:
            (series,) = re.findall(r"draftwire_\w+", rule["seriesQuery"])
            name = rule["name"]["as"].replace("${1}", r"\1")
            derived.add(re.sub(rule["name"]["matches"], name, series))
    return derived


def test_every_metric_and_alert_is_documented_and_no_other():
    made = re.findall(r'(\w+)[(,]\s*"(draftwire_\w+)"', SOURCE)
    assert {name for _, name in made} == EXPORTED
    exported = {name + SAMPLES[maker][0] for maker, name in made}
    samples = {name + suffix for maker, name in made for suffix in SAMPLES[maker]}
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("operations", "deploy")]
    operations, deploy = (re.sub(r"\bdraftwire_bench\.", "", page) for page in pages)  # a package, not a metric
    assert exported - set(re.findall(r"draftwire_\w+", operations)) == set()
    assert set(re.findall(r"draftwire_\w+", operations + deploy)) - samples - derived_metrics() == set()
    alerts = {alert["alert"] for alert in ALERTS}
    assert set(re.findall(r"^\| `(Draftwire\w+)`", operations, re.MULTILINE)) == alerts
    assert set(re.findall(r"Draftwire[A-Z]\w+", operations + deploy)) == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not on the PATH")
@pytest.mark.parametrize("arguments", PROMTOOL)
def test_prometheus_takes_its_configuration_and_alerts_fire(arguments):
    subprocess.run(["promtool", *arguments.split()], cwd=DEPLOY / "prometheus", check=True)


def test_prometheus_scrapes_the_same_with_tls():
    plain, tls = read("prometheus/prometheus.yml"), read("prometheus/prometheus-tls.yml")
    # smg calls verifiers in plain text, so there is no gateway with TLS.
    plain["scrape_configs"] = [job for job in plain["scrape_configs"] if job["job_name"] != "gateway"]
    files = set()
    for job in tls["scrape_configs"]:
        assert job.pop("scheme") == "https"
        files |= {value for key, value in job.pop("tls_config").items() if key.endswith("_file")}
    assert files == {f"/run/secrets/{secret}" for secret in services("tls")["prometheus"]["secrets"]}
    assert tls == plain


def own_compose() -> list[str]:
    """Return the compose command of this machine, as the container check calls it; skip the test without compose."""
    try:
        return compose_command()
    except (click.ClickException, FileNotFoundError) as error:
        pytest.skip(f"compose files are validated by compose itself: {error}")


@pytest.mark.parametrize("page", ["docs/deploy.md", "docs/operations.md"])
def test_no_documented_compose_command_omits_files_of_env(page):
    assert re.findall(r"docker-compose .*(?:-f|--file)\b.*", (ROOT / page).read_text()) == []


@pytest.mark.parametrize("profiles", [[], ["--profile", "monitoring", "--profile", "gateway"]], ids=["", "all"])
@pytest.mark.parametrize("overlays", [[], ["gpu"], ["tls"], ["gpu", "tls"]], ids="+".join)
def test_compose_takes_its_files(overlays, profiles, tmp_path):
    files = [part for name in ["docker-compose", *overlays] for part in ("-f", str(DEPLOY / f"{name}.yml"))]
    command = [*own_compose(), "--project-directory", str(DEPLOY), *files, *profiles, "config", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_services_start_without_a_profile_monitoring_with_one():
    profiles = {name: service.get("profiles", []) for name, service in services("docker-compose").items()}
    monitoring = {"prometheus": ["monitoring"], "grafana": ["monitoring"]}
    assert profiles == {"drafter": [], "verifier": [], "gateway": ["gateway"], **monitoring}
    assert all(services(name).keys() <= profiles.keys() for name in OVERLAYS)


def test_containers_are_locked_down():
    for name in (*BOTH, "gateway"):
        service = services("docker-compose")[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
    # Containers run as the image's user, and no overlay gives rights back.
    assert images.USER >= 10000
    for name in ("docker-compose", *OVERLAYS):
        assert all("user" not in service for service in services(name).values())
    given_back = {"read_only", "cap_drop", "cap_add", "security_opt", "privileged"}
    assert not any(given_back & service.keys() for name in OVERLAYS for service in services(name).values())


def test_images_are_built_for_cpus_unless_for_gpus():
    assert images.build_argument("PIP_ARGS").endswith("/whl/cpu")
    for name in BOTH:
        given = services("docker-compose")[name]["build"]["args"]
        assert {key: arguments(value) for key, value in given.items()} == {
            key: images.build_argument(key).split() for key in ("BASE_IMAGE", "PIP_ARGS", "APT_PACKAGES")
        }
        assert arguments(services("gpu")[name]["build"]["args"]["PIP_ARGS"]) == []


def test_each_service_has_a_gpu_and_no_memory_of_the_host():
    taken = []
    assert arguments(services("gpu")["verifier"]["shm_size"]) == ["1gb"]
    for service in services("gpu").values():
        assert "ipc" not in service
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        taken += [arguments(number)[0] for number in device["device_ids"]]
    assert sorted(taken) == ["0", "1"]
    assert services("gpu").keys() == set(BOTH)


def test_gpu_compilations_outlive_a_container_in_a_volume():
    made = re.search(r"install --directory --owner=(\d+) --group=\d+ (\S+)", (DEPLOY / "Dockerfile").read_text())
    assert made is not None
    assert int(made[1]) == images.USER
    volumes = []
    for service in services("gpu").values():
        (volume,) = service["volumes"]
        name, mounted = volume.split(":")
        assert mounted == made[2]
        assert all(Path(path).is_relative_to(mounted) for path in service["environment"].values())
        assert service["environment"].keys() == {"XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
        volumes.append(name)
    assert sorted(volumes) == sorted(read("gpu.yml")["volumes"])
    assert len(set(volumes)) == len(BOTH)


@pytest.mark.parametrize("name", ["docker-compose", "gpu", "tls"])
def test_secrets_are_files_and_neither_arguments_nor_environment(name):
    for service in services(name).values():
        settings = {**service.get("environment", {}), **service.get("build", {}).get("args", {})}
        assert not [key for key in settings if re.search("TOKEN|SECRET|PASSWORD|KEY|CERT", key)]
        for option, value in zip(given := arguments(service.get("command", "")), given[1:], strict=False):
            if re.search("^--.*(token-file|key|cert|ca)$", option):
                assert value.startswith("/run/secrets/")


def test_the_check_makes_the_secrets_that_compose_asks_for(tmp_path):
    Secrets(tmp_path)
    clients = {"client.pem", "client.key"}
    assert {file.name for file in tmp_path.iterdir()} == read("tls.yml")["secrets"].keys() | clients


@pytest.mark.parametrize("name", ["docker-compose", "tls"])
def test_services_understand_their_commands(name):
    for service in BOTH:
        described = services(name)[service]
        options = images.service_options(service, arguments(described["command"]))
        assert options["insecure"] == (options["tls_cert"] is None)
        assert options["metrics_listen"].endswith(":9090")
        files = {str(value) for key, value in options.items() if value and ("tls" in key or key == "token_file")}
        assert files == {f"/run/secrets/{secret}" for secret in described.get("secrets", [])}


def test_plain_text_is_published_on_loopback_alone():
    published = [port for service in services("docker-compose").values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for text in published for port in arguments(text))


def test_health_checks_ask_the_port_that_is_served():
    for name in BOTH:
        service = services("tls")[name]
        marker, program, command, *given = service["healthcheck"]["test"]
        assert (marker, program, command) == ("CMD", "draftwire", "health")
        asked = images.options(health, given)
        served = images.service_options(name, arguments(service["command"]))
        assert asked["server"].split(":")[1] == served["listen"].split(":")[1]
        files = ("tls_cert", "tls_key")
        assert [asked[file] for file in files] == [served[file] for file in files]
        assert asked["tls_ca"] == served["tls_client_ca"]


def test_containers_are_stopped_after_their_drain():
    for name in BOTH:
        service = services("docker-compose")[name]
        (grace,) = arguments(service["stop_grace_period"])
        options = images.service_options(name, arguments(service["command"]))
        assert float(grace.removesuffix("s")) >= options["drain_timeout"] + 5
