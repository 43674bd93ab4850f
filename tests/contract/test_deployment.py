"""The files of deploy/ agree with the code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
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


def test_every_metric_of_the_dashboard_is_exported():
    defined = set(re.findall(r'"(draftwire_\w+)"', "".join((ROOT / path).read_text() for path in METRIC_SOURCES)))
    asked = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for _, _, queries in GENERATOR.PANELS
        for _, query in queries
        for name in re.findall(r"draftwire_\w+", query)
    }
    assert asked
    assert asked <= defined


@pytest.mark.parametrize("name", ["gpu", "tls", "monitoring"])
def test_overlays_name_services_of_the_compose_file(name):
    base = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    overlay = yaml.safe_load((DEPLOY / f"{name}.yml").read_text())
    assert {"drafter", "verifier"} <= base["services"].keys()
    own = {"prometheus", "grafana"} if name == "monitoring" else set()
    assert overlay["services"].keys() == {"drafter", "verifier"} | own
