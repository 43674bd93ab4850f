"""Recipe of the demo pair: data, tokenizer, target, head, evaluation; each stage is one command (README.md)."""
