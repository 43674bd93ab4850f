"""Request ids in the logs of both services, and gRPC reflection, with real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from services import DEMO, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire.v1 import config_pb2, generate_pb2, generate_pb2_grpc
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("observability")

PROMPT = "def area(width, height):"


@dataclass
class Watched:
    """Both services, which log at level debug."""

    verifier: ServiceProcess
    drafter: ServiceProcess

    def lines(self, service: ServiceProcess, request_id: str) -> list[dict[str, Any]]:
        """Return the log entries about a request."""
        entries = [json.loads(line) for line in service.log_text().splitlines() if line.startswith("{")]
        return [entry for entry in entries if entry.get("request_id") == request_id]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    logs: Path = tmp_path_factory.mktemp("logs")
    options = ("--device", "cpu", "--log-format", "json", "--log-level", "debug")
    with (
        start_drafter(DEMO / "eagle3", DEMO / "target", *options, log_path=logs / "drafter.log") as drafter,
        start_verifier(
            DEMO / "target", [drafter.address], *options, "--draft-deadline-ms", "off", log_path=logs / "verifier.log"
        ) as verifier,
    ):
        with Client(verifier.address) as client:
            wait_for_drafter(client, drafter.address)
        yield Watched(verifier, drafter)


def generate(address: str, request_id: str, text: str = PROMPT, **sampling: Any) -> tuple[str, str]:
    """Return (request id that the server sends back, output text) of a request with its id in the call's metadata."""
    with grpc.insecure_channel(address) as channel:
        call = generate_pb2_grpc.GenerationStub(channel).Generate(
            generate_pb2.GenerateRequest(text=text, sampling_params=config_pb2.SamplingParams(**sampling)),
            metadata=[("x-request-id", request_id)] if request_id else [],
        )
        request_id = dict(call.initial_metadata()).get("x-request-id", "")
        return request_id, "".join(response.text for response in call)


def test_both_logs_have_the_request_name_of_the_client(services):
    request_id, output = generate(services.verifier.address, "r-42", max_tokens=12, temperature=0, ignore_eos=True)
    assert request_id == "r-42"
    (finished,) = [
        line for line in services.lines(services.verifier, "r-42") if line["message"] == "request finished"
    ]
    assert (finished["level"], finished["reason"], finished["output_tokens"]) == ("info", "length", 12)
    assert finished["ttft_s"] > 0
    assert 1 <= finished["acceptance_length"] <= 5
    wait_for(
        lambda: {line["message"] for line in services.lines(services.drafter, "r-42")}
        == {"sequence opened", "sequence ended"},
        "the drafter's lines about the request",
    )
    assert services.lines(services.drafter, "r-42")[-1]["drafts"] > 0
    logs = services.verifier.log_text() + services.drafter.log_text()
    assert PROMPT not in logs
    assert output.strip()
    assert output not in logs


def test_a_request_without_a_name_gets_one(services):
    request_id, _ = generate(services.verifier.address, "", max_tokens=2)
    assert len(request_id) == 32
    assert services.lines(services.verifier, request_id)[-1]["message"] == "request finished"


def test_a_refused_request_is_logged_by_its_field_alone(services):
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        generate(services.verifier.address, "r-43", top_p=7)
    (line,) = services.lines(services.verifier, "r-43")
    assert (line["message"], line["field"]) == ("request refused", "sampling_params.top_p")
    with pytest.raises(grpc.RpcError, match="x-request-id = 'two words'"):
        generate(services.verifier.address, "two words")


def test_a_request_whose_client_goes_is_logged_as_cancelled(services):
    names = (f"gone-{attempt}" for attempt in range(1000))

    def is_logged() -> bool:
        """Return whether a request that is cancelled after its first token is logged as cancelled."""
        name = next(names)
        with Client(services.verifier.address) as client:
            stream = client.generate(PROMPT, request_id=name, max_tokens=200, ignore_eos=True)
            next(stream)
            stream.cancel()
        wait_for(lambda: ends_of(services, name) != [], "the line about the request")
        return ends_of(services, name) == ["cancelled"]

    wait_for(is_logged, "a request that ends as cancelled")


def ends_of(services: Watched, request_id: str) -> list[str]:
    lines = services.lines(services.verifier, request_id)
    return [line["reason"] for line in lines if line["message"] == "request finished"]


# A client such as grpcurl knows only the address.
METHODS = {
    "verifier": ("draftwire.v1.Generation", "GetVerifierInfo", {"vocab_size": 2048, "has_tokenizer": True}),
    "drafter": ("draftwire.v1.Drafting", "GetDrafterInfo", {"target_vocab_size": 2048, "method": "eagle3"}),
}


@pytest.mark.parametrize("name", METHODS)
def test_both_services_can_be_called_by_reflection_alone(services, name):
    service, method, expected = METHODS[name]
    with grpc.insecure_channel(getattr(services, name).address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        standard = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        others = {"vllm.grpc.engine.VllmEngine"} if name == "verifier" else set()
        assert set(database.get_services()) == {service, *standard, *others}
        found = DescriptorPool(database).FindServiceByName(service).methods_by_name[method]
        request, response = GetMessageClass(found.input_type), GetMessageClass(found.output_type)
        call = channel.unary_unary(f"/{service}/{method}", request.SerializeToString, response.FromString)
        info = call(request())
    assert {key: getattr(info, key) for key in expected} == expected
