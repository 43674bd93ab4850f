"""The soak's judge distinguishes growth from variation."""

from __future__ import annotations

import sys
from dataclasses import replace
from subprocess import PIPE, Popen

import pytest
from census import MAX_MORE_THREADS, MIB, WARM_UP, Census, judge, take_census

# 240 samples in 20 minutes that vary within bounds. Of each 20 samples, 5 are between faults and 2 far from faults.
WANDERING = [
    Census(
        5.0 * i,
        300 + 4 * (i % 3),
        40 + (i % 20 > 1) * (i % 5),
        30 + i % 2,
        2 * (i % 4 > 0),
        calm_s=4.0 * (i % 20 < 5) * (5 - i % 20),
    )
    for i in range(240)
]
# Rates of the soak, per second: lower than in any run, even with other load on the CPU.
STEPS_A_SECOND = 12.0
FAULTS_A_SECOND = 1 / 40
# 256 elements of float32, the hidden size of the demo target.
FEATURE_ROW_BYTES = 256 * 4


def test_what_goes_up_and_down_is_flat() -> None:
    assert all(verdict.is_flat for verdict in judge(WANDERING))


def test_a_rise_in_the_warm_up_alone_is_flat() -> None:
    warming = [replace(one, memory_mib=one.memory_mib - 200, fds=one.fds - 20) for one in WANDERING[:50]]
    assert all(verdict.is_flat for verdict in judge(warming + WANDERING[50:]))


@pytest.mark.parametrize(("name", "count"), [("fds", 1), ("threads", 1 + MAX_MORE_THREADS), ("segments", 1)])
def test_what_is_never_given_back_is_growth(name: str, count: int) -> None:
    leaking = WANDERING[:150] + [replace(one, **{name: getattr(one, name) + count}) for one in WANDERING[150:]]
    assert [verdict.is_flat for verdict in judge(leaking)].count(False) == 1


def test_a_feature_row_left_behind_by_each_step_is_growth() -> None:
    leak = STEPS_A_SECOND * FEATURE_ROW_BYTES / MIB
    leaking = [replace(one, memory_mib=one.memory_mib + one.seconds * leak) for one in WANDERING]
    assert not judge(leaking)[0].is_flat


def test_a_leak_that_begins_half_way_is_growth() -> None:
    middle = (1 + WARM_UP) / 2 * WANDERING[-1].seconds
    leak = STEPS_A_SECOND * FEATURE_ROW_BYTES / MIB
    leaking = [replace(one, memory_mib=one.memory_mib + max(0.0, one.seconds - middle) * leak) for one in WANDERING]
    assert not judge(leaking)[1].is_flat


@pytest.mark.parametrize("minute", [8, 12, 16])
def test_a_jump_of_an_allocator_is_flat(minute: int) -> None:
    jumping = [replace(one, memory_mib=one.memory_mib + 1.5 * (one.seconds >= 60 * minute)) for one in WANDERING]
    assert all(verdict.is_flat for verdict in judge(jumping))


def test_a_descriptor_left_behind_by_each_fault_is_growth() -> None:
    leaking = [replace(one, fds=one.fds + int(one.seconds * FAULTS_A_SECOND)) for one in WANDERING]
    assert [verdict.what for verdict in judge(leaking) if not verdict.is_flat] == ["file descriptors"]


def test_counts_are_not_judged_near_faults_alone() -> None:
    with pytest.raises(ValueError, match=r"\[0, 0\] samples far from faults"):
        judge([replace(one, calm_s=min(one.calm_s, 5.0)) for one in WANDERING])


def test_too_few_samples_are_not_judged() -> None:
    with pytest.raises(ValueError, match=r"\[0, 5\] samples between faults"):
        judge(WANDERING[:30])


# Prints a line when it runs, and opens a pipe when it reads a line.
OPENING = "import os; print(flush=True); input(); fds = os.pipe(); print(flush=True); input()"


def test_a_census_counts_what_a_process_opens() -> None:
    with Popen([sys.executable, "-c", OPENING], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = take_census(process.pid, 0.0, calm_s=0.0)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = take_census(process.pid, 1.0, calm_s=0.0)
        process.kill()
    assert before is not None
    assert after is not None
    assert after.fds == before.fds + 2
    assert take_census(1 << 30, 0.0, calm_s=0.0) is None
