"""Convert text to tokens and back with the target's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from draftwire.contract.errors import CheckpointError, Described, InvalidArgumentError
from draftwire.model.checkpoints import reason_of
from draftwire.v1 import generate_pb2 as pb
from verifier_service.core.conversation import template_inputs

logger = logging.getLogger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Last tokens of the prompt that are decoded with the first output tokens.
CONTEXT_TOKENS = 6
# Number of pending tokens at which text is emitted, and number of pending tokens that remain. A character has at most
# 4 bytes, and each token has at least one byte.
MOST_PENDING = 16
KEPT_PENDING = 4
# Number of tokens above which decoding releases the GIL, which takes longer for a few tokens.
MOST_HELD = 1024
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class TextCodec:
    """The tokenizer of a model directory.

    Attributes:
        longest_token_bytes: Maximum bytes of text of one token.
        largest_token_id: Largest id, added tokens included.
        silent_ids: Ids of special tokens, which decoding leaves out.
        special_tokens: Ids of special tokens, by their text.
    """

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer; raise CheckpointError if there is none or it cannot be read."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
            self._backend = self._tokenizer.backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()
            vocab = self._backend.get_vocab(with_added_tokens=True)
            self.longest_token_bytes = max(len(token.encode()) for token in vocab)
            self.largest_token_id: int = max(vocab.values())
            added = self._backend.get_added_tokens_decoder()
            self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
            self.silent_ids = frozenset(self.special_tokens.values())
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {reason_of(error)}") from error
        self._before_token = self._ordinary_tokens()
        self._token_texts: dict[int, str] = {}

    def describe(self, token_id: int) -> Described:
        """Return a description of a token for errors: its text and id."""
        return Described(f"the token {self._backend.id_to_token(token_id)!r} = {token_id}")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            InvalidArgumentError: If the tokenizer fails on the text.
        """
        return self._encode(text, "text", add_special_tokens=True)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        # A batch releases the GIL; `encode` holds it, and a long prompt would block the engine for seconds. Without
        # offsets (`fast`) it takes half the time.
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise InvalidArgumentError(field, text, f"the target's tokenizer cannot encode it: {error}") from error
        return ids

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """Return the token ids of a word, and also of the word after a space if they are as many but begin differently.

        Same as vLLM's `SamplingParams.update_from_tokenizer`.

        Raises:
            InvalidArgumentError: If the tokenizer fails on the word.
        """
        plain, spaced = (
            self._encode(space + word.lstrip(), "sampling_params.bad_words", add_special_tokens=False)
            for space in ("", " ")
        )
        is_another = len(spaced) == len(plain) and spaced[:1] != plain[:1]
        return [plain, spaced] if is_another else [plain]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special tokens.

        Raises:
            ValueError: If the tokenizer fails on the tokens.
        """
        return self._decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not, in the middle of a text; errors as for `decode`.

        Tokenizers drop a space at the beginning of a text.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            before = self.decode_all(self._before_token)
            whole = self.decode_all([*self._before_token, token_id])
            text = whole[len(before) :] if whole.startswith(before) else self.decode_all([token_id])
            self._token_texts[token_id] = text
        return text

    def _ordinary_tokens(self) -> list[int]:
        """Return the tokens of a letter; none if the tokenizer cannot encode a letter."""
        try:
            return list(self._backend.encode("a", add_special_tokens=False).ids)
        except BaseException as error:
            if not _is_failure(error):
                raise
            return []

    def decode_all(self, token_ids: list[int]) -> str:
        """Return the text of tokens with special tokens; errors as of `decode`."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        try:
            if len(token_ids) > MOST_HELD:
                return str(self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise ValueError(f"the target's tokenizer cannot decode the tokens: {error}") from error
        return text

    def encode_chat(self, chat: pb.Chat) -> list[int]:
        """Return the token ids of a conversation under the chat template.

        They end with the opening of the assistant's answer, or with the last message if it is continued.

        Raises:
            InvalidArgumentError: If there is no chat template, or the conversation is invalid or refused by the
                template.
        """
        if not self._tokenizer.chat_template:
            given = Described(f"{len(chat.messages)} messages")
            raise InvalidArgumentError("chat", given, "the target's tokenizer has no chat template; send text")
        inputs = template_inputs(chat)
        try:
            text = self._tokenizer.apply_chat_template(**inputs, tokenize=False)
        except Exception as error:  # templates may raise any exception
            allowed = f"the chat template refuses it: {error}"
            raise InvalidArgumentError("chat.messages", inputs["conversation"], allowed) from error
        return self._encode(str(text), "chat.messages", add_special_tokens=False)


def _is_failure(error: BaseException) -> bool:
    """Return whether the tokenizers library raised this error.

    The library raises Exception, and for a panic in Rust PanicException, which is not an Exception and cannot be
    imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def find_tokenizer(directory: Path) -> TextCodec | None:
    """Return the tokenizer of a target's directory; None without one, which serves only token ids."""
    return TextCodec(directory) if has_tokenizer(directory) else None


def has_tokenizer(directory: Path) -> bool:
    """Return whether a target's directory has a tokenizer."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def warn_of_ids_beyond(codec: TextCodec, vocab_size: int) -> None:
    """Log a warning if a tokenizer has ids beyond a target's `vocab_size`."""
    if codec.largest_token_id >= vocab_size:
        logger.warning(
            "the tokenizer has %s, beyond the target's vocabulary of %d tokens: prompts with such tokens are refused",
            codec.describe(codec.largest_token_id),
            vocab_size,
        )


class Detokenizer:
    """Output text of one request, token by token; incomplete characters are held back.

    New tokens are decoded together with a few earlier tokens, because tokenizers decode a token differently at the
    beginning of a text, and a character may span several tokens. The cost of a token is independent of the number of
    pending tokens, so that no client's tokens delay other clients.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """Without `skip_special_tokens`, the text has the special tokens."""
        self._decode = codec.decode if skip_special_tokens else codec.decode_all
        self._silent_ids = codec.silent_ids if skip_special_tokens else frozenset[int]()
        self._context = [token for token in prompt[-CONTEXT_TOKENS:] if token not in self._silent_ids]
        self._context_text: str | None = None  # decoded when it is needed
        self._pending: list[int] = []  # tokens whose text is held back

    def push(self, token_id: int) -> str:
        """Append a token and return the new text, which may be empty."""
        if token_id in self._silent_ids:
            return ""
        self._pending.append(token_id)
        text = self._text()
        if text and not text.endswith(REPLACEMENT):
            return self._emit(text)
        return self._shorten(text) if len(self._pending) >= MOST_PENDING else ""

    def flush(self) -> str:
        """Return the text held back, with replacement characters for invalid UTF-8."""
        return self._emit(self._text()) if self._pending else ""

    def _emit(self, text: str) -> str:
        self._context, self._context_text, self._pending = self._pending, None, []
        return text

    def _text(self) -> str:
        """Return the text of the pending tokens."""
        if self._context_text is None:
            self._context_text = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _shorten(self, text: str) -> str:
        """Return the text of all pending tokens but the last `KEPT_PENDING`, which may begin a character.

        The returned tokens are dropped if the kept tokens have the same text without them; otherwise they are the new
        context. Byte fallback needs this: it decodes every byte of an invalid run as a replacement character.
        """
        kept, given = self._pending[-KEPT_PENDING:], self._pending[:-KEPT_PENDING]
        whole = [self._decode(self._context + given + kept[:count]) for count in range(KEPT_PENDING + 1)]
        if not whole[-1].startswith(whole[0]):
            return self._emit(text)
        expected = [one[len(whole[0]) :] for one in whole]
        for context in (self._context, given):
            own = [self._decode(context + kept[:count]) for count in range(KEPT_PENDING + 1)]
            if own == [own[0] + one for one in expected]:
                free = text[: len(text) - len(expected[-1])]
                self._context, self._context_text, self._pending = context, own[0], kept
                return free
        return self._emit(text)


class StopFinder:
    """Holds back text that may be the beginning of a stop text, and finds the first stop text in a stream.

    The cost of a character is independent of the stop texts' lengths (Knuth, Morris and Pratt, 1977), so that no
    client's stop texts delay other clients.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop text that end the text so far
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return (text to emit, the stop text found or None); no text after a stop text is emitted.

        Without `may_end`, stop texts that end in this text are ignored.
        """
        if not self._stops:
            return text, None
        matches = [(self._match(i, text, may_end), stop) for i, (stop, _) in enumerate(self._stops)]
        found = [(at, stop) for at, stop in matches if at is not None]
        self._held += text
        if found:
            at, stop = min(found)
            free, self._held = self._held[:at], ""
            return free, stop
        end = len(self._held) - max(self._matched)
        free, self._held = self._held[:end], self._held[end:]
        return free, None

    def _match(self, index: int, text: str, may_end: bool) -> int | None:
        """Return the start of the stop text, counted from the text held back, if the stop text ends in `text`."""
        stop, borders = self._stops[index]
        matched = self._matched[index]
        for i, character in enumerate(text):
            while matched and character != stop[matched]:
                matched = borders[matched - 1]
            matched += character == stop[matched]
            if matched == len(stop):
                if may_end:
                    return len(self._held) + i + 1 - matched
                matched = borders[-1]
        self._matched[index] = matched
        return None

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
