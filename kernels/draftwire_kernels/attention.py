"""Attention of a ragged batch over a paged cache."""

from __future__ import annotations

import torch

from draftwire_kernels import validation
from draftwire_kernels.ragged_batch import RaggedBatch
from draftwire_kernels.reference import attention as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK_ROWS = 32
"""Maximum number of rows of a sequence in a batch with bidirectional attention or anchored windows."""


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    anchored: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Write the rows' keys and values into the cache and attend over each row's sequence.

    Rows written by this call are attended to only by their own sequence; sequences may share blocks that an earlier
    call has filled. The call reads nothing from the device: a CUDA graph may capture it, and replay it with other
    values in the batch's tensors within its bounds. The result of a sequence depends on these bounds, and not on other
    sequences.

    Parameters
    ----------
    query, key, value
        [T, H, D], [T, KV, D], [T, KV, Dv] of one dtype (float32, bfloat16 or float16); T = batch.num_rows, H a multiple
        of KV, rotary embedding applied.
    keys, values
        [slots, KV, D] and [slots, KV, Dv], one layer of the cache, contiguous and of the same dtype; changed in place.
    batch
        Where the rows are written and what they attend to.
    scale
        Factor of the scores, usually D ** -0.5.
    window
        Size of a sliding window in positions, including the row's own; None for full attention.
    softcap
        Scores become softcap * tanh(score / softcap); None for no soft-cap.
    causal
        Whether a row attends to itself and earlier rows; otherwise to all rows of its sequence, with at most
        `MAX_BLOCK_ROWS` rows per sequence in this batch.
    anchored
        Whether all rows have the window of their sequence's first row in this batch, so that the rows of a block of
        drafts attend to the same context.
    backend
        "triton" needs CUDA tensors or Triton's interpreter; "reference" is torch; "auto" is Triton for CUDA tensors if
        installed, else torch.

    Returns
    -------
    torch.Tensor
        [T, H, Dv] of the query's dtype; zero in rows of padding.

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype, device or range. The Triton kernels support heads of up to 256
        elements, and up to 128 query heads per key-value head.

    Notes
    -----
    On CUDA a decoding step reads each row of the context once, 2 * KV * D elements. torch's attention over a paged
    cache (`torch.nn.attention.varlen`, since 2.12) is not used, because FlashAttention 2 requires blocks of 256 rows
    and there is no soft-cap.
    """
    _check(query, key, value, keys, values, batch)
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}, expected at least 1 position, or None for full attention")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, expected a number above 0, or None for none")
    if (anchored or not causal) and batch.max_rows > MAX_BLOCK_ROWS:
        raise ValueError(f"batch: got up to {batch.max_rows} rows of a sequence, expected at most {MAX_BLOCK_ROWS}")
    arguments = (query, key, value, keys, values, batch, scale, window, softcap, causal, anchored)
    if validation.choose_backend(backend, query.device) == "triton":
        from draftwire_kernels.gpu import paged_attention_launch

        return paged_attention_launch.paged_attention(*arguments)
    return reference.paged_attention(*arguments)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: RaggedBatch,
) -> None:
    device = (batch.slot_mapping.device,)
    validation.check_tensor("query", query, (batch.num_rows, "H", "D"), DTYPES, device)
    dtype, heads, size = (query.dtype,), query.shape[1], query.shape[2]
    validation.check_tensor("key", key, (batch.num_rows, "KV", size), dtype, device)
    kv_heads = key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query: got {heads} heads, expected a multiple of key's {kv_heads}")
    validation.check_tensor("value", value, (batch.num_rows, kv_heads, "Dv"), dtype, device)
    validation.check_tensor("keys", keys, ("slots", kv_heads, size), dtype, device)
    validation.check_tensor("values", values, (keys.shape[0], kv_heads, value.shape[2]), dtype, device)
    for name, cached in (("keys", keys), ("values", values)):
        if not cached.is_contiguous():
            raise ValueError(f"{name}: got strides {cached.stride()}, expected a contiguous tensor")
