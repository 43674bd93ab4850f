"""Method "coupled": the token at a position depends neither on drafts nor on k."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftwire_kernels import StreamKeys, derive_stream_keys, gumbel_sample, rejection_sample
from draftwire_kernels.reference import rejection


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["same noise", "greedy", "constant"])
def test_output_is_that_of_decoding_without_drafts(kind: str, k: int) -> None:
    """With thousands of keys and any drafter, tokens equal those decoded one at a time."""
    n, vocab, length = 3000, 50, 8
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)) * 2
    keys = derive_stream_keys(range(n))
    temperature = torch.tensor([0.0, 0.7, 1.0]).repeat(n // 3)
    alone = torch.zeros(n, length + 1, dtype=torch.int64)
    for t in range(length):
        cu_rows = torch.arange(n + 1, dtype=torch.int32)
        none = torch.zeros(0, dtype=torch.int64)
        position = torch.full((n,), t + 1)
        result = rejection_sample(table[alone[:, t]], none, cu_rows, temperature, keys, position, method="coupled")
        alone[:, t + 1] = result.tokens[:, 0]
        standard = rejection_sample(table[alone[:, t]], none, cu_rows, temperature, keys, position)
        assert torch.equal(standard.tokens, result.tokens)  # without drafts both methods draw the same token

    tokens = torch.zeros(n, length + k + 2, dtype=torch.int64)
    size, rows = torch.ones(n, dtype=torch.int64), torch.arange(n)
    g = torch.Generator().manual_seed(1)
    while rows.numel():
        last, drafts = tokens[rows, size[rows] - 1], []
        for i in range(k):
            logits = table[last] + torch.randn(len(rows), vocab, generator=g)
            if kind == "same noise":
                last = gumbel_sample(logits, temperature[rows], keys.resample[rows], size[rows] + i)
            else:
                last = logits.argmax(-1) if kind == "greedy" else torch.full_like(last, 7)
            drafts.append(last)
        draft = torch.stack(drafts, 1)
        context = torch.cat([tokens[rows, size[rows] - 1][:, None], draft], 1)
        result = rejection_sample(
            table[context.flatten()],
            draft.flatten(),
            torch.arange(len(rows) + 1, dtype=torch.int32) * (k + 1),
            temperature[rows],
            StreamKeys(*(key[rows] for key in keys)),
            size[rows],
            method="coupled",
        )
        for j in range(k + 1):
            new = j < result.num_emitted
            tokens[rows[new], size[rows[new]] + j] = result.tokens[new, j]
        size[rows] += result.num_emitted
        rows = rows[size[rows] <= length]
    assert torch.equal(tokens[:, : length + 1], alone)


K = 3


def emits_what_it_does_without_drafts(
    backend: str, method: str = "coupled", use_fp64: bool = False, device: str = "cpu", num_seeds: int = 12
) -> bool:
    """Return whether tokens with drafts of every kind equal those of each position without drafts."""
    all_seeds = range(num_seeds)
    rows = torch.randn(K + 1, 600, generator=torch.Generator().manual_seed(4)) * 3  # the target, by position
    rows[:, 7] += 9.0  # often drawn

    def draw(keys: StreamKeys, target: Tensor, drafts: list[list[int]], positions: Tensor) -> list[list[int]]:
        sizes = torch.tensor([0, *(len(own) + 1 for own in drafts)])
        tokens, num_emitted = rejection_sample(
            target.to(device),
            torch.tensor([token for own in drafts for token in own], dtype=torch.int64, device=device),
            sizes.cumsum(0).int(),
            torch.ones(len(drafts), device=device),
            keys.to(device),
            positions.to(device),
            method=method,
            use_fp64=use_fp64,
            backend=backend,
        )
        return [own[:count] for own, count in zip(tokens.tolist(), num_emitted.tolist(), strict=True)]

    one_by_one = derive_stream_keys([seed for seed in all_seeds for _ in rows])
    none: list[list[int]] = [[] for _ in all_seeds for _ in rows]
    places = torch.arange(K + 1).repeat(len(all_seeds)) + 30
    single = [token for (token,) in draw(one_by_one, rows.repeat(len(all_seeds), 1), none, places)]
    seeds, drafts, expected = [], [], []
    for number, seed in enumerate(all_seeds):
        alone = single[number * (K + 1) : (number + 1) * (K + 1)]
        wrong = [(token + 1) % rows.shape[1] for token in alone]
        for own in ([7], [7] * K, alone[:1], alone[:K], wrong[:K], [alone[0], wrong[1], alone[2]], [*alone[:2], -1]):
            right = next((j for j, token in enumerate(own) if token != alone[j]), len(own))
            seeds.append(seed)
            drafts.append(own)
            expected.append(alone[: right + 1])
    target = torch.cat([rows[: len(own) + 1] for own in drafts])
    return draw(derive_stream_keys(seeds), target, drafts, torch.full((len(seeds),), 30)) == expected


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
def test_a_position_has_one_token_whatever_is_drafted(use_fp64: bool) -> None:
    assert emits_what_it_does_without_drafts("reference", use_fp64=use_fp64)


def test_the_one_hot_test_has_others() -> None:
    assert not emits_what_it_does_without_drafts("reference", method="standard")


def test_noise_of_another_position_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = rejection.add_noise

    def noise_of_the_row(scores: Tensor, temperature: Tensor, key: Tensor, position: Tensor, *rest: Any) -> Tensor:
        return add_noise(scores, temperature, key, position + torch.arange(len(position)), *rest)

    monkeypatch.setattr(rejection, "add_noise", noise_of_the_row)
    assert not emits_what_it_does_without_drafts("reference")
