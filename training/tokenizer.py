"""Trains the byte-level BPE tokenizer and encodes the corpus: `python -m training.tokenizer`.

Leaves the tokenizer in models/demo/target and one uint16 file of tokens per split, every file preceded by
<|endoftext|>.
"""

import argparse
import json
import lzma
from collections.abc import Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.data import stable_fraction
from training.paths import CORPUS, TARGET, WORK

END = "<|endoftext|>"
# Words keep one leading sign or space, digits stand alone, indentation stays apart from the word after it.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def corpus() -> Iterator[dict]:
    """Files of the corpus: {"package", "path", "split", "text"}."""
    with lzma.open(CORPUS, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--sample", type=float, default=0.15, help="share of the training files to learn merges from")
    parser.add_argument("--no-encode", action="store_true", help="train only")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if not (TARGET / "tokenizer.json").exists():
        sample = (
            file["text"]
            for file in corpus()
            if file["split"] == "train" and stable_fraction("merge " + file["path"]) < arguments.sample
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer(sample, arguments.vocab_size),
            bos_token=END,
            eos_token=END,
            model_max_length=2048,
            clean_up_tokenization_spaces=False,
        )
        fast.save_pretrained(TARGET)
        config = TARGET / "tokenizer_config.json"  # the class name that older releases know too
        config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    if arguments.no_encode:
        return
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    files = list(corpus())
    for split in ("train", "heldout", "unseen"):
        texts = [file["text"] for file in files if file["split"] == split]
        order = np.random.default_rng(0).permutation(len(texts))
        texts = [texts[i] for i in order]
        tokens: list[np.ndarray] = []
        for start in range(0, len(texts), 1000):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 1000]):
                tokens.append(np.array([end, *encoding.ids], dtype=np.uint16))
        joined = np.concatenate(tokens)
        joined.tofile(WORK / f"{split}.bin")
        size = sum(len(text.encode()) for text in texts)
        print(f"{split}: {len(joined) / 1e6:.2f} M tokens, {size / len(joined):.3f} bytes a token", flush=True)


if __name__ == "__main__":
    main()
