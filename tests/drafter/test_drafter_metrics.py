"""What a drafter tells Prometheus."""

from __future__ import annotations

import numpy as np
import pytest

from drafter_service.answer import Answer, Load
from drafter_service.metrics import DrafterCollector
from draftwire.v1 import draft_pb2 as pb


def samples(collector: DrafterCollector) -> dict[str, float]:
    """Value of each sample, its labels' values behind the name."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_answers_are_counted_by_drafts_and_status_and_failures_by_themselves():
    collector = DrafterCollector(lambda: Load(sessions=2, sequences=3, kv_cache_usage=0.25))
    answer = Answer(1, compute_time_s=0.003)
    answer.add_drafts([1, 2], np.array([5, 6]), np.array([7, 8]), np.array([4, 3]), np.zeros(7, np.int32))
    answer.add_failure(3, pb.SEQUENCE_STATUS_NO_CAPACITY)
    collector.count(answer)
    collector.count(RuntimeError("out of memory"))
    told = samples(collector)
    assert (told["draftwire_draft_sessions"], told["draftwire_draft_sequences"]) == (2, 3)
    assert told["draftwire_kv_cache_usage_ratio"] == 0.25
    assert told["draftwire_drafted_tokens_total"] == 7
    assert told["draftwire_draft_answers_total ok"] == 2
    assert told["draftwire_draft_answers_total no_capacity"] == 1
    assert told["draftwire_draft_session_failures_total"] == 1
    assert told["draftwire_draft_step_seconds_count"] == 1
    assert told["draftwire_draft_step_seconds_sum"] == pytest.approx(0.003)
