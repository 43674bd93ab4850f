"""Masks rows of logits with the bitmasks of grammar engines, one bit per token."""

from torch import Tensor, int32, int64, no_grad

from draftwire_kernels import validation
from draftwire_kernels.reference import masks as reference


@no_grad()
def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the logits with -inf for the tokens whose bit is 0 in the given rows.

    Parameters
    ----------
    logits : Tensor
        [R, V] float32, bfloat16 or float16. Never modified.
    rows : Tensor
        [M] int64 in 0 .. R - 1, each at most once: the rows to mask.
    bits : Tensor
        [M, W] int32, 32 W at least V. Bit i of word w is the token 32 w + i; bits past the vocabulary are not read. The
        layout is that of llguidance and xgrammar.
    backend : {"auto", "reference", "triton"}
        As in `gumbel_sample`.

    Returns
    -------
    Tensor
        [R, V] of the same dtype.

    Raises
    ------
    ValueError
        If a tensor has the wrong shape, dtype or device.

    Notes
    -----
    All tensors are on one device. On a GPU the logits are copied, and one kernel reads the bits and writes the masked
    tokens.

    Examples
    --------
    >>> import torch
    >>> from draftwire_kernels import mask_logits
    >>> mask_logits(torch.zeros(2, 3), torch.tensor([1]), torch.tensor([[0b101]], dtype=torch.int32))
    tensor([[0., 0., 0.],
            [0., -inf, 0.]])
    """
    logits = validation.check_logits("logits", logits)
    validation.check_tensor("rows", rows, ("M",), (int64,), (logits.device,))
    validation.check_tensor("bits", bits, (rows.shape[0], "W"), (int32,), (logits.device,))
    if 32 * bits.shape[1] < logits.shape[1]:
        raise ValueError(f"bits: got {bits.shape[1]} words a row, expected at least {-(-logits.shape[1] // 32)}")
    if validation.choose_backend(backend, logits.device) == "triton":
        from draftwire_kernels.gpu import token_bitmask as gpu

        return gpu.mask_logits(logits, rows, bits)
    return reference.mask_logits(logits, rows, bits)
