"""Every token that is decoded without drafts is counted by cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafter_scene import move, start
from drafting_scene import Clock, Scene, answer_to, refusal_of
from engine_scene import Served, make_target
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import draft_pb2 as pb
from draftwire.v1 import generate_pb2
from verifier_service.core.request import Request
from verifier_service.drafters.fallbacks import cause_name
from verifier_service.host.metrics import VerifierCollector

DEADLINE_S = 0.05
STEP_TIME = "draftwire_step_time_seconds"

Played = tuple[Scene, Request]


def connected(**head: Any) -> Scene:
    scene = Scene()
    scene.connect(**head)
    return scene


def no_drafter() -> Played:
    scene = Scene()
    return scene, scene.decode()


def no_drafter_any_more() -> Played:
    scene, stream, one = start()
    scene.disconnect(stream)
    return scene, one


def expelled() -> Played:
    scene, stream, one = start()
    wrong = answer_to(stream.last)
    wrong.step_id += 1
    scene.answer(stream, wrong)
    return scene, one


def expelled_by_connection() -> Played:
    """Expel a drafter for a message that cannot be decoded and never reaches the engine."""
    scene, stream, one = start()
    stream.fail("its answer cannot be decoded", expel=True)
    scene.disconnect(stream)
    return scene, one


def at_capacity() -> Played:
    scene = connected(max_sequences=1)
    scene.decode()
    return scene, scene.decode()


def too_long() -> Played:
    scene = connected(max_model_len=3)
    return scene, scene.decode(4)


def not_taken() -> Played:
    scene, stream, one = start()
    scene.answer(stream, refusal_of(stream.last, pb.SEQUENCE_STATUS_NO_CAPACITY))
    return scene, one


def catching_up() -> Played:
    scene = Scene()
    _, (one,) = move(scene, 1000)
    return scene, one


def adaptive(prompt_length: int) -> Played:
    scene = Scene(adaptive_k=True, deadline_s=DEADLINE_S)
    scene.connect()
    return scene, scene.decode(prompt_length)


def no_features() -> Played:
    scene = Scene()
    one = scene.decode()
    scene.connect()
    return scene, one


def paused() -> Played:
    scene, one = adaptive(4)
    for session in scene.drafting.sessions.values():
        session.pace.policy.pin(0)
    return scene, one


def empty_answer() -> Played:
    scene, stream, one = start()
    scene.answer(stream, answer_to(stream.last, []))
    return scene, one


CASES: dict[str, tuple[Callable[[], Played], str]] = {
    "not asked": (lambda: start(k=0)[::2], "not_asked"),
    "last token": (lambda: start(max_tokens=2)[::2], "last_token"),
    "no drafter": (no_drafter, "no_drafter"),
    "no drafter any more": (no_drafter_any_more, "no_drafter"),
    "expelled": (expelled, "expelled"),
    "expelled by its connection": (expelled_by_connection, "expelled"),
    "at capacity": (at_capacity, "at_capacity"),
    "too long": (too_long, "too_long"),
    "not taken": (not_taken, "not_taken"),
    "catching up": (catching_up, "catching_up"),
    "a prompt where k adapts": (lambda: adaptive(100), "catching_up"),
    "no features": (no_features, "no_features"),
    "paused": (paused, "pace"),
    "an empty answer": (empty_answer, "empty_answer"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_described(case: str):
    play, cause = CASES[case]
    scene, one = play()
    scene.flush()
    assert [cause_name(found) for found in scene.drafting.placement.fallback_causes([one])] == [cause]


def test_a_late_drafter_is_the_cause_for_all(clock: Clock):
    scene, _, one = start(deadline_s=DEADLINE_S)
    clock.now += 2 * DEADLINE_S
    assert scene.drafting.wait_policy.is_ready(one)
    for request in (one, scene.decode()):
        scene.flush()
        assert [cause_name(found) for found in scene.drafting.placement.fallback_causes([request])] == ["late"]


def test_an_expelled_drafter_is_the_cause_until_another_takes():
    scene, one = expelled()
    stream = scene.connect()
    scene.flush()
    scene.disconnect(stream)
    assert scene.drafting.placement.fallback_causes([one]) == [generate_pb2.FALLBACK_CAUSE_NO_DRAFTER]


def scrape(served: Served, drafters: list[generate_pb2.DrafterStatus] | None = None) -> dict[str, float]:
    """Return the verifier's metrics: each value by name and label values, without the label of the model."""
    registry = CollectorRegistry()
    registry.register(VerifierCollector(served.engine, "tiny", lambda: drafters or []))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("model_name") for sample in samples} == {"tiny"}
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def run(*requests: dict[str, Any], drafter: bool) -> tuple[Served, list[Request]]:
    """Serve the requests; return the stopped engine and the requests."""
    served = Served(make_target())
    if drafter:
        served.connect()
    made = [served.submit(keys=100 * number, **options) for number, options in enumerate(requests)]
    served.run(*made)
    return served, made


