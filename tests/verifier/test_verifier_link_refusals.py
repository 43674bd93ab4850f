"""Drafters that do not fit are refused; drafters that break the protocol are expelled."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from link_scene import HIDDEN, VOCAB, Drafter, linked, make_info, on_loop, response, serve

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.tensors import encode_tensor
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from draftwire_kernels import NOISE_VERSION
from verifier_service.drafters import connection as drafter_link

GUMBEL = {"draft_sample_method": "gumbel"}


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "protocol": ({"protocol_version": 99}, f"protocol_version does not match: verifier {PROTOCOL_VERSION}, drafter 99"),
    "vocabulary": ({"target_vocab_size": 21}, "vocab_size does not match: verifier 20, drafter 21"),
    "hidden size": ({"target_hidden_size": 3}, "hidden_size does not match: verifier 2, drafter 3"),
    "number of layers": ({"target_num_layers": 5}, "num_layers does not match: verifier 4, drafter 5"),
    "layer too high": ({"layers": [1, 5]}, "drafter layers [1, 5], verifier different ones of 0 to 4, ascending"),
    "layers descend": ({"layers": [3, 1]}, "drafter layers [3, 1], verifier different ones of 0 to 4"),
    "layer twice": ({"layers": [1, 1]}, "drafter layers [1, 1], verifier different ones of 0 to 4"),
    "no layers": ({"layers": []}, "drafter layers [], verifier different ones of 0 to 4"),
    "width": ({"width": 5}, "drafter width 5 of dtype 2, verifier width 4"),
    "unknown dtype": ({"dtype": 77}, "drafter width 4 of dtype 77, verifier width 4 of dtypes [1, 2, 3]"),
    "integer features": ({"dtype": pb.DTYPE_INT32}, "drafter width 4 of dtype 4"),
    "draft vocabulary": ({"draft_vocab_size": 21}, "draft_vocab_size does not fit: verifier at most 20, drafter 21"),
    "drafts": ({"max_num_speculative_tokens": 3}, "num_speculative_tokens does not fit: verifier 4, drafter at most 3"),
}


@pytest.mark.parametrize("name", MISFITS)
@on_loop
async def test_a_drafter_that_does_not_fit_is_refused_with_both_values(name):
    changes, text = MISFITS[name]
    drafter = Drafter(make_info(**changes))
    async with linked(drafter) as own:
        assert text in await own.refused()
        assert not drafter.hellos
        assert own.events.empty()


@on_loop
async def test_a_head_of_another_kind_than_configured_is_refused():
    async with linked(Drafter(), {"method": "eagle"}) as own:
        assert "method does not match: verifier 'eagle', drafter 'eagle3'" in await own.refused()


@pytest.mark.parametrize(
    ("logits", "text"),
    [
        ("dense", f"verifier dense, drafter forms [1, 3] of {VOCAB} logits"),
        ({"top_n": VOCAB + 1}, f"drafter forms [1, 3] of {VOCAB} logits"),
    ],
    ids=["form", "more than there are"],
)
@on_loop
async def test_a_head_without_the_configured_logits_is_refused(logits, text):
    async with linked(Drafter(), {**GUMBEL, "draft_logits": logits}) as own:
        detail = await own.refused()
        assert detail.startswith("draft_logits do not fit")
        assert text in detail


@on_loop
async def test_another_version_of_noise_is_refused_for_sampled_drafts():
    async with linked(Drafter(make_info(noise_version=NOISE_VERSION + 1)), GUMBEL) as own:
        versions = f"verifier {NOISE_VERSION}, drafter {NOISE_VERSION + 1}"
        assert f"noise_version does not match: {versions}" in await own.refused()


@on_loop
async def test_greedy_drafts_accept_another_version_of_noise():
    async with linked(Drafter(make_info(noise_version=NOISE_VERSION + 1))) as own:
        await own.connected()


@on_loop
async def test_what_the_drafter_itself_refuses_is_noted_in_its_words():
    drafter = Drafter()
    drafter.abort = (grpc.StatusCode.FAILED_PRECONDITION, "model: the verifier has a, the drafter has b")
    async with linked(drafter, {"model": "a"}) as own:
        assert await own.refused() == "FAILED_PRECONDITION: model: the verifier has a, the drafter has b"
        assert drafter.hellos[0].speculative_config.model == "a"


LONG = "x" * 1_000_000


@pytest.mark.parametrize("changes", [{"method": LONG}, {"head_fingerprint": LONG}], ids=["method", "fingerprint"])
@on_loop
async def test_a_long_text_of_a_drafter_is_not_passed_on_to_clients(changes):
    async with linked(Drafter(make_info(**changes)), {"method": "eagle3"}) as own:
        assert len(await own.refused()) < 1000
        assert len(own.link.status.SerializeToString()) < 2000


def ids_message(*ids: int) -> pb.Tensor:
    return encode_tensor(torch.tensor(ids, dtype=torch.int32))


WRONG_HELLOS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"info": make_info(layers=[1, 9])}, "drafter layers [1, 9], verifier different ones of 0 to 4"),
    "dtype": ({"info": make_info(dtype=77)}, "drafter width 4 of dtype 77, verifier width 4 of dtypes [1, 2, 3]"),
    "vocabulary": ({"info": make_info(target_vocab_size=9)}, "vocab_size does not match: verifier 20, drafter 9"),
    "no info": ({"info": None}, "protocol_version does not match"),
    "empty ids": ({"draft_token_ids": pb.Tensor()}, "draft_token_ids.dtype = 0: must be 4"),
    "no ids": (
        {"info": make_info(draft_vocab_size=0), "draft_token_ids": ids_message()},
        "draft_token_ids must be in [0, 20), at least one",
    ),
    "too few ids": ({"draft_token_ids": ids_message(1, 2)}, "draft_token_ids.shape = (2,): must be [20]"),
    "ids outside": (
        {"info": make_info(draft_vocab_size=2), "draft_token_ids": ids_message(1, 20)},
        "draft_token_ids must be in [0, 20)",
    ),
    "id twice": (
        {"info": make_info(draft_vocab_size=2), "draft_token_ids": ids_message(3, 3)},
        "draft_token_ids must be in [0, 20), at least one and all different",
    ),
    "missing ids": ({"info": make_info(draft_vocab_size=7)}, "draft_token_ids are missing: drafter vocabulary 7, 20"),
    "carrier": ({"carrier": 0}, "must be a hello with one of the carriers shm, bytes"),
    "unknown carrier": ({"carrier": 77}, "must be a hello with one of the carriers shm, bytes"),
}


@pytest.mark.parametrize("name", WRONG_HELLOS)
@on_loop
async def test_a_hello_that_does_not_fit_is_refused_until_it_does(name):
    changes, text = WRONG_HELLOS[name]
    drafter = Drafter(hello=changes)
    async with linked(drafter) as own:
        assert text in await own.refused()
        assert own.events.empty()
        drafter.hello = {}
        await own.connected()
        assert own.link.status.detail == ""


@on_loop
async def test_a_head_changed_since_the_info_call_is_as_the_hello_says():
    changed = make_info(layers=[2], head_fingerprint="0ddb")
    async with linked(Drafter(hello={"info": changed})) as own:
        head = (await own.connected()).head
        assert (head.fingerprint, head.layers, head.row_bytes) == ("0ddb", (2,), 2 * HIDDEN)


@on_loop
async def test_a_first_message_that_is_no_hello_is_refused():
    class Early(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002, N802
            yield pb.DraftResponse(drafts=pb.Drafts(step_id=1))

    async with linked(Early()) as own:
        assert "first message must be a hello" in await own.refused()


class Garbled(Drafter):
    """A drafter that answers each step with `answers`, which may be invalid messages."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__()
        self.answers = answers

    async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002, N802
        await anext(request_iterator)
        yield pb.DraftResponse(hello=pb.DrafterHello(info=self.info, carrier=pb.CARRIER_BYTES)).SerializeToString()
        async for _ in request_iterator:
            for answer in self.answers:
                yield answer


