"""The stream to a drafter: which drafters are taken, how a stream ends and when it is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from rings import channel_ends

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.tensors import encode_tensor
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.fusion import FeatureFusion
from draftwire.transport import TensorReceiver, TensorSender
from draftwire.transport.ring import MAX_MESSAGE_BYTES
from draftwire.transport.traffic import Traffic
from draftwire.v1 import config_pb2, draft_pb2_grpc, generate_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from verifier_service.drafters import connection as drafter_link
from verifier_service.drafters.connection import DrafterLink
from verifier_service.drafters.features import FeatureKind
from verifier_service.drafters.stream import Answered, Connected, Disconnected, Draining, LinkEvent, Loaded, Stream

READY = generate_pb2.DRAFTER_STATE_READY
REFUSED = generate_pb2.DRAFTER_STATE_REFUSED
CONNECTING = generate_pb2.DRAFTER_STATE_CONNECTING
WAIT_S = 60.0
AT_ONCE_S = 4.0  # below what a link waits for a connection
"""Longer than anything that is to happen at once takes on a busy machine, and less than any time-out."""
VOCAB, HIDDEN, NUM_LAYERS = 20, 2, 4
TARGET: Any = SimpleNamespace(
    name="org/target",
    fingerprint="beef",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=NUM_LAYERS,
    max_model_len=64,
    device=torch.device("cpu"),
)
RUNNER = asyncio.Runner()  # one loop for all tests: gRPC's threads outlive a test
GUMBEL = {"draft_sample_method": "gumbel"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_link, "BACKOFF_S", (0.02, 0.05))
    monkeypatch.setattr(drafter_link, "REFUSED_RETRY_S", 0.05)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        RUNNER.run(asyncio.wait_for(test(*args, **kwargs), 4 * WAIT_S))

    return run


@pytest.fixture(autouse=True, scope="module")
def _close_runner() -> Iterator[None]:
    yield
    RUNNER.close()


def make_info(**changes: Any) -> pb.GetDrafterInfoResponse:
    """A head that fits the target, but for `changes`; `layers`, `width` and `dtype` are those of its features."""
    layers = changes.pop("layers", [1, 3])
    features = pb.FeatureSpec(
        layers=layers,
        width=changes.pop("width", len(layers) * HIDDEN),
        dtype=changes.pop("dtype", pb.DTYPE_BFLOAT16),
    )
    values: dict[str, Any] = {
        "method": "eagle3",
        "head": "org/head",
        "head_fingerprint": "f00d",
        "target_vocab_size": VOCAB,
        "target_hidden_size": HIDDEN,
        "target_num_layers": NUM_LAYERS,
        "features": features,
        "draft_vocab_size": VOCAB,
        "max_num_speculative_tokens": 6,
        "max_sequences": 5,
        "max_model_len": 48,
        "draft_logits_forms": [config_pb2.DRAFT_LOGITS_FORM_NONE, config_pb2.DRAFT_LOGITS_FORM_TOP_N],
        "protocol_version": PROTOCOL_VERSION,
        "noise_version": NOISE_VERSION,
    }
    return pb.GetDrafterInfoResponse(**{**values, **changes})


class Drafter(draft_pb2_grpc.DraftingServicer):
    """Says what it is told to say and answers each step with nothing but its number."""

    def __init__(self, info: pb.GetDrafterInfoResponse | None = None, hello: dict[str, Any] | None = None) -> None:
        self.info = info or make_info()
        self.hello = hello or {}  # changes of the hello
        self.hellos: list[pb.VerifierHello] = []
        self.reads = True
        self.num_keep_alives = 0
        self.abort: tuple[grpc.StatusCode, str] | None = None
        self.fusion_requests: list[str] = []
        self.fusion_data = b""
        self.padding = b""  # of each answer

    async def GetFeatureFusion(  # noqa: N802
        self, request: pb.GetFeatureFusionRequest, context: Any  # noqa: ARG002
    ) -> AsyncIterator[pb.FeatureFusionChunk]:
        self.fusion_requests.append(request.head_fingerprint)
        for begin in range(0, len(self.fusion_data), 7):
            yield pb.FeatureFusionChunk(data=self.fusion_data[begin : begin + 7])

    async def GetDrafterInfo(self, request: Any, context: Any) -> pb.GetDrafterInfoResponse:  # noqa: ARG002, N802
        return self.info

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        self.hellos.append((await anext(request_iterator)).hello)
        if self.abort is not None:
            await context.abort(*self.abort)
        yield pb.DraftResponse(hello=pb.DrafterHello(**{"info": self.info, "carrier": pb.CARRIER_BYTES, **self.hello}))
        if not self.reads:
            await asyncio.Event().wait()
        async for request in request_iterator:
            if request.HasField("keep_alive"):
                self.num_keep_alives += 1
                continue
            drafts = pb.Drafts(step_id=request.step.step_id)
            if self.padding:
                drafts.tokens.data = self.padding
            yield pb.DraftResponse(drafts=drafts)


async def serve(
    drafter: Drafter, port: int = 0, compression: grpc.Compression | None = None
) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS, compression=compression)
    draft_pb2_grpc.add_DraftingServicer_to_server(drafter, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


class Linked:
    """A link that runs and what it has posted."""

    def __init__(self, port: int, config: dict[str, Any], **options: Any) -> None:
        self.shown: list[int] = []  # the drafter's state at each event
        self.events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        settings = speculative_config_from_mapping(config)
        self.loads: list[pb.DrafterLoad] = []  # as told beside the answers
        self.link = DrafterLink(f"127.0.0.1:{port}", TARGET, settings, 8, self._post, Traffic(), **options)
        self.task = asyncio.create_task(self.link.run())

    def _post(self, event: LinkEvent) -> None:
        self.shown.append(self.link.status.state)
        if isinstance(event, Loaded):
            self.loads.append(event.load)
        else:
            self.events.put_nowait(event)

    async def next(self, timeout_s: float = WAIT_S) -> LinkEvent:
        return await asyncio.wait_for(self.events.get(), timeout_s)

    async def connected(self) -> Stream:
        event = await self.next()
        assert isinstance(event, Connected)
        assert self.link.status.state == READY
        return event.stream

    async def noted(self, state: int) -> str:
        """Waits for that state; its detail."""
        end = time.monotonic() + WAIT_S
        while self.link.status.state != state or not self.link.status.detail:
            assert time.monotonic() < end, self.link.status
            await asyncio.sleep(0.005)
        return self.link.status.detail

    async def refused(self) -> str:
        """Waits until the drafter is refused; why."""
        return await self.noted(REFUSED)


@contextlib.asynccontextmanager
async def linked(
    drafter: Drafter, config: dict[str, Any] | None = None, *, serve: Any = serve, **options: Any
) -> AsyncIterator[Linked]:
    server, port = await serve(drafter)
    own = Linked(port, config or {}, **options)
    try:
        yield own
    finally:
        own.task.cancel()
        await asyncio.gather(own.task, return_exceptions=True)
        await server.stop(None)


# A drafter that fits.


@on_loop
async def test_a_drafter_that_fits_is_connected():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        assert (stream.address, stream.failure) == (own.link.status.address, None)
        head = stream.head
        assert (head.fingerprint, head.layers, head.dtype) == ("f00d", (1, 3), torch.bfloat16)
        assert (head.draft_vocab_size, head.draft_token_ids, head.row_bytes) == (VOCAB, None, 2 * 2 * HIDDEN)
        assert (head.max_drafts, head.max_sequences, head.max_model_len) == (6, 5, 48)
        assert (own.link.status.head_fingerprint, own.link.status.detail) == ("f00d", "")


@on_loop
async def test_a_verifier_with_nothing_to_send_sends_keep_alives(monkeypatch):
    monkeypatch.setattr(drafter_link, "KEEP_ALIVE_S", 0.05)
    drafter = Drafter()
    async with linked(drafter) as own:
        stream = await own.connected()
        end = time.monotonic() + WAIT_S
        while drafter.num_keep_alives < 3:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        stream.send(pb.DraftStep(step_id=1))
        event = await own.next()
        assert isinstance(event, Answered)
        assert event.drafts.step_id == 1  # no answer of a KeepAlive came before
        assert own.link.status.state == READY


@on_loop
async def test_without_a_place_for_a_rendezvous_tensors_go_in_messages(tmp_path):
    drafter = Drafter()
    async with linked(drafter, rendezvous_dir=tmp_path / "gone") as own:
        stream = await own.connected()
        assert stream.sender.carrier == pb.CARRIER_BYTES
    assert not drafter.hellos[0].HasField("rendezvous")


@on_loop
async def test_a_drafter_is_shown_ready_when_the_engine_knows_it():
    async with linked(Drafter()) as own:
        await own.connected()
        assert own.shown == [generate_pb2.DRAFTER_STATE_CONNECTING] * 2  # once for the state and once for the load


@on_loop
async def test_the_hello_says_what_the_target_is_and_what_will_be_sent():
    drafter = Drafter()
    async with linked(drafter, {"num_speculative_tokens": 2}) as own:
        await own.connected()
    (hello,) = drafter.hellos
    assert (hello.protocol_version, hello.noise_version) == (PROTOCOL_VERSION, NOISE_VERSION)
    assert (hello.verifier, hello.target.name, hello.target.fingerprint) == ("target", "org/target", "beef")
    target = hello.target
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCAB, HIDDEN, NUM_LAYERS)
    assert hello.features == drafter.info.features
    assert hello.speculative_config.num_speculative_tokens == 2
    assert (hello.max_sequences, list(hello.carriers)) == (5, [pb.CARRIER_SHM, pb.CARRIER_BYTES])


@on_loop
async def test_target_ids_of_a_reduced_vocabulary_come_with_the_hello():
    ids = torch.tensor([2, 3, 19], dtype=torch.int32)
    async with linked(Drafter(make_info(draft_vocab_size=3), {"draft_token_ids": encode_tensor(ids)})) as own:
        head = (await own.connected()).head
        assert (head.draft_vocab_size, head.draft_token_ids.dtype) == (3, torch.int64)
        assert head.draft_token_ids.tolist() == [2, 3, 19]


@on_loop
async def test_a_head_without_its_targets_number_of_layers_is_taken():
    async with linked(Drafter(make_info(target_num_layers=0))) as own:
        await own.connected()


@on_loop
async def test_steps_go_out_in_order_and_answers_are_posted():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        for step_id in (1, 2, 3):
            stream.send(pb.DraftStep(step_id=step_id))
        for step_id in (1, 2, 3):
            event = await own.next()
            assert isinstance(event, Answered)
            assert (event.stream, event.drafts.step_id) == (stream, step_id)


@on_loop
async def test_a_message_is_encoded_once(encodings: Counter[str]):
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        assert encodings == {"DraftRequest": 2, "DraftResponse": 2}  # hellos, and what follows


@on_loop
async def test_the_status_counts_the_bytes_of_steps_and_answers_alone():
    class Leaving(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in super().Draft(request_iterator, context):
                yield response
            yield pb.DraftResponse(draining=pb.Draining(timeout_s=5))

    async with linked(Leaving()) as own:
        stream = await own.connected()
        for step_id in (1, 1000):
            stream.send(pb.DraftStep(step_id=step_id))
            assert isinstance(await own.next(), Answered)
        stream.end()
        assert isinstance(await own.next(), Draining)
        status, ids = own.link.status, (1, 1000)
        steps = [pb.DraftRequest(step=pb.DraftStep(step_id=step_id)) for step_id in ids]
        assert status.sent_message_bytes == sum(len(step.SerializeToString()) for step in steps)
        answers = [pb.DraftResponse(drafts=pb.Drafts(step_id=step_id)) for step_id in ids]
        assert status.received_message_bytes == sum(len(answer.SerializeToString()) for answer in answers)


# Features that are fused before they are sent.


def fusing_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """A drafter whose head fuses two layers' features of width 2 into states of width 3."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2 * HIDDEN, generator=draw).bfloat16()
    fusion = FeatureFusion(weight, [torch.rand(HIDDEN, generator=draw).bfloat16() for _ in range(2)], 1e-5)
    drafter = Drafter(make_info(fusion=fusion.describe(), **changes))
    drafter.fusion_data = b"".join(fusion.chunks())
    return drafter


