"""At temperature 0 each step accepts the same drafts as an offline walk of the head over transformers' states.

Wrong features do not change the output, so the chi-square test cannot find them; this comparison does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from exact_cases import MAX_DEVIATIONS, Case, count_first_drafts
from exact_law import LENGTH, Law
from exact_pair import VOCAB, Pair, run_target
from exact_services import Sample, sample, sample_prompts, serve_verifier

from draftwire.model.kv_cache import BLOCK_SIZE
from verifier_service.drafters.features import FeatureStore
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_wrong")

K = 3
OUTPUT = 24
PROMPT_LENGTHS = (2, 7, 15, 19)
PROMPTS_OF_EACH = 20
ROUNDING = 2e-4


@dataclass(frozen=True)
class Walk:
    """A prompt with its greedy output. `matches[i][s]` is true if draft s after row i is the output's token."""

    tokens: list[int]
    prompt_length: int
    matches: list[list[bool]]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_length :])

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the number of tokens that each verify step should emit."""
        return tuple(_steps(self.matches, self.prompt_length, len(self.tokens)))


def walk_all(pair: Pair, head: str) -> list[Walk]:
    """Return the greedy continuations of random prompts, with the head's drafts compared to each.

    Walks with a draft within rounding of a tie are left out, because rounding depends on the shape of the batch.
    """
    draw = torch.Generator().manual_seed(17)
    walks = []
    for length in PROMPT_LENGTHS:
        tokens = torch.randint(VOCAB, (PROMPTS_OF_EACH, length), generator=draw)
        for _ in range(OUTPUT):
            tokens = torch.cat([tokens, pair.target(tokens).logits[:, -1:].argmax(-1)], 1)
        matches, margins = _matches(pair, head, tokens)
        for row, own, margin in zip(tokens.tolist(), matches.tolist(), margins.tolist(), strict=True):
            if margin > ROUNDING:
                walks.append(Walk(row, length, own))
    assert len(walks) > 0.9 * PROMPTS_OF_EACH * len(PROMPT_LENGTHS)
    return walks


def _matches(pair: Pair, head: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the head's greedy drafts to the tokens.

    Returns matches, [B, T - 1, K] bool, and margins, [B]. A match is true if draft s after row i is token i + 2 + s; it
    is false past the last token. A margin is the smallest difference between the two largest logits of a draft.
    """
    model = pair.heads[head]
    following = tokens[:, 1:]
    chain = model.chain(
        run_target(pair.target, tokens[:, :-1])[1],
        pair.target.get_input_embeddings().weight,
        lambda s, normed: following if s == 0 else model.draft_ids[model.lm_head(normed).argmax(-1)],
        K,
    )
    matches = torch.zeros(*following.shape, K, dtype=torch.bool)
    margins = torch.full((len(tokens),), torch.inf)
    for s, normed in enumerate(chain):
        logits = model.lm_head(normed)
        wanted = tokens[:, 2 + s :]
        count = wanted.shape[1]
        matches[:, :count, s] = model.draft_ids[logits[:, :count].argmax(-1)] == wanted
        best = logits[:, :count].topk(2).values
        margins = torch.minimum(margins, (best[..., 0] - best[..., 1]).amin(1))
    return matches, margins


def _steps(matches: list[list[bool]], prompt_length: int, end: int) -> Iterable[int]:
    committed = prompt_length + 1
    while committed < end:
        num_drafts = min(K, end - committed - 1)
        row = matches[committed - 2][:num_drafts]
        accepted = row.index(False) if False in row else num_drafts
        yield accepted + 1
        committed += accepted + 1


def emitted_steps(walks: Sequence[Walk], target: Target, drafter: str) -> list[tuple[int, ...]]:
    """Return the number of tokens of each verify step of each request; check the outputs."""
    with serve_verifier(target, {"num_speculative_tokens": K}, [drafter]) as address:
        return [one.step_sizes[1:] for one in walk_through(address, walks)]


def walk_through(address: str, walks: Sequence[Walk], **options: Any) -> list[Sample]:
    """Send the prompts of walks with outputs of equal length to a verifier; check and return the outputs."""
    length = len(walks[0].output)
    samples = sample_prompts(
        address, [(walk.prompt, 0) for walk in walks], max_tokens=length, temperature=0.0, ignore_eos=True, **options
    )
    assert [one.tokens for one in samples] == [walk.output for walk in walks]
    return samples


