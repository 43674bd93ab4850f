"""The record of pacing: every step, plan, message and answer of a verifier is in it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from draftwire_bench.pacing_record import main, read, stretches

ROOT = Path(__file__).resolve().parents[2]
K = 3
PAIR = f"""if True:
    import sys
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path
    from google.protobuf.json_format import MessageToJson
    from draftwire_bench.services import wait_for_drafters
    from draftwire.client import Client
    from draftwire_bench.processes import start_drafter, start_verifier
    target, head, counters = sys.argv[1:]
    options = ("--engine-process", "--draft-deadline-ms", "off", "--speculative-config")
    with (
        start_drafter(head, target, "--device", "cpu") as drafter,
        start_verifier(
            target, [drafter.address], "--device", "cpu", *options, '{{"num_speculative_tokens": {K}}}'
        ) as verifier,
        Client(verifier.address) as client,
    ):
        wait_for_drafters(client)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda prompt: client.complete(prompt, temperature=0, max_tokens=60), ("def f(", "The")))
        Path(counters).write_text(MessageToJson(client.info().counters, preserving_proto_field_name=True))
    """


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two requests to the demo pair, recorded: events by kind, the verifier's own counters, and what was printed."""
    directory = tmp_path_factory.mktemp("record")
    output, counters, demo = directory / "record.jsonl.gz", directory / "counters.json", ROOT / "models" / "demo"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")])
    program = [sys.executable, "-c", PAIR, str(demo / "target"), str(demo / "eagle3"), str(counters)]
    result = CliRunner().invoke(main, ["--output", str(output), "--", *program], env={"PYTHONPATH": paths})
    assert result.exit_code == 0, result.output
    events = list(read(output))
    by_kind = {kind: [event for event in events if event["event"] == kind] for kind in {e["event"] for e in events}}
    return by_kind, json.loads(counters.read_text()), result.output


def test_every_step_is_recorded_up_to_the_end(recorded):
    events, counters, _ = recorded
    verified = Counter()
    for step in events["step"]:
        assert 0 < step["step_s"] < step["landed"] < step["at"]
        assert abs(step["host_s"]) < 60
        assert step["is_beside"] is None
        assert step["has_prompts"] or step["verified"]
        for drafter, drafts, count in step["verified"]:
            assert (drafter != "") >= (drafts > 0)
            verified.update(steps=count, rows=(1 + drafts) * count)
    assert len(events["step"]) == int(counters["steps"])
    assert verified == {"steps": int(counters["verify_steps"]), "rows": int(counters["verify_rows"])}
    assert 1 <= sum(step["has_prompts"] for step in events["step"]) < len(events["step"])


def test_every_message_is_recorded_with_contents_and_request(recorded):
    events, counters, _ = recorded
    messages, traffic = events["message"], counters["traffic"]
    assert [message["number"] for message in messages] == [*range(1, len(messages) + 1)]
    assert sum(message["rows"] for message in messages) == sum(int(of.get("feature_rows", 0)) for of in traffic)
    assert sum(message["num_bytes"] for message in messages) == sum(int(of.get("feature_bytes", 0)) for of in traffic)
    for message in messages:
        assert message["sent"] < message["at"]
        assert 0 <= message["drafts"] <= K
        assert (message["sequences"] > 0) == (message["drafts"] > 0)
        assert message["wait_until"] >= message["sent"]
        assert isinstance(message["has_backlog"], bool)
    assert max(message["sequences"] for message in messages) in (1, 2)


def test_every_answer_is_recorded_beside_its_message(recorded):
    events, _, _ = recorded
    messages = {message["number"]: message for message in events["message"]}
    asked = {message["number"] for message in events["message"] if message["drafts"]}
    assert asked <= {answer["number"] for answer in events["answer"]}  # the others' may come too late
    assert asked
    for answer in events["answer"]:
        message = messages[answer["number"]]
        assert all(answer[name] == message[name] for name in ("drafter", "sent", "rows", "drafts", "sequences"))
        assert answer["sent"] < answer["received"] < answer["at"]


def test_plans_are_recorded_with_what_they_were_made_from(recorded):
    events, _, _ = recorded
    assert events["plan"]
    for plan in events["plan"]:
        assert (plan["num_drafts"], plan["is_off"]) == (K, False)
        assert len(plan["speeds"]) == K + 1
        assert plan["step"]["requests"] in (1, 2)
    assert events["plan"][-1]["speeds"][K] > 0


def test_it_prints_how_much_there_was(recorded):
    events, _, output = recorded
    printed = [[float(cell) for cell in line.split()] for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert sum(row[2] for row in printed) == len(events["step"])
    assert sum(row[-1] for row in printed) == len(events["answer"])


def test_events_part_at_pauses_into_stretches():
    """Ten steps, three messages and a plan without drafts; after a second another step."""
    events = [{"event": "step", "at": 0.1 * i} for i in range(10)]
    events += [{"event": "message", "at": 1.0, "rows": 5, "num_bytes": 70}] * 3
    events += [{"event": "plan", "at": 1.1, "num_drafts": 0}, {"event": "step", "at": 2.1}]
    first, second = stretches(events)
    assert first[:2] == (0.0, 1.1)
    assert first.counts == {"steps": 10, "messages": 3, "rows": 15, "bytes": 210, "plans": 1, "plans with drafts": 0}
    assert second == (2.1, 2.1, {"steps": 1})