@on_loop
async def test_a_head_that_fuses_gets_fused_features():
    drafter = fusing_drafter()
    async with linked(drafter) as own:
        head = (await own.connected()).head
        assert own.link.status.features_are_fused
        assert own.link.status.feature_row_bytes == head.row_bytes == 2 * 3
    (hello,) = drafter.hellos
    assert (hello.features.width, hello.features.fused_for) == (3, "f00d")
    assert list(hello.features.layers) == [1, 3]
    assert drafter.fusion_requests == ["f00d"]
    assert b"".join(head.fusion.chunks()) == drafter.fusion_data
    assert (head.width, head.kind) == (3, FeatureKind((1, 3), f"f00d {drafter.info.fusion.digest}"))


@on_loop
async def test_the_operator_can_have_features_sent_as_they_are():
    drafter = fusing_drafter()
    async with linked(drafter, fuses_features=False) as own:
        head = (await own.connected()).head
        assert (head.fusion, head.kind, head.width) == (None, FeatureKind((1, 3)), 4)
        assert not own.link.status.features_are_fused
    assert (drafter.hellos[0].features, drafter.fusion_requests) == (drafter.info.features, [])


@on_loop
async def test_fusion_that_saves_nothing_is_left_to_the_drafter():
    drafter = fusing_drafter()
    drafter.info.fusion.width = 4
    async with linked(drafter) as own:
        assert (await own.connected()).head.fusion is None
    assert drafter.fusion_requests == []