def _acceptance_length(steps: Sequence[tuple[int, ...]]) -> float:
    return sum(sum(own) for own in steps) / sum(len(own) for own in steps)


@pytest.mark.parametrize("head", ["full", "reduced"])
def test_every_step_accepts_what_the_offline_walk_accepts(
    head: str, pair: Pair, target: Target, drafters: dict[str, str]
) -> None:
    walks = walk_all(pair, head)
    steps = emitted_steps(walks, target, drafters[head])
    assert steps == [walk.steps for walk in walks]
    assert 1.5 < _acceptance_length(steps) < K + 0.5


@pytest.mark.parametrize("head", ["full", "reduced"])
def test_a_prefix_that_is_in_the_cache_changes_no_step(
    head: str, pair: Pair, target: Target, drafters: dict[str, str]
) -> None:
    """The prompts of the second requests include most of the first outputs."""
    walks = walk_all(pair, head)
    again = [replace(walk, prompt_length=walk.prompt_length + OUTPUT - 7) for walk in walks]
    with serve_verifier(target, {"num_speculative_tokens": K}, [drafters[head]]) as address:
        walk_through(address, walks)
        samples = walk_through(address, again)
    for walk, one in zip(again, samples, strict=True):
        assert one.statistics.prefix_hit_tokens == (walk.prompt_length - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert [one.step_sizes[1:] for one in samples] == [walk.steps for walk in again]


def test_a_prefix_without_drafts_is_recomputed_for_one_with(
    pair: Pair, target: Target, drafters: dict[str, str]
) -> None:
    """The prefix has no features. The first request with drafts recomputes and stores them; the second finds them."""
    walks = walk_all(pair, "full")
    again = [replace(walk, prompt_length=walk.prompt_length + OUTPUT - 7) for walk in walks]
    with serve_verifier(target, {"num_speculative_tokens": K}, [drafters["full"]]) as address:
        walk_through(address, walks, num_speculative_tokens=0)
        rounds = [walk_through(address, again) for _ in range(2)]
    first, second = (sum(one.statistics.prefix_hit_tokens for one in samples) for samples in rounds)
    assert second == sum((walk.prompt_length - 1) // BLOCK_SIZE * BLOCK_SIZE for walk in again)
    assert first < second / 10  # hits among prompts with a common prefix
    for samples in rounds:
        assert [one.step_sizes[1:] for one in samples] == [walk.steps for walk in again]


@pytest.fixture(params=[-1, 1], ids=["earlier", "later"])
def shifted_features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier sends each row the features of the row before or after it."""

    def shifted(read: Callable[..., None]) -> Callable[..., None]:
        def read_shifted(store: FeatureStore, *args: object) -> None:
            rows, store.rows = store.rows, store.rows.roll(-request.param, 0)
            read(store, *args)
            store.rows = rows

        return read_shifted

    for read in (FeatureStore.read, FeatureStore.read_accepted_rows):
        monkeypatch.setattr(FeatureStore, read.__name__, shifted(read))


@pytest.mark.usefixtures("shifted_features")
def test_features_of_the_neighbouring_row_fail_the_walk(pair: Pair, target: Target, drafters: dict[str, str]) -> None:
    walks = walk_all(pair, "full")
    steps = emitted_steps(walks, target, drafters["full"])
    expected = [walk.steps for walk in walks]
    assert sum(a != b for a, b in zip(steps, expected, strict=True)) > len(walks) / 2
    assert _acceptance_length(steps) < 0.9 * _acceptance_length(expected)


@pytest.mark.usefixtures("shifted_features")
def test_features_of_a_neighbour_row_fail_only_the_closed_form(
    laws: list[Law], target: Target, drafters: dict[str, str]
) -> None:
    case, law = Case("greedy"), laws[0]
    with serve_verifier(target, case.config(), [drafters[case.head]]) as address:
        samples = sample(address, law.prompt, range(1200), max_tokens=LENGTH)
    assert law.refutation([one.tokens for one in samples], case.sampling) < 1
    first = count_first_drafts(samples, case, law)
    assert first.accepted < first.expected
    assert first.deviations > MAX_DEVIATIONS
