"""The verifier's metrics of requests."""

from __future__ import annotations

from verifier_service.request_metrics import RequestMetrics


def samples(metrics: RequestMetrics) -> dict[str, float]:
    """Value of each sample, its labels' values behind the name."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


def test_drafts_and_acceptances_are_counted_at_each_position():
    metrics = RequestMetrics(3)
    for num_drafts, num_accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        metrics.count_step(num_drafts, num_accepted)
    counted = samples(metrics)
    assert [counted[f"draftwire_draft_tokens_total {i}"] for i in range(3)] == [3, 3, 2]
    assert [counted[f"draftwire_accepted_tokens_total {i}"] for i in range(3)] == [2, 1, 1]


def test_tokens_of_verify_steps_are_a_histogram_up_to_all_drafts_and_one():
    metrics = RequestMetrics(3)
    for num_drafts, num_accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        metrics.count_step(num_drafts, num_accepted)
    counted = samples(metrics)
    name = "draftwire_acceptance_length"
    buckets = {key: value for key, value in counted.items() if key.startswith(f"{name}_bucket")}
    assert buckets == {
        f"{name}_bucket 1.0": 2,
        f"{name}_bucket 2.0": 3,
        f"{name}_bucket 3.0": 3,
        f"{name}_bucket 4.0": 4,
        f"{name}_bucket +Inf": 4,
    }
    assert (counted[f"{name}_count"], counted[f"{name}_sum"]) == (4, 4 + 2 + 1 + 1)


def test_an_interval_is_shared_by_the_tokens_that_it_brought():
    metrics = RequestMetrics(1)
    metrics.observe_first(0.5, prompt_tokens=7, output_tokens=1)
    metrics.observe_next(0.012, output_tokens=4)
    counted = samples(metrics)
    assert counted["draftwire_time_to_first_token_seconds_sum"] == 0.5
    assert counted["draftwire_inter_token_latency_seconds_sum"] == 0.003
    assert (counted["draftwire_prompt_tokens_total"], counted["draftwire_output_tokens_total"]) == (7, 5)


def test_ends_are_counted_by_reason():
    metrics = RequestMetrics(1)
    for reason in ("stop", "length", "stop"):
        metrics.count_end(reason, 1.0)
    counted = samples(metrics)
    assert (counted["draftwire_requests_total stop"], counted["draftwire_requests_total length"]) == (2, 1)
    assert counted["draftwire_request_duration_seconds_count"] == 3
