"""The engines' rehearsals: they go through what the engines do, for as long as one likes."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from benchmarks.host_path import main
from drafter_service.rehearsal import AnswerRehearsal as DraftersAnswerRehearsal
from drafter_service.rehearsal import Rehearsal as DraftersRehearsal
from verifier_service.rehearsal import AnswerRehearsal as VerifiersAnswerRehearsal
from verifier_service.rehearsal import Rehearsal as VerifiersRehearsal


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("kind", [DraftersRehearsal, VerifiersRehearsal])
@torch.inference_mode()
def test_sequences_that_come_to_their_end_are_followed_by_others(kind, sequences):
    """They end after some 170 steps."""
    rehearsal = kind(sequences)
    for _ in range(600):
        rehearsal.prepare()
        marks = [mark for mark in rehearsal.run() if mark is not None]
        assert marks == sorted(marks)
        assert len(marks) == len(rehearsal.parts) + 1


@pytest.mark.parametrize("kind", [DraftersAnswerRehearsal, VerifiersAnswerRehearsal])
@torch.inference_mode()
def test_answers_are_gone_through_for_as_long_as_one_likes(kind):
    rehearsal = kind()
    for _ in range(600):
        rehearsal.prepare()
        assert set(rehearsal.run()) == {None}


def test_the_benchmark_prints_a_table_for_each_engine_and_number_of_sequences():
    result = CliRunner().invoke(main, ["--sequences", "1,3", "--steps", "10", "--wait-ms", "2"], catch_exceptions=False)
    assert result.exit_code == 0
    for words in ("verifier, 1", "verifier, 3", "drafter, 1", "drafter, 3", *DraftersRehearsal.parts):
        assert words in result.output
