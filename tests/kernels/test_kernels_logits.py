"""process_logits: bias, suppression, penalties and filters of ragged rows."""

from dataclasses import replace
from functools import partial

import large_vocabulary
import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from covering import covering
from sampling_oracle import Options
from torch import Tensor

from draftwire_kernels import LogitBias, LogitsSampling, Penalties, Suppression, process_logits

INF = float("inf")


def one_row_each(count: int, **fields: object) -> LogitsSampling:
    values = {"cu_rows": torch.arange(count + 1, dtype=torch.int32), "temperature": torch.ones(count)}
    return LogitsSampling(**(values | fields))  # type: ignore[arg-type]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


ROW = torch.tensor([[1.0, 4.0, 3.0, 2.0, -1.0]])


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `process_logits` with each backend, Triton's through its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("compiled kernels are in test_kernels_cuda")
    monkeypatch.setitem(globals(), "process_logits", partial(process_logits, backend=request.param))


@pytest.mark.usefixtures("backend")
class TestFilters:
    def test_top_k_keeps_the_k_largest(self) -> None:
        assert kept(process_logits(ROW, one_row_each(1, top_k=int32(2)))) == [[1, 2]]

    def test_top_k_keeps_ties_with_the_kth(self) -> None:
        tied = torch.tensor([[3.0, 1.0, 3.0, 5.0, 3.0]])
        assert kept(process_logits(tied, one_row_each(1, top_k=int32(2)))) == [[0, 2, 3, 4]]

    def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(self) -> None:
        p = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
        for top_p, expected in ((0.45, [1]), (0.55, [1, 2]), (0.74, [1, 2]), (0.76, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
            assert kept(process_logits(p.log(), one_row_each(1, top_p=torch.tensor([top_p])))) == [expected]

    def test_top_p_keeps_ties_with_the_last(self) -> None:
        p = torch.tensor([[0.2, 0.4, 0.2, 0.2]])
        assert kept(process_logits(p.log(), one_row_each(1, top_p=torch.tensor([0.5])))) == [[0, 1, 2, 3]]

    def test_a_tiny_top_p_keeps_the_likeliest(self) -> None:
        assert kept(process_logits(ROW, one_row_each(1, top_p=torch.tensor([1e-9])))) == [[1]]

    def test_min_p_is_relative_to_the_likeliest(self) -> None:
        p = torch.tensor([[0.05, 0.5, 0.26, 0.19]])
        assert kept(process_logits(p.log(), one_row_each(1, min_p=torch.tensor([0.5])))) == [[1, 2]]

    def test_filters_use_the_temperature_and_leave_values_unscaled(self) -> None:
        p = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
        hot = process_logits(p.log(), one_row_each(1, top_p=torch.tensor([0.6]), temperature=torch.tensor([9.0])))
        cold = process_logits(p.log(), one_row_each(1, top_p=torch.tensor([0.6]), temperature=torch.tensor([0.1])))
        assert kept(hot) == [[1, 2, 3]]
        assert kept(cold) == [[1]]
        assert hot[0, 1] == p.log()[0, 1]

    def test_temperature_zero_is_not_filtered(self) -> None:
        sampling = one_row_each(1, temperature=torch.zeros(1), top_k=int32(1), top_p=torch.tensor([0.1]))
        assert process_logits(ROW, sampling) is ROW

    @pytest.mark.parametrize("top_k", [0, 5, 99])
    def test_neutral_parameters_return_the_same_tensor(self, top_k: int) -> None:
        sampling = one_row_each(1, top_k=int32(top_k), top_p=torch.ones(1), min_p=torch.zeros(1))
        assert process_logits(ROW, sampling) is ROW
        assert process_logits(ROW, one_row_each(1)) is ROW

    @pytest.mark.parametrize("dtype", large_vocabulary.DTYPES, ids=str)
    def test_zeros_stay_or_go_together_whatever_their_sign(self, dtype: torch.dtype) -> None:
        """The kernel searches floats and their bits; -0 and 0 have different bits."""
        row = torch.tensor([[4.0, 0.0, -1.0, -11.0, -12.0]], dtype=dtype)
        assert kept(process_logits(row, one_row_each(1, top_k=int32(3)))) == [[0, 1, 2]]
        signs = torch.tensor([[4.0, 0.0, -0.0, -1.0, -0.0, -11.0, 0.0]], dtype=dtype)
        assert kept(process_logits(signs, one_row_each(1, top_k=int32(2)))) == [[0, 1, 2, 4, 6]]
        largest = torch.tensor([[-0.0, -1.0, -3.0, -2.0, -4.0]], dtype=dtype)
        assert kept(process_logits(largest, one_row_each(1, top_k=int32(2)))) == [[0, 1]]

    @pytest.mark.parametrize("more", [2, 10, 20])
    def test_many_zeros_are_counted_once(self, more: int) -> None:
        """With mean -4 and maximum 4, the kernel's first look counts from the value 0."""
        rest = -1 - torch.arange(2000) / 32
        rest[-1] = -20000 * 4 - 500 * 4 - rest[:-1].sum()
        row = torch.cat([torch.full((500,), 4.0), torch.zeros(17500), rest])[None]
        assert row.double().mean() == -4
        assert len(kept(process_logits(row, one_row_each(1, top_k=int32(18000 + more))))[0]) == 18000 + more

    def test_an_infinite_logit_passes_min_p(self) -> None:
        row = torch.tensor([[3.4028234663852886e38, INF, 0.0, 1.0]])
        for others in ({"top_k": int32(2)}, {"top_p": torch.tensor([0.9])}):
            out = process_logits(row, one_row_each(1, min_p=torch.tensor([0.5]), **others))
            assert (out > -INF).tolist() == [[True, True, False, False]]

    def test_at_an_infinite_temperature_the_search_ends(self) -> None:
        row = torch.tensor([[1.0, 2.0, 3.0, -INF, 0.0]])
        out = process_logits(row, one_row_each(1, temperature=torch.tensor([INF]), top_p=torch.tensor([0.5])))
        assert 2 in kept(out)[0]

    @pytest.mark.parametrize("stride", [2048, 4096])
    @pytest.mark.parametrize("top_p", [1.0, 0.9])
    def test_what_is_left_may_be_of_few_columns(self, stride: int, top_p: float) -> None:
        """All finite logits are in one of the kernel's lanes, which it gathers separately."""
        row = torch.full((1, 50 * stride), -INF)
        row[0, 5::stride] = torch.randn(50, generator=torch.Generator().manual_seed(3))
        out = kept(process_logits(row, one_row_each(1, top_k=int32(20), top_p=torch.tensor([top_p]))))
        best = row[0].sort(descending=True)
        within = best.values[:20].softmax(0).cumsum(0) < top_p
        assert out == [sorted(best.indices[: min(20, 1 + int(within.sum()))].tolist())]

    def test_each_filter_sees_what_the_one_before_left(self) -> None:
        """Alone, top-p 0.75 would keep three tokens; after top-k 2 it keeps both, after top-k 1 the only one."""
        p = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(2, -1)
        sampling = one_row_each(2, top_k=int32(2, 1), top_p=torch.tensor([0.75, 0.75]))
        assert kept(process_logits(p, sampling)) == [[1, 2], [1]]
        min_p = one_row_each(2, min_p=torch.tensor([0.6, 0.6]), top_p=torch.tensor([0.5, 0.6]))
        assert kept(process_logits(p, min_p)) == [[1], [1, 2]]

    def test_only_the_rows_of_requests_that_filter_change(self) -> None:
        logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
        before = logits.clone()
        sampling = LogitsSampling(int32(0, 3, 4, 7), torch.ones(3), top_k=int32(0, 3, 0))
        out = process_logits(logits, sampling)
        assert torch.equal(logits, before)
        assert out is not logits
        unfiltered = [0, 1, 2, 4, 5, 6]
        assert torch.equal(out[unfiltered], logits[unfiltered])
        assert out[3].isfinite().sum() == 3

    def test_infinite_and_very_large_logits(self) -> None:
        logits = torch.tensor([[INF, 0.0, 1.0, -INF], [3e38, -3e38, 0.0, 1.0]])
        sampling = one_row_each(2, top_k=int32(2, 2), top_p=torch.tensor([0.9, 0.9]), min_p=torch.tensor([0.1, 0.1]))
        out = process_logits(logits, sampling)
        assert (out > -INF).tolist() == [[True, False, False, False]] * 1 + [[True, False, False, False]]

    def test_a_nan_row_has_no_distribution_and_spares_the_others(self) -> None:
        logits = torch.cat([ROW, torch.full((1, 5), float("nan")), ROW])
        sampling = one_row_each(3, top_k=int32(2, 2, 2), top_p=torch.full((3,), 0.9))
        out = process_logits(logits, sampling)
        assert kept(out) == [[1, 2], [], [1, 2]]

    @pytest.mark.parametrize("vocab", [200, 3000])
    @pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
    def test_top_p_of_wide_and_narrow_rows_is_that_of_the_oracle(self, vocab: int, spread: float) -> None:
        logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(3)) * spread
        top_p = torch.linspace(0.05, 0.95, 12)
        out = process_logits(logits, one_row_each(12, top_p=top_p))
        for i in range(12):
            expected = oracle.processed(logits[i].double().numpy(), Options(top_p=float(top_p[i])), [], [])
            assert np.array_equal(out[i].isfinite().numpy(), np.isfinite(expected))


# Pairwise coverage of 42 combinations; test_kernels_cuda runs all of them with compiled kernels.
@pytest.mark.parametrize(
    ("options", "dtype", "backend"),
    covering(large_vocabulary.FILTERS, large_vocabulary.DTYPES, ["reference", "triton"]),
    indirect=["backend"],
    ids=str,
)
@pytest.mark.usefixtures("backend")
def test_filters_of_a_large_vocabulary_are_those_of_the_oracle(options: Options, dtype: torch.dtype) -> None:
    logits = large_vocabulary.rows(dtype)
    out = process_logits(logits, large_vocabulary.sampling(options))
    large_vocabulary.check(logits, out, options)


def test_both_backends_keep_the_same_tokens() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(10, 2501, generator=g) * torch.tensor([0.0, 0.01, 1.0, 2.0, 9.0])[:, None].repeat(2, 1)
    logits[7:] = (logits[7:] * 4).round() / 4  # many ties
    sampling = one_row_each(
        10,
        temperature=torch.tensor([1.0, 0.5, 1.5, 1.0, 0.0] * 2),
        top_k=int32(50, 0, 1000, 2499, 5, 0, 1, 40, 40, 0),
        top_p=torch.tensor([0.9, 0.5, 1.0, 0.99, 0.5, 0.8, 1.0, 0.7, 1.0, 0.3]),
        min_p=torch.tensor([0.0, 0.1, 0.0, 1e-4, 0.5] * 2),
    )
    expected = process_logits(logits, sampling, backend="reference")
    out = process_logits(logits.to(device), sampling, backend="triton").cpu()
    assert torch.equal(out, expected)


def bias_of(slot: list[int], token: list[list[int]], value: list[list[float]]) -> LogitBias:
    return LogitBias(torch.tensor(slot), torch.tensor(token), torch.tensor(value))


def suppression_of(row: list[int], slot: list[int], token: list[list[int]]) -> Suppression:
    return Suppression(torch.tensor(row), torch.tensor(slot), torch.tensor(token))


class TestBiasAndSuppression:
    def test_bias_reaches_every_row_of_its_request_and_adds_up(self) -> None:
        bias = bias_of([2, -1, 0], [[2, 2], [1, 1], [0, 0]], [[1.5, 1.0], [7.0, 7.0], [-INF, 0.0]])
        out = process_logits(torch.zeros(5, 3), LogitsSampling(int32(0, 1, 2, 5), torch.zeros(3), bias=bias))
        assert out.tolist() == [[-INF, 0, 0], [0, 0, 0], [0, 0, 2.5], [0, 0, 2.5], [0, 0, 2.5]]

    @pytest.mark.parametrize("dtype", large_vocabulary.DTYPES, ids=str)
    def test_bias_of_many_tokens_is_that_of_one_by_one(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        logits = torch.randn(7, 50, generator=g).to(dtype)
        tokens = torch.stack([torch.randperm(50, generator=g)[:20] for _ in range(3)])
        values = torch.randn(3, 20, generator=g)
        slot = torch.tensor([1, -1, 0])
        out = process_logits(
            logits, LogitsSampling(int32(0, 3, 4, 7), torch.zeros(3), bias=LogitBias(slot, tokens, values))
        )
        expected = logits.clone()
        for rows, own in ((range(3), 1), (range(4, 7), 0)):
            for row in rows:
                for token, value in zip(tokens[own], values[own].to(dtype), strict=True):
                    expected[row, token] += value
        assert torch.equal(out, expected)

    def test_suppression_is_of_single_rows_and_stronger_than_bias(self) -> None:
        bias = bias_of([0], [[1]], [[100.0]])
        suppression = suppression_of([0, 1], [1, 0], [[2, 2], [1, 1]])
        sampling = LogitsSampling(int32(0, 3), torch.zeros(1), bias=bias, suppression=suppression)
        logits = torch.zeros(3, 3)
        assert process_logits(logits, sampling).tolist() == [[0, -INF, 0], [0, 100, -INF], [0, 100, 0]]
        assert logits.eq(0).all()

    def test_nothing_listed_returns_the_same_tensor(self) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        suppression = Suppression(none, none, torch.zeros(1, 1, dtype=torch.int64))
        sampling = one_row_each(1, bias=bias_of([-1], [[1]], [[1.0]]), suppression=suppression)
        assert process_logits(ROW, sampling) is ROW

    def test_filters_see_bias_and_suppression(self) -> None:
        bias, suppression = bias_of([0], [[4]], [[9.0]]), suppression_of([0], [0], [[1]])
        sampling = one_row_each(1, bias=bias, suppression=suppression, top_k=int32(2))
        assert kept(process_logits(ROW, sampling)) == [[2, 4]]


class TestPenalties:
    """Two requests of two drafts each; the second has no penalties."""

    PENALTIES = Penalties(
        repetition=torch.tensor([2.0, 5.0]),
        presence=torch.tensor([0.5, 9.0]),
        frequency=torch.tensor([0.25, 9.0]),
        slot=torch.tensor([1, -1]),
        prompt_mask=torch.tensor([[True] * 5, [True, False, False, False, False]]),
        output_counts=torch.tensor([[9] * 5, [0, 2, 0, 0, 0]], dtype=torch.int32),
    )
    SAMPLING = LogitsSampling(
        int32(0, 3, 6), torch.zeros(2), draft_tokens=torch.tensor([2, 2, 0, 1]), penalties=PENALTIES
    )

    def test_repetition_scales_logits_of_prompt_and_output(self) -> None:
        penalties = replace(self.PENALTIES, presence=torch.zeros(2), frequency=torch.zeros(2))
        logits = torch.tensor([[4.0, -4.0, 3.0, 2.0, -1.0]]).repeat(6, 1)
        out = process_logits(logits, replace(self.SAMPLING, penalties=penalties))
        assert out[0].tolist() == [2.0, -8.0, 3.0, 2.0, -1.0]
        assert out[1].tolist() == [2.0, -8.0, 1.5, 2.0, -1.0]  # after the draft 2
        assert out[2].tolist() == [2.0, -8.0, 1.5, 2.0, -1.0]  # after two drafts 2, penalised once
        assert torch.equal(out[3:], logits[3:])

    def test_presence_and_frequency_count_output_not_the_prompt(self) -> None:
        penalties = replace(self.PENALTIES, repetition=torch.ones(2))
        out = process_logits(torch.zeros(6, 5), replace(self.SAMPLING, penalties=penalties))
        assert out[0].tolist() == [0, -1.0, 0, 0, 0]
        assert out[1].tolist() == [0, -1.0, -0.75, 0, 0]
        assert out[2].tolist() == [0, -1.0, -1.0, 0, 0]
        assert out[3:].eq(0).all()

    def test_the_tables_are_not_modified(self) -> None:
        before = self.PENALTIES.output_counts.clone()
        process_logits(torch.zeros(6, 5), self.SAMPLING)
        assert torch.equal(self.PENALTIES.output_counts, before)

    def test_drafts_outside_the_vocabulary_count_nowhere(self) -> None:
        sampling = replace(self.SAMPLING, draft_tokens=torch.tensor([-1, 77, 0, 1]))
        out = process_logits(torch.ones(6, 5), sampling)
        assert torch.equal(out[0], out[2])

    def test_no_request_with_penalties_returns_the_same_tensor(self) -> None:
        logits = torch.zeros(6, 5)
        off = replace(self.PENALTIES, slot=torch.tensor([-1, -1]))
        assert process_logits(logits, replace(self.SAMPLING, penalties=off)) is logits


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_options_agree_with_the_oracle(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    vocab, requests = 23, 20
    rng = np.random.default_rng(0)
    k = torch.randint(0, 4, (requests,), generator=g)
    cu_rows = torch.cat([torch.zeros(1), (k + 1).cumsum(0)]).int()
    logits = (torch.randn(int(cu_rows[-1]), vocab, generator=g) * 2).to(dtype)
    drafts = torch.randint(0, vocab, (int(k.sum()),), generator=g)
    options = [
        Options(
            temperature=float(np.float32(rng.choice([0, 0.5, 1, 1.5]))),
            top_k=int(rng.choice([0, 3, 10])),
            top_p=float(np.float32(rng.choice([1, 0.6, 0.9]))),
            min_p=float(np.float32(rng.choice([0, 0.05]))),
            repetition=float(np.float32(rng.choice([1, 1.25]))),
            presence=float(rng.choice([0, 0.5])),
            frequency=float(rng.choice([0, 0.25])),
        )
        for _ in range(requests)
    ]
    prompts = [rng.integers(0, vocab, 4).tolist() for _ in range(requests)]
    outputs = [rng.integers(0, vocab, 5).tolist() for _ in range(requests)]

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(o, name) for o in options], dtype=dtype)

    mask = torch.zeros(requests, vocab, dtype=torch.bool)
    counts = torch.zeros(requests, vocab, dtype=torch.int32)
    for b in range(requests):
        mask[b, prompts[b]] = True
        for t in outputs[b]:
            counts[b, t] += 1
    sampling = LogitsSampling(
        cu_rows=cu_rows,
        temperature=column("temperature"),
        draft_tokens=drafts,
        top_k=column("top_k", torch.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        penalties=Penalties(
            column("repetition"), column("presence"), column("frequency"), torch.arange(requests), mask, counts
        ),
    )
    out = process_logits(logits, sampling)
    assert out.dtype == dtype
    first_draft = 0
    for b in range(requests):
        for j in range(int(k[b]) + 1):
            row = int(cu_rows[b]) + j
            output = outputs[b] + drafts[first_draft : first_draft + j].tolist()
            only_penalties = replace(options[b], top_k=0, top_p=1.0, min_p=0.0)
            penalised = oracle.processed(logits[row].double().numpy(), only_penalties, prompts[b], output)
            rounded = torch.tensor(penalised).to(dtype).double().numpy()
            filters = replace(options[b], repetition=1.0, presence=0.0, frequency=0.0)
            expected = oracle.processed(rounded, filters, [], [])
            np.testing.assert_allclose(
                out[row].double().numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2
            )
        first_draft += int(k[b])
