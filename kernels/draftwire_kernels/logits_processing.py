"""Token masks, logit bias, penalties and the filters min-p, top-k and top-p on ragged rows."""

import torch
from torch import Tensor

from draftwire_kernels import validation
from draftwire_kernels.logits_sampling import LogitsSampling
from draftwire_kernels.reference import filters, masks, penalties
from draftwire_kernels.reference.layout import Layout


@torch.no_grad()
def process_logits(logits: Tensor, sampling: LogitsSampling, *, backend: str = "auto") -> Tensor:
    """Return the logits of the distribution to sample from; filtered tokens are -inf.

    Applies in this order, each to the previous result: allowed tokens and forbidden sequences, bias, suppression,
    penalties, min-p, top-k, top-p.

    - Masks set tokens to -inf that are not allowed, or that would complete a forbidden sequence. The output includes
      the row's draft prefix.
    - Repetition divides a positive logit and multiplies any other, once, for tokens of prompt or output; frequency
      subtracts per occurrence in the output, presence once if there is one. The output includes the row's draft prefix.
    - min-p keeps tokens whose probability is at least min_p times the largest.
    - top-k keeps logits that are at least the k-th largest, so ties may keep more than k tokens.
    - top-p keeps the smallest set of the most likely tokens whose mass reaches top_p, and ties with the least likely of
      them; the most likely token is always kept.

    Filters use softmax(logits / temperature); the result is not scaled by the temperature. Rows at temperature 0 are
    not filtered. Rows without top-k and top-p are not searched.

    Parameters
    ----------
    logits : Tensor
        [R, V] float32, bfloat16 or float16. Never modified.
    sampling : LogitsSampling
    backend : {"auto", "reference", "triton"}
        Backend of the filters, as in `gumbel_sample`; masks, bias, suppression and penalties use torch.

    Returns
    -------
    Tensor
        [R, V] of the same dtype, computed in float32 (pass float32 for biased and penalised logits without rounding);
        `logits` itself if no request uses any of these.

    Raises
    ------
    ValueError
        If a tensor has the wrong shape, dtype or device.

    Examples
    --------
    >>> import torch
    >>> from draftwire_kernels import LogitsSampling, process_logits
    >>> sampling = LogitsSampling(
    ...     cu_rows=torch.tensor([0, 1], dtype=torch.int32), temperature=torch.ones(1),
    ...     top_k=torch.tensor([2], dtype=torch.int32),
    ... )
    >>> process_logits(torch.tensor([[3.0, 1.0, 2.0]]), sampling)
    tensor([[3., -inf, 2.]])
    """
    logits = validation.check_logits("logits", logits)
    if not isinstance(sampling, LogitsSampling):
        raise ValueError(f"sampling: got {type(sampling).__name__}, expected LogitsSampling")
    _check(logits, sampling)
    unused = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.penalties, sampling.bias, sampling.suppression)
    if all(value is None for value in (*unused, sampling.allowed, sampling.forbidden)):
        return logits

    layout = Layout.from_cu_rows(sampling.cu_rows, logits.shape[0], sampling.cu_rows.device)
    out = logits
    if sampling.allowed is not None:
        out = masks.keep_allowed(out, sampling.allowed, layout)
    if sampling.forbidden is not None:
        out = masks.forbid_sequences(out, sampling.forbidden, sampling.draft_tokens, layout)
    if sampling.bias is not None:
        out = penalties.add_bias(out, sampling.bias, layout)
    if sampling.suppression is not None:
        out = penalties.suppress(out, sampling.suppression)
    if sampling.penalties is not None:
        out = penalties.penalise(out, sampling.penalties, sampling.draft_tokens, layout)
    if validation.choose_backend(backend, logits.device) == "triton":
        from draftwire_kernels.gpu import filters as gpu_filters

        return gpu_filters.apply_filters(out, sampling, layout)
    return filters.apply_filters(out, sampling, layout)


def _check(logits: Tensor, sampling: LogitsSampling) -> None:
    num_rows, vocab = logits.shape
    num_requests = validation.check_cu_rows(sampling.cu_rows, num_rows, logits.device)
    num_drafts = num_rows - num_requests
    per_request: dict[str, tuple[Tensor | None, torch.dtype]] = {
        "temperature": (sampling.temperature, torch.float32),
        "top_k": (sampling.top_k, torch.int32),
        "top_p": (sampling.top_p, torch.float32),
        "min_p": (sampling.min_p, torch.float32),
    }
    tables: dict[str, tuple[Tensor, tuple[int | str, ...], torch.dtype]] = {}
    if (p := sampling.penalties) is not None:
        per_request |= {
            "penalties.repetition": (p.repetition, torch.float32),
            "penalties.presence": (p.presence, torch.float32),
            "penalties.frequency": (p.frequency, torch.float32),
            "penalties.slot": (p.slot, torch.int64),
        }
        tables["penalties.prompt_mask"] = (p.prompt_mask, ("S", vocab), torch.bool)
        tables["penalties.output_counts"] = (p.output_counts, tuple(p.prompt_mask.shape), torch.int32)
    if (b := sampling.bias) is not None:
        per_request["bias.slot"] = (b.slot, torch.int64)
        tables["bias.token"] = (b.token, ("S", "M"), torch.int64)
        tables["bias.value"] = (b.value, tuple(b.token.shape), torch.float32)
    if (a := sampling.allowed) is not None:
        per_request["allowed.slot"] = (a.slot, torch.int64)
        tables["allowed.mask"] = (a.mask, ("S", vocab), torch.bool)
    if (f := sampling.forbidden) is not None:
        per_request["forbidden.slot"] = (f.slot, torch.int64)
        tables["forbidden.last"] = (f.last, ("S", "M"), torch.int64)
        tables["forbidden.before"] = (f.before, (*f.last.shape, "L"), torch.int64)
        tables["forbidden.tail"] = (f.tail, ("S", f.before.shape[-1]), torch.int64)
    for name, (table, shape, dtype) in tables.items():
        validation.check_tensor(f"sampling.{name}", table, shape, (dtype,), (logits.device,))
    anywhere = validation.host_or(logits.device)
    for name, (value, dtype) in per_request.items():
        if value is not None:
            validation.check_tensor(f"sampling.{name}", value, (num_requests,), (dtype,), anywhere)
    _check_drafts(sampling, num_drafts, anywhere)
    if (s := sampling.suppression) is not None:
        validation.check_tensor("sampling.suppression.row", s.row, ("N",), (torch.int64,), anywhere)
        size = tuple(s.row.shape)
        validation.check_tensor("sampling.suppression.slot", s.slot, size, (torch.int64,), anywhere)
        validation.check_tensor("sampling.suppression.token", s.token, ("S", "M"), (torch.int64,), (logits.device,))


def _check_drafts(sampling: LogitsSampling, num_drafts: int, devices: tuple[torch.device, ...]) -> None:
    if sampling.draft_tokens is not None:
        validation.check_tensor("sampling.draft_tokens", sampling.draft_tokens, (num_drafts,), (torch.int64,), devices)
        return
    users = {"penalties": sampling.penalties, "forbidden": sampling.forbidden}
    for name, value in users.items():
        if value is not None and num_drafts:
            raise ValueError(f"sampling.draft_tokens: got None with {name}, expected a tensor [{num_drafts}]")
