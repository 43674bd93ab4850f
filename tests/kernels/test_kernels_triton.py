"""The Triton kernels against the reference: compiled on CUDA, through Triton's interpreter elsewhere."""

from itertools import product

import pytest
import sampling_oracle as oracle
import torch
from covering import covering
from markov import Case, chi_square_ratio, simulate
from test_kernels_coupled import emits_what_it_does_without_drafts
from test_kernels_law import CASES, case_name
from test_kernels_rejection import COMBINATIONS, RATES, Batch
from torch import Tensor

from draftwire_kernels import DraftLogits, RejectionResult, StreamKeys, derive_stream_keys, gumbel_sample
from draftwire_kernels import rejection_sample as public_rejection_sample

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

from draftwire_kernels.gpu import counters, draw, launch, verify
from draftwire_kernels.gpu.tuning import LARGE_VOCABULARY, Shape, Tuning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's about -inf and NaN, in the interpreter

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NUM_SEEDS = 12 if CUDA else 4  # the interpreter takes 2 s per seed
INF, NAN = float("inf"), float("nan")
KEYS = derive_stream_keys(range(64))


def _moved(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(DEVICE)


def _both(
    batch: Batch, logits: DraftLogits | None, method: str, use_fp64: bool, tuning: Tuning | None = None
) -> RejectionResult:
    """Return the Triton result after checking that it equals the reference's."""
    target, drafts, cu_rows, temperature, keys, position = batch.args()
    arguments = (
        target.to(DEVICE),
        drafts.to(DEVICE),
        cu_rows,
        temperature.to(DEVICE),
        keys.to(DEVICE),
        position.to(DEVICE),
    )
    if logits is not None:
        logits = DraftLogits(logits.logits.to(DEVICE), _moved(logits.token_ids))
    rates = RATES.to(DEVICE) if method == "synthetic" else None
    expected = public_rejection_sample(
        *arguments,
        draft_logits=logits,
        method=method,
        synthetic_rates=rates,
        use_fp64=use_fp64,
        backend="reference",
    )
    result = launch.rejection_sample(*arguments, logits, method, rates, use_fp64, tuning)
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.num_emitted.tolist() == expected.num_emitted.tolist()
    assert result.tokens.dtype == torch.int64
    assert result.num_emitted.dtype == torch.int32
    return result


SIZES = [(37, 5), *([(5003, 64), (40_000, 24)] if CUDA else [])]


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("method", "form"), COMBINATIONS)
@pytest.mark.parametrize(("vocab", "requests"), SIZES)
def test_rejection_sample(vocab: int, requests: int, method: str, form: str, use_fp64: bool) -> None:
    batch = Batch(3, requests=requests, vocab=vocab, spread=0.7, max_k=5 if CUDA else 3)
    logits = batch.draft_logits(form)
    if method == "coupled":
        batch.drafts = batch.sample_drafts(batch.draft, batch.keys.resample)
    _both(batch, logits, method, use_fp64)


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
def test_a_coupled_position_has_one_token_whatever_is_drafted(use_fp64: bool) -> None:
    assert emits_what_it_does_without_drafts("triton", use_fp64=use_fp64, device=DEVICE, num_seeds=NUM_SEEDS)


def test_the_one_hot_test_has_other_tokens() -> None:
    assert not emits_what_it_does_without_drafts("triton", method="standard", device=DEVICE, num_seeds=NUM_SEEDS)


