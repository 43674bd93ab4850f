"""The verifier's metrics of requests."""

from __future__ import annotations

from verifier_service.engine.request_metrics import RequestMetrics


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
    name = "draftwire_spec_decode_num"
    assert [counted[f"{name}_draft_tokens_per_pos_total {i}"] for i in range(3)] == [3, 3, 2]
    assert [counted[f"{name}_accepted_tokens_per_pos_total {i}"] for i in range(3)] == [2, 1, 1]
    assert counted[f"{name}_drafts_total"] == 3
    assert (counted[f"{name}_draft_tokens_total"], counted[f"{name}_accepted_tokens_total"]) == (8, 4)


def test_tokens_of_verify_steps_are_a_histogram_up_to_k_and_one():
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
