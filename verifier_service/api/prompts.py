"""Convert the prompts of requests to token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.contract.validation import check_token_ids
from draftwire.v1.generate_pb2 import DetokenizeRequest, GenerateRequest, TokenizeRequest
from verifier_service.core.conversation import texts_of
from verifier_service.core.tokenizer import TextCodec
from verifier_service.host.access import EngineFacts

# Maximum bytes of a token id in a message, and of all fields besides the prompt.
MAX_ID_BYTES = 5
OTHER_FIELDS_BYTES = 1024 * 1024


class PromptReader:
    """Tokenises prompts that fit into the context. Stores no request."""

    def __init__(self, facts: EngineFacts, codec: TextCodec | None) -> None:
        self._vocab_size = facts.vocab_size
        self._longest = facts.max_model_len
        self._codec = codec

    def check_message_size(self, request: GenerateRequest | TokenizeRequest | DetokenizeRequest) -> None:
        """Raise InvalidArgumentError for a message that is larger than any prompt of this context.

        Call before the other checks, so that such messages do not wait in memory.
        """
        per_token = max(MAX_ID_BYTES, 0 if self._codec is None else self._codec.longest_token_bytes)
        if (num_bytes := request.ByteSize()) > self._longest * per_token + OTHER_FIELDS_BYTES:
            self._refuse_length(f"a message of {num_bytes} bytes")

    def read(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids, cut to the last `truncate_prompt_tokens`; thread-safe.

        Raises:
            InvalidArgumentError: If the prompt is missing, empty, too long for the context or rejected by the tokenizer
                or the chat template, or has a token id outside of the vocabulary.
        """
        is_cut = request.HasField("truncate_prompt_tokens")
        if request.WhichOneof("prompt") == "token_ids":
            token_ids = list(request.token_ids.ids)
            if not is_cut and len(token_ids) >= self._longest:
                self._refuse_length(f"{len(token_ids)} tokens")
            self._check_ids("token_ids.ids", token_ids)
        else:
            token_ids = self._tokenise(request, checks_size=not is_cut)
        if is_cut:
            token_ids = token_ids[-request.truncate_prompt_tokens :]
        if len(token_ids) >= self._longest:
            self._refuse_length(f"{len(token_ids)} tokens")
        return token_ids

    def tokenise(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a prompt, which may be longer than the context; errors as of `read`."""
        return self._tokenise(request)

    def text_of(self, request: DetokenizeRequest) -> str:
        """Return the text of tokens.

        Raises:
            InvalidArgumentError: If there is no tokenizer, or token ids are too many, outside of the vocabulary or
                without a text.
        """
        token_ids = list(request.token_ids)
        given = Described(f"{len(token_ids)} tokens")
        if self._codec is None:
            raise InvalidArgumentError("token_ids", given, "this server has no tokenizer")
        if len(token_ids) > self._longest:
            raise InvalidArgumentError("token_ids", given, f"allowed range [0, {self._longest}] tokens")
        check_token_ids("token_ids", token_ids, self._vocab_size)
        try:
            return self._codec.decode(token_ids) if request.skip_special_tokens else self._codec.decode_all(token_ids)
        except ValueError as error:
            raise InvalidArgumentError("token_ids", token_ids, str(error)) from error

    def _tokenise(self, request: GenerateRequest | TokenizeRequest, *, checks_size: bool = True) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            kinds = "text, token_ids and chat" if isinstance(request, GenerateRequest) else "text and chat"
            raise InvalidArgumentError("prompt", None, f"exactly one of {kinds} is required")
        if self._codec is None:
            raise InvalidArgumentError("prompt", kind, "this server has no tokenizer; send token_ids")
        if checks_size:
            self._check_size(request, self._codec)
        if kind == "chat":
            token_ids = self._codec.encode_chat(request.chat)
        elif request.text:
            token_ids = self._codec.encode(request.text)
        else:
            raise InvalidArgumentError("text", request.text, "must not be empty")
        self._check_ids("chat.messages" if kind == "chat" else "text", token_ids, self._codec.describe)
        return token_ids

    def _check_ids(self, field: str, token_ids: list[int], describe: Callable[[int], object] = int) -> None:
        if not token_ids:
            raise InvalidArgumentError(field, Described("no token"), "at least one token is required")
        check_token_ids(field, token_ids, self._vocab_size, describe)

    def _check_size(self, request: GenerateRequest | TokenizeRequest, codec: TextCodec) -> None:
        """Refuse a prompt that is too long for the context before tokenising it."""
        num_bytes = sum(len(text.encode()) for text in (request.text, *texts_of(request.chat)))
        if num_bytes > self._longest * codec.longest_token_bytes:
            self._refuse_length(f"{num_bytes} bytes")

    def _refuse_length(self, length: str) -> NoReturn:
        allowed = f"allowed range [1, {self._longest - 1}] tokens: the context has {self._longest}"
        raise InvalidArgumentError("prompt", Described(length), allowed)
