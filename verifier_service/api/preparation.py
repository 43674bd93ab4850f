"""From a request as it came to one that the engine can take: validated and tokenised."""

from __future__ import annotations

import itertools
import secrets

from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.contract.validation import check_limits, check_token_ids, resolve_sampling_params
from draftwire.v1 import config_pb2
from draftwire.v1.generate_pb2 import GenerateRequest
from draftwire_kernels import derive_stream_keys
from verifier_service.core.request import NoiseKeys
from verifier_service.core.tokenizer import TextCodec
from verifier_service.host.access import EngineFacts, Submission

# Of a token id in a message, and of all that is not the prompt.
MAX_ID_BYTES = 5
OTHER_FIELDS_BYTES = 1024 * 1024


class RequestPreparer:
    """Checks requests against the engine's facts and tokenises their prompts. Keeps nothing of a request."""

    def __init__(self, facts: EngineFacts, codec: TextCodec | None, config: config_pb2.SpeculativeConfig) -> None:
        self._facts = facts
        self._codec = codec
        self._config = config
        self._numbers = itertools.count()

    def check_message_size(self, request: GenerateRequest) -> None:
        """Refuse at once what no prompt can need: such messages must not wait in memory until they are checked.

        Raises
        ------
        InvalidArgumentError
            When the message is larger than any prompt of this context can be.
        """
        per_token = max(MAX_ID_BYTES, 0 if self._codec is None else self._codec.longest_token_bytes)
        if (num_bytes := request.ByteSize()) > self._facts.max_model_len * per_token + OTHER_FIELDS_BYTES:
            self._refuse_length(f"a message of {num_bytes} bytes")

    def prepare(self, request: GenerateRequest, request_id: str, traceparent: str) -> Submission:
        """Return the validated request; may be called in any thread.

        Raises
        ------
        InvalidArgumentError
            Names the field, its value and what is allowed.
        """
        check_limits(request)
        params = resolve_sampling_params(request.sampling_params, self._facts.vocab_size)
        prompt = self._prompt(request)
        longest = self._facts.max_model_len
        if len(prompt) >= longest:
            self._refuse_length(f"{len(prompt)} tokens")
        if params.stop and self._codec is None:
            raise InvalidArgumentError("sampling_params.stop", list(params.stop), "this server has no tokenizer")
        seed = params.seed if params.HasField("seed") else secrets.randbits(63)
        return Submission(
            number=next(self._numbers),
            request_id=request_id,
            prompt=prompt,
            params=params,
            num_speculative_tokens=self._num_speculative_tokens(request),
            keys=NoiseKeys(*(int(key) for key in derive_stream_keys([seed]))),
            max_length=min(len(prompt) + params.max_tokens, longest),
            traceparent=traceparent,
        )

    def _num_speculative_tokens(self, request: GenerateRequest) -> int:
        most = self._config.num_speculative_tokens
        if not request.HasField("num_speculative_tokens"):
            return most
        if request.num_speculative_tokens > most:
            raise InvalidArgumentError(
                "num_speculative_tokens", request.num_speculative_tokens, f"allowed range [0, {most}] on this server"
            )
        return request.num_speculative_tokens

    def _prompt(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids, for each of which the target has a row."""
        token_ids = self._read_prompt(request)
        kind = request.WhichOneof("prompt")
        field = {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(str(kind), str(kind))
        if not token_ids:
            raise InvalidArgumentError(field, Described("no token"), "at least one token is required")
        describe = int if self._codec is None or kind == "token_ids" else self._codec.describe
        check_token_ids(field, token_ids, self._facts.vocab_size, describe)
        return token_ids

    def _read_prompt(self, request: GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        self._check_size(request)
        if kind is None:
            raise InvalidArgumentError("prompt", None, "exactly one of text, token_ids and chat is required")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if self._codec is None:
            raise InvalidArgumentError("prompt", kind, "this server has no tokenizer; send token_ids")
        if kind == "chat":
            if not request.chat.messages:
                raise InvalidArgumentError("chat.messages", [], "at least one message is required")
            if not all(message.role for message in request.chat.messages):
                raise InvalidArgumentError("chat.messages.role", "", "allowed length 1 to 64 bytes, got 0")
            return self._codec.encode_chat(request.chat.messages)
        if not request.text:
            raise InvalidArgumentError("text", request.text, "must not be empty")
        return self._codec.encode(request.text)

    def _check_size(self, request: GenerateRequest) -> None:
        """Refuse, before the prompt is read and tokenised, what no context can hold."""
        longest = self._facts.max_model_len
        if len(request.token_ids.ids) >= longest:
            self._refuse_length(f"{len(request.token_ids.ids)} tokens")
        if self._codec is not None:
            texts = [request.text, *(message.content for message in request.chat.messages)]
            num_bytes = sum(len(text.encode()) for text in texts)
            if num_bytes > longest * self._codec.longest_token_bytes:
                self._refuse_length(f"{num_bytes} bytes")

    def _refuse_length(self, length: str) -> None:
        longest = self._facts.max_model_len
        allowed = f"allowed range [1, {longest - 1}] tokens: the context has {longest}"
        raise InvalidArgumentError("prompt", Described(length), allowed)
