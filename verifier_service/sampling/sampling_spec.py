"""One request's sampling parameters in the form that steps read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwire.v1 import config_pb2


class PenaltyStrengths(NamedTuple):
    """A request's penalties; 1, 0 and 0 are off."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


NO_PENALTIES = PenaltyStrengths()


@dataclass(frozen=True)
class SamplingSpec:
    """The parameters that change a request's logits and log probabilities.

    They are read from the protobuf message once, because reading protobuf fields is slow.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: PenaltyStrengths
    allowed: np.ndarray  # [a] int64, the only tokens that may be drawn; empty for all
    bad_words: tuple[tuple[int, ...], ...]  # sequences of tokens that the output must not contain
    bias_tokens: np.ndarray  # [n] int64
    bias_values: np.ndarray  # [n] float32
    min_tokens: int
    end_ids: np.ndarray  # [m] int64, tokens that are not drawn before min_tokens
    logprobs: int | None  # number of most likely tokens to report beside the emitted one; None reports nothing
    has_seed: bool  # whether the request has a seed; then drafts must not change its tokens
    has_penalties: bool
    has_filter: bool  # whether top-k, top-p or min-p removes tokens

    @classmethod
    def of(cls, params: config_pb2.SamplingParams, eos_token_ids: frozenset[int]) -> SamplingSpec:
        """Return the parameters of a request, for a target with these end tokens."""
        bias = list(params.logit_bias.items())
        end_ids = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        penalties = PenaltyStrengths(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            penalties=penalties,
            allowed=np.array(params.allowed_token_ids, np.int64),
            bad_words=tuple(tuple(word.ids) for word in params.bad_word_ids),
            bias_tokens=np.array([token for token, _ in bias], np.int64),
            bias_values=np.array([value for _, value in bias], np.float32),
            min_tokens=params.min_tokens,
            end_ids=np.array(sorted(end_ids), np.int64),
            logprobs=params.logprobs if params.HasField("logprobs") else None,
            has_seed=params.HasField("seed"),
            has_penalties=penalties != NO_PENALTIES,
            has_filter=params.temperature > 0 and (params.top_k, params.top_p, params.min_p) != (0, 1, 0),
        )

    @property
    def keeps_logits(self) -> bool:
        """Return whether the request samples from unchanged logits after min_tokens."""
        has_lists = len(self.bias_tokens) > 0 or len(self.allowed) > 0 or len(self.bad_words) > 0
        return not (self.has_filter or self.has_penalties or has_lists)
