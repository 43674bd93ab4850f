"""A small target with random weights, a byte-level tokenizer and a ChatML template, for the training tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|slot|>")
START, END, SLOT = 1, 2, 3
NUM_LAYERS = 7
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the special ones and single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    names = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[START], "eos_token": SPECIAL[END], "pad_token": SPECIAL[END]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    return fast


def write_chat_target(directory: Path, **changes: Any) -> Path:
    """Write the target in float32; `changes` are keys of its configuration."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "eos_token_id": END,
        "bos_token_id": START,
        "pad_token_id": END,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(directory)
    return directory
