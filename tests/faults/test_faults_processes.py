"""Drafters that die, hang, return with another head or run out of memory."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drafters import Drafter
from exact_services import sample
from load import FaultRecord
from stage import Stage
from tcp_proxy import TcpProxy

Matrix = Callable[[FaultRecord], None]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
LONG_PROMPT = [1, 2, 3, 4, 5, 6, 7] * 7


def test_the_only_drafter_is_killed_and_started_again(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter()
    load = stage.load([drafter.address])
    with load.fault("the only drafter killed (SIGKILL)", during_below=0.5) as record:
        drafter.kill()
        load.wait_for_rounds(2)
        drafter.start()
    matrix(record)


def test_one_of_two_drafters_dies_and_the_other_takes_over(stage: Stage, matrix: Matrix) -> None:
    first, second = stage.drafter(), stage.drafter()
    load = stage.load([first.address, second.address])
    with load.fault("one of two drafters killed (SIGKILL)") as record:
        first.kill()
        load.wait_for_rounds(4)
    matrix(record)


def test_all_drafters_are_gone_and_come_back(stage: Stage, matrix: Matrix) -> None:
    drafters = [stage.drafter(), stage.drafter()]
    load = stage.load([drafter.address for drafter in drafters])
    with load.fault("all of two drafters killed", during_below=0.5) as record:
        for drafter in drafters:
            drafter.kill()
        load.wait_for_rounds(2)
        for drafter in drafters:
            drafter.start()
    matrix(record)


def test_a_drafter_hangs_for_ten_seconds(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter()
    load = stage.load([drafter.address])
    with load.fault("drafter stopped for 10 s (SIGSTOP)", during_below=0.5) as record:
        drafter.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(10)
        finally:
            drafter.process.send_signal(signal.SIGCONT)
    matrix(record)


def test_a_drafter_returns_with_another_head_the_other_keeps_its(stage: Stage, matrix: Matrix) -> None:
    first, second = stage.drafter(), stage.drafter()
    load = stage.load([first.address, second.address])
    with load.fault("one of two drafters restarted with another head") as record:
        first.kill()
        first.start(stage.other_head)
    statuses = load.drafters()
    assert len({status.head_fingerprint for status in statuses}) == 2
    load.wait_for(lambda: all(status.sequences for status in load.drafters()), "sequences draft at both heads")
    matrix(record)


def test_a_drafter_has_no_memory_for_some_batches(stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter(program=(sys.executable, str(Path(__file__).parent / "starving_drafter.py")))
    load = stage.load([drafter.address])
    with load.fault("drafter's allocator fails in every 20th batch, for 5 s") as record:
        drafter.process.send_signal(signal.SIGUSR1)
        time.sleep(5)
        drafter.process.send_signal(signal.SIGUSR2)
    assert "out of memory; all sessions end" in drafter.process.log_text()
    assert drafter.process.running
    matrix(record)


def test_a_drafter_may_take_no_more_memory(stage: Stage, matrix: Matrix) -> None:
    """At the limit the drafter must open a new session and take many prompts. It may survive or die."""
    drafter = stage.drafter()
    with TcpProxy(drafter.address) as proxy:
        load = stage.load([proxy.address])
        with load.fault("drafter's address space limited to half of what it has, for 5 s") as record:
            limits = resource.prlimit(drafter.process.pid, resource.RLIMIT_AS)
            resource.prlimit(drafter.process.pid, resource.RLIMIT_AS, (_address_space(drafter) // 2, limits[1]))
            proxy.cut(from_service=True)
            load.wait_for(lambda: proxy.is_cut, "the connection is cut")
            sample(load.addresses[0], LONG_PROMPT, range(64), max_tokens=8)
            time.sleep(5)
            # The share of lost drafts is not checked: it varies from a tenth to nearly all.
            log = drafter.process.log_text()
            assert not drafter.process.running or "MemoryError" in log or "Cannot allocate memory" in log
            if drafter.process.running:
                resource.prlimit(drafter.process.pid, resource.RLIMIT_AS, limits)
            else:
                drafter.start()
    matrix(record)


def _address_space(drafter: Drafter) -> int:
    """Return the size of the drafter's address space in bytes."""
    pages = Path(f"/proc/{drafter.process.pid}/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
