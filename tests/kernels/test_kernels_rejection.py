"""rejection_sample against the float64 oracle, closed-form acceptance, batch independence and corner cases."""

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from sampling_oracle import Request
from torch import Tensor

from draftwire_kernels import (
    DraftLogits,
    StreamKeys,
    acceptance_length_to_rates,
    derive_stream_keys,
    gumbel_sample,
    rejection_sample,
    unconditional_to_conditional_rates,
)

INF = float("inf")
NAN = float("nan")
# Four equally likely rates of each offset.
RATES = torch.tensor([0.9, 0.6, 0.3, 0.8, 0.5])[:, None] * torch.tensor([1.0, 0.9, 0.4, 0.1])


class Batch:
    """Random requests with ragged k_b, temperatures 0 and above, and drafts drawn from q."""

    def __init__(self, seed: int, requests: int = 24, vocab: int = 37, spread: float = 1.0, max_k: int = 5) -> None:
        g = torch.Generator().manual_seed(seed)
        self.k = torch.randint(0, max_k + 1, (requests,), generator=g)
        self.k[0] = max_k
        self.cu_rows = torch.cat([torch.zeros(1), (self.k + 1).cumsum(0)]).int()
        self.temperature = torch.tensor([0.0, 0.6, 1.0, 1.8])[torch.randint(0, 4, (requests,), generator=g)]
        self.keys = derive_stream_keys(range(seed * 1000, seed * 1000 + requests))
        self.position = torch.randint(1, 5000, (requests,), generator=g)
        self.target = torch.randn(int(self.cu_rows[-1]), vocab, generator=g) * 1.5
        self.request = torch.repeat_interleave(torch.arange(requests), self.k)
        self.offset = torch.cat([torch.arange(int(k)) for k in self.k])
        self.row = torch.arange(len(self.request)) + self.request
        self.draft = self.target[self.row] + torch.randn(len(self.request), vocab, generator=g) * spread
        self.ids: Tensor | None = None
        self.drafts = self.sample_drafts(self.draft)

    def sample_drafts(self, logits: Tensor, key: Tensor | None = None) -> Tensor:
        return gumbel_sample(
            logits,
            self.temperature[self.request],
            (self.keys.proposal if key is None else key)[self.request],
            self.position[self.request] + self.offset,
            draft_offset=self.offset.int() if key is None else 0,
        )

    def draft_logits(self, form: str) -> DraftLogits | None:
        """Return q in the given form; draw the drafts again if the form changes q."""
        vocab = self.target.shape[1]
        if form == "one-hot":
            return None
        if form == "dense":
            return DraftLogits(self.draft)
        ids = torch.arange(0, vocab, 2).flip(0) if form == "reduced" else self.draft.topk(min(8, vocab // 2)).indices
        index = ids.expand(len(self.draft), -1)
        values = self.draft.gather(1, index)
        self.draft = torch.full_like(self.draft, -INF).scatter(1, index, values)
        self.drafts = self.sample_drafts(self.draft)
        return DraftLogits(values, ids)

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, StreamKeys, Tensor]:
        return self.target, self.drafts, self.cu_rows, self.temperature, self.keys, self.position

    def oracle_requests(self, with_q: bool) -> list[Request]:
        requests = []
        for b in range(len(self.k)):
            temperature = float(self.temperature[b])
            mine = (self.request == b).nonzero()[:, 0]
            rows = range(int(self.cu_rows[b]), int(self.cu_rows[b + 1]))
            q = [oracle.softmax(self.draft[i].double().numpy(), temperature) for i in mine]
            requests.append(
                Request(
                    p=np.stack([oracle.softmax(self.target[r].double().numpy(), temperature) for r in rows]),
                    q=np.stack(q) if with_q and q and temperature > 0 else None,
                    drafts=self.drafts[mine].tolist(),
                    accept_key=int(self.keys.accept[b]),
                    resample_key=int(self.keys.resample[b]),
                    position=int(self.position[b]),
                )
            )
        return requests


def _emitted(result: object) -> list[list[int]]:
    tokens, num_emitted = result  # type: ignore[misc]
    return [row[:n].tolist() for row, n in zip(tokens, num_emitted.tolist(), strict=True)]


def _oracle(request: Request, method: str) -> list[int]:
    if method == "synthetic":
        return oracle.verify_synthetic(request, RATES.tolist())
    if method == "coupled":
        return oracle.verify_coupled(request)
    block = method == "block" and request.q is not None
    return oracle.verify_block(request) if block else oracle.verify_standard(request)


FORMS = ["one-hot", "dense", "reduced", "top-n"]
COMBINATIONS = [(m, f) for m in ("standard", "block", "synthetic") for f in FORMS] + [("coupled", "one-hot")]


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("method", "form"), COMBINATIONS)
def test_tokens_are_those_of_the_oracle(method: str, form: str, use_fp64: bool) -> None:
    for seed in range(1, 9):
        batch = Batch(seed, spread=0.5 * seed)
        logits = batch.draft_logits(form)
        if method == "coupled" and seed % 2:
            batch.drafts = batch.sample_drafts(batch.draft, batch.keys.resample)
        rates = RATES if method == "synthetic" else None
        result = rejection_sample(
            *batch.args(), draft_logits=logits, method=method, synthetic_rates=rates, use_fp64=use_fp64
        )
        assert _emitted(result) == [_oracle(r, method) for r in batch.oracle_requests(form != "one-hot")]
        beyond = torch.arange(result.tokens.shape[1]) >= result.num_emitted[:, None]
        assert (result.tokens[beyond] == -1).all()
        assert result.tokens.dtype == torch.int64
        assert result.num_emitted.dtype == torch.int32


