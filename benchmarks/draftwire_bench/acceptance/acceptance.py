"""Acceptance of a pair with every method, measured with both services and compared to closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftwire.client.request import Options, build_request
from draftwire.contract.errors import BenchmarkError
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire.v1 import config_pb2
from draftwire_bench.acceptance import closed_forms
from draftwire_bench.acceptance.recomputation import Continuation, Models, StepRows
from draftwire_bench.serve.counts import expected_work
from draftwire_bench.serve.load import ClientPool, Planned, Timeline
from draftwire_bench.serve.workload import Level, in_slots


@dataclass(frozen=True, slots=True)
class Method:
    """How drafts are sampled, sent and verified."""

    name: str
    config: dict[str, Any]
    law: str  # closed form of the acceptance: a key of FORMS, or "block"


GUMBEL = {"draft_sample_method": "gumbel"}
METHODS = (
    Method("greedy one-hot", {}, "p(draft)"),
    Method("gumbel one-hot", GUMBEL, "sum p q"),
    Method("gumbel dense", {**GUMBEL, "draft_logits": "dense"}, "1 - TV"),
    Method("gumbel top-64", {**GUMBEL, "draft_logits": {"top_n": 64}}, "1 - TV"),
    Method("block one-hot", {**GUMBEL, "rejection_sample_method": "block"}, "block"),
    Method("block dense", {**GUMBEL, "draft_logits": "dense", "rejection_sample_method": "block"}, "block"),
    Method("block top-64", {**GUMBEL, "draft_logits": {"top_n": 64}, "rejection_sample_method": "block"}, "block"),
    Method("coupled", {**GUMBEL, "rejection_sample_method": "coupled"}, "coupled"),
)
FORMS = ("p(draft)", "sum p q", "1 - TV", "coupled")


@dataclass
class Position:
    """Counts at one draft position, over the steps whose test has a closed form."""

    tested: int = 0
    accepted: int = 0
    expected: float = 0.0
    variance: float = 0.0
    reached: int = 0  # steps that accepted all earlier drafts
    forms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FORMS, 0.0))  # sums over `reached`

    @property
    def z(self) -> float | None:
        """Return measured minus expected, in standard errors; None without randomness, such as at temperature 0.

        Given all previous tokens, a draft is accepted with exactly the closed form's probability. Therefore the
        differences are uncorrelated and their variances add up, even if the steps depend on each other.
        """
        if self.variance < 1e-9:
            return None
        return (self.accepted - self.expected) / math.sqrt(self.variance)


@dataclass
class Cell:
    """One method at one temperature."""

    method: Method
    temperature: float
    k: int
    continuations: int = 0
    steps: int = 0
    emitted: int = 0
    # Steps whose recomputed drafts differ, because two scores are equal within rounding.
    unlike: int = 0
    positions: list[Position] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.positions = self.positions or [Position() for _ in range(self.k)]

    @property
    def acceptance_length(self) -> float:
        """Return the emitted tokens per step, including the bonus token."""
        return self.emitted / max(self.steps, 1)

    @property
    def rate(self) -> float:
        """Return accepted over drafted at all positions."""
        return sum(position.accepted for position in self.positions) / max(self.k * self.steps, 1)

    @property
    def expected_rate(self) -> float:
        """Return the closed forms' value of `rate`."""
        return sum(position.expected for position in self.positions) / max(self.k * self.steps, 1)

    def conditional(self, closed: bool) -> list[float]:
        """Return the acceptance at each position if the previous draft was accepted, of the closed form or measured."""
        numbers = [position.expected if closed else position.accepted for position in self.positions]
        if self.method.law != "block":
            return [n / max(position.tested, 1) for n, position in zip(numbers, self.positions, strict=True)]
        return [n / before if before else 0.0 for n, before in zip(numbers, [self.steps, *numbers], strict=False)]

    def add(self, rows: StepRows, draft_token_ids: Tensor | None) -> None:
        """Count recomputed steps."""
        vocab_size = rows.target_logits.shape[-1]
        p = closed_forms.probabilities(rows.target_logits, self.temperature)
        q = closed_forms.draft_probabilities(rows.draft_logits, self.temperature, draft_token_ids, vocab_size)
        offsets = torch.arange(self.k, device=p.device)
        was_accepted = offsets < rows.accepted[:, None]
        # Row j was served only if all earlier drafts were accepted.
        is_reached = offsets <= rows.accepted[:, None]
        is_same = self._is_same(rows, was_accepted, is_reached)
        self.unlike += int((~is_same).sum())
        self.steps += int(is_same.sum())
        self.emitted += int((rows.accepted + 1)[is_same].sum())
        forms = {
            "p(draft)": closed_forms.at_draft(p, rows.drafts),
            "sum p q": closed_forms.one_hot(p, q),
            "1 - TV": closed_forms.with_logits(p, q),
            "coupled": closed_forms.coupled(p, q),
        }
        if self.method.law == "block":
            law, tested = self._block(rows, q), is_same[:, None].expand_as(was_accepted)
        else:
            law, tested = forms[self.method.law], is_reached & is_same[:, None]
        for j, position in enumerate(self.positions):
            mask = tested[:, j]
            own = law[:, j][mask]
            position.tested += int(mask.sum())
            position.accepted += int(was_accepted[:, j][mask].sum())
            position.expected += own.sum().item()
            position.variance += (own * (1 - own)).sum().item()
            mask = is_reached[:, j] & is_same
            position.reached += int(mask.sum())
            for name, values in forms.items():
                position.forms[name] += values[:, j][mask].sum().item()

    def _is_same(self, rows: StepRows, was_accepted: Tensor, is_reached: Tensor) -> Tensor:
        """Return for each sequence whether its recomputed drafts agree with the served tokens, [S].

        An accepted draft is the served token. A rejected draft is not, because the token sampled after a rejection
        excludes it, except in block verification.
        """
        equal = rows.drafts == rows.emitted
        if self.method.law == "block":
            return (equal | ~was_accepted).all(-1)
        return ((equal == was_accepted) | ~is_reached).all(-1)

    def _block(self, rows: StepRows, q: Tensor) -> Tensor:
        assert rows.own_path_logits is not None
        p = closed_forms.at_draft(closed_forms.probabilities(rows.own_path_logits, self.temperature), rows.drafts)
        # Without logits the verifier assumes probability 1 for drafts.
        sends_logits = "draft_logits" in self.method.config
        return closed_forms.block(p, closed_forms.at_draft(q, rows.drafts) if sends_logits else torch.ones_like(p))