@on_loop
async def test_equal_heads_share_weights_and_get_their_own_features():
    one, other = fusing_drafter(5), fusing_drafter(5, head_fingerprint="0ddb")
    async with linked(one) as own:
        heads = [(await own.connected()).head]
        async with linked(other) as second:
            heads.append((await second.connected()).head)
    assert heads[0].fusion is heads[1].fusion
    assert heads[0].kind != heads[1].kind
    assert len(one.fusion_requests + other.fusion_requests) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda drafter: setattr(drafter, "fusion_data", drafter.fusion_data[:-1]), "must be 32 bytes"),
        (lambda drafter: setattr(drafter, "fusion_data", drafter.fusion_data * 1000), "must be 32 bytes"),
        (lambda drafter: setattr(drafter, "fusion_data", bytes(32)), "fusion.digest"),
        (lambda drafter: setattr(drafter.info.fusion, "num_norms", 7), "fusion does not fit: width 3, num_norms 7"),
        (lambda drafter: drafter.hello.update(info=make_info(head_fingerprint="0ddb")), "the head has changed"),
    ],
    ids=["too little", "too much", "other weights", "no such fusion", "changed head"],
)
@on_loop
async def test_weights_that_are_not_the_heads_are_refused(change, text):
    drafter = fusing_drafter(7)
    change(drafter)
    async with linked(drafter) as own:
        assert text in await own.refused()
        assert own.events.empty()


