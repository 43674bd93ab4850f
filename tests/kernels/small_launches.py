"""One small launch of each sampling kernel, for `compute-sanitizer`; needs CUDA. See benchmarks/kernels_check.sh."""

import torch
from test_kernels_rejection import RATES, Batch

from draftwire_kernels import DraftLogits, LogitsSampling, gumbel_sample, process_logits, rejection_sample
from draftwire_kernels.gpu import launch
from draftwire_kernels.gpu.tuning import Tuning


def main() -> None:
    for method, form, use_fp64 in (
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
    ):
        # A vocabulary that ends within a group; both one wave and one for each row.
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
        waves = launch.rejection_sample(*arguments, logits, method, rates, use_fp64, Tuning(programs=96, wave=1))
        assert torch.equal(whole.tokens, waves.tokens), (method, form, use_fp64)
        print(method, form, "float64" if use_fp64 else "float32", flush=True)

    rows = torch.randn(6, 5003, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        integers = torch.arange(6, device="cuda")
        gumbel_sample(rows.to(dtype), torch.linspace(0, 1, 6, device="cuda"), integers, integers, backend="triton")
    sampling = LogitsSampling(
        cu_rows=torch.arange(7, dtype=torch.int32),
        temperature=torch.linspace(0, 1, 6),
        top_k=torch.full((6,), 50, dtype=torch.int32),
        top_p=torch.full((6,), 0.9),
        min_p=torch.full((6,), 0.01),
    )
    process_logits(rows, sampling, backend="triton")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