@pytest.mark.parametrize("form", ["one-hot", "dense", "top-n"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_row_is_read_by_several_programs_in_waves(method: str, form: str) -> None:
    batch = Batch(8, requests=4, vocab=1100, spread=0.5, max_k=3)
    _both(batch, batch.draft_logits(form), method, False, Tuning(programs=24, tile=1, wave=2))


@pytest.mark.parametrize("tile", [4, 8])
@pytest.mark.parametrize("form", ["one-hot", "dense", "top-n"])
def test_many_groups(form: str, tile: int) -> None:
    batch = Batch(5, requests=2, vocab=LARGE_VOCABULARY + 37, spread=1.0, max_k=2)
    _both(batch, batch.draft_logits(form), "standard", False, Tuning(tile=tile, programs=24))


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("shift", [3e4, -3e4])
def test_masses_of_large_scores(shift: float, method: str) -> None:
    batch = Batch(14, requests=3, vocab=1500, spread=0.5, max_k=3)
    batch.target[:, :700] += shift
    batch.draft[:, :700] += shift
    batch.target[::3], batch.draft[::2] = batch.target[::3] + shift, batch.draft[::2] + shift
    _both(batch, batch.draft_logits("dense"), method, False, Tuning(programs=24, tile=1))


@pytest.mark.parametrize("columns", [1, 37, 16384, 128256, 151936, 262144])
@pytest.mark.parametrize("rows", [1, 6, 192, 6144])
def test_a_third_of_the_programs_at_most_has_no_tile(columns: int, rows: int) -> None:
    tuning = Tuning(programs=2112)
    shape = Shape.of(columns, 4, rows, tuning)
    assert shape.num_splits.bit_count() == 1
    assert shape.num_splits * 2 <= triton.cdiv(columns, shape.group * tuning.tile) * 3


@pytest.mark.gpu
@pytest.mark.parametrize("wave", [1, 2, 3])
@pytest.mark.parametrize(("method", "form"), [("standard", "one-hot"), ("standard", "dense"), ("block", "dense")])
def test_programs_that_run_at_once_do_not_part(method: str, form: str, wave: int) -> None:
    """Many programs read decisions while others write them."""
    batch = Batch(12, requests=96, vocab=40_000, spread=0.4, max_k=5)
    for _ in range(10):
        _both(batch, batch.draft_logits(form), method, False, Tuning(programs=2112, wave=wave))


@triton.jit
def leaders_kernel(bound_ptr, highest_ptr, bounds_ptr, places_ptr, GROUPS: tl.constexpr, LANES: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, LANES)
    bounds, places, highest = draw.leaders(draw.in_lanes(tl.load(bound_ptr + tl.arange(0, GROUPS)), LANES))
    tl.store(highest_ptr, highest)
    tl.store(bounds_ptr + lane, bounds)
    tl.store(places_ptr + lane, places)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_a_bound_that_shares_bits_with_an_index_is_not_too_low(scale: float) -> None:
    groups, lanes = 1024, 4
    size = groups // lanes
    bound = torch.randn(size, lanes, generator=torch.Generator().manual_seed(3)) * scale
    bound[:, 0] = -INF
    bound[:, 1] = -bound[:, 1].abs()
    highest, bounds = torch.empty(1, device=DEVICE), torch.empty(lanes, device=DEVICE)
    places = torch.empty(lanes, dtype=torch.int32, device=DEVICE)
    leaders_kernel[(1,)](bound.flatten().to(DEVICE), highest, bounds, places, groups, lanes)
    exact = bound.max(0).values
    assert (bounds.cpu() >= exact).all()
    assert torch.allclose(bounds.cpu(), exact, rtol=size * 2**-23, atol=0)
    assert highest.item() == bounds.max().item()
    own = bound.gather(0, places.cpu().long()[None])[0]
    assert (own[1:] >= exact[1:] - size * 2**-23 * exact[1:].abs()).all()


@pytest.mark.skipif(CUDA, reason="the interpreter alone runs programs in a chosen order")
@pytest.mark.parametrize("order", ["reversed", "shuffled", "split by split"])
@pytest.mark.parametrize(
    ("method", "form"),
    [("standard", f) for f in ("one-hot", "dense", "top-n")]
    + [("block", f) for f in ("dense", "top-n")]
    + [("coupled", "one-hot")],
)
def test_the_order_of_the_programs_does_not_matter(
    method: str, form: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx

    def set_grid_idx(x: int, y: int, z: int) -> None:
        last = builder.grid_dim[0] - 1
        if order == "reversed":
            place = last - x
        elif order == "shuffled":
            place = int(torch.randperm(last + 1, generator=torch.Generator().manual_seed(7))[x])
        else:  # rows have two splits each: all rows begin, the last one first, before any ends
            place = 2 * (last // 2 - x) if x <= last // 2 else 2 * (x - last // 2) - 1
        in_order(place, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    batch = Batch(4, requests=4, vocab=600, spread=0.5, max_k=4)
    batch.temperature = torch.tensor([1.0, 0.0, 0.6, 0.0])  # greedy and sampled requests run at the same time
    if method == "coupled":
        batch.drafts = batch.sample_drafts(batch.draft, batch.keys.resample)
    _both(batch, batch.draft_logits(form), method, False, Tuning(programs=60, tile=1, wave=1))


@pytest.mark.skipif(CUDA, reason="the interpreter alone runs programs one after another")
@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
def test_a_decision_between_the_rows_of_target_and_draft(use_fp64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's first check misses the decision and the second sees it: only the target's row is read."""
    builder = interpreter.interpreter_builder
    set_grid_idx, look = builder.set_grid_idx, verify.is_decided_before
    looks, seen_late = 0, 0

    def begin(x: int, y: int, z: int) -> None:
        nonlocal looks
        looks = 0
        set_grid_idx(x, y, z)

    def is_decided_before(waves: object, request: tl.tensor, wave: tl.tensor) -> tl.tensor:
        nonlocal looks, seen_late
        looks += 1
        is_decided = look(waves, request, wave)
        if looks == 1:
            return wave < 0
        seen_late += looks == 3 and bool(is_decided.handle.data.item())  # in a program that closes its wave
        return is_decided

    monkeypatch.setattr(builder, "set_grid_idx", begin)
    monkeypatch.setattr(verify, "is_decided_before", is_decided_before)
    batch = Batch(4, requests=4, vocab=600, spread=0.5, max_k=4)
    _both(batch, batch.draft_logits("dense"), "standard", use_fp64, Tuning(programs=60, tile=1, wave=1))
    assert seen_late > 0


# Pairwise coverage of 52 combinations.
@pytest.mark.parametrize(("combination", "wave", "max_k"), covering(COMBINATIONS, [1, 3], [1, 3]))
def test_a_launch_leaves_its_counters_at_zero(
    combination: tuple[str, str], wave: int, max_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launch on the stream uses the same counters."""
    method, form = combination
    used = []

    def zeros(count: int, device: torch.device) -> Tensor:
        used.append(torch.zeros(count, dtype=torch.int32, device=device))
        return used[-1]

    monkeypatch.setattr(counters, "zeros", zeros)
    batch = Batch(9, requests=4, vocab=37, spread=0.7, max_k=max_k)
    _both(batch, batch.draft_logits(form), method, False, Tuning(programs=30, wave=wave))
    assert len(used) == 1
    assert not used[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("vocab", [5, 600, *([128256] if CUDA else [])])
def test_gumbel_sample(vocab: int, use_fp64: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    rows = torch.randn(9, vocab, generator=g) * 2
    rows[5, 1], rows[6, 2], rows[7] = INF, NAN, -INF
    rows[8, 1:] = -INF
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.7, 0.0, 1.0, 1.0, 1.0, 1.0])
    ids = torch.randperm(vocab, generator=g)
    for token_ids in [ids.to(DEVICE), *([None] if CUDA or vocab == 5 else [])]:
        arguments = (
            rows.to(dtype).to(DEVICE),
            temperature.to(DEVICE),
            KEYS.proposal[:9].to(DEVICE),
            torch.arange(9, device=DEVICE) * 11,
            torch.arange(9, dtype=torch.int32, device=DEVICE),
            token_ids,
            use_fp64,
        )
        tokens = launch.gumbel_sample(*arguments, Tuning(programs=27, tile=2))
        expected = gumbel_sample(
            *arguments[:4],
            draft_offset=arguments[4],
            token_ids=token_ids,
            use_fp64=use_fp64,
            backend="reference",
        )
        assert tokens.tolist() == expected.tolist()
        assert tokens[5:].tolist() == [1, -1, -1, 0]


# Pairwise coverage of 24 combinations.
@pytest.mark.parametrize(
    ("combination", "use_fp64", "is_filtered"),
    covering(
        [*product(("standard", "block"), ("dense", "top-n")), ("standard", "one-hot"), ("coupled", "one-hot")],
        [False, True],
        [False, True],
    ),
)
def test_the_least_uniform_has_no_infinite_noise(
    combination: tuple[str, str], use_fp64: bool, is_filtered: bool
) -> None:
    """Word 0 has probability 2**-32: with 128256 tokens it occurs once in 33,000 rows."""
    method, form = combination
    batch = Batch(6, requests=4, vocab=300, spread=0.5, max_k=1)
    logits = batch.draft_logits(form)
    batch.temperature[:] = 0.7
    drawn_at = []
    for b in range(4):
        drawn_at.append(int(_reference(batch, logits, method, use_fp64).num_emitted[b]) - 1)
        token = 70 * b + 11
        key = oracle.key_with_least_word(token, int(batch.position[b]) + drawn_at[b], 0)
        assert oracle.token_word(oracle.row_state(key, int(batch.position[b]) + drawn_at[b], 0), token) == 0
        batch.keys.resample[b] = key
        if is_filtered:
            batch.target[int(batch.cu_rows[b]) + drawn_at[b], token] = -INF
    _both(batch, logits, method, use_fp64)
    tokens = _reference(batch, logits, method, use_fp64).tokens.tolist()
    found = sum(70 * b + 11 in row for b, row in enumerate(tokens))
    assert found == 0 if is_filtered else found >= 3


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
def test_a_draw_of_the_least_uniform(use_fp64: bool) -> None:
    tokens = [0, 77, 3, 599]
    keys = [oracle.key_with_least_word(token, 40 + i, 3) for i, token in enumerate(tokens)]
    rows = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
    drawn = launch.gumbel_sample(
        rows.to(DEVICE),
        torch.ones(4, device=DEVICE),
        torch.tensor(keys, device=DEVICE),
        torch.arange(40, 44, device=DEVICE),
        3,
        None,
        use_fp64,
        Tuning(programs=8, tile=2),
    )
    assert drawn.tolist() == tokens


def _reference(batch: Batch, logits: DraftLogits | None, method: str, use_fp64: bool) -> RejectionResult:
    return public_rejection_sample(
        *batch.args(), draft_logits=logits, method=method, use_fp64=use_fp64, backend="reference"
    )


@pytest.mark.parametrize("row", [[0.0, NAN, 0.0, 0.0], [-INF] * 4, [INF, 0.0, INF, 0.0], [3e38, -3e38, 0.0, 3e38]])
@pytest.mark.parametrize(("method", "form"), [("standard", "one-hot"), ("standard", "dense"), ("block", "dense")])
def test_rows_without_a_distribution_and_infinite_logits(method: str, form: str, row: list[float]) -> None:
    batch = Batch(5, requests=4, vocab=4, max_k=2)
    logits = batch.draft_logits(form)
    batch.target[1] = torch.tensor(row)
    batch.target[4] = torch.tensor(row)
    _both(batch, logits, method, False)


@pytest.mark.parametrize("token", [2, 4, 99, -1])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_draft_outside_its_q_ends_the_drafts(method: str, token: int) -> None:
    batch = Batch(5, requests=4, vocab=4, max_k=2)
    batch.draft[:, 2] = -INF
    batch.drafts[::2] = token
    _both(batch, DraftLogits(batch.draft), method, False)


def test_equal_distributions_accept_every_draft() -> None:
    batch = Batch(7, requests=6, vocab=50, spread=0.0, max_k=3)
    batch.temperature[:] = 1.0
    result = _both(batch, DraftLogits(batch.draft), "standard", False)
    assert result.num_emitted.tolist() == (batch.k + 1).tolist()


@pytest.mark.parametrize("wave", [1, 3])
@pytest.mark.parametrize("form", ["dense", "top-n"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_p_replaces_a_residual_without_mass(method: str, form: str, wave: int) -> None:
    """The target masks the second draft, whose probability under q is lost in rounding."""
    batch = Batch(7, requests=4, vocab=4, spread=0.0, max_k=2)
    batch.temperature[:] = 1.0
    masked = batch.offset == 1
    batch.target[batch.row[~masked], 2] += 2.0  # the first draft is certainly accepted
    batch.drafts[~masked] = 2
    batch.target[batch.row[masked]] = torch.tensor([0.0, -INF, -INF, -INF])
    batch.draft[masked] = torch.tensor([0.0, -20.0, -INF, -INF])
    ids = None if form == "dense" else torch.tensor([3, 2, 1, 0]).expand(len(batch.draft), -1)
    logits = DraftLogits(batch.draft if ids is None else batch.draft.gather(1, ids), ids)
    batch.drafts[masked] = 1
    result = _both(batch, logits, method, False, Tuning(programs=24, tile=1, wave=wave))
    assert result.tokens[batch.request[masked], 1].tolist() == [0] * int(masked.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_million_continuations_follow_the_target(case: Case) -> None:
    from dataclasses import replace

    case = replace(case, sequences=1_000_000, backend="triton", device="cuda")
    continuations, _ = simulate(case)
    assert chi_square_ratio(continuations, case.options) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
def test_a_captured_graph_replays_on_new_inputs(ragged: bool) -> None:
    batches = [Batch(seed, requests=8, vocab=3001, spread=0.5) for seed in (1, 2)]
    if not ragged:
        batches = [_uniform(batch) for batch in batches]
    else:
        batches[1] = batches[0]
    static = [t.cuda() for t in _flat(batches[0])]
    cu_rows = batches[0].cu_rows.pin_memory()

    def call() -> RejectionResult:
        target, drafts, temperature, accept, resample, position, draft = static
        keys = StreamKeys(accept, accept, resample)
        return public_rejection_sample(
            target, drafts, cu_rows, temperature, keys, position, draft_logits=DraftLogits(draft), backend="triton"
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for batch in batches:
        for into, value in zip(static, _flat(batch), strict=True):
            into.copy_(value)
        graph.replay()
        tokens = captured.tokens.clone()
        assert torch.equal(tokens, call().tokens)


def _uniform(batch: Batch) -> Batch:
    n, k, vocab = 8, 3, 3001
    batch.k = torch.full((n,), k)
    batch.cu_rows = torch.arange(n + 1, dtype=torch.int32) * (k + 1)
    g = torch.Generator().manual_seed(int(batch.position[0]))
    batch.target = torch.randn(n * (k + 1), vocab, generator=g)
    batch.request = torch.arange(n).repeat_interleave(k)
    batch.offset = torch.arange(k).repeat(n)
    batch.draft = batch.target.view(n, k + 1, vocab)[:, :k].reshape(-1, vocab) + 0.3
    batch.drafts = batch.sample_drafts(batch.draft)
    return batch


def _flat(batch: Batch) -> list[Tensor]:
    keys = batch.keys
    return [batch.target, batch.drafts, batch.temperature, keys.accept, keys.resample, batch.position, batch.draft]


@pytest.mark.gpu
def test_a_capture_refuses_what_would_wait_for_the_device() -> None:
    batch = Batch(1, requests=4, vocab=37)
    target, drafts, cu_rows, temperature, keys, position = batch.args()
    rest = (temperature.cuda(), keys.to("cuda"), position.cuda())
    target, drafts = target.cuda(), drafts.cuda()
    for rows, message in ((cu_rows.cuda(), "cu_rows: got a tensor on the device"), (cu_rows, "cu_rows: got ragged")):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match=message), torch.cuda.graph(graph):
            public_rejection_sample(target, drafts, rows, *rest, backend="triton")
