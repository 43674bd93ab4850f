"""The measurement of what a second stream costs."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from draftwire_bench.second_stream import CASES, main, measure


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = CliRunner().invoke(main)
    assert run.exit_code == 1
    assert "this measures a GPU" in run.output


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_each_case_can_be_measured(name: str) -> None:
    before, after = measure(name, pairs=2, times=2)
    assert before > 0
    assert after > 0
