"""Emitted continuations follow the target's distribution for any drafts."""

from dataclasses import replace

import pytest
from markov import Case, chi_square_ratio, simulate

CASES = [
    Case("one-hot"),
    Case("greedy"),
    Case("dense"),
    Case("reduced"),
    Case("top-n"),
    Case("dense", "block"),
    Case("reduced", "block"),
    Case("top-n", "block"),
    Case("greedy", "block"),
    Case("one-hot", "coupled"),
    Case("greedy", "coupled"),
    Case("dense", use_fp64=True),
    Case("one-hot").with_options(temperature=0.5),
    Case("dense").with_options(temperature=0.5),
    Case("dense", "block").with_options(temperature=1.7),
    Case("one-hot", "coupled").with_options(temperature=0.7),
    Case("greedy").with_options(top_k=2),
    Case("dense").with_options(top_k=3, top_p=0.8),
    Case("dense", "block").with_options(top_p=0.7),
    Case("one-hot").with_options(min_p=0.2, temperature=0.8),
    Case("greedy").with_options(repetition=1.4, presence=0.3, frequency=0.2),
    Case("dense").with_options(repetition=1.3, frequency=0.4, top_p=0.9),
    Case("dense", "block").with_options(presence=0.8),
    Case("one-hot", "coupled").with_options(frequency=0.5),
    Case("greedy", "coupled").with_options(repetition=1.4, presence=0.3, frequency=0.2),
]


def case_name(case: Case) -> str:
    options = ",".join(f"{k}={v}" for k, v in vars(case.options).items() if v != type(case.options).__dict__[k])
    return " ".join(filter(None, [case.method, case.form, options, "fp64" if case.use_fp64 else ""]))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_continuations_follow_the_target(case: Case) -> None:
    continuations, _ = simulate(case)
    assert chi_square_ratio(continuations, case.options) < 1


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_continuations_follow_the_target_for_other_k(method: str, k: int) -> None:
    case = Case("dense", method, k=k, sequences=20_000)
    continuations, _ = simulate(case)
    assert chi_square_ratio(continuations, case.options) < 1


@pytest.mark.parametrize("form", ["dense", "reduced", "top-n"])
def test_block_accepts_no_less_than_standard(form: str) -> None:
    standard = Case(form, sequences=10_000)
    _, standard_length = simulate(standard)
    _, block_length = simulate(replace(standard, method="block"))
    assert block_length > standard_length
