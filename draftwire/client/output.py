"""The outputs of a client, as immutable data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Literal

from draftwire.contract.errors import RequestError
from draftwire.v1 import generate_pb2 as pb

FinishReason = Literal["stop", "length"]
_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of one token under the target."""

    logprob: float
    rank: int
    """Rank of the token; 1 is the most likely."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the most likely tokens, most likely first."""
    text: str = ""
    """Text of the token alone; empty if the server has no tokenizer."""
    top_texts: tuple[str, ...] = ()
    """Texts of the most likely tokens."""
    token_id: int | None = None
    """The token; set only for tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of one request, with the fields of the contract's RequestStatistics."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    verify_tokens: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    time_to_first_token_s: float = 0.0
    total_time_s: float = 0.0
    queue_time_s: float = 0.0
    synthetic_acceptance: bool = False
    prefix_hit_tokens: int = 0
    preemptions: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens emitted per verify step, bonus token included; None without verify steps."""
        return self.verify_tokens / self.verify_steps if self.verify_steps else None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Accepted over drafted at each draft position, first position first (unconditional rates)."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time in the server, queue and prompt included; 0 when no time passed."""
        return self.output_tokens / self.total_time_s if self.total_time_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output. The last one of a request has `finish_reason` and `statistics`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    """For each token, whether it is an accepted draft."""
    token_text_ends: tuple[int, ...] = ()
    """For each token, the number of characters of `text` up to its end; empty if the server does not send it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    stop_token_id: int | None = None
    statistics: Statistics | None = None
    request_id: str = ""
    index: int = 0
    """Index of the output, in [0, n)."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's tokens, from the second token on; sent before the output."""

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, drafted) of each token with text; text of no token counts as not drafted."""
        return _pieces(self.text, self.token_text_ends, self.drafted)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    token_text_ends: tuple[int, ...]
    """For each token, the number of characters of `text` up to its end; empty if the server does not send it."""
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_text: str | None
    stop_token_id: int | None
    statistics: Statistics
    request_id: str
    index: int = 0
    """Index of the output, in [0, n)."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's tokens, from the second token on, if requested; of output 0 only."""

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, drafted) of each token with text; text of no token counts as not drafted."""
        return _pieces(self.text, self.token_text_ends, self.drafted)

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> Completion:
        """Join the chunks of one output.

        Raises:
            RequestError: If the last chunk is missing.
        """
        last = chunks[-1] if chunks else Chunk()
        if last.finish_reason is None or last.statistics is None:
            raise RequestError("INTERNAL", "the server ended the stream without a finish reason and statistics")
        starts = accumulate((len(chunk.text) for chunk in chunks), initial=0)
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            drafted=tuple(flag for chunk in chunks for flag in chunk.drafted),
            token_text_ends=tuple(
                start + end for start, chunk in zip(starts, chunks, strict=False) for end in chunk.token_text_ends
            ),
            logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
            finish_reason=last.finish_reason,
            stop_text=last.stop_text,
            stop_token_id=last.stop_token_id,
            statistics=last.statistics,
            request_id=last.request_id,
            index=last.index,
            prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
        )

    @classmethod
    def all_from_chunks(cls, chunks: Sequence[Chunk], count: int) -> list[Completion]:
        """Join the chunks of a request with `count` outputs, interleaved in any order; errors as of `from_chunks`."""
        outputs: list[list[Chunk]] = [[] for _ in range(count)]
        for chunk in chunks:
            outputs[chunk.index].append(chunk)
        return [cls.from_chunks(output) for output in outputs]


def _pieces(text: str, ends: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    start = 0
    for end, drafted in zip(ends, flags, strict=False):
        if end > start:
            yield text[start:end], drafted
            start = end
    if start < len(text):
        yield text[start:], False


def chunk_from_message(message: pb.GenerateResponse, request_id: str) -> Chunk:
    """Return the chunk of one message; `request_id` is that of earlier messages, empty for the first."""
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        drafted=tuple(message.drafted),
        token_text_ends=tuple(message.token_text_ends),
        logprobs=tuple(map(_token_logprobs, message.logprobs)),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        stop_text=message.stop_text if message.HasField("stop_text") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        statistics=_statistics(message.statistics) if message.HasField("statistics") else None,
        request_id=message.request_id or request_id,
        index=message.index,
        prompt_logprobs=tuple(map(_token_logprobs, message.prompt_logprobs)),
    )


def _token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob,
        rank=message.rank,
        top=tuple(zip(message.top_ids, message.top_logprobs, strict=True)),
        text=message.text,
        top_texts=tuple(message.top_texts),
        token_id=message.token_id if message.HasField("token_id") else None,
    )


def _statistics(message: pb.RequestStatistics) -> Statistics:
    values = {field.name: getattr(message, field.name) for field in fields(Statistics)}
    return Statistics(**{**values, "drafted": tuple(message.drafted), "accepted": tuple(message.accepted)})
