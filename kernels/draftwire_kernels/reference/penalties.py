"""Logit bias, suppression and penalties. Functions return new logits, or the input if nothing changes."""

import torch
from torch import Tensor

from draftwire_kernels.logits_sampling import LogitBias, Penalties, Suppression
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.transfer import upload


def add_bias(logits: Tensor, bias: LogitBias, layout: Layout) -> Tensor:
    rows = layout.rows_of(bias.slot >= 0)
    if rows.shape[0] == 0:
        return logits
    slot = upload(bias.slot.to(rows.device)[layout.row_request[rows]], logits.device)
    cells = upload(rows, logits.device)[:, None] * logits.shape[1] + bias.token[slot]
    return logits.flatten().scatter_add(0, cells.flatten(), bias.value[slot].flatten().to(logits.dtype)).view_as(logits)


def suppress(logits: Tensor, suppression: Suppression) -> Tensor:
    if suppression.row.shape[0] == 0:
        return logits
    row, slot = (upload(x, logits.device) for x in (suppression.row, suppression.slot))
    cells = row[:, None] * logits.shape[1] + suppression.token[slot]
    return logits.flatten().index_fill(0, cells.flatten(), -torch.inf).view_as(logits)


def penalise(logits: Tensor, penalties: Penalties, draft_tokens: Tensor | None, layout: Layout) -> Tensor:
    rows = layout.rows_of(penalties.slot >= 0)
    if rows.shape[0] == 0:
        return logits
    request = layout.row_request[rows]
    slot = upload(penalties.slot.to(request.device)[request], logits.device)
    counts = penalties.output_counts[slot]
    if draft_tokens is not None and layout.max_drafts:
        _count_prefixes(counts, rows, request, draft_tokens.to(rows.device), layout)
    used = penalties.prompt_mask[slot] | (counts > 0)

    def of_rows(values: Tensor) -> Tensor:
        return upload(values.to(request.device)[request], logits.device)[:, None]

    rows = upload(rows, logits.device)
    x = logits[rows].float()
    repetition = of_rows(penalties.repetition)
    x = torch.where(used, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= of_rows(penalties.frequency) * counts + of_rows(penalties.presence) * (counts > 0)
    return logits.index_copy(0, rows, x.to(logits.dtype))


def _count_prefixes(counts: Tensor, rows: Tensor, request: Tensor, draft_tokens: Tensor, layout: Layout) -> None:
    """Add the drafts before each row to the row's counts, in place."""
    drafts = upload(layout.pad(draft_tokens, -1)[request], counts.device)
    place = torch.arange(layout.max_drafts, device=rows.device)
    before = upload(place < (rows - layout.first_row[request])[:, None], counts.device)
    inside = before & (drafts >= 0) & (drafts < counts.shape[1])
    counts.scatter_add_(1, drafts.clamp(0, counts.shape[1] - 1), inside.to(counts.dtype))
