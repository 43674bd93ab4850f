"""The reference draws the same tokens on CUDA as on the CPU."""

from dataclasses import replace

import large_vocabulary
import pytest
import torch
from sampling_oracle import Options

from draftwire_kernels import (
    DraftLogits,
    LogitBias,
    LogitsSampling,
    Penalties,
    StreamKeys,
    Suppression,
    derive_stream_keys,
    gumbel_sample,
    process_logits,
    rejection_sample,
)
from draftwire_kernels.reference import noise

pytestmark = pytest.mark.gpu

B, K, V = 64, 4, 5003
G = torch.Generator().manual_seed(0)
TARGET = torch.randn(B * (K + 1), V, generator=G) * 2
DRAFT = TARGET.view(B, K + 1, V)[:, :K].reshape(-1, V) + torch.randn(B * K, V, generator=G) * 0.3
CU_ROWS = torch.arange(B + 1, dtype=torch.int32) * (K + 1)
TEMPERATURE = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(B // 4)
KEYS = derive_stream_keys(range(B))
POSITION = torch.randint(0, 10_000, (B,), generator=G)
OFFSET = torch.arange(K, dtype=torch.int32).repeat(B)


def _draw(device: str) -> torch.Tensor:
    arguments = (DRAFT, TEMPERATURE.repeat_interleave(K), KEYS.proposal.repeat_interleave(K))
    position = POSITION.repeat_interleave(K) + OFFSET
    moved = (t.to(device) for t in (*arguments, position))
    return gumbel_sample(*moved, draft_offset=OFFSET.to(device), backend="reference").cpu()


def test_noise_has_the_same_bits() -> None:
    state = noise.row_state(KEYS.resample, POSITION, 3)
    words = noise.token_words(state, torch.arange(V, dtype=torch.int32))
    on_cuda = noise.row_state(KEYS.resample.cuda(), POSITION.cuda(), 3)
    assert torch.equal(on_cuda.cpu(), state)
    assert torch.equal(noise.token_words(on_cuda, torch.arange(V, dtype=torch.int32).cuda()).cpu(), words)


def test_gumbel_sample() -> None:
    assert torch.equal(_draw("cuda"), _draw("cpu"))


@pytest.mark.parametrize("cu_rows_device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("method", "form"),
    [(m, f) for m in ("standard", "block", "synthetic") for f in ("one-hot", "dense", "top-n")]
    + [("coupled", "one-hot")],
)
def test_rejection_sample(method: str, form: str, cu_rows_device: str) -> None:
    drafts = _draw("cpu")
    values, ids = DRAFT.topk(64)
    logits = {"one-hot": None, "dense": DraftLogits(DRAFT), "top-n": DraftLogits(values, ids)}[form]
    rates = torch.tensor([0.9, 0.8, 0.7, 0.6]) if method == "synthetic" else None
    arguments = (TARGET, drafts, CU_ROWS, TEMPERATURE, KEYS, POSITION)
    expected = rejection_sample(*arguments, draft_logits=logits, method=method, synthetic_rates=rates)
    on_cuda = rejection_sample(
        TARGET.cuda(),
        drafts.cuda(),
        CU_ROWS.to(cu_rows_device),
        TEMPERATURE.cuda(),
        StreamKeys(*(key.cuda() for key in KEYS)),
        POSITION.cuda(),
        draft_logits=logits and DraftLogits(*(t if t is None else t.cuda() for t in logits)),
        method=method,
        synthetic_rates=None if rates is None else rates.cuda(),
        backend="reference",
    )
    assert torch.equal(on_cuda.tokens.cpu(), expected.tokens)
    assert torch.equal(on_cuda.num_emitted.cpu(), expected.num_emitted)


@pytest.mark.parametrize("dtype", large_vocabulary.DTYPES, ids=str)
@pytest.mark.parametrize("options", large_vocabulary.FILTERS, ids=str)
def test_filters_of_a_large_vocabulary(options: Options, dtype: torch.dtype) -> None:
    logits = large_vocabulary.rows(dtype)
    out = process_logits(logits.cuda(), large_vocabulary.sampling(options)).cpu()
    large_vocabulary.check(logits, out, options)


@pytest.mark.parametrize("parameters_device", ["cpu", "cuda"])
def test_process_logits(parameters_device: str) -> None:
    mask = torch.rand(B, V, generator=G) < 0.1
    counts = torch.randint(0, 3, (B, V), generator=G, dtype=torch.int32)
    penalties = Penalties(
        torch.full((B,), 1.2), torch.full((B,), 0.1), torch.full((B,), 0.2), torch.arange(B), mask, counts
    )
    sampling = LogitsSampling(
        cu_rows=CU_ROWS,
        temperature=TEMPERATURE,
        draft_tokens=_draw("cpu"),
        top_k=torch.arange(B, dtype=torch.int32),
        top_p=torch.linspace(0.3, 1.0, B),
        min_p=torch.linspace(0.0, 0.02, B),
        penalties=penalties,
        bias=LogitBias(
            torch.where(torch.arange(B) % 4 == 1, torch.arange(B) % 3, -1),
            torch.randint(0, V, (3, 5), generator=G),
            50 * torch.randn(3, 5, generator=G),
        ),
        suppression=Suppression(torch.tensor([11, 2]), torch.tensor([1, 0]), torch.tensor([[4, 3], [7, 7]])),
    )

    def moved(fields: object) -> dict[str, torch.Tensor]:
        tensors = {name: t for name, t in vars(fields).items() if isinstance(t, torch.Tensor)}
        on_logits = ("prompt_mask", "output_counts", "token", "value")
        return {name: t.to("cuda" if name in on_logits else parameters_device) for name, t in tensors.items()}

    assert sampling.bias is not None
    assert sampling.suppression is not None
    on_cuda = replace(
        sampling,
        **moved(sampling),
        penalties=replace(penalties, **moved(penalties)),
        bias=replace(sampling.bias, **moved(sampling.bias)),
        suppression=replace(sampling.suppression, **moved(sampling.suppression)),
    )
    expected = process_logits(TARGET, sampling)
    out = process_logits(TARGET.cuda(), on_cuda).cpu()
    assert torch.equal(out.isfinite(), expected.isfinite())
    kept = expected.isfinite()
    torch.testing.assert_close(out[kept], expected[kept])
