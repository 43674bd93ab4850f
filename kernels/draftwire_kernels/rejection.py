"""Verification of draft tokens against the target's logits."""

from torch import Tensor, float32, int64, no_grad

from draftwire_kernels import validation
from draftwire_kernels.reference import rejection
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys

METHODS = ("standard", "synthetic", "block", "coupled")


@no_grad()
def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    keys: StreamKeys,
    position: Tensor,
    *,
    draft_logits: DraftLogits | None = None,
    method: str = "standard",
    synthetic_rates: Tensor | None = None,
    use_fp64: bool = False,
    backend: str = "auto",
) -> RejectionResult:
    """Accept a prefix of each request's drafts and sample the next token.

    With target p = softmax(target_logits / temperature) and draft q = softmax(draft_logits / temperature), one-hot at
    the draft without `draft_logits`:

    - "standard" accepts draft x if u < p(x) / q(x), samples from max(p - q, 0) after a rejection, and from p after the
      last draft (Leviathan et al. 2211.17192; vLLM PR 40651).
    - "synthetic" accepts the draft at offset i with probability `synthetic_rates`[i], independent of p, and samples as
      "standard" does; the output does not follow p (vLLM PRs 40662, 41035). If an offset has several rates, each draft
      has one of them (`draft_rates`).
    - "block" decides the drafts of a step together, with an acceptance length of at least that of "standard" (Sun et
      al. 2403.10444); without draft logits it equals "standard".
    - "coupled" samples every token from p with the RESAMPLE noise of its position and accepts drafts while they are
      equal to it; a drafter that samples with the same noise agrees often (Daliri et al. 2408.07978).

    The output follows p for all methods except "synthetic", if the drafts follow q; with a one-hot q, for any drafts.
    At temperature 0 a draft is accepted if it is the argmax of its row, and the argmax is emitted. The ACCEPT uniform
    is keyed by position and offset, RESAMPLE noise by position; the PROPOSAL stream is not used, because sharing it
    would bias the output (vLLM PR 54282). The result of a request depends only on its own rows, keys and position.

    Parameters
    ----------
    target_logits : Tensor
        [R, V] float32, bfloat16 or float16, not scaled by the temperature, R = sum of (k_b + 1), in the order of
        requests; row j of a request is the target's distribution at `position` + j. Infinite logits are treated as in
        `gumbel_sample`.
    draft_tokens : Tensor
        [R - B] int64 target ids, the k_b drafts of each request in order; k_b may be 0. An id outside of [0, V) or of
        the support of its q ends the request's drafts, and the next token is sampled from p.
    cu_rows : Tensor
        [B + 1] int32, prefix sums of k_b + 1. May be on the CPU, which avoids synchronisation; values are checked only
        there. During CUDA graph capture it must be on the CPU, in pinned memory if the requests differ in length.
    temperature : Tensor
        [B] float32.
    keys : StreamKeys
        int64 [B] each; `accept` and `resample` are used.
    position : Tensor
        [B] int64, absolute position of each request's first draft.
    draft_logits : DraftLogits, optional
        q of each draft, for "standard", "block" and "synthetic".
    method : {"standard", "synthetic", "block", "coupled"}
    synthetic_rates : Tensor, optional
        [k] or [k, N] float32 conditional rates, k >= k_max, N a power of two: N equally likely rates of each offset;
        only for "synthetic", which requires them.
    use_fp64 : bool
        Compute, sample and compare in float64.
    backend : {"auto", "reference", "triton"}
        As in `gumbel_sample`.

    Returns
    -------
    RejectionResult
        tokens [B, k_max + 1] int64, padded with -1, and num_emitted [B] int32. If acceptance reaches a row without a
        distribution (with NaN, or only -inf), only the drafts accepted before that row are emitted; num_emitted is
        their number, 0 if it is the request's first row. A caller should fail a request with num_emitted 0: a later bad
        row is the first row of the next step.

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype or device, or does not fit `method`; with "triton" also if a request
        has more than 24 drafts with "block".

    Examples
    --------
    >>> import torch
    >>> from draftwire_kernels import derive_stream_keys, rejection_sample
    >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    >>> result = rejection_sample(
    ...     logits, torch.tensor([1, 1]), torch.tensor([0, 3], dtype=torch.int32),
    ...     torch.zeros(1), derive_stream_keys([7]), torch.tensor([12]),
    ... )
    >>> result.tokens, result.num_emitted
    (tensor([[ 1,  0, -1]]), tensor([2], dtype=torch.int32))
    """
    target_logits = validation.check_logits("target_logits", target_logits)
    num_rows, vocab = target_logits.shape
    on_device = (target_logits.device,)
    num_requests = validation.check_cu_rows(cu_rows, num_rows, target_logits.device)
    num_drafts = num_rows - num_requests
    validation.check_tensor("draft_tokens", draft_tokens, (num_drafts,), (int64,), on_device)
    validation.check_tensor("temperature", temperature, (num_requests,), (float32,), on_device)
    validation.check_tensor("position", position, (num_requests,), (int64,), on_device)
    if not isinstance(keys, StreamKeys):
        raise ValueError(f"keys: got {type(keys).__name__}, expected StreamKeys")
    validation.check_tensor("keys.accept", keys.accept, (num_requests,), (int64,), on_device)
    validation.check_tensor("keys.resample", keys.resample, (num_requests,), (int64,), on_device)
    validation.check_choice("method", method, METHODS)
    if draft_logits is not None:
        _check_draft_logits(draft_logits, num_drafts, vocab, method, target_logits)
    _check_synthetic_rates(synthetic_rates, method, cu_rows, target_logits)
    if synthetic_rates is not None:
        synthetic_rates = synthetic_rates.view(len(synthetic_rates), -1)
    arguments = (
        target_logits,
        draft_tokens,
        cu_rows,
        temperature,
        keys,
        position,
        draft_logits,
        method,
        synthetic_rates,
        use_fp64,
    )
    if validation.choose_backend(backend, target_logits.device) == "triton":
        from draftwire_kernels.gpu import launch

        return launch.rejection_sample(*arguments)
    return rejection.rejection_sample(*arguments)


