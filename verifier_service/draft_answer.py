"""What a drafter answers: checked, decoded, and now and then drawn again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from draftwire import config as cfg
from draftwire.errors import InvalidArgumentError
from draftwire.tensors import decode_tensor
from draftwire.v1 import config_pb2, draft_pb2
from draftwire_kernels import gumbel_sample
from verifier_service.request import ReadyDrafts, Request


@dataclass(frozen=True)
class AnsweredSequence:
    """The answer for one sequence; `drafts` is None when the drafter has no state of it."""

    sequence_id: int
    drafts: ReadyDrafts | None


def decode_answer(
    answer: draft_pb2.Drafts,
    config: config_pb2.SpeculativeConfig,
    vocab_size: int,
    draft_vocab_size: int,
    draft_token_ids: torch.Tensor | None,
) -> Iterator[AnsweredSequence]:
    """The answers for each sequence of a message, which is not trusted.

    Parameters
    ----------
    config
        The verifier's, which says what logits are due.
    draft_token_ids
        Target ids of the draft vocabulary on the target's device, handed on with dense logits.

    Raises
    ------
    InvalidArgumentError
        When arrays disagree, or a tensor is not what is due.
    """
    count = len(answer.sequence_ids)
    for name in ("statuses", "committed_lengths", "last_tokens", "num_drafts"):
        given = len(getattr(answer, name))
        if given != count:
            raise InvalidArgumentError(f"drafts.{name}", f"{given} entries", f"must be {count}")
    tokens, logits, logits_token_ids = _decode_tensors(answer, config, vocab_size, draft_vocab_size)
    start = 0
    for i, sequence_id in enumerate(answer.sequence_ids):
        end = start + answer.num_drafts[i]
        drafts = None
        if answer.statuses[i] == draft_pb2.SEQUENCE_STATUS_OK:
            drafts = ReadyDrafts(
                committed_length=answer.committed_lengths[i],
                last_token=answer.last_tokens[i],
                tokens=tokens[start:end],
                logits=None if logits is None else logits[start:end],
                logits_token_ids=None if logits_token_ids is None else logits_token_ids[start:end],
                draft_token_ids=draft_token_ids,
            )
        yield AnsweredSequence(sequence_id, drafts)
        start = end


def _decode_tensors(
    answer: draft_pb2.Drafts, config: config_pb2.SpeculativeConfig, vocab_size: int, draft_vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Tokens int32 [D] and, as configured, logits float32 [D, n] and their ids int32 [D, n]."""
    total = sum(answer.num_drafts)
    if total == 0:
        return torch.empty(0, dtype=torch.int32), None, None
    tokens = decode_tensor(answer.tokens, "drafts.tokens", torch.int32, (total,))
    _check_ids(tokens, "drafts.tokens", vocab_size)
    form = config.draft_logits.form
    if form == cfg.NONE:
        return tokens, None, None
    width = config.draft_logits.n if form == cfg.TOP_N else draft_vocab_size
    logits = decode_tensor(answer.logits, "drafts.logits", torch.float32, (total, width))
    if form == cfg.DENSE:
        return tokens, logits, None
    ids = decode_tensor(answer.logits_token_ids, "drafts.logits_token_ids", torch.int32, (total, width))
    _check_ids(ids, "drafts.logits_token_ids", vocab_size)
    return tokens, logits, ids


def _check_ids(ids: torch.Tensor, name: str, vocab_size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidArgumentError(name, low if low < 0 else high, f"token ids must be in [0, {vocab_size})")


def is_drawn_from_logits(
    drafts: ReadyDrafts, request: Request, draft_token_ids: torch.Tensor | None, use_fp64: bool
) -> bool:
    """Whether the drafts are what the logits sent with them sample under the request's proposal noise.

    Parameters
    ----------
    draft_token_ids
        Target ids of the draft vocabulary on the CPU, for dense logits over part of the vocabulary.
    """
    assert drafts.logits is not None
    temperature = torch.full((1,), request.params.temperature)
    key = torch.tensor([request.keys.proposal])
    for j, token in enumerate(drafts.tokens.tolist()):
        ids = draft_token_ids if drafts.logits_token_ids is None else drafts.logits_token_ids[j].to(torch.int64)
        column = gumbel_sample(
            drafts.logits[j : j + 1],
            temperature,
            key,
            torch.tensor([drafts.committed_length + j]),
            draft_offset=j,
            token_ids=ids,
            use_fp64=use_fp64,
        )
        if token != int(column if ids is None else ids[column]):
            return False
    return True