async def serve_bytes(drafter: Garbled) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    handlers = {
        "GetDrafterInfo": grpc.unary_unary_rpc_method_handler(
            drafter.GetDrafterInfo, None, pb.GetDrafterInfoResponse.SerializeToString
        ),
        "Draft": grpc.stream_stream_rpc_method_handler(drafter.Draft, None, None),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("draftwire.v1.Drafting", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


GARBLED = {
    "no message": ([b"\xff\xff\xff\xff"], "the answer cannot be decoded"),
    "more answers than steps": ([response(drafts=pb.Drafts(step_id=1))] * 2, "answered more steps than it was sent"),
    "drains twice": ([response(draining=pb.Draining())] * 2, "sent Draining twice"),
}


@pytest.mark.parametrize("name", GARBLED)
@on_loop
async def test_a_drafter_that_does_not_speak_the_protocol_is_expelled(name):
    answers, text = GARBLED[name]
    async with linked(Garbled(*answers), serve=serve_bytes) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert await own.wait_for_state(generate_pb2.DRAFTER_STATE_EXPELLED) == f"expelled: {text}"
        assert stream.is_expelled


TOO_LARGE = "x" * (drafter_link.LEAST_ANSWER_BYTES + 1)


async def serve_compressed(drafter: Drafter) -> tuple[grpc.aio.Server, int]:
    return await serve(drafter, compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("serving", [serve, serve_compressed])
@pytest.mark.parametrize("where", ["info", "hello", "answer", "later info"])
@on_loop
async def test_a_too_large_message_of_a_drafter_expels_it(where, serving, monkeypatch):
    """Otherwise the verifier would reconnect every second or two and begin to read the message again."""
    monkeypatch.setattr(drafter_link, "INFO_EVERY_S", 0.02)
    drafter = Drafter()
    if where == "info":
        drafter.info.head = TOO_LARGE
    elif where == "hello":
        drafter.hello["info"] = make_info(head=TOO_LARGE)
    elif where == "answer":
        drafter.padding = TOO_LARGE.encode()
    async with linked(drafter, serve=serving) as own:
        if where in ("answer", "later info"):
            stream = await own.connected()
            if where == "later info":
                drafter.info.head = TOO_LARGE
            stream.send(pb.DraftStep(step_id=1))
        detail = await own.wait_for_state(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert "message larger than max" in detail
        if where in ("answer", "later info"):
            assert stream.is_expelled
