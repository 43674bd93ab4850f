"""Processing of the target's logits: masks, bias, min_tokens, penalties and filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from draftwire.contract.fields import limits_of
from draftwire.model.devices import upload
from draftwire.v1 import config_pb2
from draftwire_kernels import LogitBias, LogitsSampling, Suppression, mask_logits, process_logits
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.grammar.matcher import RowMasks
from verifier_service.sampling.sampling_spec import SamplingSpec
from verifier_service.sampling.token_history import TokenHistory
from verifier_service.sampling.token_lists import TokenLists
from verifier_service.sampling.token_masks import AllowedLists, BadWords

MOST_BIASED_TOKENS = limits_of(config_pb2.SamplingParams(), "logit_bias").max_items
MOST_STOP_TOKENS = limits_of(config_pb2.SamplingParams(), "stop_token_ids").max_items


class LogitsProcessor:
    """Stores each request's options on the device from its first draw to its end, so that a step's cost is independent
    of the lengths of lists."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._specs: dict[Request, SamplingSpec] = {}
        self._history = TokenHistory(max_num_seqs, vocab_size, device)
        self._biases = TokenLists(max_num_seqs, MOST_BIASED_TOKENS, device)
        self._end_ids = TokenLists(max_num_seqs, MOST_STOP_TOKENS + len(eos_token_ids), device)
        self._allowed = AllowedLists(max_num_seqs, vocab_size, device)
        self._bad_words = BadWords(max_num_seqs, device)

    def spec(self, request: Request) -> SamplingSpec:
        """Return the request's parameters; the first call copies its lists of tokens to the device."""
        spec = self._specs.get(request)
        if spec is None:
            spec = self._specs[request] = SamplingSpec.of(request.params, self._eos_token_ids)
            if len(spec.bias_tokens) > 0:
                self._biases.add(request, spec.bias_tokens, spec.bias_values)
            if spec.min_tokens > 0 and len(spec.end_ids) > 0:
                self._end_ids.add(request, spec.end_ids)
            if len(spec.allowed) > 0:
                self._allowed.add(request, spec.allowed)
            if spec.bad_words:
                self._bad_words.add(request, spec.bad_words)
        return spec

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted."""
        self._specs.pop(request, None)
        for tables in (self._history, self._biases, self._end_ids, self._allowed, self._bad_words):
            tables.release(request)

    def count(self, batch: Sequence[ScheduledRows], drawn: torch.Tensor) -> None:
        """Count drawn tokens as output, for penalties and bad words; see `TokenHistory.count`."""
        self._history.count(batch, drawn)
        self._bad_words.count(batch, drawn)

    def process(
        self,
        batch: Sequence[ScheduledRows],
        specs: Sequence[SamplingSpec],
        logits: torch.Tensor,
        masks: RowMasks | None = None,
    ) -> torch.Tensor:
        """Return the logits that the batch samples from; `logits` itself if no request changes them.

        `masks` are for the rows of requests with structured output.
        """
        if masks is not None:
            (rows,) = upload([masks.rows], logits.device)
            logits = mask_logits(logits, rows, masks.bits.to(logits.device, non_blocking=True))
        suppression = self._suppression(batch, specs)
        if suppression is None and all(spec.keeps_logits for spec in specs):
            return logits
        requests = [item.request for item in batch]
        penalties = self._history.penalties(requests, [spec.penalties for spec in specs])
        bias = self._bias(requests)
        forbidden = self._bad_words.of(requests)
        counts_drafts = penalties is not None or forbidden is not None
        sampling = LogitsSampling(
            cu_rows=first_rows(batch),
            temperature=torch.tensor([spec.temperature for spec in specs]),
            draft_tokens=torch.tensor(draft_tokens(batch), dtype=torch.int64) if counts_drafts else None,
            top_k=_column([spec.top_k for spec in specs], 0, torch.int32),
            top_p=_column([spec.top_p for spec in specs], 1, torch.float32),
            min_p=_column([spec.min_p for spec in specs], 0, torch.float32),
            penalties=penalties,
            bias=bias,
            suppression=suppression,
            allowed=self._allowed.of(requests),
            forbidden=forbidden,
        )
        # Masks and filters keep all other values. Biased and penalised logits are not rounded to the target's dtype.
        is_exact = penalties is None and bias is None
        return process_logits(logits if is_exact else logits.float(), sampling)

    def _bias(self, requests: Sequence[Request]) -> LogitBias | None:
        tables = self._biases.tables(requests)
        if tables is None:
            return None
        return LogitBias(torch.tensor(self._biases.slots(requests)), *tables)

    def _suppression(self, batch: Sequence[ScheduledRows], specs: Sequence[SamplingSpec]) -> Suppression | None:
        """Return the end and stop tokens of the rows before min_tokens."""
        rows: list[int] = []
        slots: list[int] = []
        users = []
        first = 0
        for item, spec in zip(batch, specs, strict=True):
            count = min(item.num_logit_rows, spec.min_tokens - num_output(item)) if spec.min_tokens else 0
            if item.request.grammar is not None:
                count = 0  # the masks already apply min_tokens
            if count > 0 and len(spec.end_ids) > 0:
                rows += range(first, first + count)
                slots += self._end_ids.slots([item.request]) * count
                users.append(item.request)
            first += item.num_logit_rows
        tables = self._end_ids.tables(users)
        return None if tables is None else Suppression(torch.tensor(rows), torch.tensor(slots), tables[0])


def num_output(item: ScheduledRows) -> int:
    """Return the number of output tokens before this step; after a step in flight, one more than the host knows."""
    return item.request.num_output + (item.follows is not None)


def draft_tokens(batch: Iterable[ScheduledRows]) -> list[int]:
    """Return the drafts of all items, concatenated."""
    return [token for item in batch if item.drafts is not None for token in item.drafts.tokens]


def first_rows(batch: Sequence[ScheduledRows]) -> torch.Tensor:
    """Return prefix sums [B + 1] int32 of a batch's rows, on the CPU, where kernels' launches read them."""
    return torch.tensor([0, *accumulate(item.num_logit_rows for item in batch)], dtype=torch.int32)


def _column(values: Sequence[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
    return None if all(value == off for value in values) else torch.tensor(values, dtype=dtype)
