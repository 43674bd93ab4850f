"""Sets tokens that must not be sampled to -inf. Functions return new logits, or the input if nothing changes."""

import torch
from torch import Tensor

from draftwire_kernels.logits_sampling import AllowedTokens, ForbiddenSequences
from draftwire_kernels.reference.layout import Layout
from draftwire_kernels.transfer import upload

ANY_TOKEN = -2


def keep_allowed(logits: Tensor, allowed: AllowedTokens, layout: Layout) -> Tensor:
    rows = layout.rows_of(allowed.slot >= 0)
    if rows.shape[0] == 0:
        return logits
    slot = upload(allowed.slot.to(rows.device)[layout.row_request[rows]], logits.device)
    rows = upload(rows, logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill_(~allowed.mask[slot], -torch.inf))


def forbid_sequences(
    logits: Tensor, forbidden: ForbiddenSequences, draft_tokens: Tensor | None, layout: Layout
) -> Tensor:
    rows = layout.rows_of(forbidden.slot >= 0)
    if rows.shape[0] == 0:
        return logits
    request = layout.row_request[rows]
    slot = upload(forbidden.slot.to(request.device)[request], logits.device)
    before, last = forbidden.before[slot], forbidden.last[slot]
    output = forbidden.tail[slot]
    if draft_tokens is not None and layout.max_drafts and before.shape[2] > 0:
        drafts = layout.pad(draft_tokens.to(rows.device), -1)[request]
        place = (rows - layout.first_row[request])[:, None] + torch.arange(before.shape[2], device=rows.device)
        drafts, place = upload(drafts, logits.device), upload(place, logits.device)
        output = torch.cat([output, drafts], dim=1).gather(1, place)
    matches = ((before == output[:, None]) | (before == ANY_TOKEN)).all(2)
    cells = upload(rows, logits.device)[:, None] * logits.shape[1] + last
    # Added and not assigned, because a token may be the last one of several sequences.
    values = torch.zeros(matches.shape, dtype=logits.dtype, device=logits.device).masked_fill_(matches, -torch.inf)
    return logits.flatten().scatter_add(0, cells.flatten(), values.flatten()).view_as(logits)


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    is_allowed = (bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1 == 1
    is_allowed = is_allowed.flatten(1)[:, : logits.shape[1]]
    return logits.index_copy(0, rows, logits[rows].masked_fill_(~is_allowed, -torch.inf))
