"""The kinds of cases. Each plays a connection, call, stream or answer, returns its outcome and raises for a bug."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import grpc
import torch
from fuzz_carriers import CARRIERS, CPU, Announcer, LyingRendezvous, lie_about_span, scribble, share
from fuzz_noise import hostile_connection, hostile_message, hostile_scrape
from fuzz_requests import hostile_request
from fuzz_requests import seeds as request_seeds
from fuzz_steps import CONFIGS, Writer, hello, hostile_step, set_hostile
from fuzz_steps import seeds as step_seeds
from fuzz_streams import FindingError, Ledger
from fuzz_theft import steal
from fuzz_vllm import SERVICE as VLLM_SERVICE
from fuzz_vllm import hostile_generate
from fuzz_vllm import methods as vllm_methods
from fuzz_world import OWNERS, PATIENCE_S, World
from google.protobuf.message import DecodeError
from outgoing import finish

from draftwire.transport import Channel, Rendezvous, SharedSegments, TensorSender
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2

Status = grpc.StatusCode
# Statuses that a server may return to hostile input; INTERNAL and UNKNOWN mean errors of the server.
PROPER = {
    Status.OK,
    Status.INVALID_ARGUMENT,
    Status.FAILED_PRECONDITION,
    Status.RESOURCE_EXHAUSTED,
    Status.UNIMPLEMENTED,
    Status.NOT_FOUND,
}
GENERATE = "/draftwire.v1.Generation/Generate"
DRAFT = "/draftwire.v1.Drafting/Draft"
REQUESTS, STEPS = request_seeds(), step_seeds()
TOKENIZE = [
    generate_pb2.TokenizeRequest(text="The river bends").SerializeToString(),
    generate_pb2.TokenizeRequest(
        chat=generate_pb2.Chat(messages=[generate_pb2.ChatMessage(role="user", content="Who?")], tools=["{}"])
    ).SerializeToString(),
]
DETOKENIZE = [generate_pb2.DetokenizeRequest(token_ids=[5, 6, 7], skip_special_tokens=False).SerializeToString()]
# Methods of both services: (path, valid messages, whether requests are a stream).
METHODS: dict[str, list[tuple[str, list[bytes], bool]]] = {
    "verifier": [
        (GENERATE, REQUESTS, False),
        (GENERATE, REQUESTS, False),
        (GENERATE, REQUESTS, False),
        ("/draftwire.v1.Generation/Tokenize", TOKENIZE, False),
        ("/draftwire.v1.Generation/Detokenize", DETOKENIZE, False),
        ("/draftwire.v1.Generation/GetVerifierInfo", [b""], False),
        ("/draftwire.v1.Generation/Nothing", [b""], False),
        ("/grpc.health.v1.Health/Check", [b"", b"\x0a\x18draftwire.v1.Generation"], False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [b"\x3a\x00"], True),
        *vllm_methods(),
    ],
    "drafter": [
        (DRAFT, STEPS, True),
        (DRAFT, STEPS, True),
        (DRAFT, STEPS, True),
        ("/draftwire.v1.Drafting/GetDrafterInfo", [b""], False),
        ("/draftwire.v1.Drafting/GetFeatureFusion", [b"", b"\x0a\x04abcd"], False),
        ("/grpc.health.v1.Health/Check", [b"", b"\x0a\x16draftwire.v1.Drafting"], False),
    ],
}

Outcomes = Counter[str]


def judged(code: Status, details: str | None) -> str:
    """Return the name of a proper final status.

    Raises
    ------
    FindingError
        If the status means an error of the server, or a refusal does not name what was wrong.
    """
    text = details or ""
    if text == "Internal error from Core":  # an error of this client: the call ended during a write
        return "ended early"
    if code not in PROPER or "Traceback" in text or "<class" in text:
        raise FindingError(f"{code.name}: {text}")
    if code == Status.INVALID_ARGUMENT and not (" = " in text and ": " in text):
        raise FindingError(f"{code.name} does not name field, value and what is allowed: {text}")
    return code.name


async def read_all(call: Any, most: int = 3) -> str:
    """Return the status with which a call ends, or cancel it after `most` answers and return `accepted`."""
    try:
        for _ in range(most):
            if await call.read() is grpc.aio.EOF:
                return judged(await call.code(), await call.details())
    except grpc.aio.AioRpcError as error:
        return judged(error.code(), error.details())
    call.cancel()
    return "accepted"


async def connection(world: World, rng: Random) -> Outcomes:
    """Play one TCP connection to a service or its metrics port, with bytes that may be invalid."""
    name = rng.choice(("drafter", "verifier"))
    if rng.random() < 0.2:
        data, address, name = hostile_scrape(rng), world.metrics[name], f"{name}'s metrics"
    else:
        path, messages, _ = rng.choice(METHODS[name])
        message = rng.choice(messages) if rng.random() < 0.5 else hostile_message(rng, messages)
        data, address = hostile_connection(rng, path, message), world.processes[name].address
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.05):
                while chunk := await reader.read(1 << 16):
                    got += chunk
        with contextlib.suppress(OSError):
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):  # until the server closes it
                got += chunk
    finally:
        writer.close()
    if b"Traceback" in got or b"<class" in got:
        raise FindingError(f"the {name} shows its inside: {got!r}")
    return Counter([f"{name} answered" if got else f"{name} closed"])


async def message(world: World, rng: Random) -> Outcomes:
    """Play one call whose last message may be no protobuf, or of another type."""
    name = rng.choice(("drafter", "verifier"))
    channel = world.to_drafter if name == "drafter" else world.to_verifier
    path, messages, is_stream = rng.choice(METHODS[name])
    if not is_stream:
        call = channel.unary_stream(path)(hostile_message(rng, messages), timeout=PATIENCE_S)
        return Counter([await read_all(call)])
    sent = [rng.choice(messages) for _ in range(rng.randrange(3))] + [hostile_message(rng, messages)]
    stream = channel.stream_stream(path)(timeout=PATIENCE_S)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        for one in sent:
            await stream.write(one)
        await stream.done_writing()
    return Counter([await read_all(stream, most=8)])


async def request(world: World, rng: Random) -> Outcomes:
    """Play one request of a client or a gateway with hostile values."""
    path, hostile = rng.choice(((GENERATE, hostile_request), (f"{VLLM_SERVICE}/Generate", hostile_generate)))
    call = world.to_verifier.unary_stream(path)(hostile(rng).SerializeToString(), timeout=PATIENCE_S)
    return Counter([await read_all(call)])


async def _open(world: World, first: pb.VerifierHello) -> tuple[Any, Any]:
    call = world.to_drafter.stream_stream(
        DRAFT, pb.DraftRequest.SerializeToString, pb.DraftResponse.FromString
    )(timeout=PATIENCE_S)
    answer: Any = None
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(pb.DraftRequest(hello=first))
        answer = await call.read()
    return call, answer


async def greeting(world: World, rng: Random) -> Outcomes:
    """Play one hello with one or two hostile values."""
    first = hello(rng.choice(CONFIGS))
    for _ in range(rng.choice((1, 1, 2))):
        set_hostile(rng, first)
    call, answer = await _open(world, first)
    if isinstance(answer, pb.DraftResponse):
        await call.done_writing()
    ending = judged(await call.code(), await call.details())
    return Counter(["accepted" if ending == "OK" else ending])


async def _say(call: Any, one: pb.DraftRequest, ledger: Ledger) -> pb.DraftResponse | None:
    """Return the answer to a message, None if the stream has ended. The answer must follow from this stream alone."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(one)
        answer = await call.read()
        if isinstance(answer, pb.DraftResponse):
            ledger.judge(one.step, answer.drafts)
            return answer
    return None