def continue_prompts(
    pool: ClientPool,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    output_tokens: int,
    k: int,
    concurrency: int,
    seed: int,
) -> list[Continuation]:
    """Return the verifier's continuations of the prompts; a prompt's seed is `seed` + its index.

    Raises:
        BenchmarkError: If drafts are missing in any step.
    """
    requests = [
        _request(prompt, temperature=temperature, max_tokens=output_tokens, seed=seed + index)
        for index, prompt in enumerate(prompts)
    ]
    level = Level(concurrency=min(concurrency, len(requests)))
    slots = in_slots(list(requests), level, seed)
    order = [index for slot in range(len(slots)) for index in range(slot, len(requests), len(slots))]
    timelines, _ = pool.run(slots)
    _check_drafts(timelines, k, output_tokens)
    by_index = dict(zip(order, timelines, strict=True))
    return [
        Continuation(tuple(prompt), by_index[i].token_ids, by_index[i].drafted, seed + i)
        for i, prompt in enumerate(prompts)
    ]


def _request(prompt: Sequence[int], **given: Any) -> Planned:
    options: Options = {**given, "ignore_eos": True}  # type: ignore[typeddict-item]
    return Planned(build_request(prompt, options)[0].SerializeToString())


def _check_drafts(timelines: Sequence[Timeline], k: int, output_tokens: int) -> None:
    missing = sum(
        sum(expected_work(timeline, k, output_tokens).drafted) - sum(timeline.statistics.drafted)
        for timeline in timelines
    )
    if missing:
        raise BenchmarkError(f"{missing} drafts were not made in time: start the verifier with --draft-deadline-ms off")
    if any(timeline.statistics.synthetic_acceptance for timeline in timelines):
        raise BenchmarkError("the verifier accepts drafts synthetically, independent of the head")


def evaluate(models: Models, method: Method, temperature: float, k: int, continuations: Sequence[Continuation]) -> Cell:
    """Return measured acceptance and closed forms over the same steps."""
    cell = Cell(method, temperature, k, continuations=len(continuations))
    for rows in models.recompute(continuations, config_of(method, k), temperature):
        cell.add(rows, models.draft_token_ids)
    return cell


def config_of(method: Method, k: int) -> config_pb2.SpeculativeConfig:
    """Return the verifier's speculative config."""
    return speculative_config_from_mapping({**method.config, "num_speculative_tokens": k})