def test_each_token_without_drafts_is_counted_once():
    served, requests = run({"k": 0, "max_tokens": 8}, {"max_tokens": 9}, {"max_tokens": 2}, drafter=False)
    assert scrape(served)["draftwire_fallback_tokens_total not_asked"] == 7
    assert scrape(served)["draftwire_fallback_tokens_total no_drafter"] == 7
    assert scrape(served)["draftwire_fallback_tokens_total last_token"] == 2
    counted = {one.cause: one.tokens for one in served.engine.counters().fallbacks}
    assert sum(counted.values()) == sum(one.verify_steps for one in requests) == 16


def test_drafts_are_counted_for_their_drafter():
    served, (one,) = run({"max_tokens": 12}, drafter=True)
    status = generate_pb2.DrafterStatus(address="drafter:1")
    samples = scrape(served, [status])
    assert samples["draftwire_drafter_draft_tokens_total drafter:1"] == sum(one.drafted) > 0
    assert samples["draftwire_drafter_accepted_tokens_total drafter:1"] == sum(one.accepted)
    assert served.engine.counters().accepted_drafts == sum(one.accepted)
    assert (status.drafted, status.accepted) == (sum(one.drafted), sum(one.accepted))


def test_the_pool_is_shown_drafter_by_drafter():
    served, _ = run({"max_tokens": 2}, drafter=False)
    drafters = [
        generate_pb2.DrafterStatus(address="a:1", state=generate_pb2.DRAFTER_STATE_READY),
        generate_pb2.DrafterStatus(address="b:1", state=generate_pb2.DRAFTER_STATE_EXPELLED),
    ]
    samples = scrape(served, drafters)
    for address, state in (("a:1", "ready"), ("b:1", "expelled")):
        states = {name.split()[-1] for name, value in samples.items() if f"drafter_state {address}" in name and value}
        assert states == {state}


def test_a_step_is_once_in_each_phase_of_the_histogram():
    served, _ = run({"max_tokens": 12}, drafter=True)
    samples = scrape(served)
    counted = {name.split()[1]: value for name, value in samples.items() if name.startswith(f"{STEP_TIME}_count")}
    assert counted == dict.fromkeys(("draft", "wire", "verify", "sample", "host"), served.engine.counters().steps)
    assert samples[f"{STEP_TIME}_sum verify"] == pytest.approx(served.engine.counters().times.verify_s)


def test_the_prefix_cache_is_asked_for_each_prompt_once():
    prompt = [3 + i % 7 for i in range(2 * BLOCK_SIZE + 1)]
    with Served(make_target()) as served:
        for _ in range(2):
            served.tokens(served.submit(prompt, max_tokens=2))
    samples = scrape(served)
    assert samples["draftwire_prefix_cache_queries_total"] == 2 * len(prompt)
    assert samples["draftwire_prefix_cache_hits_total"] == 2 * BLOCK_SIZE
