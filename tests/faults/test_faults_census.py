"""The soak's judge: what grows is told from what goes up and down."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from census import MAX_MORE_THREADS, MAX_RISE_MIB, Census, judge, take_census

# 100 samples in 20 minutes that wander within bounds.
WANDERING = [Census(12.0 * i, 300 + 4 * (i % 3), 40 + i % 5, 30 + i % 2, 2 * (i % 4 > 0)) for i in range(100)]


def test_what_goes_up_and_down_is_flat() -> None:
    assert all(verdict.is_flat for verdict in judge(WANDERING))


def test_a_rise_in_the_warm_up_alone_is_flat() -> None:
    warming = [replace(one, memory_mib=one.memory_mib - 200, fds=one.fds - 20) for one in WANDERING[:20]]
    assert all(verdict.is_flat for verdict in judge(warming + WANDERING[20:]))


@pytest.mark.parametrize(("name", "count"), [("fds", 1), ("threads", 1 + MAX_MORE_THREADS), ("segments", 1)])
def test_what_is_never_given_back_is_growth(name: str, count: int) -> None:
    leaking = WANDERING[:60] + [replace(one, **{name: getattr(one, name) + count}) for one in WANDERING[60:]]
    assert [verdict.is_flat for verdict in judge(leaking)].count(False) == 1


def test_memory_that_creeps_is_growth() -> None:
    per_sample = 2 * MAX_RISE_MIB / len(WANDERING)
    creeping = [replace(one, memory_mib=one.memory_mib + i * per_sample) for i, one in enumerate(WANDERING)]
    assert not judge(creeping)[0].is_flat


def test_too_few_samples_are_not_judged() -> None:
    with pytest.raises(ValueError, match="3 samples"):
        judge(WANDERING[:4])


def test_a_census_counts_what_a_process_opens() -> None:
    before = take_census(os.getpid(), 0.0)
    fds = os.pipe()
    after = take_census(os.getpid(), 1.0)
    for fd in fds:
        os.close(fd)
    assert before is not None
    assert after is not None
    assert after.fds == before.fds + 2
    assert take_census(1 << 30, 0.0) is None
