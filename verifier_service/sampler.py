"""Drawing tokens: each request's parameters as tensors, the logit processing and the rejection test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftwire import config as cfg
from draftwire.v1 import config_pb2, generate_pb2
from draftwire_kernels import (
    DraftLogits,
    LogitBias,
    LogitsSampling,
    Penalties,
    StreamKeys,
    Suppression,
    acceptance_length_to_rates,
    process_logits,
    rejection_sample,
    unconditional_to_conditional_rates,
)
from verifier_service.request import Request
from verifier_service.scheduler import Work

METHOD_NAMES = {
    cfg.STANDARD: "standard",
    cfg.SYNTHETIC: "synthetic",
    cfg.BLOCK: "block",
    cfg.COUPLED: "coupled",
}


@dataclass(frozen=True)
class Drawn:
    """What a step drew for one request: no tokens when its logits were not a distribution."""

    tokens: list[int]
    logprobs: list[generate_pb2.TokenLogprobs]


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
        self._use_fp64 = config.use_fp64_gumbel
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._history = _TokenHistory(max_num_seqs, vocab_size, device)
        self._rates = _conditional_rates(config, device)

    def forget(self, request: Request) -> None:
        """Drops what is kept of a request that has ended."""
        self._history.release(request)

    def draw(self, works: Sequence[Work], logits: torch.Tensor) -> list[Drawn]:
        """Draws the tokens of `works`, all of which sample.

        Parameters
        ----------
        logits
            [R, V], the rows of the works one after another, num_logit_rows each.
        """
        processed = process_logits(logits.float(), self._sampling(works))
        first_rows = [0, *accumulate(work.num_logit_rows for work in works)]
        drawn: list[list[int]] = [[] for _ in works]
        for members in _by_columns(works):
            rows = processed
            if len(members) < len(works):
                index = [row for i in members for row in range(first_rows[i], first_rows[i + 1])]
                rows = processed[torch.tensor(index, device=self._device)]
            group = [works[i] for i in members]
            for i, tokens in zip(members, self._reject(group, rows), strict=True):
                drawn[i] = tokens
        self._history.count(works, drawn)
        return [
            Drawn(tokens, _logprobs(work, tokens, logits[first : first + len(tokens)]))
            for work, tokens, first in zip(works, drawn, first_rows, strict=False)
        ]

    def _reject(self, works: Sequence[Work], logits: torch.Tensor) -> list[list[int]]:
        requests = [work.request for work in works]
        keys = StreamKeys(
            *(
                self._tensor([getattr(request.keys, stream) for request in requests], torch.int64)
                for stream in StreamKeys._fields
            )
        )
        result = rejection_sample(
            logits,
            _concatenate([work.drafts.tokens for work in works if work.drafts is not None], torch.int32)
            .to(torch.int64)
            .to(self._device),
            _cu_rows(works),
            self._tensor([request.params.temperature for request in requests], torch.float32),
            keys,
            self._tensor([work.start + len(work.tokens) - work.num_drafts for work in works], torch.int64),
            draft_logits=self._draft_logits(works),
            method=self._method,
            synthetic_rates=self._rates,
            use_fp64=self._use_fp64,
        )
        packed = torch.cat([result.num_emitted[:, None].to(torch.int64), result.tokens], dim=1).tolist()
        return [row[1 : 1 + row[0]] for row in packed]

    def _draft_logits(self, works: Sequence[Work]) -> DraftLogits | None:
        drafts = [work.drafts for work in works if work.drafts is not None and work.drafts.logits is not None]
        if not drafts:
            return None
        logits = torch.cat([d.logits for d in drafts if d.logits is not None]).to(self._device)
        if drafts[0].logits_token_ids is not None:
            ids = torch.cat([d.logits_token_ids for d in drafts if d.logits_token_ids is not None])
            return DraftLogits(logits, ids.to(torch.int64).to(self._device))
        return DraftLogits(logits, drafts[0].draft_token_ids)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

    def _sampling(self, works: Sequence[Work]) -> LogitsSampling:
        """The step's parameters; a field that no request uses is None."""
        params = [work.request.params for work in works]
        penalties = self._history.penalties(works)
        drafts = None
        if penalties is not None:
            drafts = _concatenate([w.drafts.tokens for w in works if w.drafts is not None], torch.int32).to(torch.int64)
        return LogitsSampling(
            cu_rows=_cu_rows(works),
            temperature=torch.tensor([p.temperature for p in params]),
            draft_tokens=drafts,
            top_k=_column([p.top_k for p in params], 0, torch.int32),
            top_p=_column([p.top_p for p in params], 1, torch.float32),
            min_p=_column([p.min_p for p in params], 0, torch.float32),
            penalties=penalties,
            bias=_bias(params),
            suppression=self._suppression(works),
        )

    def _suppression(self, works: Sequence[Work]) -> Suppression | None:
        """End and stop tokens in the rows whose token comes before min_tokens."""
        entries = []
        row = 0
        for work in works:
            params = work.request.params
            if work.request.num_output < params.min_tokens:
                ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
                count = min(work.num_logit_rows, params.min_tokens - work.request.num_output)
                entries += [(row + j, token_id) for j in range(count) for token_id in ends]
            row += work.num_logit_rows
        if not entries:
            return None
        return Suppression(*torch.tensor(entries, dtype=torch.int64).unbind(1))


