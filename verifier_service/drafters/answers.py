"""Decoding and checks of a drafter's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwire.contract import validation as cfg
from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.model.tensors import decode_ids, decode_probabilities
from draftwire.transport import TensorReceiver
from draftwire.v1 import config_pb2, draft_pb2
from draftwire_kernels import gumbel_sample
from verifier_service.core.request import AnswerLogits, ReadyDrafts, Request

CPU = torch.device("cpu")


class DecodedAnswer(NamedTuple):
    """The answers for the sequences of a message, as columns, and the concatenated drafts."""

    sequence_ids: list[int]
    statuses: list[draft_pb2.SequenceStatus]
    committed_lengths: list[int]
    last_tokens: list[int]
    num_drafts: list[int]
    tokens: list[int]  # [sum of num_drafts], sequence after sequence
    logits: AnswerLogits | None  # logits of each draft
    confidences: list[float] | None  # confidence of each draft, in [0, 1]


def decode_answer(
    answer: draft_pb2.Drafts,
    config: config_pb2.SpeculativeConfig,
    vocab_size: int,
    draft_vocab_size: int,
    draft_token_ids: torch.Tensor | None,
    receiver: TensorReceiver,
    *,
    confidences: bool,
) -> DecodedAnswer:
    """Return the decoded answers of an untrusted message.

    Args:
        answer: The message.
        config: The verifier's settings, which determine the form of the logits.
        vocab_size: Size of the target's vocabulary.
        draft_vocab_size: Size of the draft vocabulary.
        draft_token_ids: Target ids of the draft vocabulary on the target's device, for dense logits.
        receiver: Receives the logits and their ids.
        confidences: Whether each draft must have a confidence.

    Raises:
        InvalidArgumentError: If lengths differ, or a tensor is invalid, such as a confidence outside [0, 1].
    """
    sequence_ids, num_drafts = answer.sequence_ids[:], answer.num_drafts[:]
    count, most = len(sequence_ids), config.num_speculative_tokens
    if count and max(num_drafts, default=0) > most:
        raise InvalidArgumentError("drafts.num_drafts", max(num_drafts), f"allowed range [0, {most}]")
    statuses, lengths, last_tokens = answer.statuses[:], answer.committed_lengths[:], answer.last_tokens[:]
    if not len(statuses) == len(lengths) == len(last_tokens) == len(num_drafts) == count:
        for name in ("statuses", "committed_lengths", "last_tokens", "num_drafts"):
            given = len(getattr(answer, name))
            if given != count:
                raise InvalidArgumentError(f"drafts.{name}", f"{given} entries", f"must be {count}")
    total = sum(num_drafts)
    tokens, logits = _decode_tensors(answer, total, config, vocab_size, draft_vocab_size, draft_token_ids, receiver)
    sure = None
    if confidences and total:
        sure = decode_probabilities(answer.confidences, "drafts.confidences", total).tolist()
    return DecodedAnswer(sequence_ids, statuses, lengths, last_tokens, num_drafts, tokens, logits, sure)


def _decode_tensors(
    answer: draft_pb2.Drafts,
    total: int,
    config: config_pb2.SpeculativeConfig,
    vocab_size: int,
    draft_vocab_size: int,
    draft_token_ids: torch.Tensor | None,
    receiver: TensorReceiver,
) -> tuple[list[int], AnswerLogits | None]:
    """Return the tokens [D], and their logits if configured."""
    if total == 0:
        return [], None
    tokens = decode_ids(answer.tokens, "drafts.tokens", total)
    _check_range(min(tokens), max(tokens), "drafts.tokens", vocab_size)
    form = config.draft_logits.form
    if form == cfg.NONE:
        return tokens, None
    width = config.draft_logits.n if form == cfg.TOP_N else draft_vocab_size
    claimed = receiver.claim(answer.logits, "drafts.logits", torch.float32, (total, width))
    logits = claimed.load()
    if form == cfg.DENSE:
        return tokens, AnswerLogits(logits, None, draft_token_ids, claimed.carrier)
    claimed_ids = receiver.claim(answer.logits_token_ids, "drafts.logits_token_ids", torch.int32, (total, width))
    ids = claimed_ids.load(CPU)  # a copy that the drafter cannot change after the check
    _check_range(int(ids.min()), int(ids.max()), "drafts.logits_token_ids", vocab_size)
    ordered = ids.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):  # q would differ from the distribution of the drafts
        rows = Described(f"{total} rows")
        raise InvalidArgumentError("drafts.logits_token_ids", rows, "each id at most once in a row")
    return tokens, AnswerLogits(logits, ids, draft_token_ids, claimed.carrier)


def _check_range(low: int, high: int, name: str, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        raise InvalidArgumentError(name, low if low < 0 else high, f"token ids must be in [0, {vocab_size})")


def find_mismatched(answers: Sequence[tuple[Request, ReadyDrafts]], use_fp64: bool) -> list[ReadyDrafts]:
    """Return the drafts that differ from the sample of their logits under their request's proposal noise.

    Args:
        answers: Requests and their drafts, all of one message with logits.
        use_fp64: Whether the noise is float64.
    """
    if not answers:
        return []
    logits = answers[0][1].logits
    assert logits is not None
    device = logits.values.device
    drawn = [(request, drafts, j) for request, drafts in answers for j in range(len(drafts.tokens))]
    rows = torch.tensor([drafts.first_row + j for _, drafts, j in drawn])
    values, ids = logits.values[rows.to(device)], logits.draft_token_ids
    if logits.token_ids is not None:  # rows have different ids; their union is the vocabulary
        together, columns = logits.token_ids[rows].to(torch.int64).unique(return_inverse=True)
        ids = together.to(device)
        whole = torch.full((len(rows), len(ids)), -torch.inf, device=device)
        values = whole.scatter_(1, columns.to(device), values)
    column = gumbel_sample(
        values,
        torch.tensor([request.params.temperature for request, _, _ in drawn], device=device),
        torch.tensor([request.keys.proposal for request, _, _ in drawn], device=device),
        torch.tensor([drafts.committed_length + j for _, drafts, j in drawn], device=device),
        draft_offset=torch.tensor([j for _, _, j in drawn], dtype=torch.int32, device=device),
        token_ids=ids,
        use_fp64=use_fp64,
    )
    tokens = column if ids is None else ids[column.clamp(min=0)].where(column >= 0, -1)
    sampled = iter(tokens.tolist())
    return [drafts for _, drafts in answers if drafts.tokens != [next(sampled) for _ in drafts.tokens]]
