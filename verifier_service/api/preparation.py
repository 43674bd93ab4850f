"""Validate and tokenise a client's request for the engine."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.fields import check_limits, limits_of
from draftwire.contract.validation import check_token_ids, resolve_sampling_params
from draftwire.v1 import config_pb2
from draftwire.v1.generate_pb2 import GenerateRequest
from draftwire_kernels import derive_stream_keys
from verifier_service.api.prompts import PromptReader
from verifier_service.core.request import NoiseKeys
from verifier_service.core.tokenizer import TextCodec
from verifier_service.grammar.translation import GrammarSource, translate
from verifier_service.host.access import EngineFacts, Submission

LONGEST_BAD_WORD = limits_of(config_pb2.TokenSequence(), "ids").max_items


@dataclass(frozen=True)
class RequestRules:
    """The operator's rules for requests."""

    takes_priorities: bool = False  # whether a request may have a priority other than 0
    default_sampling_params: config_pb2.SamplingParams | None = None  # replace the contract's defaults


DEFAULT_RULES = RequestRules()


class RequestPreparer:
    """Checks requests against the engine's limits and tokenises their prompts. Stores no request.

    Attributes:
        prompts: Reads the prompts of requests.
    """

    def __init__(
        self, facts: EngineFacts, codec: TextCodec | None, config: config_pb2.SpeculativeConfig, rules: RequestRules
    ) -> None:
        self._facts = facts
        self._rules = rules
        self._codec = codec
        self._config = config
        self.prompts = PromptReader(facts, codec)
        self._numbers = itertools.count()

    def prepare(self, request: GenerateRequest, request_id: str, traceparent: str) -> Submission:
        """Return the validated request; thread-safe.

        Raises:
            InvalidArgumentError: If a field is invalid.
        """
        check_limits(request)
        params = self._sampling_params(request.sampling_params)
        prompt = self.prompts.read(request)
        count = self.num_outputs(request)
        return Submission(
            numbers=tuple(next(self._numbers) for _ in range(count)),
            request_id=request_id,
            prompt=prompt,
            params=params,
            num_speculative_tokens=self._num_speculative_tokens(request),
            keys=tuple(_noise_keys(params, index) for index in range(count)),
            max_length=min(len(prompt) + params.max_tokens, self._facts.max_model_len),
            traceparent=traceparent,
            grammar=self._grammar(params),
            priority=self._priority(request),
            cache_salt=request.cache_salt,
        )

    def num_outputs(self, request: GenerateRequest) -> int:
        """Return the number of outputs that a request wants.

        Raises:
            InvalidArgumentError: If this server never has room for them, or the contract does not allow the number.
        """
        if not request.HasField("n"):
            return 1
        limits = limits_of(request, "n")
        most = int(min(limits.max, self._facts.max_num_seqs + self._facts.max_queue))
        if not limits.min <= request.n <= most:
            raise InvalidArgumentError("n", request.n, f"allowed range [1, {most}] on this server")
        return request.n

    def _priority(self, request: GenerateRequest) -> int:
        if request.priority != 0 and not self._rules.takes_priorities:
            allowed = "allowed: 0, because this server runs without --scheduling-policy priority"
            raise InvalidArgumentError("priority", request.priority, allowed)
        return request.priority

    def _sampling_params(self, given: config_pb2.SamplingParams) -> config_pb2.SamplingParams:
        """Return the parameters with defaults, and with bad words as token ids."""
        params = config_pb2.SamplingParams()
        params.CopyFrom(given)
        for field in ("stop", "bad_words"):
            if self._codec is None and (texts := getattr(params, field)):
                raise InvalidArgumentError(f"sampling_params.{field}", list(texts), "this server has no tokenizer")
        for word in params.bad_words:
            params.bad_word_ids.extend(config_pb2.TokenSequence(ids=ids) for ids in self._tokens_of_bad_word(word))
        return resolve_sampling_params(params, self._facts.vocab_size, self._rules.default_sampling_params)

    def _grammar(self, params: config_pb2.SamplingParams) -> GrammarSource | None:
        """Return the grammar of a request with structured output; the engine's process compiles it."""
        if not params.HasField("structured_output"):
            return None
        if self._codec is None:
            kind = params.structured_output.WhichOneof("kind")
            raise InvalidArgumentError("sampling_params.structured_output", kind, "this server has no tokenizer")
        return translate(params.structured_output, self._codec.special_tokens)

    def _tokens_of_bad_word(self, word: str) -> list[list[int]]:
        assert self._codec is not None
        sequences = self._codec.encode_bad_word(word)
        for ids in sequences:
            if not 1 <= len(ids) <= LONGEST_BAD_WORD:
                allowed = f"allowed length 1 to {LONGEST_BAD_WORD} tokens, got {len(ids)}"
                raise InvalidArgumentError("sampling_params.bad_words", word, allowed)
            check_token_ids("sampling_params.bad_words", ids, self._facts.vocab_size, self._codec.describe)
        return sequences

    def _num_speculative_tokens(self, request: GenerateRequest) -> int:
        most = self._config.num_speculative_tokens
        if not request.HasField("num_speculative_tokens"):
            return most
        if request.num_speculative_tokens > most:
            raise InvalidArgumentError(
                "num_speculative_tokens", request.num_speculative_tokens, f"allowed range [0, {most}] on this server"
            )
        return request.num_speculative_tokens


def _noise_keys(params: config_pb2.SamplingParams, index: int) -> NoiseKeys:
    """Return the keys of an output: of the seed plus the output's index, modulo 2^64, or of a random seed."""
    seed = secrets.randbits(63)
    if params.HasField("seed"):
        seed = (params.seed + index + 2**63) % 2**64 - 2**63
    return NoiseKeys(*(int(key) for key in derive_stream_keys([seed])))
