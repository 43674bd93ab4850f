"""Structured output through both services follows the masked, renormalised target; mutants are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from exact_cases import Case
from exact_law import LENGTH, Sampling
from exact_pair import Pair
from exact_services import sample, serve_verifier, wait_for_drafters
from exact_structured import END, OPTIONS, StructuredLaw, padded, write_tokenizer

from draftwire.v1 import generate_pb2
from draftwire_bench.processes import start_verifier
from verifier_service.grammar.matcher import MaskedRows, MaskFiller, Matcher, RowMasks
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_structured")

REQUESTS = 1200
MORE_REQUESTS = 9000
"""For the mutant whose bias is small."""
PROMPTS = ((3, 0, 6, 6, 4, 1), (2, 4, 2))
FILTERED = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)

CASES = [
    Case("greedy", seeded=False),
    Case("greedy", head="reduced", prompt=1, sampling=FILTERED),
    Case("gumbel", k=4, seeded=False),
    Case("gumbel", method="coupled", prompt=1),
    Case("dense", k=4),
    Case("dense", prompt=1, sampling=FILTERED),
    Case("top-3", head="reduced"),
    Case("dense", method="block", k=4),
]


@pytest.fixture(scope="module")
def laws(pair: Pair) -> list[StructuredLaw]:
    return [StructuredLaw(pair, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def directory(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's directory with a tokenizer."""
    path = tmp_path_factory.mktemp("structured") / "target"
    shutil.copytree(pair.target_dir, path)
    write_tokenizer(path)
    return path


def refutation(
    case: Case, law: StructuredLaw, target: Target, directory: Path, drafters: dict[str, str], requests: int = REQUESTS
) -> float:
    """Return `Law.refutation` of the outputs; check that drafts are accepted and rejected and that outputs end."""
    options = case.sampling.options() | OPTIONS
    with serve_verifier(target, case.config(), [drafters[case.head]], tokenizer_dir=directory) as address:
        samples = sample(address, law.prompt, case.seeds(requests), max_tokens=LENGTH, **options)
    drafted, accepted = (sum(sum(getattr(one.statistics, what)) for one in samples) for what in ("drafted", "accepted"))
    print(f"accepted {accepted} of {drafted} drafts")
    assert 0 < accepted < drafted or case.drafts == "greedy"
    assert any(END in one.tokens for one in samples)
    return law.refutation(padded(samples), case.sampling)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_follow_the_masked_target(
    case: Case, laws: list[StructuredLaw], target: Target, directory: Path, drafters: dict[str, str]
) -> None:
    ratio = refutation(case, laws[case.prompt], target, directory, drafters)
    print(f"{ratio:.2f} of the threshold")
    assert ratio < 1


def test_seeds_give_the_same_with_and_without_drafts(
    laws: list[StructuredLaw], target: Target, directory: Path, drafters: dict[str, str]
) -> None:
    case = Case("greedy")
    with serve_verifier(target, case.config(), [drafters["full"]], tokenizer_dir=directory) as address:
        drafted = sample(address, laws[0].prompt, range(200), max_tokens=LENGTH, **OPTIONS)
        alone = sample(address, laws[0].prompt, range(200), max_tokens=LENGTH, num_speculative_tokens=0, **OPTIONS)
    assert [one.tokens for one in drafted] == [one.tokens for one in alone]


def test_samples_of_two_processes_follow_the_masked_target(
    laws: list[StructuredLaw], directory: Path, drafters: dict[str, str]
) -> None:
    case = Case("dense")
    with start_verifier(
        directory,
        [drafters[case.head]],
        *("--speculative-config", json.dumps(case.config()), "--draft-deadline-ms", "off"),
        *("--max-num-seqs", "256", "--device", "cpu", "--async-scheduling", "--engine-process"),
    ) as verifier:
        wait_for_drafters(verifier.address, generate_pb2.DRAFTER_STATE_READY)
        drafted = sample(verifier.address, laws[0].prompt, range(REQUESTS), max_tokens=LENGTH, **OPTIONS)
        alone = sample(
            verifier.address, laws[0].prompt, range(REQUESTS), max_tokens=LENGTH, num_speculative_tokens=0, **OPTIONS
        )
    for samples in (drafted, alone):
        assert laws[0].refutation(padded(samples), case.sampling) < 1


def mask_without_the_drafts(filler: MaskFiller, requests: Sequence[MaskedRows]) -> RowMasks:
    """Give every row of a request the mask of its first row."""
    first = fill(filler, [one._replace(drafts=[]) for one in requests])
    counts = [1 + len(one.drafts) for one in requests]
    rows = np.concatenate([np.arange(one.first, one.first + n) for one, n in zip(requests, counts, strict=True)])
    return RowMasks(rows, first.bits.repeat_interleave(first.bits.new_tensor(counts), 0))


def cut_every_draft_outside(matcher: Matcher, drafts: Sequence[int], *, has_logits: bool) -> int:  # noqa: ARG001
    return num_verified(matcher, drafts, has_logits=False)


fill, num_verified = MaskFiller.fill, Matcher.num_verified


@pytest.mark.parametrize("case", [Case("greedy", seeded=False), Case("dense")], ids=str)
def test_masks_without_the_drafts_leave_the_grammar(
    case: Case,
    laws: list[StructuredLaw],
    target: Target,
    directory: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MaskFiller, "fill", mask_without_the_drafts)
    with pytest.raises(ExceptionGroup) as caught:
        refutation(case, laws[case.prompt], target, directory, drafters)
    assert all("is not in the request's grammar" in str(error) for error in caught.value.exceptions)


def test_cutting_drafts_that_have_logits_is_refuted(
    laws: list[StructuredLaw],
    target: Target,
    directory: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Matcher, "num_verified", cut_every_draft_outside)
    ratio = refutation(Case("dense", k=1), laws[0], target, directory, drafters, MORE_REQUESTS)
    print(f"{ratio:.1f}")
    assert ratio > 1
