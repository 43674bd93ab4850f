"""A request makes one trace across three processes; without an endpoint there are no traces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from services import DEMO, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.contract.errors import InvalidArgumentError
from draftwire.server import tracing
from draftwire.server.security import is_plain_url_outside
from draftwire.server.tracing import exporting_traces, is_exporting
from draftwire_bench.processes import start_drafter, start_verifier
from verifier_service.api.request_log import RequestWatch

pytestmark = pytest.mark.xdist_group("observability")


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A trace collector that keeps received spans with the name of their service."""

    address: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        for resource in request.resource_spans:
            name = next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
            self.spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def find(self, service: str, name: str) -> list[Span]:
        return [span for owner, span in self.spans if (owner, span.name) == (service, name)]


@contextmanager
def collecting() -> Iterator[Collector]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


def set_endpoint(monkeypatch: pytest.MonkeyPatch, variable: str | None, url: str) -> None:
    """Remove all endpoint variables, then set `variable`, if given, to `url`."""
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, url)


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_client_verifier_and_drafter_make_one_trace(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with collecting() as collector:
        options = ("--device", "cpu", "--otlp-endpoint", collector.address)
        with (
            start_drafter(DEMO / "eagle3", DEMO / "target", *options) as drafter,
            start_verifier(DEMO / "target", [drafter.address], *options, "--draft-deadline-ms", "off") as verifier,
        ):
            with Client(verifier.address) as client:
                wait_for_drafter(client, drafter.address)
            command = ["generate", "--server", verifier.address, "--prompt", "import ", "--max-tokens", "12"]
            subprocess.run(
                [sys.executable, "-m", "draftwire_cli", *command, "--temperature", "0", "--ignore-eos",
                 "--otlp-endpoint", collector.address],
                check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ,
            )  # fmt: skip
            wait_for(lambda: bool(collector.find("draftwire-drafter", "draft")), "the drafter's span")
            wait_for(lambda: bool(collector.find("draftwire-verifier", "Generate")), "the verifier's span")
    (client_span,) = collector.find("draftwire-client", "draftwire.generate")
    (generate,) = collector.find("draftwire-verifier", "Generate")
    (draft,) = collector.find("draftwire-drafter", "draft")
    assert len({span.trace_id for _, span in collector.spans}) == 1
    assert (client_span.parent_span_id, generate.parent_span_id) == (b"", client_span.span_id)
    assert draft.parent_span_id == generate.span_id
    phases = [collector.find("draftwire-verifier", name)[0] for name in ("queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {generate.span_id}
    for before, after in pairwise(phases):
        assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano
    generated, drafted = attributes(generate), attributes(draft)
    assert (generated["draftwire.output_tokens"], generated["draftwire.reason"]) == (12, "length")
    assert generated["draftwire.request_id"] == drafted["draftwire.request_id"] != ""
    assert attributes(client_span)["draftwire.request_id"] == generated["draftwire.request_id"]
    assert drafted["draftwire.drafts"] >= attributes(phases[2])["draftwire.drafted"] > 0
    assert drafted["draftwire.reason"] == "closed"


def test_a_request_that_is_refused_is_a_failed_span(monkeypatch):
    monkeypatch.setattr("verifier_service.api.request_log.is_exporting", lambda: True)
    ended: list[tuple[dict[str, Any], str]] = []
    monkeypatch.setattr(
        "verifier_service.api.request_log.end_span", lambda _, generated, failure="": ended.append((generated, failure))
    )
    RequestWatch("r-1", ()).refused(InvalidArgumentError("text", "a secret prompt", "must not be"))
    assert ended == [({"field": "text"}, "refused")]


def test_without_an_endpoint_no_span_is_made_or_sent(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    with exporting_traces("draftwire-verifier", None):
        assert not is_exporting()
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    assert RequestWatch("r-1", [("traceparent", parent)]).traceparent == ""


@pytest.mark.parametrize("url", ["collector:4317", "http://", "http://a/b", "ftp://a:1"])
def test_an_endpoint_that_is_none_is_refused(url):
    with (
        pytest.raises(InvalidArgumentError, match=r"otlp_endpoint = .* must be http://HOST:PORT"),
        exporting_traces("draftwire-verifier", url),
    ):
        pass


@pytest.mark.parametrize("url", ["http://collector:4317", "http://10.0.0.1:4317"])
@pytest.mark.parametrize("variable", [None, *ENDPOINTS])
def test_plain_text_beyond_loopback_needs_insecure(monkeypatch, url, variable):
    set_endpoint(monkeypatch, variable, url)
    refused = re.escape(f"{variable or 'otlp_endpoint'} = '{url}': plain text outside of loopback needs insecure")
    with (
        pytest.raises(InvalidArgumentError, match=refused),
        exporting_traces("draftwire-verifier", None if variable else url),
    ):
        pass


@pytest.mark.parametrize("is_plain_allowed", [False, True])
@pytest.mark.parametrize("variable", [None, *ENDPOINTS])
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@collector:4317", "http://collector:4317"),
        ("https://hunter2@collector:4317", "https://collector:4317"),
        ("https://me:hunter2@collector:4317?key=hunter2#hunter2", "https://collector:4317"),
        ("https://me:hunter2#@collector:4317", "https://..."),
        ("https://me:hunter2?hunter2@collector:4317", "https://..."),
    ],
)
def test_an_endpoint_with_a_user_is_refused_without_its_secrets(
    monkeypatch, url, shown, variable, is_plain_allowed
):
    set_endpoint(monkeypatch, variable, url)
    with (
        pytest.raises(InvalidArgumentError, match=re.escape(f"{variable or 'otlp_endpoint'} = '{shown}': ")) as error,
        exporting_traces("draftwire-verifier", None if variable else url, insecure=is_plain_allowed),
    ):
        pass
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in str(error.value.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://collector:4317?key=hunter2", "http://collector:4317"),
        ("http://collector:4317/v1/traces?key=hunter2", "http://collector:4317/v1/traces"),
        ("http://collector:4317#hunter2", "http://collector:4317"),
    ],
)
def test_the_query_of_a_plain_text_endpoint_is_not_shown(monkeypatch, url, shown):
    set_endpoint(monkeypatch, ENDPOINTS[0], url)
    with (
        pytest.raises(InvalidArgumentError, match=re.escape(f"{ENDPOINTS[0]} = '{shown}': plain text outside")),
        exporting_traces("draftwire-verifier", None),
    ):
        pass


@pytest.mark.parametrize("url", ["me:hunter2@collector:4317", "http://me:hunter2@a/b", "ftp://me:hunter2@a:1?hunter2"])
def test_what_is_secret_in_an_endpoint_that_is_none_is_not_shown(url):
    with (
        pytest.raises(InvalidArgumentError, match=r"must be http://HOST:PORT") as error,
        exporting_traces("draftwire-verifier", url),
    ):
        pass
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "is_plain"),
    [
        ("http://collector:4317", True),
        ("http://[2001:db8::1]:4317", True),
        ("https://collector:4317", False),
        ("http://localhost:4317", False),
        ("http://localhost", False),
        ("http://127.0.0.1:4317", False),
        ("http://[::1]:4317", False),
    ],
)
def test_which_endpoints_are_plain_text_outside_of_loopback(url, is_plain):
    assert is_plain_url_outside(url) == is_plain


def test_the_end_does_not_wait_for_a_silent_collector(monkeypatch, caplog):
    taken = threading.Event()
    monkeypatch.setattr(tracing, "LAST_SPANS_S", 0.05)
    monkeypatch.setattr(TracerProvider, "shutdown", lambda _: taken.wait())
    with exporting_traces("draftwire-verifier", "http://127.0.0.1:1"):
        pass
    assert not taken.is_set()
    assert "the last spans are lost" in caplog.text
    taken.set()
