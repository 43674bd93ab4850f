"""Sampling: each request's parameters as tensors, logit processing and rejection sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from draftwire.contract import validation as cfg
from draftwire.model.devices import record_event, upload
from draftwire.v1 import config_pb2
from draftwire_kernels import (
    DraftLogits,
    LogitsSampling,
    StreamKeys,
    acceptance_length_to_rates,
    mask_logits,
    process_logits,
    rejection_sample,
    spread_rates,
    unconditional_to_conditional_rates,
)
from verifier_service.core.batch import SampledLogprobs, SampledTokens, ScheduledRows
from verifier_service.core.request import AnswerLogits, Request
from verifier_service.grammar.matcher import RowMasks
from verifier_service.sampling.logits_processor import LogitsProcessor, draft_tokens, first_rows
from verifier_service.sampling.logprobs import MOST_LIKELIEST, pack_logprobs, unpack_logprobs
from verifier_service.sampling.sampling_spec import SamplingSpec

METHOD_NAMES = {
    cfg.STANDARD: "standard",
    cfg.SYNTHETIC: "synthetic",
    cfg.BLOCK: "block",
    cfg.COUPLED: "coupled",
}


# Columns of draft logits of a reduced vocabulary for which kernels are compiled at start. Triton compiles again for a
# number that is not a multiple of 16.
PART_OF_VOCABULARY = 32000


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens that are copied to the host; see `TokenSampler.finish`."""

    rows: Sequence[ScheduledRows]
    groups: list[tuple[list[int], torch.Tensor]]  # (indices in rows, [B, k + 2] int64: number of tokens, tokens)
    logprobs: _LogprobRows | None  # if log probabilities are requested
    on_host: torch.Tensor  # [N] int64: all of the groups, then all of `logprobs`
    copied: torch.cuda.Event | None

    @property
    def packed(self) -> torch.Tensor | None:
        """Return [len(rows), k + 2] int64 on the device: the number of tokens of each of the rows, then the tokens.
        None if there are several groups."""
        return None if len(self.groups) > 1 else self.groups[0][1]

    @property
    def first_tokens(self) -> torch.Tensor | None:
        """Return the first tokens [len(rows)] int64 on the device, -1 for none; None if there are several groups."""
        return None if len(self.groups) > 1 else self.groups[0][1][:, 1]


@dataclass(frozen=True)
class _LogprobRows:
    """Rows of logits with log probabilities, grouped by item."""

    wanted: list[tuple[int, int]]  # (index, number of most likely tokens) of each item with log probabilities
    most: int  # likely tokens of each row


