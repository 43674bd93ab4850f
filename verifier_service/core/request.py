"""A request: its tokens, cache blocks and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.grammar.matcher import Matcher


@dataclass(frozen=True)
class NoiseKeys:
    """Keys of a request's noise streams, signed 64-bit."""

    proposal: int
    accept: int
    resample: int


@dataclass(frozen=True, eq=False)
class AnswerLogits:
    """Logits of all drafts of one answer, [D, n]; a sequence's drafts are consecutive rows."""

    values: torch.Tensor  # [D, n] float32, on the target's device
    token_ids: torch.Tensor | None  # [D, n] int32, CPU, for top_n
    draft_token_ids: torch.Tensor | None  # int64 [V_draft] on the target's device, for a smaller draft vocabulary
    carrier: draft_pb2.Carrier = draft_pb2.CARRIER_BYTES

    @property
    def row_bytes(self) -> int:
        """Return the size of one draft's logits on the wire, bytes."""
        return sum(tensor[:1].nbytes for tensor in (self.values, self.token_ids) if tensor is not None)


class ReadyDrafts(NamedTuple):
    """Draft tokens that have arrived, and the committed tokens that they continue."""

    committed_length: int
    last_token: int
    tokens: list[int]
    logits: AnswerLogits | None = None
    first_row: int = 0  # of `logits`
    confidences: list[float] | None = None  # [0, 1], of each token; see `Drafts.confidences` in draft.proto

    def first(self, count: int) -> ReadyDrafts:
        """Return the first `count` drafts."""
        return self._replace(tokens=self.tokens[:count])


@dataclass(eq=False)
class Request:
    """State of a request from arrival to its last token.

    The committed tokens are x_0 .. x_n; the cache holds keys and values of the first `num_computed` of them. While
    decoding, num_computed = n: the last token has not run through the target. A preempted request keeps its tokens,
    which all run again.
    """

    request_id: str
    prompt: list[int]
    params: config_pb2.SamplingParams
    num_speculative_tokens: int
    keys: NoiseKeys
    stops: StopConditions
    max_length: int  # most tokens of prompt and output
    traceparent: str = ""  # of the request's span, sent to the drafters; empty without a trace
    number: int = 0  # id in its service
    priority: int = 0  # requests of a lower number go first
    cache_salt: str = ""  # only requests of the same salt share cache blocks
    leader: Request | None = None  # the first output of the same prompt, whose cache blocks this one waits for
    arrival: int = 0  # number of the request in order of arrival; set by the scheduler
    grammar: Matcher | None = None  # of its structured output
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of its full blocks, as far as needed
    num_published: int = 0  # blocks that other requests can find
    num_reused: int = 0  # rows found in the cache at the last admission
    num_prefix_hits: int = 0  # rows found in the cache at the first admission
    num_preemptions: int = 0
    num_in_flight: int = 0  # launched steps with rows of the request that are not committed
    # Whether a drafter sees the draw of a step in flight. Such a draw must be committed: a new draw could be biased by
    # a drafter that has seen the first.
    is_announced: bool = False
    prompt_logprobs: int | None = field(init=False, default=None)  # most likely tokens to report per prompt token
    num_prompt_logprobs: int = 0  # rows of the prompt whose log probabilities are committed
    drafts: ReadyDrafts | None = None
    verify_steps: int = 0
    verify_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_output: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.drafted = [0] * self.num_speculative_tokens
        self.accepted = [0] * self.num_speculative_tokens
        # The first output of a prompt reports them for all outputs.
        if self.params.HasField("prompt_logprobs") and self.leader is None:
            self.prompt_logprobs = self.params.prompt_logprobs

    @property
    def num_output(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Return whether all tokens but the last have run."""
        return len(self.prompt) <= self.num_computed == len(self.tokens) - 1

    @property
    def num_prompt_logprobs_left(self) -> int:
        """Return the number of prompt rows whose log probabilities are still to be committed; the last row has none."""
        return 0 if self.prompt_logprobs is None else max(0, len(self.prompt) - 1 - self.num_prompt_logprobs)

    @property
    def is_in_flight(self) -> bool:
        """Return whether a launched step has rows of the request, and so may give more tokens."""
        return self.num_in_flight > 0

    @property
    def num_drafts_wanted(self) -> int:
        """Return the most drafts of the next verify step, which emits one more token, within the request's length."""
        room = self.max_length - len(self.tokens) - 1
        return self.num_speculative_tokens if room >= self.num_speculative_tokens else max(0, room)

    @property
    def num_feature_rows(self) -> int:
        """Return the number of accepted rows that can be sent: row i needs the features at i and the token at i + 1."""
        last = len(self.tokens) - 1
        return self.num_computed if self.num_computed < last else last

    def count_step(self, num_drafts: int, num_emitted: int) -> None:
        """Count a verify step."""
        self.verify_steps += 1
        self.verify_tokens += num_emitted
        for position in range(num_drafts):
            self.drafted[position] += 1
        for position in range(num_emitted - 1):
            self.accepted[position] += 1

    def statistics(self, synthetic: bool) -> generate_pb2.RequestStatistics:
        """Return the counts and times so far."""
        now = time.monotonic()
        return generate_pb2.RequestStatistics(
            prompt_tokens=len(self.prompt),
            output_tokens=self.num_output,
            verify_steps=self.verify_steps,
            verify_tokens=self.verify_tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            time_to_first_token_s=(now if self.first_token is None else self.first_token) - self.arrived,
            total_time_s=now - self.arrived,
            queue_time_s=(now if self.started is None else self.started) - self.arrived,
            synthetic_acceptance=synthetic,
            prefix_hit_tokens=self.num_prefix_hits,
            preemptions=self.num_preemptions,
        )
