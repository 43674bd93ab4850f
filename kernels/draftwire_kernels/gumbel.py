"""Gumbel-max sampling of one token per row."""

from torch import Tensor, float32, int32, int64, no_grad

from draftwire_kernels import validation
from draftwire_kernels.reference import distribution


@no_grad()
def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    *,
    draft_offset: int | Tensor = 0,
    token_ids: Tensor | None = None,
    use_fp64: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Sample a token from softmax(logits / temperature) in each row: argmax(logits / temperature + Gumbel noise).

    The noise is a function of (key, position, draft_offset, target token id), see `draftwire_kernels.noise`, so a row's
    token does not depend on other rows.

    Parameters
    ----------
    logits : Tensor
        [N, V] float32, bfloat16 or float16, not scaled by the temperature; -inf excludes a token. +inf is treated as
        the largest finite value: an infinite logit wins, several share the mass.
    temperature : Tensor
        [N] float32; 0 selects the largest logit, the lowest column on ties.
    key : Tensor
        [N] int64, one stream's keys of `StreamKeys`.
    position : Tensor
        [N] int64, absolute position of the sampled token in the sequence.
    draft_offset : int or Tensor
        Offset within the verify step, one int or [N] int32, part of the noise key. Drafts use their offset 0 .. k - 1;
        tokens sampled with a RESAMPLE key, including the drafts of the method "coupled", use 0.
    token_ids : Tensor, optional
        [V] int64, target ids of the columns of a reduced vocabulary; by default the column indices.
    use_fp64 : bool
        Sample and compare in float64.
    backend : {"auto", "reference", "triton"}
        "auto" is "triton" for CUDA tensors if Triton is installed, else the torch reference; "triton" needs CUDA
        tensors or Triton's interpreter.

    Returns
    -------
    Tensor
        [N] int64 column indices; -1 for a row without a distribution (with NaN, or only -inf). `rejection_sample` never
        accepts a draft of -1.

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype or device.

    Examples
    --------
    >>> import torch
    >>> from draftwire_kernels import derive_stream_keys, gumbel_sample
    >>> logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, -torch.inf]])
    >>> keys = derive_stream_keys([1, 2])
    >>> gumbel_sample(logits, torch.tensor([0.0, 0.0]), keys.proposal, torch.tensor([5, 9]))
    tensor([1, 1])
    """
    logits = validation.check_logits("logits", logits)
    num_rows, vocab = logits.shape
    on_device = (logits.device,)
    validation.check_tensor("temperature", temperature, (num_rows,), (float32,), on_device)
    validation.check_tensor("key", key, (num_rows,), (int64,), on_device)
    validation.check_tensor("position", position, (num_rows,), (int64,), on_device)
    if isinstance(draft_offset, Tensor):
        validation.check_tensor("draft_offset", draft_offset, (num_rows,), (int32,), on_device)
    elif not isinstance(draft_offset, int) or draft_offset < 0:
        raise ValueError(f"draft_offset: got {draft_offset!r}, expected an int of at least 0 or a tensor [{num_rows}]")
    if token_ids is not None:
        validation.check_tensor("token_ids", token_ids, (vocab,), (int64,), on_device)
    arguments = (logits, temperature, key, position, draft_offset, token_ids, use_fp64)
    if validation.choose_backend(backend, logits.device) == "triton":
        from draftwire_kernels.gpu import launch

        return launch.gumbel_sample(*arguments)
    return distribution.gumbel_sample(*arguments)
