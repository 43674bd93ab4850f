"""Half-sent messages, and bursts of calls that exceed every queue of both services."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

import grpc
from fuzz_cases import DRAFT, GENERATE, METHODS
from fuzz_streams import FindingError
from fuzz_world import PATIENCE_S, Resources, read_page, unexpected_record
from half_sent import HalfSender

from drafter_service.server.service import READING
from draftwire.contract.addresses import MAX_REQUEST_BYTES
from draftwire.contract.retry import retry_after_s
from draftwire.server.message_reading import ReadingLimits
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc as pb_grpc
from draftwire_bench.processes import ServiceProcess
from models import SENTENCES, make_tokenizer
from verifier_service.main import reading_limits

MAX_NUM_SEQS, MAX_QUEUE = 2, 4
# Maximum number of open requests: running, waiting, and finished but not read to their end.
MAX_OPEN = 2 * MAX_NUM_SEQS + MAX_QUEUE
LIMITS: dict[str, ReadingLimits] = {"verifier": reading_limits(MAX_OPEN), "drafter": READING}
OWN_METHOD = {"verifier": GENERATE, "drafter": DRAFT}
OUTPUT_TOKENS = 4
# In bytes. A case of half-sent messages sends up to 1 GB; servers may hold a few messages and one window per call.
MAX_MEMORY = 256 << 20
SIZES = (0, 1, 1000, 65536, 1 << 20, MAX_REQUEST_BYTES, MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1, 2**32 - 1)
PAUSE_S = 0.5  # of a server stopped by SIGSTOP
FULL_QUEUE = re.compile(r"request failed .*(the queue is full|outputs wait for clients)")


@dataclass
class Scene:
    """Both services with small queues, and their memory at the first check."""

    processes: dict[str, ServiceProcess]
    base: dict[str, int] = field(default_factory=dict)  # private bytes
    log_read: dict[str, int] = field(default_factory=dict)

    async def check(self) -> None:
        """Check that both services run, log no unexpected errors, answer a request and have grown little."""
        for name, process in self.processes.items():
            if not process.running:
                raise FindingError(f"the {name} ended with {process.returncode}:\n{process.log_text()[-4000:]}")
            text = process.log_text().encode()
            if record := unexpected_record(text[self.log_read.get(name, 0) :]):
                raise FindingError(f"the {name} has logged an error that it did not expect:\n{record}")
            self.log_read[name] = len(text)
        async with asyncio.timeout(PATIENCE_S):
            while (await self.ask(self.processes["verifier"].address))[0] != grpc.StatusCode.OK:
                await asyncio.sleep(0.1)
        for name, process in self.processes.items():
            memory = Resources.of(process.pid).memory
            if memory > self.base.setdefault(name, memory) + MAX_MEMORY:
                raise FindingError(f"the {name} has grown from {self.base[name] >> 20} to {memory >> 20} MiB")

    async def ask(self, address: str) -> tuple[grpc.StatusCode, str, float | None]:
        """Send a request over a new connection; return its status, its details and the seconds until a retry.

        Raises
        ------
        FindingError
            If an output does not have the requested length.
        """
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=make_tokenizer().encode(SENTENCES[0]).ids[:6]),
            sampling_params=config_pb2.SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            num_tokens = 0
            try:
                async for response in pb_grpc.GenerationStub(channel).Generate(request, timeout=PATIENCE_S):
                    num_tokens += len(response.token_ids)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or "", retry_after_s(error.trailing_metadata())
        if num_tokens != OUTPUT_TOKENS:
            raise FindingError(f"{num_tokens} tokens of {OUTPUT_TOKENS}")
        return grpc.StatusCode.OK, "", None

    async def num_refused(self) -> tuple[int, int]:
        """Return the number of refused requests in the verifier's metrics, and of full-queue refusals in its log."""
        log = self.processes["verifier"].log_text()
        metrics_line = re.search(r"metrics on http://(\S+)/metrics", log)
        assert metrics_line is not None
        page = await asyncio.to_thread(read_page, f"http://{metrics_line[1]}/metrics")
        counted = re.search(r"^draftwire_requests_refused_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert counted is not None
        return int(float(counted[1])), len(FULL_QUEUE.findall(log))


async def send_half(scene: Scene, rng: Random) -> str:
    """Play calls whose messages stop in the header, half way or just before their end."""
    name = rng.choice(sorted(scene.processes))
    path = rng.choice(METHODS[name])[0]
    num_calls, waits = rng.randint(1, 60), rng.random() < 0.2
    async with HalfSender(scene.processes[name].address) as client:
        calls = await client.begin_many(num_calls, path)
        sizes = {call: rng.choice(SIZES) for call in calls}
        sends = [asyncio.create_task(client.send(call, sizes[call], rng.choice((1, 3, 10)))) for call in calls]
        if waits:
            await client.wait_for_ends(num_calls, PATIENCE_S)
            # gRPC itself ends calls with larger messages.
            dropped = [call for call in client.dropped if sizes[call] <= MAX_REQUEST_BYTES]
            if dropped:
                raise FindingError(f"{len(dropped)} of {num_calls} calls of {path} ended without a status")
        else:
            await asyncio.wait(sends, timeout=2 * rng.random())
            for call in rng.sample(calls, rng.randint(0, num_calls)):
                client.cancel(call)
        for send in sends:
            send.cancel()
        await scene.check()
    return f"{name}, {'all ended' if waits else 'given up'}"


async def exceed_admission(scene: Scene, rng: Random) -> str:
    """Play more calls without a message than are admitted, of one connection or in total."""
    name = rng.choice(sorted(scene.processes))
    most = LIMITS[name].max_unread_of_peer
    counts = [rng.randint(most + 1, 2 * most) for _ in range(rng.randint(1, 4))]
    await _burst(scene, name, counts, ())
    return f"{name}, {len(counts)} connections"


async def exceed_accepting(scene: Scene, rng: Random) -> str:
    """Play up to more calls than may wait to be accepted, while the server is stopped."""
    name = rng.choice(sorted(scene.processes))
    most_of_connection = dict(LIMITS[name].options())["grpc.max_concurrent_streams"]
    await _burst(scene, name, [most_of_connection] * rng.randint(1, 5), (signal.SIGSTOP, signal.SIGCONT))
    return name


async def _burst(scene: Scene, name: str, counts: list[int], signals: tuple[int, ...]) -> None:
    """Begin calls, `counts` of each connection. Send the first signal before they begin, the second after a pause.

    All calls that are not admitted must end with a status. gRPC may drop calls in excess of those that may wait.
    """
    process, limits = scene.processes[name], LIMITS[name]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(HalfSender(process.address)) for _ in counts]
        for number in signals[:1]:
            process.send_signal(number)
        begun = [
            asyncio.create_task(client.begin_many(count, OWN_METHOD[name]))
            for client, count in zip(clients, counts, strict=True)
        ]
        try:
            await asyncio.wait(begun, timeout=PAUSE_S if signals else None)
        finally:
            for number in signals[1:]:
                process.send_signal(number)
        await asyncio.gather(*begun)
        for client, count in zip(clients, counts, strict=True):
            await client.wait_for_ends(max(0, count - limits.max_unread_of_peer), PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while sum(len(client.ended) for client in clients) < sum(counts) - limits.max_unread:
                await asyncio.sleep(0.05)
        num_dropped = sum(len(client.dropped) for client in clients)
        most_waiting = dict(limits.options())["grpc.server.max_pending_requests"]
        if num_dropped > max(0, sum(counts) - most_waiting):
            raise FindingError(f"{num_dropped} of {sum(counts)} calls of the {name} ended without a status")
        await _check_refusal(process.address, OWN_METHOD[name])
    await scene.check()


async def _check_refusal(address: str, path: str) -> None:
    """Check that a call without its message is refused with a retry time, or ends at its deadline."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            await channel.stream_stream(path)(timeout=PATIENCE_S).read()
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            if is_refused and retry_after_s(error.trailing_metadata()) is None:
                raise FindingError(f"refused without a time to come again: {error.details()}") from None
            if not is_refused and error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise FindingError(f"{error.code().name}: {error.details()}") from None


async def exceed_queue(scene: Scene, rng: Random) -> str:
    """Play more requests at once than can run and wait: each gets its output or a retry time."""
    address = scene.processes["verifier"].address
    before = await scene.num_refused()
    answers = await asyncio.gather(*(scene.ask(address) for _ in range(rng.randint(MAX_OPEN + 1, 100))))
    refused = [answer for answer in answers if answer[0] != grpc.StatusCode.OK]
    for code, details, seconds in refused:
        if code != grpc.StatusCode.RESOURCE_EXHAUSTED or seconds is None:
            raise FindingError(f"{code.name}, try again after {seconds} s: {details}")
    expected = before[0] + len(refused), before[1] + len(refused)
    deadline = time.monotonic() + PATIENCE_S
    while (now := await scene.num_refused()) != expected:  # the engine's thread updates the counter later
        if time.monotonic() > deadline:
            raise FindingError(f"counted and logged refusals: {now} in place of {expected}")
        await asyncio.sleep(0.1)
    await scene.check()
    return "some refused" if refused else "none refused"


BURSTS: dict[str, Callable[[Scene, Random], Awaitable[str]]] = {
    "half-sent messages": send_half,
    "calls past admission": exceed_admission,
    "calls past those that wait to be accepted": exceed_accepting,
    "requests past the queue": exceed_queue,
}
