"""Gather the rows of a verify step, accepted rows first."""

from torch import Tensor, bfloat16, float16, float32, int32, int64, no_grad

from draftwire_kernels import validation
from draftwire_kernels.reference import accepted_rows as reference

DTYPES = (float32, bfloat16, float16)


@no_grad()
def gather_accepted_rows(
    rows: Tensor,
    slots: Tensor,
    cu_rows: Tensor,
    places: Tensor,
    drawn: Tensor,
    out: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy the accepted rows of all sequences to `out`, in the order of sequences, followed by the other rows in order.

    The accepted rows of a sequence are its first ones, one per sampled token: the rows of its last token and of the
    accepted drafts. Their number is read on the device, without synchronisation.

    Parameters
    ----------
    rows : Tensor
        [S, W] float32, bfloat16 or float16, the source.
    slots : Tensor
        [T] int64 in 0 .. S - 1, index in `rows` of each verified row, in the order of sequences.
    cu_rows : Tensor
        [n + 1] int32, first row of each of the n sequences, and T; increasing, n at least 1.
    places : Tensor
        [n] int64 in 0 .. B - 1, the sequences' rows of `drawn`.
    drawn : Tensor
        [B, columns] int64, with the number of sampled tokens in column 0, clamped to 0 .. the sequence's rows. Other
        columns are not read.
    out : Tensor
        [T, W] of `rows`' dtype, the result; shares no memory with `rows`.
    backend : {"auto", "reference", "triton"}
        As in `gumbel_sample`.

    Raises
    ------
    ValueError
        If a tensor has the wrong shape, dtype or device, or is not contiguous.

    Notes
    -----
    All tensors are on one device. On a GPU, one launch reads and writes each row once.

    Examples
    --------
    >>> import torch
    >>> from draftwire_kernels import gather_accepted_rows
    >>> rows, out = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]), torch.empty(4, 1)
    >>> cu_rows = torch.tensor([0, 2, 4], dtype=torch.int32)
    >>> drawn = torch.tensor([[1, 7, -1], [2, 7, 7]])
    >>> gather_accepted_rows(rows, torch.tensor([1, 2, 3, 4]), cu_rows, torch.tensor([0, 1]), drawn, out)
    >>> out.flatten()
    tensor([1., 3., 4., 2.])
    """
    _check(rows, slots, cu_rows, places, drawn, out)
    arguments = (rows, slots, cu_rows, places, drawn, out)
    if validation.choose_backend(backend, rows.device) == "triton":
        from draftwire_kernels.gpu import accepted_rows as gpu

        gpu.gather_accepted_rows(*arguments)
    else:
        reference.gather_accepted_rows(*arguments)


def _check(rows: Tensor, slots: Tensor, cu_rows: Tensor, places: Tensor, drawn: Tensor, out: Tensor) -> None:
    validation.check_tensor("rows", rows, ("S", "W"), DTYPES, [rows.device] if isinstance(rows, Tensor) else [])
    if rows.shape[1] == 0:
        raise ValueError(f"rows: got shape {list(rows.shape)}, expected at least one column")
    device = (rows.device,)
    validation.check_tensor("slots", slots, ("T",), (int64,), device)
    validation.check_tensor("places", places, ("n",), (int64,), device)
    validation.check_tensor("cu_rows", cu_rows, (places.shape[0] + 1,), (int32,), device)
    validation.check_cu_rows(cu_rows, slots.shape[0], rows.device, "slots")
    validation.check_tensor("drawn", drawn, ("B", "columns"), (int64,), device)
    if drawn.shape[1] == 0:
        raise ValueError(f"drawn: got shape {list(drawn.shape)}, expected at least one column")
    validation.check_tensor("out", out, (slots.shape[0], rows.shape[1]), (rows.dtype,), device)
    contiguous = {"rows": rows, "slots": slots, "cu_rows": cu_rows, "places": places, "drawn": drawn, "out": out}
    for name, value in contiguous.items():
        if not value.is_contiguous():
            raise ValueError(f"{name}: got strides {value.stride()}, expected a contiguous tensor")
