"""The engine in a separate process: answers do not change, and all processes, also of a split target, end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
from process_tree import all_ending, descendants, is_spawned
from services import DEMO, crowd, drafted_share, wait_for_drafter

from draftwire import Client
from draftwire.contract.errors import DraftwireError, RequestError
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("engine_process")

TEXT = "def read_lines(path):\n"
PROMPT = [5, 6, 7]
# Long enough to be still running when a process is ended.
LONG = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
OPTIONS = ("--device", "cpu", "--metrics-listen", "127.0.0.1:0", "--draft-deadline-ms", "off", "--no-adaptive-k")
# Ways to end a verifier, each with the options of that verifier.
SPLIT = ("--tensor-parallel-size", "2")
ENDED = {
    "asked to end": ("--engine-process", *SPLIT),
    "engine killed": ("--engine-process",),
    "engine hangs": ("--engine-process",),
    "front killed": ("--engine-process", *SPLIT),
    "rank killed": SPLIT,
}
# More processes start concurrently than a small machine has cores.
START_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def drafter() -> Iterator[ServiceProcess]:
    with start_drafter(DEMO / "eagle3", DEMO / "target", "--device", "cpu") as process:
        yield process


@pytest.fixture(scope="module")
def verifiers(drafter) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Two verifiers with the same drafter: without and with a separate process for the engine."""

    def start(option: str) -> ServiceProcess:
        return start_verifier(DEMO / "target", [drafter.address], *OPTIONS, option, timeout_s=START_TIMEOUT_S)

    with ThreadPoolExecutor() as pool:
        one, two = pool.map(start, ("--no-engine-process", "--engine-process"))
    with one, two:
        for process in (one, two):
            with Client(process.address) as client:
                wait_for_drafter(client, drafter.address)
        yield one, two


@pytest.fixture(scope="module")
def ending(shelf) -> Iterator[dict[str, ServiceProcess]]:
    """Verifiers for the tests that end one, started concurrently."""

    def start(how: str) -> ServiceProcess:
        options = ("--device", "cpu", "--kv-cache-tokens", "1024", *ENDED[how])
        return start_verifier(shelf.target("random_llama"), [], *options, timeout_s=START_TIMEOUT_S)

    with ThreadPoolExecutor() as pool:
        started = dict(zip(ENDED, pool.map(start, ENDED), strict=True))
    yield started
    for process in started.values():
        process.kill()


def test_output_is_the_same(verifiers):
    calls = [
        (TEXT, {"temperature": 0, "max_tokens": 40}),
        (TEXT, {"temperature": 0, "max_tokens": 200, "stop": ["return"], "num_speculative_tokens": 2}),
        (TEXT, {"temperature": 0.9, "seed": 5, "max_tokens": 40, "num_speculative_tokens": 0}),
        (PROMPT, {"temperature": 0.9, "seed": 6, "max_tokens": 12, "logprobs": 3, "num_speculative_tokens": 0}),
    ]
    answers = []
    for process in verifiers:
        with Client(process.address) as client:
            done = crowd(client, calls, at_once=1)  # in larger batches, logits differ by rounding
            assert drafted_share(done[:1]) > 0.3
            answers.append([(c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_text) for c in done])
    assert answers[0] == answers[1]
    assert answers[1][1][4] == "return"
    assert answers[1][3][2]


def test_errors_are_the_same(verifiers):
    texts = []
    for process in verifiers:
        with Client(process.address) as client:
            for options in ({"max_tokens": 0}, {"num_speculative_tokens": 9}):
                with pytest.raises(DraftwireError) as refused:
                    client.complete(TEXT, **options)
                texts.append(str(refused.value))
    assert texts[:2] == texts[2:]