def _check_draft_logits(
    draft_logits: DraftLogits, num_drafts: int, vocab: int, method: str, target_logits: Tensor
) -> None:
    if method == "coupled":
        raise ValueError("draft_logits: got DraftLogits with method 'coupled', expected None: its test needs no q")
    if not isinstance(draft_logits, DraftLogits):
        raise ValueError(f"draft_logits: got {type(draft_logits).__name__}, expected DraftLogits or None")
    logits, ids = draft_logits
    on_device = (target_logits.device,)
    columns: int | str = vocab if ids is None else "n"
    validation.check_tensor("draft_logits.logits", logits, (num_drafts, columns), (float32,), on_device)
    width = logits.shape[1]
    if width == 0:
        raise ValueError(f"draft_logits.logits: got shape {list(logits.shape)}, expected at least one column")
    if ids is not None:
        shape = (width,) if isinstance(ids, Tensor) and ids.ndim == 1 else (num_drafts, width)
        validation.check_tensor("draft_logits.token_ids", ids, shape, (int64,), on_device)


def _check_synthetic_rates(rates: Tensor | None, method: str, cu_rows: Tensor, target_logits: Tensor) -> None:
    if (rates is not None) != (method == "synthetic"):
        given = "none" if rates is None else "rates"
        expected = "conditional rates [k]" if rates is None else "None"
        raise ValueError(f"synthetic_rates: got {given} with method {method!r}, expected {expected}")
    if rates is None:
        return
    shape = ("k", "N") if isinstance(rates, Tensor) and rates.ndim == 2 else ("k",)
    validation.check_tensor("synthetic_rates", rates, shape, (float32,), (target_logits.device,))
    if rates.ndim == 2 and rates.shape[1].bit_count() != 1:
        raise ValueError(f"synthetic_rates: got {rates.shape[1]} rates of an offset, expected a power of two")
    if cu_rows.device.type == "cpu":
        max_drafts = int(cu_rows.diff().max()) - 1
        if rates.shape[0] < max_drafts:
            raise ValueError(f"synthetic_rates: got {rates.shape[0]} rates, expected at least k_max = {max_drafts}")
