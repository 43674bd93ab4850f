"""Speculative decoding of a small Markov target, many sequences at once, and the exact distribution of its output."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from sampling_oracle import Array, Options, distribution
from scipy import stats
from torch import Tensor

from draftwire_kernels import (
    DraftLogits,
    LogitsSampling,
    Penalties,
    StreamKeys,
    derive_stream_keys,
    gumbel_sample,
    process_logits,
    rejection_sample,
)

VOCAB = 4
LENGTH = 5
START = 0
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
"""Logits of the target after each token."""
DRAFTER = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(51)) * 2
"""Logits of the drafter, far enough from the target's to reveal every error in verification."""


@cache
def stream_keys(count: int) -> StreamKeys:
    return derive_stream_keys(range(1, count + 1))


@dataclass(frozen=True)
class Case:
    """How to draft and verify."""

    form: str = "one-hot"  # one-hot, greedy, dense, reduced, top-n
    method: str = "standard"
    options: Options = field(default_factory=Options)
    k: int = 3
    use_fp64: bool = False
    sequences: int = 30_000  # enough for every mutant of test_kernels_mutants to fail
    backend: str = "auto"
    device: str = "cpu"
    edit_keys: Callable[[StreamKeys], StreamKeys] = lambda keys: keys
    edit_draft_logits: Callable[[DraftLogits], DraftLogits] = lambda logits: logits

    def with_options(self, **options: float) -> "Case":
        return replace(self, options=Options(**options))  # type: ignore[arg-type]


REDUCED = torch.tensor([3, 0, 2])


def simulate(case: Case) -> tuple[np.ndarray, float]:
    """Return continuations [sequences, LENGTH] after START, and the mean acceptance length of full verify steps."""
    n, k = case.sequences, case.k
    keys = case.edit_keys(stream_keys(n)).to(case.device)
    tokens = torch.full((n, LENGTH + k + 2), START, device=case.device)
    size = torch.ones(n, dtype=torch.int64, device=case.device)  # START is the prompt, at position 0
    rows = torch.arange(n, device=case.device)
    target = TARGET.to(case.device)
    emitted_total, steps = 0, 0
    while rows.numel():
        drafts, logits = _draft(case, keys, tokens, size, rows)
        context = torch.cat([tokens[rows, size[rows] - 1][:, None], drafts], 1)
        cu_rows = torch.arange(rows.numel() + 1, dtype=torch.int32) * (k + 1)
        temperature = torch.full((rows.numel(),), case.options.temperature, device=case.device)
        sampling = _sampling(case.options, cu_rows, temperature, drafts, tokens[rows], size[rows])
        result = rejection_sample(
            process_logits(target[context.flatten()], sampling),
            drafts.flatten(),
            cu_rows,
            temperature,
            StreamKeys(*(key[rows] for key in keys)),
            size[rows],
            draft_logits=logits,
            method=case.method,
            use_fp64=case.use_fp64,
            backend=case.backend,
        )
        for j in range(k + 1):
            new = rows[j < result.num_emitted]
            tokens[new, size[new] + j] = result.tokens[j < result.num_emitted, j]
        emitted_total += int(result.num_emitted.sum())
        steps += rows.numel()
        size[rows] += result.num_emitted
        rows = rows[size[rows] <= LENGTH]
    return tokens[:, 1 : LENGTH + 1].cpu().numpy(), emitted_total / steps


def _draft(
    case: Case, keys: StreamKeys, tokens: Tensor, size: Tensor, rows: Tensor
) -> tuple[Tensor, DraftLogits | None]:
    key = keys.resample if case.method == "coupled" else keys.proposal
    temperature = torch.full((rows.numel(),), case.options.temperature, device=case.device)
    last = tokens[rows, size[rows] - 1]
    drafter, reduced = DRAFTER.to(case.device), REDUCED.to(case.device)
    drafts, logits, all_ids = [], [], []
    for i in range(case.k):
        row = drafter[last]
        ids = None
        if case.form == "reduced":
            ids, row = reduced, row[:, reduced]
        elif case.form == "top-n":
            row, ids = row.topk(2)
            row = torch.full_like(drafter[last], -torch.inf).scatter(1, ids, row)
        offset = 0 if case.method == "coupled" else i
        greedy = case.form == "greedy"
        column = gumbel_sample(
            row,
            torch.zeros_like(temperature) if greedy else temperature,
            key[rows],
            size[rows] + i,
            draft_offset=offset,
            token_ids=ids if case.form == "reduced" else None,
            use_fp64=case.use_fp64,
            backend=case.backend,
        )
        last = reduced[column] if case.form == "reduced" else column
        drafts.append(last)
        logits.append(row.gather(1, ids) if case.form == "top-n" and ids is not None else row)
        all_ids.append(ids)
    stacked = torch.stack(logits, 1).flatten(0, 1)
    token_ids = {"reduced": reduced}.get(case.form)
    if case.form == "top-n":
        token_ids = torch.stack([ids for ids in all_ids if ids is not None], 1).flatten(0, 1)
    with_logits = case.form in ("dense", "reduced", "top-n")
    return torch.stack(drafts, 1), case.edit_draft_logits(DraftLogits(stacked, token_ids)) if with_logits else None


def _sampling(
    options: Options, cu_rows: Tensor, temperature: Tensor, drafts: Tensor, tokens: Tensor, size: Tensor
) -> LogitsSampling:
    n = temperature.shape[0]
    device = tokens.device
    place = torch.arange(tokens.shape[1], device=device)
    used = (place < size[:, None]) & (place > 0)
    counts = torch.zeros(n, VOCAB, dtype=torch.int32, device=device).scatter_add_(1, tokens, used.int())
    penalties = None
    if (options.repetition, options.presence, options.frequency) != (1, 0, 0):
        prompt = torch.zeros(n, VOCAB, dtype=torch.bool, device=device)
        prompt[:, START] = True
        penalties = Penalties(
            repetition=torch.full((n,), options.repetition),
            presence=torch.full((n,), options.presence),
            frequency=torch.full((n,), options.frequency),
            slot=torch.arange(n),
            prompt_mask=prompt,
            output_counts=counts,
        )
    return LogitsSampling(
        cu_rows=cu_rows,
        temperature=temperature,
        draft_tokens=drafts.flatten(),
        top_k=torch.full((n,), options.top_k, dtype=torch.int32) if options.top_k else None,
        top_p=torch.full((n,), options.top_p) if options.top_p < 1 else None,
        min_p=torch.full((n,), options.min_p) if options.min_p else None,
        penalties=penalties,
    )


@cache
def exact_law(options: Options) -> Array:
    """Return the probability of every continuation [VOCAB ** LENGTH], the first token most significant."""
    law = np.ones(1)
    prefixes: list[list[int]] = [[]]
    target = TARGET.double().numpy()
    for _ in range(LENGTH):
        rows = [distribution(target[p[-1] if p else START], options, [START], p) for p in prefixes]
        law = (law[:, None] * np.stack(rows)).flatten()
        prefixes = [[*p, t] for p in prefixes for t in range(VOCAB)]
    return law


def chi_square_ratio(continuations: np.ndarray, options: Options) -> float:
    """Return the largest chi-square, of continuations and of each position, over its quantile at 1 - 1e-6.

    A ratio above 1 rejects the exact distribution.
    """
    law = exact_law(options).reshape((VOCAB,) * LENGTH)
    index = tuple(continuations.T)
    counts = np.zeros(law.shape)
    np.add.at(counts, index, 1)
    ratios = [_ratio(counts.flatten(), law.flatten())]
    for axis in range(LENGTH):
        others = tuple(a for a in range(LENGTH) if a != axis)
        ratios.append(_ratio(counts.sum(others), law.sum(others)))
    return max(ratios)


def _ratio(counts: Array, law: Array) -> float:
    assert counts[law == 0].sum() == 0, "emitted a token of probability 0"
    expected = law * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(statistic / stats.chi2.isf(1e-6, max(len(expected) - 1, 1)))