def test_the_verifier_reports_its_engine_and_counts_its_work(verifiers, drafter):
    infos = []
    for process in verifiers:
        with Client(process.address) as client:
            client.complete(TEXT, max_tokens=4)
            infos.append(client.info())
        url = re.search(r"metrics on (http://\S+)", process.log_text())[1]
        with urlopen(url, timeout=20) as response:
            page = response.read().decode()
        tokens = re.search(r"^draftwire_generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert float(tokens[1]) >= 4
        assert re.search(rf'^draftwire_drafter_state\{{drafter="{drafter.address}".*state="ready".*\}} 1', page, re.M)
    for info in infos:
        assert info.counters.steps > 0
        assert info.counters.times.verify_s > 0
        assert info.memory.peak_host_bytes > 50 << 20  # torch alone
        assert info.drafters[0].address == drafter.address
    in_one, in_two = sorted(infos, key=lambda info: info.HasField("server_memory"))
    assert not in_one.HasField("server_memory")
    assert in_two.server_memory.peak_host_bytes > 50 << 20
    assert in_two.server_memory.peak_host_bytes != in_two.memory.peak_host_bytes
    for info in infos:
        for field in ("counters", "memory", "server_memory", "drafters"):
            info.ClearField(field)
    assert in_one == in_two


def test_asked_to_end_all_finish_what_runs(ending):
    process = ending["asked to end"]
    with all_ending(process), Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        chunks = [next(output)]
        # A service manager or a terminal signals every process of the service.
        for child in filter(is_spawned, descendants(process.pid)):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(child, number)
        process.send_signal(signal.SIGTERM)
        chunks += output
    assert sum(len(chunk.token_ids) for chunk in chunks) == LONG["max_tokens"]
    assert process.returncode == 0
    assert "CRITICAL" not in process.log_text()
    assert "Traceback" not in process.log_text()


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
def test_a_split_target_with_cuda_graphs_ends_when_asked(shelf):
    options = ("--device", "cuda:0", "--kv-cache-tokens", "1024", "--max-num-seqs", "2", "--tensor-parallel-size", "2")
    process = start_verifier(shelf.target("random_llama"), [], *options, timeout_s=START_TIMEOUT_S)
    with all_ending(process), Client(process.address) as client:
        assert len(client.complete(PROMPT, **LONG).token_ids) == LONG["max_tokens"]
        assert process.stop() == 0
    assert "killing" not in process.log_text()


def test_a_killed_engine_ends_its_requests_and_the_verifier(ending):
    process = ending["engine killed"]
    with all_ending(process) as engine, Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        next(output)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(RequestError, match="the engine's process has ended unexpectedly") as ended:
            list(output)
        assert ended.value.status == "INTERNAL"
    assert process.wait(30) == 1
    assert "the engine's process ended with status -9, and the verifier with it" in process.log_text()
    assert "Error: the engine or a rank of the target failed; the log says why" in process.log_text()


def test_a_killed_rank_ends_the_verifier_and_the_log_names_it(ending):
    process = ending["rank killed"]
    with all_ending(process) as rank, Client(process.address) as client:
        output = client.generate(PROMPT, **LONG)
        next(output)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RequestError):
            list(output)
    assert process.wait(30) == 1
    expected = f"rank 1 of 2 (process {rank}) ended with status -9, and the verifier with it"
    assert expected in process.log_text()


def test_an_engine_that_hangs_is_killed_when_it_is_to_end(ending):
    process = ending["engine hangs"]
    with all_ending(process) as engine:
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert "killing the engine's process" in process.log_text()
    assert "Error: the engine or a rank of the target failed; the log says why" in process.log_text()


def test_a_killed_front_leaves_no_process(ending):
    process = ending["front killed"]
    with all_ending(process) as engine, Client(process.address) as client:
        assert sum(map(is_spawned, descendants(process.pid))) == 2, "the engine and a rank"
        assert list(map(is_spawned, descendants(engine))) == [True]
        output = client.generate(PROMPT, **LONG)
        next(output)
        process.kill()
        with pytest.raises(RequestError):
            list(output)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--max-model-len", "999999"), 1, "Error: max_model_len = 999999:"),
        (
            ("--metrics-listen", "192.0.2.1:1", "--insecure"),
            1,
            "Error: metrics_listen = '192.0.2.1:1': cannot be bound",
        ),
        (("--tensor-parallel-size", "3"), 2, "Error: tensor_parallel_size = 3: must divide"),
    ],
    ids=["checkpoint", "metrics", "split"],
)
def test_a_failed_start_is_reported_as_without_the_process(shelf, options, status, message):
    given = ("--target", str(shelf.target("random_llama")), "--listen", "127.0.0.1:0", "--device", "cpu", *options)
    command = [sys.executable, "-m", "draftwire_cli", "verifier", "--engine-process", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert ended.stderr.strip().splitlines()[-1].startswith(message)
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr
