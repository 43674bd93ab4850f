"""The benchmark of structured output: the tokenizer for targets without one."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from draftwire_bench.structured_output import with_tokenizer

VOCAB_SIZE, END = 400, 300


def test_end_ids_of_the_target_are_no_text(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": END}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with with_tokenizer(str(tmp_path)) as directory:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert len(tokenizer) == VOCAB_SIZE
        assert tokenizer.added_tokens_decoder.keys() == {END}
        assert tokenizer.decode([END, 40], skip_special_tokens=True) == tokenizer.decode([40])
        with with_tokenizer(directory) as same:
            assert same == directory
