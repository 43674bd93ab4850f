"""`draftwire bench acceptance` from the command line; test_bench_closed_forms.py tests the closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from timelines import timeline

from draftwire_bench.acceptance.acceptance import METHODS, Cell, Position
from draftwire_bench.acceptance.recomputation import Continuation
from draftwire_bench.acceptance.report import find_deviations
from draftwire_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
PAIR = ("--target", str(DEMO / "target"), "--head", str(DEMO / "eagle3"))


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "acceptance", *arguments])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A prompt file: beginnings of Draftwire's source files as text, and one prompt of token ids."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [file.read_text()[:80] for file in sorted((ROOT / "draftwire" / "contract").glob("*.py"))[:7]]
    lines = [{"text": text} for text in texts if text] + [{"token_ids": [5, 300, 41]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("head", [pytest.param("eagle3", marks=pytest.mark.full), "dspark"])
def test_a_head_in_8_bits_samples_what_its_logits_say(head, prompts, tmp_path):
    """Drafts are accepted as often as the closed form of the head in 8 bits says."""
    path = tmp_path / "acceptance.json"
    result = bench(
        *("--target", str(DEMO / "target"), "--head", str(DEMO / head), "--quantization", "fp8"),
        *("--verifier-device", "cpu", "--drafter-device", "cpu", "--dtype", "float32", "--prompts", str(prompts)),
        *("--num-prompts", "6", "--prompt-tokens", "20", "--output-tokens", "24", "--samples", "2"),
        *("--methods", "gumbel dense", "--temperatures", "0,1", "--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    certain, sampled = json.loads(path.read_text())["cells"]
    assert certain["conditional"] == certain["conditional_closed_form"]
    assert all(abs(position["z"]) < 4.5 for position in sampled["positions"])
    assert sampled["acceptance_length"] > 1.3
    assert certain["steps_unlike"] + sampled["steps_unlike"] <= 2


def test_the_demo_pair_with_one_method(prompts, tmp_path):
    path = tmp_path / "acceptance.json"
    result = bench(
        *PAIR,
        *("--verifier-device", "cpu", "--drafter-device", "cpu", "--dtype", "float32", "--prompts", str(prompts)),
        *("--num-prompts", "6", "--prompt-tokens", "20", "--output-tokens", "24", "--samples", "2"),
        *("--methods", "block dense", "--temperatures", "0,1", "--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    certain, sampled = json.loads(path.read_text())["cells"]
    assert (certain["continuations"], sampled["continuations"]) == (6, 12)
    assert certain["conditional"] == certain["conditional_closed_form"]
    assert [position["z"] for position in certain["positions"]] == [None] * 4
    assert all(abs(position["z"]) < 4.5 for position in sampled["positions"])
    assert certain["steps_unlike"] == sampled["steps_unlike"] == 0
    assert sampled["verify_steps"] > 6 * 12 / 5
    assert sampled["acceptance_length"] > 1.5
    assert "largest deviation from a closed form" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--methods", "strict"), "methods = 'strict': allowed: greedy one-hot, gumbel one-hot"),
        (("--temperatures", "-1"), "'--temperatures': '-1' is not a list of numbers from 0 on"),
        (("--prompts", "missing.jsonl"), "prompts = 'missing.jsonl': must be a file of JSON lines"),
    ],
)
def test_wrong_arguments_are_named(arguments, text, prompts):
    result = bench(*PAIR, "--prompts", str(prompts), *arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_target_and_head_are_required(prompts):
    assert "needs --target and --head" in bench("--prompts", str(prompts)).output


def served(*steps: tuple[int, int], prompt: tuple[int, ...] = (1, 2, 3)) -> Continuation:
    """Return a continuation of verify steps (drafts made, drafts accepted)."""
    seen = timeline(steps, k=2)
    return Continuation(prompt, seen.token_ids, seen.drafted, seed=0)


def test_verify_steps_are_found_in_the_stream():
    # The first output token is at position 3. The steps emit 2, 3 and 1 more; the last has no room for two drafts.
    steps = served((2, 1), (2, 2), (0, 0)).whole_steps(k=2)
    assert [(step.last, step.accepted) for step in steps] == [(3, 1), (5, 2)]


def test_steps_that_had_no_room_for_all_drafts_are_left_out():
    # Of six output tokens, a step with two drafts needs three left: the drafts and the bonus token.
    assert [step.last for step in served((2, 1), (2, 1), (0, 0)).whole_steps(k=2)] == [3, 5]
    assert [step.last for step in served((2, 2), (1, 1)).whole_steps(k=2)] == [3]


def cell(accepted: int, expected: float, variance: float) -> Cell:
    return Cell(METHODS[0], 1.0, k=1, steps=100, positions=[Position(100, accepted, expected, variance)])


def test_a_rate_that_parts_from_its_closed_form_is_named():
    assert find_deviations([cell(accepted=55, expected=50.0, variance=25.0)]) == []
    assert find_deviations([cell(accepted=76, expected=50.0, variance=25.0)]) == [
        "greedy one-hot, temperature 1, position 1: 76 of 100 accepted, 50.0 expected, +5.2 standard errors"
    ]


def test_conditional_rates_of_block_are_ratios_of_unconditional():
    positions = [Position(100, 60, 50.0, 1.0), Position(100, 30, 20.0, 1.0)]
    block = Cell(METHODS[4], 1.0, k=2, steps=100, positions=positions)
    assert block.conditional(closed=False) == [0.6, 0.5]
    assert block.conditional(closed=True) == [0.5, 0.4]
