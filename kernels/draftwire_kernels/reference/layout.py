"""Index tensors for the rows and drafts of each request in a ragged batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Index tensors of a ragged batch: B requests, R rows, D = R - B drafts; request b has k_b drafts, k_b + 1 rows."""

    first_row: Tensor  # [B] int64
    num_drafts: Tensor  # [B] int64, k_b
    max_drafts: int  # k_max
    row_request: Tensor  # [R] int64
    draft_request: Tensor  # [D] int64
    draft_row: Tensor  # [D] int64, target row that verifies each draft
    draft_offset: Tensor  # [D] int64, index within its request, 0 .. k_b - 1

    @classmethod
    def from_cu_rows(cls, cu_rows: Tensor, num_rows: int, device: torch.device) -> "Layout":
        """Return the layout of a batch; synchronises to read the largest k_b unless `cu_rows` is on the CPU."""
        sizes = cu_rows.diff().long()
        max_drafts = int(sizes.max()) - 1
        first_row = cu_rows[:-1].to(device).long()
        sizes = sizes.to(device)
        num_requests = sizes.shape[0]
        requests = torch.arange(num_requests, device=device)
        rows = torch.arange(num_rows, device=device)
        num_drafts = sizes - 1
        num_draft_rows = num_rows - num_requests
        row_request = torch.repeat_interleave(requests, sizes, output_size=num_rows)
        draft_request = torch.repeat_interleave(requests, num_drafts, output_size=num_draft_rows)
        draft_row = rows[:num_draft_rows] + draft_request
        return cls(
            first_row=first_row,
            num_drafts=num_drafts,
            max_drafts=max_drafts,
            row_request=row_request,
            draft_request=draft_request,
            draft_row=draft_row,
            draft_offset=draft_row - first_row[draft_request],
        )

    @property
    def num_requests(self) -> int:
        return self.first_row.shape[0]

    def rows_of(self, flags: Tensor) -> Tensor:
        """Return the rows, int64, of the requests whose flag [B] is set."""
        return flags.to(self.row_request.device)[self.row_request].nonzero()[:, 0]

    def pad(self, values: Tensor, fill: float) -> Tensor:
        """Return the values of drafts [D] laid out as [B, k_max]."""
        padded = values.new_full((self.num_requests, self.max_drafts), fill)
        padded[self.draft_request, self.draft_offset] = values
        return padded

    def draft_index(self, offset: Tensor) -> Tensor:
        """Return the index in [0, D) of each request's draft at `offset` [B]; any valid index without such a draft."""
        first_draft = self.first_row - torch.arange(self.num_requests, device=self.first_row.device)
        return (first_draft + offset).clamp_(max=max(self.draft_row.shape[0] - 1, 0))
