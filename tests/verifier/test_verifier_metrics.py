"""The verifier's metrics, their names, and the retry hint."""

from __future__ import annotations

import pytest
from drafting_scene import Clock
from engine_scene import make_target
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from service_scene import make_host

from draftwire.contract.errors import InvalidArgumentError
from verifier_service.core import retry_hint, token_rate
from verifier_service.core.retry_hint import RETRY_S, WINDOW_S, RetryAfterEstimator
from verifier_service.engine.request_metrics import RequestMetrics
from verifier_service.host.host import EngineHost
from verifier_service.options import VerifierOptions
from verifier_service.settings import check_options

# Samples of vLLM's V1 engine (docs/usage/metrics.md) with their labels besides `model_name`.
VLLM = {
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:num_preemptions_total": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:prefix_cache_queries_total": set(),
    "vllm:prefix_cache_hits_total": set(),
    "vllm:prompt_tokens_total": set(),
    "vllm:generation_tokens_total": set(),
    "vllm:request_success_total": {"finished_reason"},
    "vllm:time_to_first_token_seconds_bucket": {"le"},
    "vllm:inter_token_latency_seconds_bucket": {"le"},
    "vllm:e2e_request_latency_seconds_bucket": {"le"},
    "vllm:request_time_per_output_token_seconds_bucket": {"le"},
    "vllm:spec_decode_num_drafts_total": set(),
    "vllm:spec_decode_num_draft_tokens_total": set(),
    "vllm:spec_decode_num_accepted_tokens_total": set(),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"position"},
}


def scraped(host: EngineHost) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and values by sample name, parsed from Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(host.collector)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics_have_vllms_names_too_where_asked_for():
    host = make_host(vllm_metrics=True)
    host.engine.metrics.observe_first(0.3, prompt_tokens=7, output_tokens=1)
    host.engine.metrics.count_step(4, 2)
    found = scraped(host)
    named = {name: found[name] for name in found if name.startswith("vllm:")}
    kept = {name for name in named if not name.endswith(("_sum", "_count", "_created"))}
    assert kept == set(VLLM)
    for name, samples in named.items():
        own = name.replace("vllm:", "draftwire_")
        assert samples == found[own]
        if name in VLLM:
            assert all(set(labels) == VLLM[name] | {"model_name"} for labels, _ in samples)


def test_metrics_have_no_vllm_names_by_default():
    assert all(name.startswith("draftwire_") for name in scraped(make_host()))


@pytest.mark.parametrize("name", ["llama-8b", None])
def test_the_served_name_is_in_info_and_metrics(name):
    target = make_target()
    host = make_host(served_model_name=name, vllm_metrics=True)
    expected = name or target.name
    assert host.info().target == expected
    assert {labels["model_name"] for samples in scraped(host).values() for labels, _ in samples} == {expected}


def test_a_served_name_is_not_empty():
    with pytest.raises(InvalidArgumentError, match="served_model_name"):
        check_options(VerifierOptions("tiny", served_model_name="", device="cpu"))


def samples(metrics: RequestMetrics) -> dict[str, float]:
    """Return the value of each sample by its name, followed by its label values."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


@pytest.fixture
def counted() -> dict[str, float]:
    """Return the samples after four steps with at most three drafts."""
    metrics = RequestMetrics(3)
    for num_drafts, num_accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        metrics.count_step(num_drafts, num_accepted)
    return samples(metrics)


def test_drafts_and_acceptances_are_counted_at_each_position(counted):
    name = "draftwire_spec_decode_num"
    assert [counted[f"{name}_draft_tokens_per_pos_total {i}"] for i in range(3)] == [3, 3, 2]
    assert [counted[f"{name}_accepted_tokens_per_pos_total {i}"] for i in range(3)] == [2, 1, 1]
    assert counted[f"{name}_drafts_total"] == 3
    assert (counted[f"{name}_draft_tokens_total"], counted[f"{name}_accepted_tokens_total"]) == (8, 4)


def test_tokens_of_verify_steps_are_a_histogram_up_to_k_and_one(counted):
    name = "draftwire_acceptance_length"
    assert [counted[f"{name}_bucket {most}"] for most in ("1.0", "2.0", "3.0", "4.0", "+Inf")] == [2, 3, 3, 4, 4]
    assert (counted[f"{name}_count"], counted[f"{name}_sum"]) == (4, 4 + 2 + 1 + 1)


def test_an_interval_is_between_outputs_not_tokens():
    metrics = RequestMetrics(1)
    metrics.observe_first(0.5, prompt_tokens=7, output_tokens=1)
    metrics.observe_next(0.012, output_tokens=4)
    counted = samples(metrics)
    assert counted["draftwire_time_to_first_token_seconds_sum"] == 0.5
    assert counted["draftwire_inter_token_latency_seconds_sum"] == 0.012
    assert (counted["draftwire_prompt_tokens_total"], counted["draftwire_generation_tokens_total"]) == (7, 5)


def test_the_time_of_an_output_token_excludes_the_first_token():
    metrics = RequestMetrics(1)
    metrics.observe_decode(2.0, output_tokens=5)
    metrics.observe_decode(0.0, output_tokens=1)
    counted = samples(metrics)
    name = "draftwire_request_time_per_output_token_seconds"
    assert (counted[f"{name}_sum"], counted[f"{name}_count"]) == (0.5, 1)


def test_ends_are_counted_by_reason_and_refusals_separately():
    metrics = RequestMetrics(1)
    for reason in ("stop", "length", "stop", "abort", "error"):
        metrics.count_end(reason, 1.0)
    metrics.count_refused()
    counted = samples(metrics)
    reasons = ("stop", "length", "abort", "error")
    assert [counted[f"draftwire_request_success_total {reason}"] for reason in reasons] == [2, 1, 1, 1]
    assert counted["draftwire_requests_refused_total"] == 1
    assert counted["draftwire_e2e_request_latency_seconds_count"] == 5


def test_the_rate_is_over_the_window():
    rate = token_rate.TokenRate()
    assert rate.tokens_per_s == 0
    rate.count(30)
    rate.count(20)
    assert rate.tokens_per_s == 50 / token_rate.WINDOW_S


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retry_hint, "time", made)
    monkeypatch.setattr(retry_hint.random, "uniform", lambda low, high: (low + high) / 2)
    return made


def test_it_is_when_half_of_the_queue_has_moved_on(clock):
    pace = RetryAfterEstimator(64)
    for _ in range(40):
        clock.now += WINDOW_S / 40
        pace.count_end()
    assert pace.retry_after_s() == pytest.approx(32 * WINDOW_S / 40)


def test_what_ended_long_ago_does_not_count(clock):
    pace = RetryAfterEstimator(2)
    for _ in range(100):
        pace.count_end()
    clock.now += WINDOW_S + 1
    pace.count_end()
    assert pace.retry_after_s() == WINDOW_S


@pytest.mark.parametrize(("num_ends", "seconds"), [(0, RETRY_S[1]), (100_000, RETRY_S[0])])
def test_it_stays_within_bounds(clock, num_ends, seconds):  # noqa: ARG001
    pace = RetryAfterEstimator(64)
    for _ in range(num_ends):
        pace.count_end()
    assert pace.retry_after_s() == seconds


def test_clients_are_not_sent_to_come_together():
    pace = RetryAfterEstimator(64)
    assert len({pace.retry_after_s() for _ in range(8)}) == 8