# Drafters that do not fit.

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
    """Answers each step with `answers`, which need not be messages."""

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


def response(**parts: Any) -> bytes:
    return pb.DraftResponse(**parts).SerializeToString()


GARBLED = {
    "no message": ([b"\xff\xff\xff\xff"], "its answer cannot be decoded"),
    "more answers than steps": ([response(drafts=pb.Drafts(step_id=1))] * 2, "answered more steps than it was sent"),
    "drains twice": ([response(draining=pb.Draining())] * 2, "said twice that it drains"),
}


@pytest.mark.parametrize("name", GARBLED)
@on_loop
async def test_a_drafter_that_does_not_speak_the_protocol_is_expelled(name):
    answers, text = GARBLED[name]
    async with linked(Garbled(*answers), serve=serve_bytes) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert await own.noted(generate_pb2.DRAFTER_STATE_EXPELLED) == f"expelled: {text}"
        assert stream.is_expelled


TOO_LARGE = "x" * (drafter_link.LEAST_ANSWER_BYTES + 1)


async def serve_compressed(drafter: Drafter) -> tuple[grpc.aio.Server, int]:
    return await serve(drafter, compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("serving", [serve, serve_compressed])
@pytest.mark.parametrize("where", ["info", "hello", "answer", "later info"])
@on_loop
async def test_a_too_large_message_of_a_drafter_expels_it(where, serving, monkeypatch):
    """It was tried again every second or two, and each time the message began to be read."""
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
        detail = await own.noted(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert "message larger than max" in detail
        if where in ("answer", "later info"):
            assert stream.is_expelled


@on_loop
async def test_a_drafter_without_room_is_tried_again():
    drafter = Drafter()
    drafter.abort = (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 8)")
    async with linked(drafter) as own:
        assert "RESOURCE_EXHAUSTED" in await own.noted(CONNECTING)
        drafter.abort = None
        await own.connected()


@on_loop
async def test_the_load_is_asked_for_while_no_answer_tells_it(monkeypatch):
    monkeypatch.setattr(drafter_link, "INFO_EVERY_S", 0.02)
    drafter = Drafter(make_info(load=pb.DrafterLoad(sequences=3)))
    async with linked(drafter) as own:
        await own.connected()
        assert [load.sequences for load in own.loads] == [3]
        drafter.info.load.sequences = 9
        end = time.monotonic() + WAIT_S
        while own.loads[-1].sequences != 9:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


@on_loop
async def test_the_memory_is_noted_and_noted_anew_while_answers_come(monkeypatch):
    monkeypatch.setattr(drafter_link, "INFO_EVERY_S", 0.02)
    drafter = Drafter(make_info(memory=pb.MemoryUse(peak_host_bytes=3)))
    async with linked(drafter) as own:
        stream = await own.connected()
        assert own.link.status.memory.peak_host_bytes == 3
        unknown = b"\x98\x06\x01"  # field 99
        drafter.info.memory.MergeFromString(pb.MemoryUse(peak_host_bytes=9).SerializeToString() + unknown)
        end, step_id = time.monotonic() + WAIT_S, 0
        while own.link.status.memory.peak_host_bytes != 9:
            assert time.monotonic() < end
            stream.send(pb.DraftStep(step_id=(step_id := step_id + 1)))
            await asyncio.sleep(0.005)
        # What no one has defined is not passed on to clients.
        assert own.link.status.memory == pb.MemoryUse(peak_host_bytes=9)


@on_loop
async def test_a_draining_drafter_is_told_and_left_when_streams_end():
    drafter = Drafter()

    class Leaving(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in drafter.Draft(request_iterator, context):
                yield response
                if response.HasField("drafts"):
                    yield pb.DraftResponse(draining=pb.Draining(timeout_s=5))

    async with linked(Leaving()) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        assert isinstance(await own.next(), Draining)
        assert own.link.status.state == generate_pb2.DRAFTER_STATE_DRAINING
        stream.end()
        assert isinstance(await own.next(), Disconnected)
        assert "drained" in await own.noted(CONNECTING)


@on_loop
async def test_a_drafter_that_says_no_hello_is_tried_again(monkeypatch):
    monkeypatch.setattr(drafter_link, "HELLO_TIMEOUT_S", 0.2)
    drafter = Drafter()

    class Silent(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            if len(drafter.hellos) == 0:
                drafter.hellos.append((await anext(request_iterator)).hello)
                await asyncio.Event().wait()
            async for response in drafter.Draft(request_iterator, context):
                yield response

    async with linked(Silent()) as own:
        await own.connected()
        assert len(drafter.hellos) == 2


@on_loop
async def test_a_drafter_may_capture_its_graphs_before_its_hello(monkeypatch):
    """Longer than a connection may take; whoever gave it up would have it begin anew."""
    monkeypatch.setattr(drafter_link, "CONNECT_TIMEOUT_S", 1.0)

    class Capturing(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in super().Draft(request_iterator, context):
                await asyncio.sleep(2.0)
                yield response

    drafter = Capturing()
    async with linked(drafter) as own:
        await own.connected()
        assert len(drafter.hellos) == 1


# Steps that go straight to the drafter's engine.


@on_loop
async def test_steps_go_directly_unless_too_long_or_overtaking():
    ours, theirs = channel_ends()
    sender, receiver = TensorSender(torch.device("cpu")), TensorReceiver(torch.device("cpu"))
    status = generate_pb2.DrafterStatus(address="drafter:1")
    head: Any = SimpleNamespace()
    stream = Stream(status, head, lambda: None, sender, receiver, lambda *_: None, Traffic(), ours)

    def sent(step_id: int, num_bytes: int = 0) -> str:
        """Which way a step goes."""
        features = None
        if num_bytes:
            features = sender.begin(torch.float32, (num_bytes // 4,))
            features.seal()
        stream.send(pb.DraftStep(step_id=step_id), features)
        return "ring" if theirs.receive() else "stream"

    assert [sent(1), sent(2)] == ["ring", "ring"]
    assert sent(3, 4 * MAX_MESSAGE_BYTES) == "stream"
    assert sent(4) == "stream"
    stream.take(pb.Drafts(step_id=2))
    assert sent(5) == "stream"
    stream.take(pb.Drafts(step_id=3))
    stream.take(pb.Drafts(step_id=4))
    assert sent(6) == "stream"
    for step_id in (5, 6):
        stream.take(pb.Drafts(step_id=step_id))
    assert sent(7) == "ring"
    await asyncio.sleep(0)
    assert [stream.outbox.get_nowait()[0].step_id for _ in range(stream.outbox.qsize())] == [3, 4, 5, 6]
    theirs.close()
    stream.send(pb.DraftStep(step_id=8))
    await asyncio.sleep(0)
    assert stream.outbox.get_nowait()[0].step_id == 8
    ours.close()


@on_loop
async def test_answers_are_read_directly_until_nonsense_comes():
    ours, theirs = channel_ends()
    head: Any = SimpleNamespace()
    cancelled = asyncio.Event()
    cpu = torch.device("cpu")
    status = generate_pb2.DrafterStatus()
    sender, receiver = TensorSender(cpu), TensorReceiver(cpu)
    stream = Stream(status, head, cancelled.set, sender, receiver, lambda *_: None, Traffic(), ours)
    for step_id in (1, 2):
        stream.send(pb.DraftStep(step_id=step_id))
        theirs.send(pb.DraftResponse(drafts=pb.Drafts(step_id=step_id)).SerializeToString())
    assert [event.drafts.step_id for event in stream.read_direct() or ()] == [1, 2]
    theirs.send(b"\xff" * 20)
    assert stream.read_direct() is None
    assert stream.is_expelled
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    theirs.send(pb.DraftResponse(drafts=pb.Drafts(step_id=3)).SerializeToString())
    assert stream.read_direct() is None
    ours.close()
    theirs.close()


# The end of a stream.


@on_loop
async def test_a_failed_stream_ends_at_once_and_a_new_one_is_opened():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.fail("no answer in 10 s")
        event = await own.next(AT_ONCE_S)
        assert isinstance(event, Disconnected)
        assert event.stream is stream
        assert await own.connected() is not stream


@on_loop
async def test_the_first_failure_of_a_stream_counts():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        stream.fail("first")
        stream.fail("second", expel=True)
        assert (stream.failure, stream.is_expelled) == ("first", False)
        await own.next()
        await own.connected()


@on_loop
async def test_a_stream_whose_peer_never_reads_ends_when_it_is_failed():
    drafter = Drafter()
    drafter.reads = False
    async with linked(drafter) as own:
        stream = await own.connected()
        features = pb.Tensor(data=bytes(8 << 20))
        for step_id in range(1, 5):
            stream.send(pb.DraftStep(step_id=step_id, features=features))
        await asyncio.sleep(0.2)
        assert not stream.outbox.empty()  # a message is stuck on its way
        began = time.monotonic()
        stream.fail("too much is unanswered")
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)
        drafter.reads = True
        await own.connected()
        assert time.monotonic() - began < AT_ONCE_S


@on_loop
async def test_a_failure_from_another_thread_ends_the_stream():
    async with linked(Drafter()) as own:
        stream = await own.connected()
        await asyncio.to_thread(stream.fail, "lost")
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)


@on_loop
async def test_an_expelled_drafter_is_left_alone():
    drafter = Drafter()
    async with linked(drafter) as own:
        (await own.connected()).fail("wrong answer: drafts.tokens", expel=True)
        assert isinstance(await own.next(AT_ONCE_S), Disconnected)
        detail = await own.noted(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert detail == "expelled: wrong answer: drafts.tokens"
        await asyncio.sleep(0.3)
        assert own.events.empty()
        assert len(drafter.hellos) == 1


@on_loop
async def test_an_expulsion_outlives_the_name_servers_answers(monkeypatch):
    """A link that is no longer needed goes with its name, and a new one takes the drafter for a new one."""
    async with linked(Drafter()) as own:
        stream = await own.connected()
        assert own.link.is_needed
        stream.fail("the connection broke")
        assert isinstance(await own.next(), Disconnected)
        await own.noted(CONNECTING)
        assert not own.link.is_needed
        (await own.connected()).fail("wrong answer", expel=True)
        await own.noted(generate_pb2.DRAFTER_STATE_EXPELLED)
        assert own.link.is_needed
        monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.0, 0.0))  # its time is over
        assert not own.link.is_needed


@on_loop
async def test_an_expelled_drafter_is_taken_back_after_a_while(monkeypatch):
    monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.05, 0.1))
    async with linked(Drafter()) as own:
        for on_trial in (False, True, True):
            stream = await own.connected()
            assert stream.on_trial == on_trial
            stream.fail("wrong answer", expel=True)
            assert isinstance(await own.next(), Disconnected)


@on_loop
async def test_a_drafter_is_shown_as_its_stream_is_judged(monkeypatch):
    monkeypatch.setattr(drafter_link, "EXPELLED_RETRY_S", (0.05, 0.1))
    async with linked(Drafter()) as own:
        first = await own.connected()
        first.fail("wrong answer", expel=True)
        await own.next()
        second = await own.connected()
        second.report(generate_pb2.DRAFTER_STATE_PROBING)
        assert "on trial" in await own.noted(generate_pb2.DRAFTER_STATE_PROBING)
        first.report(generate_pb2.DRAFTER_STATE_SLOW)  # of a stream that has ended
        second.report(READY)
        second.fail("the connection broke")
        await own.next()
        assert own.link.status.state == CONNECTING
        assert not (await own.connected()).on_trial


@on_loop
async def test_a_stream_that_the_drafter_ends_is_posted_and_reopened():
    class Brief(Drafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            async for response in super().Draft(request_iterator, context):
                yield response
                if response.HasField("drafts") and len(self.hellos) == 1:
                    await context.abort(grpc.StatusCode.INTERNAL, "the head is on fire")

    async with linked(Brief()) as own:
        stream = await own.connected()
        stream.send(pb.DraftStep(step_id=1))
        assert isinstance(await own.next(), Answered)
        event = await own.next()
        assert isinstance(event, Disconnected)
        assert event.stream is stream
        assert await own.noted(CONNECTING) == "INTERNAL: the head is on fire"
        await own.connected()


@on_loop
async def test_an_unreachable_drafter_is_tried_again_until_it_is_there():
    server, port = await serve(Drafter())
    await server.stop(None)
    own = Linked(port, {})
    assert "UNAVAILABLE" in await own.noted(CONNECTING)
    server, _ = await serve(Drafter(), port)
    await own.connected()
    own.task.cancel()
    await asyncio.gather(own.task, return_exceptions=True)
    await server.stop(None)


@on_loop
async def test_a_drafter_that_was_restarted_is_connected_again():
    server, port = await serve(Drafter())
    own = Linked(port, {})
    first = await own.connected()
    await server.stop(None)
    event = await own.next()
    assert isinstance(event, Disconnected)
    assert event.stream is first
    server, _ = await serve(Drafter(make_info(head_fingerprint="1234")), port)
    second = await own.connected()
    assert (second.head.fingerprint, own.link.status.head_fingerprint) == ("1234", "1234")
    own.task.cancel()
    await asyncio.gather(own.task, return_exceptions=True)
    await server.stop(None)


async def end(own: Linked) -> float:
    """Cancels the link; how long its end took."""
    began = time.monotonic()
    own.task.cancel()
    await asyncio.wait([own.task], timeout=WAIT_S)
    assert own.task.cancelled()
    return time.monotonic() - began


@on_loop
async def test_a_cancelled_link_ends_at_once_and_posts_its_end():
    async with linked(Drafter()) as own:
        await own.connected()
        assert await end(own) < AT_ONCE_S
        assert isinstance(await own.next(), Disconnected)


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.3])
@pytest.mark.parametrize("expel", [False, True])
@on_loop
async def test_a_link_cancelled_after_its_stream_failed_ends_at_once(expel, pause_s, monkeypatch):
    monkeypatch.setattr(drafter_link, "BACKOFF_S", (60.0, 60.0))
    monkeypatch.setattr(drafter_link, "CONNECT_TIMEOUT_S", WAIT_S)  # there is one try within the test's time
    async with linked(Drafter()) as own:
        (await own.connected()).fail("lost", expel=expel)
        await asyncio.sleep(pause_s)
        assert await end(own) < AT_ONCE_S
        assert isinstance(await own.next(), Disconnected)