class TokenSampler:
    """Draws the tokens of a step's requests from the target's logits and their drafts."""

    def __init__(
        self,
        config: config_pb2.SpeculativeConfig,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self._method = METHOD_NAMES[config.rejection_sample_method]
        # A seeded request gets the same tokens with any drafts. With draft logits this would cost acceptance.
        is_one_hot = config.draft_logits.form == cfg.NONE and config.rejection_sample_method != cfg.SYNTHETIC
        self._seeded_method = "coupled" if is_one_hot else self._method
        self._use_fp64 = config.use_fp64_gumbel
        self._logits_form = config.draft_logits
        self._device = device
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._most_rows = config.num_speculative_tokens + 1
        self._processor = LogitsProcessor(max_num_seqs, vocab_size, eos_token_ids, device)
        rates = synthetic_rates(config)
        self._rates = None if rates is None else rates.to(device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Draw from batches of all sizes with logits of `dtype`, raw and processed, so that no step waits for a
        compilation.

        This covers any number of drafts, equal for all requests or not, and the configured forms of draft logits, of
        the whole vocabulary and of a part.
        """
        one = torch.ones(1)
        filters = LogitsSampling(torch.tensor([0, 1], dtype=torch.int32), one, top_k=one.to(torch.int32), min_p=one)
        for form in dict.fromkeys((dtype, torch.float32)):
            for draft_logits in chain((None,), self._configured_draft_logits()):
                for method in dict.fromkeys((self._method, self._seeded_method)):
                    self._draw_all_sizes(form, draft_logits, method)
            row = torch.zeros(1, self._vocab_size, dtype=form, device=self._device)
            process_logits(row, filters)
            bits = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32, device=self._device)
            mask_logits(row, torch.zeros(1, dtype=torch.int64, device=self._device), bits)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _configured_draft_logits(self) -> Iterator[DraftLogits]:
        """Yield draft logits of every configured form for the most drafts."""
        count, vocab = self._max_num_seqs * (self._most_rows - 1), self._vocab_size
        if self._logits_form.form == config_pb2.DRAFT_LOGITS_FORM_DENSE:
            part = min(PART_OF_VOCABULARY, vocab)
            for columns, ids in ((vocab, None), (part, torch.arange(part, device=self._device))):
                yield DraftLogits(torch.zeros(count, columns, device=self._device), ids)
        elif self._logits_form.form == config_pb2.DRAFT_LOGITS_FORM_TOP_N:
            ids = torch.arange(min(self._logits_form.n, vocab), device=self._device).repeat(count, 1)
            yield DraftLogits(torch.zeros(ids.shape, device=self._device), ids)

    def _draw_all_sizes(self, dtype: torch.dtype, draft_logits: DraftLogits | None, method: str) -> None:
        most = self._most_rows
        logits = torch.zeros(self._max_num_seqs * most, self._vocab_size, dtype=dtype, device=self._device)
        mixes = {(rows, others) for rows in range(1, most + 1) for others in (1, rows)}
        for count in range(1, self._max_num_seqs + 1):
            for rows, others in mixes:
                sizes = [rows] + [others] * (count - 1)
                num_rows, zeros = sum(sizes), np.zeros(count, np.int64)
                drafts, temperature = np.zeros(num_rows - count, np.int64), np.ones(count, np.float32)
                arrays: list[np.ndarray] = [drafts, zeros, *(zeros for _ in StreamKeys._fields), temperature]
                cu_rows = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
                if draft_logits is None:
                    self._draw(logits[:num_rows], arrays, cu_rows, None, method)
                elif len(drafts) > 0:
                    values, ids = draft_logits
                    ids = ids[: len(drafts)] if ids is not None and ids.dim() == 2 else ids
                    self._draw(logits[:num_rows], arrays, cu_rows, DraftLogits(values[: len(drafts)], ids), method)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted."""
        self._processor.forget(request)

    def launch(
        self, batch: Sequence[ScheduledRows], logits: torch.Tensor, masks: RowMasks | None = None
    ) -> SamplerOutput:
        """Start to draw tokens for all items of a batch, on a GPU without waiting.

        Args:
            logits: [R, V], the rows of all items, concatenated, num_logit_rows each. Only later work of the same stream
                may overwrite them.
            masks: Tokens that the rows of requests with structured output may draw.
        """
        specs = [self._processor.spec(item.request) for item in batch]
        processed = self._processor.process(batch, specs, logits, masks)
        starts = [0, *accumulate(item.num_logit_rows for item in batch)]
        groups = []
        for members in _by_columns(batch):
            rows = processed
            if len(members) < len(batch):
                index = [row for i in members for row in range(starts[i], starts[i + 1])]
                rows = processed[upload([np.array(index)], self._device)[0]]
            packed = self._reject([batch[i] for i in members], [specs[i] for i in members], rows)
            self._processor.count([batch[i] for i in members], packed[:, 1:])
            groups.append((members, packed))
        logprobs, flat = self._launch_logprobs(batch, specs, logits, starts, groups)
        on_host = flat.to("cpu", non_blocking=True)
        return SamplerOutput(batch, groups, logprobs, on_host, record_event(self._device))

    def finish(self, output: SamplerOutput) -> list[SampledTokens]:
        """Wait for the tokens of a draw, and return them for each item."""
        if output.copied is not None:
            output.copied.synchronize()
        batch, end = output.rows, sum(packed.numel() for _, packed in output.groups)
        values = (output.on_host if output.logprobs is None else output.on_host[:end]).tolist()
        drawn = [SampledTokens([])] * len(batch)
        begin = 0
        for members, packed in output.groups:
            width = packed.shape[1]
            for i in members:
                drawn[i] = SampledTokens(values[begin + 1 : begin + 1 + values[begin]])
                begin += width
        if output.logprobs is not None:
            rows = unpack_logprobs(output.on_host[end:], output.logprobs.most)
            first = 0
            for i, likeliest in output.logprobs.wanted:
                last = first + batch[i].num_logit_rows
                drawn[i] = drawn[i]._replace(logprobs=SampledLogprobs(likeliest, *(part[first:last] for part in rows)))
                first = last
        return drawn

    def _launch_logprobs(
        self,
        batch: Sequence[ScheduledRows],
        specs: Sequence[SamplingSpec],
        logits: torch.Tensor,
        starts: Sequence[int],
        groups: Sequence[tuple[list[int], torch.Tensor]],
    ) -> tuple[_LogprobRows | None, torch.Tensor]:
        """Launch the log probabilities; return their rows and the tensor for `SamplerOutput.on_host`."""
        drawn = groups[0][1].flatten() if len(groups) == 1 else torch.cat([packed.flatten() for _, packed in groups])
        wanted = [(i, own.logprobs) for i, own in enumerate(specs) if own.logprobs is not None]
        if not wanted:
            return None, drawn
        first_places, begin = {}, 0  # index of each item's first token among all sampled tokens
        for members, packed in groups:
            first_places.update({i: begin + own * packed.shape[1] + 1 for own, i in enumerate(members)})
            begin += packed.numel()
        rows: list[int] = []
        places: list[int] = []
        for i, _ in wanted:
            count = batch[i].num_logit_rows
            rows += range(starts[i], starts[i] + count)
            places += range(first_places[i], first_places[i] + count)
        row, place = upload([np.array(rows), np.array(places)], self._device)
        tokens = drawn.index_select(0, place).clamp_(min=0)  # -1 after an item's last token, which is not reported
        own = logits if len(rows) == len(logits) else logits.index_select(0, row)
        # One number for all requests, because the order of equally likely tokens depends on it.
        most = min(MOST_LIKELIEST, self._vocab_size)
        return _LogprobRows(wanted, most), torch.cat([drawn, pack_logprobs(own, tokens, most)])

    def _reject(
        self, batch: Sequence[ScheduledRows], specs: Sequence[SamplingSpec], logits: torch.Tensor
    ) -> torch.Tensor:
        """Run the rejection test; return [B, k_max + 2] int64 on the device: number of tokens, then the tokens.

        One seeded request decides the method for all, because both methods follow the target's distribution.
        """
        requests = [item.request for item in batch]
        arrays: list[np.ndarray] = [
            np.array(draft_tokens(batch), np.int64),
            np.array([item.start + len(item.tokens) - item.num_drafts for item in batch], np.int64),
            *(np.array([getattr(r.keys, stream) for r in requests], np.int64) for stream in StreamKeys._fields),
            np.array([spec.temperature for spec in specs], np.float32),
        ]
        method = self._seeded_method if any(spec.has_seed for spec in specs) else self._method
        return self._draw(logits, arrays, first_rows(batch), self._draft_logits(batch), method)

    def _draw(
        self,
        logits: torch.Tensor,
        arrays: Sequence[np.ndarray],
        cu_rows: torch.Tensor,
        draft_logits: DraftLogits | None,
        method: str,
    ) -> torch.Tensor:
        """Run the rejection test; `arrays` are drafts, positions, keys and temperatures. Returns as `_reject`."""
        drafts, position, *keys, temperature = upload(arrays, self._device)
        result = rejection_sample(
            logits,
            drafts,
            cu_rows,
            temperature,
            StreamKeys(*keys),
            position,
            draft_logits=draft_logits,
            method=method,
            synthetic_rates=self._rates,
            use_fp64=self._use_fp64,
        )
        return torch.cat([result.num_emitted[:, None].to(torch.int64), result.tokens], dim=1)

    def _draft_logits(self, batch: Sequence[ScheduledRows]) -> DraftLogits | None:
        """Return the logits of all drafts, concatenated."""
        pieces: list[tuple[AnswerLogits, list[int]]] = []
        for item in batch:
            drafts, logits = item.drafts, _logits(item)
            if drafts is not None and logits is not None:
                rows = range(drafts.first_row, drafts.first_row + len(drafts.tokens))
                if pieces and pieces[-1][0] is logits:
                    pieces[-1][1].extend(rows)
                else:
                    pieces.append((logits, list(rows)))
        if not pieces:
            return None
        values = self._gathered([(answer.values, rows) for answer, rows in pieces])
        if pieces[0][0].token_ids is None:
            return DraftLogits(values, pieces[0][0].draft_token_ids)
        ids = self._gathered([(answer.token_ids, rows) for answer, rows in pieces if answer.token_ids is not None])
        return DraftLogits(values, ids.to(torch.int64))

    def _gathered(self, pieces: list[tuple[torch.Tensor, list[int]]]) -> torch.Tensor:
        """Return rows of several tensors, concatenated, on the device."""
        gathered = []
        for values, rows in pieces:
            picked = values
            if rows != list(range(len(values))):
                picked = values.index_select(0, upload([np.array(rows)], values.device)[0])
            gathered.append(picked.to(self._device, non_blocking=True))
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered)


def synthetic_rates(config: config_pb2.SpeculativeConfig) -> torch.Tensor | None:
    """Return the equally likely conditional acceptance rates of each position, [k, N] float32; None unless acceptance
    is synthetic."""
    if config.rejection_sample_method != cfg.SYNTHETIC:
        return None
    rates = list(config.synthetic_acceptance_rates) or acceptance_length_to_rates(
        config.synthetic_acceptance_length, config.num_speculative_tokens
    )
    spread = spread_rates(unconditional_to_conditional_rates(rates), config.synthetic_confidence_skill)
    return torch.tensor(spread, dtype=torch.float32)


def _by_columns(batch: Sequence[ScheduledRows]) -> list[list[int]]:
    """Return the indices of items by rejection test: one test takes items whose draft logits have equal columns."""
    members: dict[int | None, list[int]] = {}
    for index, item in enumerate(batch):
        logits = _logits(item)
        columns = None if logits is None else id(logits.draft_token_ids)
        members.setdefault(columns, []).append(index)
    return list(members.values())


def _logits(item: ScheduledRows) -> AnswerLogits | None:
    """Return the logits of an item's drafts, if it has drafts."""
    return item.drafts.logits if item.drafts is not None and item.drafts.tokens else None