@pytest.mark.parametrize(("method", "form"), COMBINATIONS)
def test_a_request_does_not_depend_on_the_batch_or_its_slot(method: str, form: str) -> None:
    batch = Batch(3, vocab=301)
    logits = batch.draft_logits(form)
    rates = RATES if method == "synthetic" else None
    together = _emitted(rejection_sample(*batch.args(), draft_logits=logits, method=method, synthetic_rates=rates))
    for order in ([b] for b in range(0, 24, 3)):
        _check_subset(batch, logits, method, rates, order, together)
    _check_subset(batch, logits, method, rates, [17, 4, 23, 0, 9], together)


def _check_subset(
    batch: Batch,
    logits: DraftLogits | None,
    method: str,
    rates: Tensor | None,
    order: list[int],
    together: list[list[int]],
) -> None:
    rows = torch.cat([torch.arange(int(batch.cu_rows[b]), int(batch.cu_rows[b + 1])) for b in order])
    drafts = torch.cat([(batch.request == b).nonzero()[:, 0] for b in order])
    if logits is not None:
        per_row = logits.token_ids is not None and logits.token_ids.ndim == 2
        ids = logits.token_ids[drafts] if per_row and logits.token_ids is not None else logits.token_ids
        logits = DraftLogits(logits.logits[drafts], ids)
    result = rejection_sample(
        batch.target[rows],
        batch.drafts[drafts],
        torch.cat([torch.zeros(1), (batch.k[order] + 1).cumsum(0)]).int(),
        batch.temperature[order],
        StreamKeys(*(key[order] for key in batch.keys)),
        batch.position[order],
        draft_logits=logits,
        method=method,
        synthetic_rates=rates,
    )
    assert _emitted(result) == [together[b] for b in order]


def _first_acceptance(p: Tensor, q: Tensor, n: int, with_q: bool, method: str = "standard", **options: Tensor) -> float:
    """Return the share of n requests that accept their only draft, drawn from softmax(q)."""
    keys = derive_stream_keys(range(n))
    one, position = torch.ones(n), torch.full((n,), 9)
    q = q.expand(n, -1)
    drafts = gumbel_sample(q, one, keys.resample if method == "coupled" else keys.proposal, position)
    cu_rows = torch.arange(n + 1, dtype=torch.int32) * 2
    target = p.expand(2 * n, -1)
    logits = DraftLogits(q) if with_q else None
    result = rejection_sample(
        target, drafts, cu_rows, one, keys, position, draft_logits=logits, method=method, **options
    )  # type: ignore[arg-type]
    return float((result.num_emitted == 2).float().mean())