async def steps(world: World, rng: Random) -> Outcomes:
    """Play one stream of hostile steps until a step is refused; each step counts as a case."""
    outcomes: Outcomes = Counter()
    call, answer = await _open(world, hello(rng.choice(CONFIGS)))
    if not isinstance(answer, pb.DraftResponse):
        return Counter([judged(await call.code(), await call.details())])
    writer = Writer(rng, last_id=rng.choice((0, 2**40, 2**63)), scale=rng.choice((1.0, 1.0, 1e4, 1e30)))
    ledger = Ledger()
    for _ in range(rng.randrange(2, 12)):
        writer.others = world.open_rows
        step, _ = hostile_step(rng, writer) if rng.random() < 0.7 else (writer.step(), "")
        one = pb.DraftRequest(hello=hello()) if rng.random() < 0.02 else pb.DraftRequest(step=step)
        answer = await _say(call, one, ledger)
        if answer is None:
            outcomes[judged(await call.code(), await call.details())] += 1
            return outcomes
        for sequence_id, status in zip(answer.drafts.sequence_ids, answer.drafts.statuses, strict=True):
            if status != pb.SEQUENCE_STATUS_OK:
                writer.rows.pop(sequence_id, None)
        outcomes["accepted"] += 1
    if rng.random() < 0.5:
        await call.done_writing()
        judged(await call.code(), await call.details())
    else:
        call.cancel()
    return outcomes


