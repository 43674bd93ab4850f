"""The metrics of both services as Prometheus scrapes them: names, labels, and equal byte counts at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import urlopen

import pytest
from addresses import free_address
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from services import DEMO, wait_for_drafter
from waiting import wait_for

from draftwire import Client
from draftwire_bench.processes import start_drafter, start_verifier

pytestmark = pytest.mark.xdist_group("metrics")

CONFIG = '{"num_speculative_tokens": 4, "draft_sample_method": "gumbel", "draft_logits": "dense"}'
# Metrics that vLLM has too, with their labels except the model's.
VLLM = {
    "draftwire_num_requests_running": set(),
    "draftwire_num_requests_waiting": set(),
    "draftwire_kv_cache_usage_perc": set(),
    "draftwire_num_preemptions_total": set(),
    "draftwire_prompt_tokens_total": set(),
    "draftwire_generation_tokens_total": set(),
    "draftwire_prefix_cache_queries_total": set(),
    "draftwire_prefix_cache_hits_total": set(),
    "draftwire_request_success_total": {"finished_reason"},
    "draftwire_time_to_first_token_seconds_bucket": {"le"},
    "draftwire_inter_token_latency_seconds_bucket": {"le"},
    "draftwire_request_time_per_output_token_seconds_bucket": {"le"},
    "draftwire_e2e_request_latency_seconds_bucket": {"le"},
    "draftwire_spec_decode_num_drafts_total": set(),
    "draftwire_spec_decode_num_draft_tokens_total": set(),
    "draftwire_spec_decode_num_accepted_tokens_total": set(),
    "draftwire_spec_decode_num_accepted_tokens_per_pos_total": {"position"},
}
SHARED = {
    "draftwire_step_time_seconds_bucket": {"le", "phase"},
    "draftwire_idle_seconds_total": set(),
    "draftwire_wire_bytes_total": {"carrier", "direction", "content"},
}
VERIFIER = VLLM | SHARED | {
    "draftwire_requests_refused_total": set(),
    "draftwire_spec_decode_num_draft_tokens_per_pos_total": {"position"},
    "draftwire_acceptance_length_bucket": {"le"},
    "draftwire_verify_rows_total": set(),
    "draftwire_prompt_rows_total": set(),
    "draftwire_fallback_tokens_total": {"cause"},
    "draftwire_drafter_state": {"drafter", "state"},
    "draftwire_drafter_sequences": {"drafter"},
    "draftwire_drafter_draft_tokens_total": {"drafter"},
    "draftwire_drafter_accepted_tokens_total": {"drafter"},
    "draftwire_drafter_offered_tokens_total": {"drafter"},
    "draftwire_drafter_expected_tokens_total": {"drafter"},
    "draftwire_verification_budget": set(),
    "draftwire_drafter_planned_drafts": {"drafter"},
    "draftwire_drafter_expected_gain": {"drafter"},
}
DRAFTER = SHARED | {
    "draftwire_kv_cache_usage_perc": set(),
    "draftwire_draft_calls_refused_total": set(),
    "draftwire_draft_sessions": set(),
    "draftwire_draft_sequences": set(),
    "draftwire_draft_steps_unanswered": set(),
    "draftwire_draft_rows_waiting": set(),
    "draftwire_draft_evictions_total": set(),
    "draftwire_draft_batches_ahead_total": {"outcome"},
    "draftwire_draft_step_seconds_bucket": {"le"},
    "draftwire_drafted_tokens_total": set(),
    "draftwire_draft_answers_total": {"status"},
    "draftwire_draft_session_failures_total": set(),
}


@dataclass
class Pair:
    """Metrics addresses of both services, and a client of the verifier, which was started with `carriers`."""

    carriers: str
    verifier: str
    drafter: str
    client: Client


@pytest.fixture(scope="module", params=["auto", "bytes"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both services after some load, connected directly and by shared memory, or by gRPC messages only."""
    pages = free_address(), free_address()
    options = ("--device", "cpu", "--metrics-listen")
    config = ("--speculative-config", CONFIG, "--draft-deadline-ms", "off", "--no-adaptive-k")
    with (
        start_drafter(DEMO / "eagle3", DEMO / "target", *options, pages[1]) as drafter,
        start_verifier(
            *(DEMO / "target", [drafter.address], *options, pages[0], *config, "--carriers", request.param)
        ) as verifier,
        Client(verifier.address) as client,
    ):
        wait_for_drafter(client, drafter.address)
        for number in range(3):
            client.complete("def area(width, height):", max_tokens=20, temperature=number / 2, ignore_eos=True)
        yield Pair(request.param, *pages, client)


def scrape(page: str) -> list[Sample]:
    """Return the samples of Draftwire's metrics, without the `_created` ones."""
    with urlopen(f"http://{page}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return [one for one in samples if one.name.startswith("draftwire_") and not one.name.endswith("_created")]


def labels_by_name(page: str, model_name: str) -> dict[str, set[str]]:
    samples = scrape(page)
    assert {sample.labels.pop("model_name") for sample in samples} == {model_name}
    return {one.name: set(one.labels) for one in samples if not one.name.endswith(("_sum", "_count"))}


def wire_bytes(page: str) -> dict[tuple[str, str, str], float]:
    """Return the bytes by carrier, direction (as in the verifier's metrics) and content."""
    turned = {"sent": "received", "received": "sent"}
    found = {}
    for sample in scrape(page):
        if sample.name == "draftwire_wire_bytes_total":
            carrier, direction, content = (sample.labels[name] for name in ("carrier", "direction", "content"))
            found[carrier, direction, content] = sample.value
    if any(content == "features" and direction == "received" for _, direction, content in found):
        return {(carrier, turned[direction], content): value for (carrier, direction, content), value in found.items()}
    return found


def test_a_verifier_has_exactly_these_metrics_and_labels(pair: Pair):
    assert labels_by_name(pair.verifier, pair.client.info().target) == VERIFIER


def test_a_drafter_has_exactly_these_metrics_and_labels(pair: Pair):
    assert labels_by_name(pair.drafter, "eagle3") == DRAFTER


def test_each_step_of_the_verifier_is_in_every_phase(pair: Pair):
    counts = {
        sample.labels["phase"]: sample.value
        for sample in scrape(pair.verifier)
        if sample.name == "draftwire_step_time_seconds_count"
    }
    assert counts == dict.fromkeys(("draft", "wire", "verify", "sample", "host"), pair.client.info().counters.steps)


def test_both_ends_count_the_same_bytes_and_none_twice(pair: Pair):
    # The verifier polls the drafter's load; one end may count such a message before the other.
    wait_for(lambda: wire_bytes(pair.verifier) == wire_bytes(pair.drafter), "the two ends agree")
    found, info = wire_bytes(pair.verifier), pair.client.info()
    (traffic,) = [traffic for traffic in info.counters.traffic if traffic.feature_bytes]
    for content, num_bytes in (("features", traffic.feature_bytes), ("logits", traffic.logits_bytes)):
        assert sum(value for (_, _, other), value in found.items() if other == content) == num_bytes
    carriers = {carrier for carrier, _, content in found if content != "fusion"}
    assert carriers == ({"grpc", "direct", "shm"} if pair.carriers == "auto" else {"grpc"})
    (status,) = info.drafters
    for direction, num_bytes in (("sent", status.sent_message_bytes), ("received", status.received_message_bytes)):
        messages = [value for key, value in found.items() if key[0] != "shm" and key[1] == direction]
        # Messages include more than steps and answers: hellos, fusion weights and drafter infos.
        assert sum(messages) > num_bytes > 0
