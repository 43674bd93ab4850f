"""From the prompt of a request to token ids."""

from __future__ import annotations

from typing import NoReturn

from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.contract.validation import check_token_ids
from draftwire.v1.generate_pb2 import Chat, GenerateRequest
from verifier_service.core.tokenizer import TextCodec
from verifier_service.host.access import EngineFacts

# Of a token id in a message, and of all that is not the prompt.
MAX_ID_BYTES = 5
OTHER_FIELDS_BYTES = 1024 * 1024


class PromptReader:
    """Tokenises prompts that fit into the context. Keeps nothing of a request."""

    def __init__(self, facts: EngineFacts, codec: TextCodec | None) -> None:
        self._vocab_size = facts.vocab_size
        self._longest = facts.max_model_len
        self._codec = codec

    def check_message_size(self, request: GenerateRequest) -> None:
        """Refuse at once what no prompt can need: such messages must not wait in memory until they are checked.

        Raises
        ------
        InvalidArgumentError
            When the message is larger than any prompt of this context can be.
        """
        per_token = max(MAX_ID_BYTES, 0 if self._codec is None else self._codec.longest_token_bytes)
        if (num_bytes := request.ByteSize()) > self._longest * per_token + OTHER_FIELDS_BYTES:
            self._refuse_length(f"a message of {num_bytes} bytes")

    def read(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids, cut to the last `truncate_prompt_tokens`; may be called in any thread.

        Raises
        ------
        InvalidArgumentError
            Names the field: for no prompt, an empty one, one that the context does not hold, one that the tokenizer or
            the chat template refuses, and a token for which the target has no row.
        """
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgumentError("prompt", None, "exactly one of text, token_ids and chat is required")
        if not request.HasField("truncate_prompt_tokens"):
            self._check_size(request)
        token_ids = self._read(kind, request)
        field = {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(kind, kind)
        if not token_ids:
            raise InvalidArgumentError(field, Described("no token"), "at least one token is required")
        describe = int if self._codec is None or kind == "token_ids" else self._codec.describe
        check_token_ids(field, token_ids, self._vocab_size, describe)
        if request.HasField("truncate_prompt_tokens"):
            token_ids = token_ids[-request.truncate_prompt_tokens :]
        if len(token_ids) >= self._longest:
            self._refuse_length(f"{len(token_ids)} tokens")
        return token_ids

    def _read(self, kind: str, request: GenerateRequest) -> list[int]:
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if self._codec is None:
            raise InvalidArgumentError("prompt", kind, "this server has no tokenizer; send token_ids")
        if kind == "chat":
            _check_messages(request.chat)
            return self._codec.encode_chat(request.chat.messages)
        if not request.text:
            raise InvalidArgumentError("text", request.text, "must not be empty")
        return self._codec.encode(request.text)

    def _check_size(self, request: GenerateRequest) -> None:
        """Refuse, before the prompt is read and tokenised, what no context can hold."""
        if len(request.token_ids.ids) >= self._longest:
            self._refuse_length(f"{len(request.token_ids.ids)} tokens")
        if self._codec is not None:
            texts = [request.text, *(message.content for message in request.chat.messages)]
            num_bytes = sum(len(text.encode()) for text in texts)
            if num_bytes > self._longest * self._codec.longest_token_bytes:
                self._refuse_length(f"{num_bytes} bytes")

    def _refuse_length(self, length: str) -> NoReturn:
        allowed = f"allowed range [1, {self._longest - 1}] tokens: the context has {self._longest}"
        raise InvalidArgumentError("prompt", Described(length), allowed)


def _check_messages(chat: Chat) -> None:
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", [], "at least one message is required")
    if not all(message.role for message in chat.messages):
        raise InvalidArgumentError("chat.messages.role", "", "allowed length 1 to 64 bytes, got 0")
