"""Log probabilities of rows of logits, and their copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwire.contract.fields import limits_of
from draftwire.model.devices import record_event, upload
from draftwire.v1 import config_pb2
from verifier_service.core.batch import SampledLogprobs, ScheduledRows

# Maximum number of tokens of a row with log probabilities.
MOST_LIKELIEST = int(limits_of(config_pb2.SamplingParams(), "logprobs").max)
# Maximum number of rows of a prompt whose float32 log probabilities are on the device at once.
ROWS_AT_ONCE = 64


def pack_logprobs(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Return [R * (2 + 2 * most)] int64: ranks of `tokens` [R], likeliest tokens and the bits of all log probabilities.

    Args:
        logits: [R, V].
        most: Number of likely tokens of each row.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(1, keepdim=True) + 1
    top = logprobs.topk(most, dim=1)
    values = torch.cat([own, top.values], dim=1).view(torch.int32)
    return torch.cat([ranks, top.indices, values.to(torch.int64)], dim=1).flatten()


def unpack_logprobs(flat: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ranks [R], likeliest tokens [R, most] and log probabilities float32 [R, 1 + most] of `pack_logprobs`."""
    ranks, top_ids, values = flat.view(-1, 2 + 2 * most).split([1, most, 1 + most], dim=1)
    return ranks[:, 0], top_ids, values.to(torch.int32).view(torch.float32)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of prompts' tokens that are copied to the host."""

    rows: Sequence[ScheduledRows]  # those with prompt rows that give log probabilities
    most: int  # likely tokens of each row of logits
    on_host: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def launch(cls, rows: Sequence[ScheduledRows], logits: torch.Tensor) -> PromptLogprobs | None:
        """Compute them after a forward pass; None if no prompt row gives log probabilities.

        Args:
            logits: [R, V], the logits of `rows`, concatenated: first `num_prompt_logit_rows` of each, then
                `num_logit_rows`.
        """
        chosen = [row for row in rows if row.num_prompt_logit_rows > 0]
        if not chosen:
            return None
        most = min(MOST_LIKELIEST, logits.shape[1])
        index = np.array(logit_places(rows, of_prompts=True), np.int64)
        # The row of a token predicts the next one.
        tokens = np.array([token for row in chosen for token in row.prompt_logprob_tokens], np.int64)
        places, targets = upload([index, tokens], logits.device)
        pieces = zip(places.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True)
        packed = torch.cat([pack_logprobs(logits.index_select(0, rows_), own, most) for rows_, own in pieces])
        return cls(chosen, most, packed.to("cpu", non_blocking=True), record_event(logits.device))

    def finish(self) -> None:
        """Wait for the copy, and set each row's `prompt_logprobs`."""
        if self.copied is not None:
            self.copied.synchronize()
        parts = unpack_logprobs(self.on_host, self.most)
        first = 0
        for row in self.rows:
            last = first + row.num_prompt_logit_rows
            num_top = row.request.prompt_logprobs
            assert num_top is not None
            row.prompt_logprobs = SampledLogprobs(num_top, *(part[first:last] for part in parts))
            first = last


def logit_places(rows: Sequence[ScheduledRows], *, of_prompts: bool) -> list[int]:
    """Return the indices, in a step's logits, of the rows for prompts' log probabilities, or of those for sampling."""
    places: list[int] = []
    first = 0
    for row in rows:
        middle, last = first + row.num_prompt_logit_rows, first + row.num_prompt_logit_rows + row.num_logit_rows
        places += range(first, middle) if of_prompts else range(middle, last)
        first = last
    return places
