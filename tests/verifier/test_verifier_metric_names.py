"""The name under which a target is served, and metrics under vLLM's names."""

from __future__ import annotations

import pytest
from engine_scene import make_target
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from draftwire.contract.client_security import LOOPBACK
from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.validation import speculative_config_from_mapping
from verifier_service.engine.engine import EngineLimits
from verifier_service.host.host import EngineHost
from verifier_service.options import VerifierOptions
from verifier_service.settings import check_options

# vLLM's V1 engine, docs/usage/metrics.md: the samples by their labels besides `model_name`.
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


def make_host(**options) -> EngineHost:
    limits = EngineLimits(max_num_seqs=2, max_queue=1, max_prefill_rows=64, num_blocks=33, draft_deadline_s=None)
    return EngineHost(make_target(), speculative_config_from_mapping({}), limits, [], LOOPBACK, **options)


def scraped(host: EngineHost) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values by the samples' names, through Prometheus' text."""
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
