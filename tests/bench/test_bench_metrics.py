"""Figures computed from timelines, each checked by hand."""

from __future__ import annotations

import pytest
from timelines import counters, timeline

from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.serve.metrics import (
    acceptance,
    difference,
    latencies,
    percentiles,
    steady_counters,
    steady_intervals,
    step_seconds,
    throughput,
)

ONE_EACH = [(0, 0)]


def test_percentiles_are_linear_between_neighbours():
    found = percentiles(range(101))
    assert (found.mean, found.p50, found.p90, found.p99) == (50, 50, 90, 99)
    found = percentiles([1.0, 2.0])
    assert (found.p50, found.p90, found.p99) == pytest.approx((1.5, 1.9, 1.99))
    assert percentiles([]) is None


def test_latencies_are_a_clients():
    # Sent at 10, messages of 1, 3 and 1 tokens at 12, 13 and 16.
    seen = latencies([timeline([(2, 2), (0, 0)], sent=10.0, arrivals=[12.0, 13.0, 16.0])])
    assert seen.first_token.p50 == 2
    assert (seen.inter_token.mean, seen.inter_token.p50) == (2, 2)  # gaps of 1 and 3
    assert seen.per_output_token.p50 == 1  # 4 seconds for 4 tokens


def test_steady_state_is_when_all_are_decoding():
    first = timeline([(0, 0)] * 3, arrivals=[1.0, 2.0, 3.0, 4.0])
    second = timeline([(0, 0)] * 2, arrivals=[2.5, 3.5, 5.0])
    assert steady_intervals([first, second], 2) == [(2.5, 4.0)]


def test_a_slots_next_request_ends_the_steady_state():
    first = timeline(ONE_EACH, arrivals=[1.0, 3.0])
    following = timeline(ONE_EACH, arrivals=[4.0, 6.0])
    beside = timeline(ONE_EACH, arrivals=[0.0, 9.0])
    assert steady_intervals([first, following, beside], 2) == [(1.0, 3.0), (4.0, 6.0)]


def test_throughput_of_the_whole_run_and_of_the_steady_state():
    first = timeline([(0, 0)] * 3, sent=0.0, arrivals=[1.0, 2.0, 3.0, 4.0])
    second = timeline([(2, 2)] * 2, sent=0.0, arrivals=[2.0, 3.0, 5.0])
    found = throughput([first, second], 2)
    assert found.whole_run == 11 / 5
    # Both decode from 2 to 4. After 2 and up to 4, the first emits 2 tokens and the second 3.
    assert (found.steady, found.steady_s) == (5 / 2, 2)


def test_requests_at_a_rate_have_no_steady_state():
    found = throughput([timeline(ONE_EACH, sent=0.0, arrivals=[1.0, 2.0])], None)
    assert (found.whole_run, found.steady, found.steady_s) == (1.0, None, 0)


def test_acceptance_adds_up_over_requests():
    found = acceptance([timeline([(2, 1), (2, 2)]), timeline([(2, 0), (1, 1)])])
    assert (found.verify_steps, found.verify_tokens) == (4, 8)
    assert (found.drafted, found.accepted) == ((4, 3), (3, 1))
    assert (found.length, found.rates) == (2.0, (0.75, 1 / 3))


def test_counters_are_subtracted_carrier_by_carrier():
    before = counters(prompt_rows=1, verify_steps=2, verify_rows=3, feature_rows=4)
    after = counters(prompt_rows=11, verify_steps=22, verify_rows=33, feature_rows=44)
    before.times.CopyFrom(pb.PhaseTimes(verify_s=1.0))
    after.times.CopyFrom(pb.PhaseTimes(verify_s=3.0, host_s=1.0))
    found = difference(before, after)
    assert (found.steps, found.prompt_rows, found.verify_steps, found.verify_rows) == (20, 10, 20, 30)
    assert [(t.steps, t.feature_rows) for t in found.traffic] == [(20, 40)]
    assert step_seconds(found) == {"draft": 0, "wire": 0, "verify": 0.1, "sample": 0, "host": 0.05}


def test_a_steps_times_are_from_the_longest_steady_interval():
    readings = [(float(t), counters(prompt_rows=0, verify_steps=10 * t, verify_rows=0)) for t in range(10)]
    assert steady_counters(readings, [(0.0, 1.0), (2.5, 6.5)]).steps == 30
    assert steady_counters(readings, [(2.5, 3.5)]) is None
    assert steady_counters(readings, []) is None
