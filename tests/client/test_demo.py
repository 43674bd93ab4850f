"""The output of the demo, with a fake verifier in place of its services."""

from __future__ import annotations

import io
from contextlib import contextmanager

import pytest
from rich.console import Console

from draftwire import Client
from draftwire.contract.errors import CheckpointError, ServerError
from draftwire.v1 import generate_pb2 as pb
from draftwire_cli import demo_run as demo


@pytest.fixture
def models(tmp_path):
    for name in ("head", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    return tmp_path


@pytest.fixture
def run(verifier, models):
    @contextmanager
    def services(*_):
        with Client(verifier.address) as client:
            yield client

    def run() -> tuple[bool, str]:
        console = Console(file=io.StringIO(), width=120, highlight=False)
        good = demo.run_demo(models / "head", models / "target", demo.PROMPTS[:2], 8, console, services)
        return good, console.file.getvalue()

    return run


def test_each_prompt_runs_with_drafts_and_without(verifier, run):
    good, printed = run()
    warm_up, *requests = verifier.requests
    assert good
    assert [r.num_speculative_tokens if r.HasField("num_speculative_tokens") else None for r in requests] == [
        0,
        None,
    ] * 3
    assert [round(r.sampling_params.temperature, 3) for r in requests] == [0, 0, 0, 0, 0.8, 0.8]
    assert [r.text for r in requests[::2]] == [demo.PROMPTS[0], demo.PROMPTS[1], demo.PROMPTS[0]]
    assert warm_up.sampling_params.max_tokens == 8
    assert "greedy output is the same with and without drafts: 2 of 2 prompts" in printed
    assert "1.00 0.00" in printed


def test_greedy_output_that_changes_is_a_failure(verifier, run):
    verifier.script_without_drafts = verifier.script[1:]
    good, printed = run()
    assert not good
    assert "CHANGED with drafts, from token 0 on" in printed


def test_text_colours_accepted_drafts_alone(verifier, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard", highlight=False)
    with Client(verifier.address) as client:
        demo.print_text(demo.compare(client, "1", "prompt ", demo.GREEDY, 8), console)
    dim, green, reset = "\x1b[2m", "\x1b[32m", "\x1b[0m"
    assert f"{dim}prompt {reset}é{green} b{reset} {green}end{reset}\n" in console.file.getvalue()


def test_missing_model_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        demo.run_demo(tmp_path / "head", tmp_path / "target", demo.PROMPTS[:1], 8, Console(file=io.StringIO()))


def test_refused_drafter_ends_the_demo():
    class Refusing:
        address = "127.0.0.1:1"

        def info(self):
            status = pb.DrafterStatus(state=pb.DRAFTER_STATE_REFUSED, detail="vocabulary 9, head 8")
            return pb.GetVerifierInfoResponse(drafters=[status])

    with pytest.raises(ServerError, match=r"drafters of 127\.0\.0\.1:1 are not ready: .*: vocabulary 9, head 8"):
        demo.wait_for_drafters(Refusing())
