"""Fake drafters that answer a verifier wrongly; each of their messages may have any bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import grpc
import numpy as np
import torch
from fuzz_carriers import CARRIERS, CPU
from fuzz_noise import EDGES, hostile_message
from fuzz_steps import LAYERS, WIDTH, hostile_features, set_hostile, tensor

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.version import PROTOCOL_VERSION, VERSION
from draftwire.transport import Body, Channel, Segment, SharedSegments, meet, segment_bytes
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from models import CONTEXT, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE

SERVICE = "draftwire.v1.Drafting"
FUSED_WIDTH = 16

Plan = tuple[Random, asyncio.Future[str]]


def describe(fusion: pb.FeatureFusion | None = None) -> pb.GetDrafterInfoResponse:
    """Return the info of a valid drafter."""
    return pb.GetDrafterInfoResponse(
        version=VERSION,
        method="eagle3",
        head="fuzz",
        head_fingerprint="0bad",
        target_vocab_size=VOCAB_SIZE,
        target_hidden_size=HIDDEN_SIZE,
        target_num_layers=NUM_LAYERS,
        features=pb.FeatureSpec(layers=LAYERS, width=WIDTH, dtype=pb.DTYPE_FLOAT32),
        draft_vocab_size=VOCAB_SIZE,
        max_num_speculative_tokens=16,
        max_sequences=64,
        max_model_len=CONTEXT,
        draft_logits_forms=[
            config_pb2.DRAFT_LOGITS_FORM_NONE,
            config_pb2.DRAFT_LOGITS_FORM_DENSE,
            config_pb2.DRAFT_LOGITS_FORM_TOP_N,
        ],
        device="cpu",
        dtype="float32",
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        fusion=fusion,
    )


def answer(rng: Random, step: pb.DraftStep, top_n: int) -> pb.Drafts:
    """Return a valid answer: random drafts for every sequence that requests some, with logits (`top_n`, 0 for all)."""
    drafts = pb.Drafts(step_id=step.step_id, compute_time_s=0.001)
    ends = np.cumsum(step.num_rows)
    tokens = np.frombuffer(step.tokens.data, np.int32)
    for i, wanted in enumerate(step.num_drafts):
        if wanted:
            drafts.sequence_ids.append(step.sequence_ids[i])
            drafts.statuses.append(pb.SEQUENCE_STATUS_OK)
            drafts.committed_lengths.append(step.first_rows[i] + step.num_rows[i] + 1)
            drafts.last_tokens.append(int(tokens[ends[i] - 1]))
            drafts.num_drafts.append(wanted)
    total = sum(drafts.num_drafts)
    generator = np.random.default_rng(rng.getrandbits(64))
    drafts.tokens.CopyFrom(tensor(generator.integers(0, VOCAB_SIZE, total, np.int32)))
    if total:
        width = top_n or VOCAB_SIZE
        drafts.logits.CopyFrom(tensor(generator.standard_normal((total, width), np.float32)))
        if top_n:
            ids = np.tile(np.arange(width, dtype=np.int32), (total, 1))
            drafts.logits_token_ids.CopyFrom(tensor(ids))
    return drafts


def hostile_answers(rng: Random, good: pb.Drafts, old: deque[pb.Drafts]) -> list[pb.Drafts | bytes]:
    """Return the messages to send in place of the valid answer."""
    kind = rng.randrange(11)
    wrong = pb.Drafts()
    wrong.CopyFrom(good)
    if kind == 0:
        return [good, good] if rng.random() < 0.5 else [pb.Drafts(step_id=good.step_id + 1)] * rng.choice((1, 100))
    if kind == 1 and old:
        wrong.CopyFrom(rng.choice(old))
        if rng.random() < 0.8:
            wrong.step_id = good.step_id
    elif kind == 2:
        wrong.step_id = rng.choice((0, good.step_id - 1, *EDGES))
    elif kind == 3 and wrong.HasField("logits"):
        hostile_logits(rng, wrong.logits)
    elif kind == 4:
        wrong.compute_time_s = rng.choice((float("nan"), float("inf"), -float("inf"), -1.0, 1e308, 1e9))
    elif kind == 5 and wrong.HasField("logits_token_ids"):
        ids = np.frombuffer(wrong.logits_token_ids.data, np.int32).copy()
        ids[rng.randrange(len(ids))] = rng.choice((-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1))
        wrong.logits_token_ids.data = ids.tobytes()
    elif kind == 6 and len(wrong.tokens.data):
        tokens = np.frombuffer(wrong.tokens.data, np.int32).copy()
        tokens[rng.randrange(len(tokens))] = rng.choice((-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1))
        wrong.tokens.data = tokens.tobytes()
    elif kind == 7:
        which = rng.choice((wrong.logits, wrong.tokens, wrong.logits_token_ids))
        which.span.generation, which.span.offset = rng.choice(EDGES), rng.choice(EDGES)
    elif kind == 8:
        return [hostile_message(rng, [pb.DraftResponse(drafts=good).SerializeToString()])]
    elif kind == 9 and wrong.sequence_ids:
        at = rng.randrange(len(wrong.sequence_ids))
        wrong.statuses[at] = rng.choice((0, 2, 3, 4, -1, 2**31 - 1))
        wrong.sequence_ids[at] = rng.choice((wrong.sequence_ids[at], 0, 1, 2, 2**64 - 1))
    else:
        set_hostile(rng, wrong)
    return [wrong]


def hostile_logits(rng: Random, logits: pb.Tensor) -> None:
    """Replace elements by NaN, infinities and extreme values; sometimes also truncate the bytes."""
    step = pb.DraftStep(features=logits)
    hostile_features(rng, step)
    logits.CopyFrom(step.features)
    if rng.random() < 0.2:
        logits.data = logits.data[: rng.randrange(len(logits.data))]


class FakeDrafter:
    """A drafter that behaves correctly except where a plan requires a wrong message.

    A plan is a random generator and a future that is set when the wrong message is sent. The plans in `steps`, which
    all drafters share, are for answers; the plans in `hellos` are for new connections.
    """

    def __init__(self, top_n: int, steps: deque[Plan], *, is_direct: bool) -> None:
        """With `is_direct` the drafter shares memory with the verifier and answers through the ring, as on one host."""
        self._top_n = top_n
        self._is_direct = is_direct
        self._rng = Random(0)
        self._steps = steps
        self.hellos: deque[Plan] = deque()
        self._old: deque[pb.Drafts] = deque(maxlen=8)
        self._hello: Plan | None = None  # plan of the connection that is being made
        self._inbox: asyncio.Queue[pb.DraftStep | None] = asyncio.Queue()  # steps of the stream; None ends it
        self.address = ""

    async def start(self) -> grpc.aio.Server:
        """Serve on a free port; return the server."""
        handlers = {
            "GetDrafterInfo": grpc.unary_unary_rpc_method_handler(self._info, None, _encode),
            "GetFeatureFusion": grpc.unary_stream_rpc_method_handler(self._fusion, None, _encode),
            "Draft": grpc.stream_stream_rpc_method_handler(self._draft, pb.DraftRequest.FromString, _encode),
        }
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        return server

    def hang_up(self) -> None:
        """End the stream, so that the verifier connects again."""
        self._inbox.put_nowait(None)

    async def _info(self, _request: bytes, context: Any) -> Any:
        if self._hello is not None and not self._hello[1].done():
            self._hello[1].set_result("connection")  # the verifier reconnects, so it has handled the last answers
        self._hello = self.hellos.popleft() if self.hellos else None
        info = describe()
        if self._hello is not None:
            rng, done = self._hello
            kind = rng.randrange(8)
            if kind in (0, 1):
                done.set_result(f"info.{set_hostile(rng, info)}")
            elif kind == 2:
                done.set_result("info bytes")
                return hostile_message(rng, [info.SerializeToString()])
            elif kind == 3:
                done.set_result("status")
                code = rng.choice(list(grpc.StatusCode)[1:])
                await context.abort(code, rng.choice(("", "x" * 3000, "line\nline\x1b[2J", "é" * 500)))
            elif kind in (4, 5):
                norms = rng.choice((0, 1, 3))
                info.fusion.CopyFrom(pb.FeatureFusion(width=FUSED_WIDTH, num_norms=norms, norm_eps=1e-5))
                if kind == 5:
                    set_hostile(rng, info.fusion)
        return info

    async def _fusion(self, _request: bytes, _context: Any) -> AsyncIterator[Any]:
        rng, done = self._hello or (self._rng, asyncio.get_running_loop().create_future())
        if not done.done():
            done.set_result("fusion")
        size = 4 * WIDTH * FUSED_WIDTH
        kind = rng.randrange(4)
        if kind == 0:
            while True:  # the verifier must end this endless stream
                yield pb.FeatureFusionChunk(data=rng.randbytes(rng.choice((0, 1, 4096, 1 << 20))))
        elif kind == 1:
            yield pb.FeatureFusionChunk(data=rng.randbytes(size))
        elif kind == 2:
            yield rng.randbytes(100)
        else:
            yield pb.FeatureFusionChunk(data=b"\0" * rng.randrange(size))

    async def _draft(self, requests: AsyncIterator[pb.DraftRequest], context: Any) -> AsyncIterator[Any]:
        inbox = self._inbox = asyncio.Queue()
        if self.hellos:  # a plan waits for a new connection
            inbox.put_nowait(None)
        self._old.clear()
        shared = await self._meet((await anext(requests)).hello)
        hello = pb.DrafterHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            info=describe(),
            carrier=_carrier(shared.incoming),
            logits_carrier=_carrier(shared.outgoing),
            direct=shared.channel is not None,
        )
        if self._hello is not None and not self._hello[1].done():
            rng, done = self._hello
            kind = rng.randrange(4)
            done.set_result("hello")
            if kind == 0:
                yield pb.DraftResponse(drafts=pb.Drafts(step_id=1))
            elif kind == 1:
                yield hostile_message(rng, [pb.DraftResponse(hello=hello).SerializeToString()])
            else:
                if rng.random() < 0.3:
                    ids = rng.choice((range(VOCAB_SIZE), [0] * VOCAB_SIZE, [-1] * VOCAB_SIZE, range(1, VOCAB_SIZE + 1)))
                    hello.draft_token_ids.CopyFrom(tensor(np.array(ids, np.int32)))
                set_hostile(rng, hello)
                yield pb.DraftResponse(hello=hello)
        else:
            yield pb.DraftResponse(hello=hello)
        with _filled(inbox, requests, shared.channel):
            features_read = 0
            while (step := await inbox.get()) is not None:
                good = answer(self._rng, step, self._top_n)
                features_read = good.features_read = max(features_read, step.features.span.generation)
                wrong: list[pb.Drafts | bytes] | None = None
                if self._steps and good.sequence_ids:
                    rng, done = self._steps.popleft()
                    # Before the answer, because the verifier may end the stream.
                    done.set_result("direct answer" if shared.channel else "answer")
                    wrong = hostile_answers(rng, good, self._old)
                    if shared.channel is not None and rng.random() < 0.2:
                        _lie_in_the_ring(rng, shared.channel)
                for one in [good] if wrong is None else wrong:
                    message = one if isinstance(one, bytes) else pb.DraftResponse(drafts=one).SerializeToString()
                    if shared.channel is None or not shared.channel.send(message):
                        yield message
                self._old.append(good)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a while")

    async def _meet(self, hello: pb.VerifierHello) -> SharedSegments:
        if not self._is_direct:
            return SharedSegments()
        size = segment_bytes(4 * WIDTH * 64)
        return await asyncio.to_thread(meet, hello.rendezvous, CARRIERS, size, CPU)


@contextlib.contextmanager
def _filled(
    inbox: asyncio.Queue[pb.DraftStep | None], requests: AsyncIterator[pb.DraftRequest], channel: Channel | None
) -> Iterator[None]:
    """Fill the inbox with the steps from the stream and from the ring; close the ring at the end."""
    loop = asyncio.get_running_loop()

    async def read() -> None:
        async for request in requests:
            if not request.HasField("keep_alive"):
                inbox.put_nowait(request.step)
        inbox.put_nowait(None)

    announced: dict[int, tuple[pb.Announce, Body]] = {}

    def read_channel() -> None:
        assert channel is not None
        try:
            for record in channel.receive():
                request = pb.DraftRequest.FromString(record.message)
                if record.body is not None:
                    announced[request.announce.announced_id] = request.announce, record.body
                elif request.WhichOneof("message") == "commit":
                    inbox.put_nowait(_committed(request.commit, *announced.pop(request.commit.announced_id)))
                else:
                    inbox.put_nowait(request.step)
        except ConnectionError:
            loop.remove_reader(channel)

    reading = asyncio.ensure_future(read())
    if channel is not None:
        loop.add_reader(channel, read_channel)
    try:
        yield
    finally:
        reading.cancel()
        if channel is not None:
            loop.remove_reader(channel)
            channel.close()


def _committed(commit: pb.Commit, announce: pb.Announce, body: Body) -> pb.DraftStep:
    """Return the step that a commit confirms."""
    numbers = body.read((len(announce.sequence_ids), announce.columns))
    body.release()
    left = [place for place, one in enumerate(announce.sequence_ids) if one not in commit.closed_ids]
    step = pb.DraftStep(
        step_id=commit.step_id,
        closed_ids=commit.closed_ids,
        sequence_ids=[announce.sequence_ids[place] for place in left],
        first_rows=[announce.first_rows[place] for place in left],
        num_rows=[int(numbers[place, 0]) for place in left],
        num_drafts=commit.num_drafts,
    )
    tokens = [numbers[place, 1 : 1 + numbers[place, 0]] for place in left]
    step.tokens.CopyFrom(tensor(np.concatenate([np.empty(0, np.int32), *tokens])))
    step.features.span.CopyFrom(announce.features)
    return step


def _lie_in_the_ring(rng: Random, channel: Channel) -> None:
    """Send early drafts of a random step, or overwrite bytes of the ring."""
    if rng.random() < 0.5:
        early = pb.DraftResponse(early=pb.EarlyDrafts(announced_id=rng.choice((0, 1, 2, 3, 10**6, 2**64 - 1))))
        numbers = torch.randint(-2, 2 * VOCAB_SIZE, (rng.choice((1, 2, 7)), rng.choice((1, 4))), dtype=torch.int32)
        channel.send(early.SerializeToString(), numbers if rng.random() < 0.8 else None)
        return
    rings = channel.memory
    at = rng.randrange(len(rings) // 2, len(rings) - 64)
    if rng.random() < 0.5:
        at = len(rings) // 2 + rng.randrange(-64, 512)
    rings[at : at + 8] = torch.frombuffer(bytearray(rng.randbytes(8)), dtype=torch.uint8)


def _carrier(segment: Segment | None) -> pb.Carrier:
    return pb.CARRIER_BYTES if segment is None else segment.carrier


def _encode(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