@pytest.mark.full
class TestAcceptanceRate:
    N = 40_000
    P = torch.tensor([0.5, -0.4, 1.2, 0.0, -2.0])
    Q = torch.tensor([1.5, 0.3, 0.1, -1.0, -0.3])

    def _assert_rate(self, measured: float, expected: float) -> None:
        assert abs(measured - expected) < 4.5 * np.sqrt(expected * (1 - expected) / self.N)

    @pytest.mark.parametrize("method", ["standard", "block"])
    def test_with_draft_logits_is_one_minus_total_variation(self, method: str) -> None:
        p, q = self.P.double().softmax(0), self.Q.double().softmax(0)
        rate = _first_acceptance(self.P, self.Q, self.N, True, method)
        self._assert_rate(rate, float(torch.minimum(p, q).sum()))

    def test_without_draft_logits_is_the_mean_of_p_at_the_draft(self) -> None:
        p, q = self.P.double().softmax(0), self.Q.double().softmax(0)
        self._assert_rate(_first_acceptance(self.P, self.Q, self.N, False), float((p * q).sum()))

    @pytest.mark.parametrize("method", ["standard", "coupled"])
    def test_of_a_greedy_draft_is_p_at_the_draft(self, method: str) -> None:
        greedy = torch.full((5,), -INF).scatter(0, self.Q.argmax(0, keepdim=True), 0)
        p = self.P.double().softmax(0)[self.Q.argmax()]
        self._assert_rate(_first_acceptance(self.P, greedy, self.N, False, method), float(p))

    def test_coupled_is_that_of_shared_gumbel_noise(self) -> None:
        """The rate is the sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x))."""
        p, q = self.P.double().softmax(0), self.Q.double().softmax(0)
        expected = (1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
        self._assert_rate(_first_acceptance(self.P, self.Q, self.N, False, "coupled"), float(expected))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("form", ["one-hot", "dense"])
    def test_synthetic_is_as_given(self, temperature: float, form: str) -> None:
        n, k = 20_000, 4
        unconditional = acceptance_length_to_rates(2.6, k)
        target = torch.randn(1, 7, generator=torch.Generator().manual_seed(2)).expand(n * (k + 1), -1)
        keys = derive_stream_keys(range(n))
        result = rejection_sample(
            target,
            torch.arange(n * k) % 7,
            torch.arange(n + 1, dtype=torch.int32) * (k + 1),
            torch.full((n,), temperature),
            keys,
            torch.arange(n),
            draft_logits=DraftLogits(torch.zeros(n * k, 7)) if form == "dense" else None,
            method="synthetic",
            synthetic_rates=torch.tensor(unconditional_to_conditional_rates(unconditional)),
        )
        for i, rate in enumerate(unconditional):
            measured = (result.num_emitted > i + 1).double().mean().item()
            assert abs(measured - rate) <= 4.5 * np.sqrt(rate * (1 - rate) / n)


class TestCorners:
    """One request with two drafts over four tokens, at temperature 1 by default."""

    KEYS = derive_stream_keys(range(400))
    BASE = torch.tensor([[0.0, 1.0, 0.5, -1.0], [0.3, 0.0, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0]])

    def run(
        self,
        target: Tensor,
        drafts: list[int],
        q: Tensor | None = None,
        ids: Tensor | None = None,
        temperature: float = 1.0,
        **options: object,
    ) -> list[list[int]]:
        """Return the outputs of 400 copies of a request, each with its own key."""
        n, k = 400, len(drafts)
        result = rejection_sample(
            target.repeat(n, 1),
            torch.tensor(drafts, dtype=torch.int64).repeat(n),
            torch.arange(n + 1, dtype=torch.int32) * (k + 1),
            torch.full((n,), temperature),
            self.KEYS,
            torch.full((n,), 30),
            draft_logits=None
            if q is None
            else DraftLogits(q.repeat(n, 1), ids.repeat(n, 1) if ids is not None else None),
            **options,  # type: ignore[arg-type]
        )
        return _emitted(result)

    @pytest.mark.parametrize("method", ["standard", "block"])
    def test_equal_distributions_accept_every_draft(self, method: str) -> None:
        for scale in (0.1, 1.0, 30.0):
            target = self.BASE * scale
            assert all(row[:2] == [1, 3] for row in self.run(target, [1, 3], target[:2], method=method))

    @pytest.mark.parametrize("ids", [None, torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])])
    @pytest.mark.parametrize("method", ["standard", "block"])
    def test_a_masked_draft_of_little_mass_is_not_emitted(self, method: str, ids: Tensor | None) -> None:
        """max(p - q, 0) has no mass, because 1 - q(draft) rounds to 1."""
        target, q = self.BASE.clone(), self.BASE[:2].clone()
        target[1] = torch.tensor([0.0, -INF, -INF, -INF])
        q[1] = torch.tensor([0.0, -20.0, -INF, -INF])
        given = q if ids is None else q.gather(1, ids)
        assert all(row == [1, 0] for row in self.run(target, [1, 1], given, ids, method=method))

    @pytest.mark.parametrize("method", ["standard", "block"])
    def test_p_replaces_a_residual_without_mass(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from draftwire_kernels.reference import rejection

        def refuse(*args: object) -> Tensor:
            return torch.ones_like(uniform(*args))  # type: ignore[arg-type]

        uniform = rejection.accept_uniform
        monkeypatch.setattr(rejection, "accept_uniform", refuse)
        assert self.run(self.BASE, [1, 3], self.BASE[:2], method=method) == self.run(self.BASE[:1], [])

    def test_certain_drafts_are_accepted_impossible_ones_never(self) -> None:
        target = self.BASE.clone()
        target[0] = torch.tensor([-INF, 0.0, -INF, -INF])
        target[1, 3] = -INF
        emitted = self.run(target, [1, 3])
        assert all(row[0] == 1 and len(row) == 2 and row[1] != 3 for row in emitted)

    @pytest.mark.parametrize("method", ["standard", "block"])
    @pytest.mark.parametrize("token", [2, 4, 99, -1])
    def test_a_draft_outside_its_own_q_ends_the_drafts(self, method: str, token: int) -> None:
        q = self.BASE[:2].clone()
        q[1, 2] = -INF
        emitted = self.run(self.BASE, [1, token], q, method=method)
        assert max(map(len, emitted)) == 2
        second = np.bincount([row[1] for row in emitted if len(row) == 2], minlength=4)
        p = self.BASE[1].double().softmax(0).numpy()
        assert np.abs(second / second.sum() - p).max() < 4.5 * np.sqrt(0.25 / second.sum())

    def test_a_draft_outside_the_columns_of_its_q_ends_the_drafts(self) -> None:
        ids = torch.tensor([[0, 1], [3, 1]])
        emitted = self.run(self.BASE, [1, 2], torch.zeros(2, 2), ids)
        assert max(map(len, emitted)) == 2

    def test_ids_of_q_outside_the_vocabulary_hold_no_mass_of_p(self) -> None:
        ids = torch.tensor([[1, 77], [3, -5]])
        emitted = self.run(self.BASE, [1, 3], torch.zeros(2, 2), ids)
        assert all(0 <= token < 4 for row in emitted for token in row)

    @pytest.mark.parametrize("method", ["standard", "block"])
    def test_a_nan_row_of_q_ends_the_drafts_there(self, method: str) -> None:
        q = self.BASE[:2].clone()
        q[1, 0] = NAN
        emitted = self.run(self.BASE, [1, 3], q, method=method)
        assert all(1 <= len(row) <= 2 for row in emitted)
        assert all(row[0] == 1 for row in emitted)

    @pytest.mark.parametrize("one_hot_draft", [5, -1])
    def test_a_one_hot_draft_outside_the_vocabulary_is_no_draft(self, one_hot_draft: int) -> None:
        with_draft = self.run(self.BASE, [one_hot_draft, 3])
        without = self.run(self.BASE[:1], [])
        assert with_draft == without
        assert self.run(self.BASE, [one_hot_draft, 3], method="coupled") == without

    @pytest.mark.parametrize("bad", [[0.0, NAN, 0.0, 0.0], [-INF, -INF, -INF, -INF]])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(("method", "form"), COMBINATIONS)
    def test_a_bad_row_ends_its_own_request_before_it(
        self, method: str, form: str, temperature: float, bad: list[float]
    ) -> None:
        for bad_row in range(3):
            batch = self._four_requests(temperature)
            logits = batch.draft_logits(form)
            rates = torch.ones(2) if method == "synthetic" else None
            options = {"draft_logits": logits, "method": method, "synthetic_rates": rates}
            good = _emitted(rejection_sample(*batch.args(), **options))  # type: ignore[arg-type]
            batch.target[3 + bad_row] = torch.tensor(bad)  # the second request
            mixed = _emitted(rejection_sample(*batch.args(), **options))  # type: ignore[arg-type]
            assert [mixed[0], *mixed[2:]] == [good[0], *good[2:]]
            drafts = batch.drafts[2:4].tolist()
            if method == "block" and form != "one-hot" and temperature > 0:
                assert mixed[1] == good[1] if len(good[1]) < bad_row else len(mixed[1]) <= bad_row + 1
            elif len(good[1]) <= bad_row:
                assert mixed[1] == good[1]
            else:
                assert mixed[1] == drafts[:bad_row]
            if bad_row == 0:
                assert mixed[1] == []

    def _four_requests(self, temperature: float) -> Batch:
        batch = Batch(5, requests=4, vocab=4, max_k=2)
        batch.k = torch.full((4,), 2)
        batch.cu_rows = torch.arange(5, dtype=torch.int32) * 3
        batch.temperature = torch.full((4,), temperature)
        batch.request = torch.arange(4).repeat_interleave(2)
        batch.offset = torch.arange(2).repeat(4)
        batch.row = torch.arange(8) + batch.request
        g = torch.Generator().manual_seed(8)
        batch.target = torch.randn(12, 4, generator=g)
        batch.draft = batch.target[batch.row] + 0.1 * torch.randn(8, 4, generator=g)
        batch.drafts = batch.sample_drafts(batch.draft)
        return batch

    @pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
    def test_very_large_logits(self, size: float) -> None:
        target = torch.tensor([[size, -size, 0.0, 0.0], [0.0, 0.0, 0.0, size], [size, size, -size, 0.0]])
        emitted = self.run(target, [0, 3])
        assert all(row[:2] == [0, 3] and row[2] in (0, 1) for row in emitted)
        assert all(row == [0] for row in self.run(target, [1, 3]))

    def test_infinite_logits_share_the_mass(self) -> None:
        target = torch.tensor([[INF, 0.0, INF, 0.0], [0.0, INF, 0.0, 0.0], [0.0, 0.0, 0.0, INF]])
        emitted = self.run(target, [0, 1])
        accepted = [row for row in emitted if len(row) == 3]
        assert all(row == [0, 1, 3] for row in accepted)
        assert all(row == [2] for row in emitted if len(row) != 3)
        assert 140 < len(accepted) < 260

    def test_ties_at_temperature_zero_take_the_lowest_token(self) -> None:
        target = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
        assert all(row == [0, 1, 0] for row in self.run(target, [0, 1], temperature=0.0))
        assert all(row == [0] for row in self.run(target, [1, 1], temperature=0.0))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_logits_are_taken_at_their_value(self, dtype: torch.dtype) -> None:
        target = self.BASE.to(dtype)
        assert self.run(target, [1, 3]) == self.run(target.float(), [1, 3])

    def test_thousand_requests_with_and_without_drafts(self) -> None:
        batch = Batch(6, requests=1024, vocab=19)
        emitted = _emitted(rejection_sample(*batch.args(), draft_logits=batch.draft_logits("dense")))
        assert all(1 <= len(row) <= k + 1 for row, k in zip(emitted, batch.k.tolist(), strict=True))

    def test_requests_without_drafts_get_one_token(self) -> None:
        assert all(len(row) == 1 for row in self.run(self.BASE[:1], []))
