"""The HTTP port of the metrics."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwire.errors import InvalidArgumentError, ServerError
from draftwire.metrics import serving_metrics


class Answer(Collector):
    def collect(self):
        yield GaugeMetricFamily("answer", "To everything.", value=42)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return response.read().decode()


def test_the_collectors_and_the_process_are_shown_while_it_serves():
    with serving_metrics("127.0.0.1:0", [Answer()]) as port:
        text = scrape(port)
    assert "\nanswer 42.0\n" in text
    assert "\nprocess_open_fds " in text
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_no_address_serves_nothing():
    with serving_metrics(None, [Answer()]) as port:
        assert port is None


def test_a_port_in_use_and_a_wrong_address_are_refused():
    with serving_metrics("127.0.0.1:0", []) as port:
        with pytest.raises(ServerError, match=f"metrics_listen = '127.0.0.1:{port}': cannot be bound"):
            serving_metrics(f"127.0.0.1:{port}", []).__enter__()
        with pytest.raises(InvalidArgumentError, match="metrics_listen = 'nowhere': must be HOST:PORT"):
            serving_metrics("nowhere", []).__enter__()
