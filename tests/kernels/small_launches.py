"""Launch each kernel except attention on small inputs, for `compute-sanitizer`; needs CUDA. See kernels_check.sh.

    python tests/kernels/small_launches.py [PART PARTS]

With two numbers, run every PARTS-th launch from PART on, so that several processes can share the work.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from test_kernels_rejection import RATES, Batch

from draftwire_kernels import (
    DraftLogits,
    LogitsSampling,
    gather_accepted_rows,
    gumbel_sample,
    process_logits,
    rejection_sample,
)
from draftwire_kernels.gpu import launch
from draftwire_kernels.gpu.tuning import Tuning

FORMS = (
    ("standard", "one-hot", False),
    ("standard", "one-hot", True),
    ("standard", "dense", False),
    ("standard", "dense", True),
    ("standard", "reduced", False),
    ("standard", "top-n", False),
    ("synthetic", "dense", False),
    ("coupled", "one-hot", False),
    ("block", "dense", False),
    ("block", "dense", True),
    ("block", "reduced", True),
    ("block", "top-n", False),
)


def verify(method: str, form: str, use_fp64: bool) -> None:
    """Compare default tuning with waves of one row. The vocabulary ends within a group."""
    batch = Batch(3, requests=6, vocab=5003, spread=0.7, max_k=4)
    logits = batch.draft_logits(form)
    if logits is not None:
        logits = DraftLogits(logits.logits.cuda(), None if logits.token_ids is None else logits.token_ids.cuda())
    target, drafts, cu_rows, temperature, keys, position = batch.args()
    rates = RATES.cuda() if method == "synthetic" else None
    arguments = (target.cuda(), drafts.cuda(), cu_rows, temperature.cuda(), keys.to("cuda"), position.cuda())
    whole = rejection_sample(
        *arguments, draft_logits=logits, method=method, synthetic_rates=rates, use_fp64=use_fp64, backend="triton"
    )
    waves = launch.rejection_sample(*arguments, logits, method, rates, use_fp64, Tuning(programs=96, tile=2, wave=1))
    assert torch.equal(whole.tokens, waves.tokens), (method, form, use_fp64)


def serve(requests: int, method: str) -> None:
    """Verify a ragged batch like a server's: large vocabulary, 16-bit logits, one-hot drafts, default tuning."""
    batch = Batch(requests, requests=requests, vocab=128256, max_k=4)
    target, drafts, cu_rows, temperature, keys, position = batch.args()
    arguments = (target.bfloat16().cuda(), drafts.cuda(), cu_rows, temperature.cuda(), keys.to("cuda"), position.cuda())
    rates = RATES.cuda() if method == "synthetic" else None
    result, expected = (
        rejection_sample(*arguments, method=method, synthetic_rates=rates, backend=backend)
        for backend in ("triton", "reference")
    )
    assert torch.equal(result.tokens, expected.tokens), (requests, method)


def sample(dtype: torch.dtype) -> None:
    rows, integers = torch.randn(6, 5003, device="cuda"), torch.arange(6, device="cuda")
    gumbel_sample(rows.to(dtype), torch.linspace(0, 1, 6, device="cuda"), integers, integers, backend="triton")


def filter_rows() -> None:
    sampling = LogitsSampling(
        cu_rows=torch.arange(7, dtype=torch.int32),
        temperature=torch.linspace(0, 1, 6),
        top_k=torch.full((6,), 50, dtype=torch.int32),
        top_p=torch.full((6,), 0.9),
        min_p=torch.full((6,), 0.01),
    )
    process_logits(torch.randn(6, 5003, device="cuda"), sampling, backend="triton")


def gather() -> None:
    """Gather for more sequences than one iteration reads, and rows wider than one program copies."""
    rows, places = torch.randn(900, 3001, device="cuda").bfloat16(), torch.arange(300, device="cuda")
    drawn, cu_rows = (places % 4)[:, None], torch.arange(301, device="cuda", dtype=torch.int32) * 3
    gather_accepted_rows(rows, torch.arange(900, device="cuda"), cu_rows, places, drawn, torch.empty_like(rows))


def main() -> None:
    launches: list[tuple[str, Callable[[], None]]] = [
        *((f"{method} {form} {'float64' if wide else 'float32'}", partial(verify, method, form, wide))
          for method, form, wide in FORMS),
        *((f"{method}, {requests} requests", partial(serve, requests, method))
          for method in ("standard", "synthetic") for requests in (5, 33, 64)),
        *((f"gumbel {dtype}", partial(sample, dtype)) for dtype in (torch.float32, torch.bfloat16)),
        ("filters", filter_rows),
        ("accepted rows", gather),
    ]  # fmt: skip
    part, parts = (int(argument) for argument in sys.argv[1:] or ("0", "1"))
    for name, call in launches[part::parts]:
        call()
        torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
