"""The target's vocabulary for the grammar engine: the bytes of each token."""

from __future__ import annotations

import logging
from pathlib import Path

import llguidance
import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

logger = logging.getLogger(__name__)

# An additional token, which the engine allows where a grammar's text may end.
END_TOKEN = "<|draftwire: the text may end|>"


class Vocabulary:
    """The vocabulary of a target, created once.

    Attributes:
        tokenizer: llguidance's tokenizer. No grammar allows ids of the target without a token of the tokenizer.
        num_words: 32-bit words of a row's bit mask; bit i of word w is the token 32 w + i.
        end_bit: Id of the token for the end of a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read a copy of a tokenizer for a target of `vocab_size` ids.

        Raises:
            ValueError: If llguidance cannot determine the bytes of the tokenizer's tokens.
        """
        own = Tokenizer.from_str(tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        own.add_special_tokens([AddedToken(END_TOKEN, special=True)])
        end = own.token_to_id(END_TOKEN)
        assert end is not None
        self.end_bit: int = end
        size = max(vocab_size, own.get_vocab_size(with_added_tokens=True), end + 1)
        self.tokenizer = llguidance.LLTokenizer(own.to_str(), n_vocab=size, eos_token=[end])
        self.num_words = -(-size // 32)

    def take_end_bits(self, masks: np.ndarray) -> np.ndarray:
        """Clear the end bit in masks [M, num_words] int32, and return [M] bool: where the bit was set."""
        word, place = divmod(self.end_bit, 32)
        bit = np.array([1 << place], np.uint32).view(np.int32)[0]
        is_set: np.ndarray = (masks[:, word] & bit) != 0
        masks[:, word] &= ~bit
        return is_set


def load_vocabulary(directory: Path, vocab_size: int) -> Vocabulary | str:
    """Return the vocabulary of a target's directory, or the reason why structured output cannot be served."""
    try:
        backend = AutoTokenizer.from_pretrained(directory).backend_tokenizer
        return Vocabulary(backend, vocab_size)
    except BaseException as error:  # of the tokenizers library, whose panics are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.warning("structured output is not served: %s", error)
        return f"the target's tokenizer cannot be used for structured output: {error}"