async def sharing(world: World, rng: Random) -> Outcomes:
    """Play a verifier on the drafter's host that lies at the rendezvous, about spans, or in announcements."""
    first = hello(rng.choice(CONFIGS))
    first.carriers[:] = CARRIERS
    if rng.random() < 0.6:
        liar = LyingRendezvous(rng)
        first.rendezvous.CopyFrom(liar.encode())
        serving = asyncio.ensure_future(asyncio.to_thread(liar.serve))
        try:
            call, answer = await _open(world, first)
        finally:
            liar.close()
            await serving
        if isinstance(answer, pb.DraftResponse):
            call.cancel()
            return Counter(["accepted"])
        return Counter([judged(await call.code(), await call.details())])
    with Rendezvous() as rendezvous:
        first.rendezvous.CopyFrom(rendezvous.encode())
        settled = await share(rendezvous)
        call, answer = await _open(world, first)
    shared = await settled
    sender = TensorSender(CPU, shared.outgoing)
    channel = shared.channel
    announcer = None if channel is None else Announcer(rng, channel, sender)
    writer, ledger = Writer(rng), Ledger()
    outcomes: Outcomes = Counter()
    for _ in range(4):
        commits = announcer is not None and bool(writer.rows) and rng.random() < 0.5
        step = writer.step(new=0 if commits else 1)
        if channel is None or announcer is None:
            _share_features(rng, step, sender, shared)
            answer = await _say(call, pb.DraftRequest(step=step), ledger)
        elif commits and step.sequence_ids:
            answer = await _announce(call, rng, channel, announcer, step, ledger)
        else:
            if step.sequence_ids and rng.random() < 0.4:
                for _ in range(rng.choice((1, 1, 1, 2, 5))):
                    announcer.announce(step)
                step.replaces = rng.choice((0, announcer.last_id, announcer.last_id, 1, 2**64 - 1))
            _share_features(rng, step, sender, shared)
            data = pb.DraftRequest(step=step).SerializeToString()
            one = (hostile_message(rng, [data]) or b"\0") if rng.random() < 0.2 else data
            answer = await _say_directly(call, channel, one, ledger, _step_of(one))
        if answer is None:
            if not call.done() or call.cancelled():  # `_announce` cancels after a lie
                outcomes["unread"] += 1
                break
            outcomes[judged(await call.code(), await call.details())] += 1
            break
        outcomes["accepted"] += 1
    if channel is not None:
        channel.close()
    call.cancel()
    return outcomes


def _share_features(rng: Random, step: pb.DraftStep, sender: TensorSender, shared: SharedSegments) -> None:
    """Move a step's features into shared memory, possibly with a wrong span or overwritten."""
    if not step.HasField("features"):
        return
    data = step.features.data
    outgoing = sender.begin(torch.float32, tuple(step.features.shape))
    outgoing.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.float32).view_as(outgoing.tensor))
    step.features.Clear()
    finish(outgoing, step.features)
    if rng.random() < 0.5:
        lie_about_span(rng, step.features)
    if rng.random() < 0.3:
        scribble(rng, sender, shared)


async def _announce(
    call: Any, rng: Random, channel: Channel, announcer: Announcer, step: pb.DraftStep, ledger: Ledger
) -> pb.DraftResponse | None:
    """Announce and commit a step. If either is wrong, the answer is not judged and the case ends."""
    is_true = announcer.announce(step)
    await asyncio.sleep(rng.choice((0, 0.01)))
    commit, is_right = announcer.commit(step)
    data = pb.DraftRequest(commit=commit).SerializeToString()
    answer = await _say_directly(call, channel, data, ledger, step if is_true and is_right else None)
    if not (is_true and is_right):
        call.cancel()
        await asyncio.sleep(0)
    return answer


async def _say_directly(
    call: Any, channel: Channel, one: bytes, ledger: Ledger, step: pb.DraftStep | None
) -> pb.DraftResponse | None:
    """Return the answer to a message that is sent through the ring; None if the stream has ended.

    A message that was overwritten before the drafter read it gets no answer.
    """
    if not channel.send(one):
        return None
    deadline = asyncio.get_running_loop().time() + PATIENCE_S / 4
    while not call.done() and asyncio.get_running_loop().time() < deadline:
        try:
            records = channel.receive()
        except ConnectionError:
            return None
        for record in records:
            answer = pb.DraftResponse.FromString(record.message)
            if record.body is not None:
                record.body.release()
                continue
            if step is not None:
                ledger.judge(step, answer.drafts)
            return answer
        await asyncio.sleep(0.005)
    return None


async def theft(world: World, rng: Random) -> Outcomes:
    """Play a verifier that uses, closes and opens the sequence ids of another verifier."""
    which = rng.choice(OWNERS)
    return await steal(world.to_drafter, rng, which, world.known[which], PATIENCE_S)


async def answers(world: World, rng: Random) -> Outcomes:
    """Play one wrong answer of a fake drafter while clients are served."""
    done = asyncio.get_running_loop().create_future()
    world.wrong_answers.append((rng, done))
    while not done.done():  # enough requests at once that a fake drafter gets some of them
        await asyncio.gather(*(world.recite(number, 8) for number in range(3)))
    return Counter([done.result()])


async def introduction(world: World, rng: Random) -> Outcomes:
    """Play one connection to a fake drafter that is wrong from the beginning."""
    done = asyncio.get_running_loop().create_future()
    fake = rng.choice(world.fakes)
    fake.hellos.append((rng, done))
    fake.hang_up()
    return Counter([await done])


def _step_of(data: bytes) -> pb.DraftStep | None:
    """Return the step of a message; None if the message is not a `DraftRequest`."""
    try:
        return pb.DraftRequest.FromString(data).step
    except DecodeError:
        return None


Play = Callable[[World, Random], Awaitable[Outcomes]]
# Kinds of cases with their weights.
KINDS: dict[str, tuple[int, Play]] = {
    "connection": (34, connection),
    "message": (32, message),
    "request": (14, request),
    "greeting": (6, greeting),
    "steps": (5, steps),
    "sharing": (1, sharing),
    "theft": (2, theft),
    "answers": (5, answers),
    "introduction": (3, introduction),
}