def _cu_rows(works: Sequence[Work]) -> torch.Tensor:
    """[B + 1] int32 on the CPU, where the kernels can read it without waiting for the device."""
    return torch.tensor([0, *accumulate(work.num_logit_rows for work in works)], dtype=torch.int32)


def _conditional_rates(config: config_pb2.SpeculativeConfig, device: torch.device) -> torch.Tensor | None:
    if config.rejection_sample_method != cfg.SYNTHETIC:
        return None
    rates = list(config.synthetic_acceptance_rates) or acceptance_length_to_rates(
        config.synthetic_acceptance_length, config.num_speculative_tokens
    )
    return torch.tensor(unconditional_to_conditional_rates(rates), dtype=torch.float32, device=device)


def _by_columns(works: Sequence[Work]) -> list[list[int]]:
    """Works that one rejection test can take together: their draft logits, if any, have the same columns."""
    members: dict[int | None, list[int]] = {}
    for index, work in enumerate(works):
        columns = None
        if work.drafts is not None and work.drafts.logits is not None:
            columns = id(work.drafts.draft_token_ids)
        members.setdefault(columns, []).append(index)
    return list(members.values())


def _concatenate(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=dtype)


def _column(values: Sequence[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
    return None if all(value == off for value in values) else torch.tensor(values, dtype=dtype)


def _bias(params: Sequence[config_pb2.SamplingParams]) -> LogitBias | None:
    entries = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias.items()]
    if not entries:
        return None
    request, token, value = zip(*entries, strict=True)
    return LogitBias(torch.tensor(request), torch.tensor(token), torch.tensor(value, dtype=torch.float32))


def _logprobs(work: Work, tokens: list[int], logits: torch.Tensor) -> list[generate_pb2.TokenLogprobs]:
    """Log probabilities of the emitted tokens under the target's own logits [len(tokens), V]."""
    params = work.request.params
    if not params.HasField("logprobs") or not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(1) + 1
    top = logprobs.topk(min(params.logprobs, logits.shape[1]), dim=1)
    return [
        generate_pb2.TokenLogprobs(logprob=logprob, rank=rank, top_ids=ids, top_logprobs=values)
        for logprob, rank, ids, values in zip(
            own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]


class _TokenHistory:
    """Tokens seen by the requests that use penalties, in tables that are made when the first such request comes."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._slots: dict[Request, int] = {}
        self._free = list(range(max_num_seqs))
        self._prompt_mask: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def release(self, request: Request) -> None:
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def penalties(self, works: Sequence[Work]) -> Penalties | None:
        users = [work.request for work in works if _uses_penalties(work.request.params)]
        if not users:
            return None
        if self._prompt_mask is None or self._output_counts is None:
            self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        for request in users:
            if request not in self._slots:
                slot = self._slots[request] = self._free.pop()
                self._prompt_mask[slot] = False
                self._prompt_mask[slot, torch.tensor(request.prompt, device=self._device)] = True
                self._output_counts[slot] = 0
        params = [work.request.params for work in works]
        return Penalties(
            repetition=torch.tensor([p.repetition_penalty for p in params]),
            presence=torch.tensor([p.presence_penalty for p in params]),
            frequency=torch.tensor([p.frequency_penalty for p in params]),
            slot=torch.tensor([self._slots.get(work.request, -1) for work in works]),
            prompt_mask=self._prompt_mask,
            output_counts=self._output_counts,
        )

    def count(self, works: Sequence[Work], drawn: Sequence[list[int]]) -> None:
        """Adds the drawn tokens to the outputs."""
        places = [
            (self._slots[work.request], token)
            for work, tokens in zip(works, drawn, strict=True)
            if work.request in self._slots
            for token in tokens
        ]
        if places and self._output_counts is not None:
            slot, token = torch.tensor(places, device=self._device).unbind(1)
            self._output_counts.index_put_((slot, token), torch.ones_like(slot, dtype=torch.int32), accumulate=True)


def _uses_penalties(params: config_pb2.SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
