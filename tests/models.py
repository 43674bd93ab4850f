"""Small targets and heads for the tests, made on disk in the published layouts, once per test session.

Four targets with one byte-level tokenizer: a Llama that has learnt a few sentences by heart, and a Llama, a Qwen3 and a
Mistral (sliding window of 12 positions) with random weights. Each has three heads: `good` is trained on the target's
own output, nearly all drafts of `random` are wrong, and `other` has the same shape and other random weights.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from training.eagle3 import Eagle3Head, feature_layers
from training.export import exported_weights
from training.layers import HeadShape

VOCAB_SIZE = 300
DRAFT_VOCAB_SIZE = 220
HIDDEN_SIZE = 64
NUM_LAYERS = 7  # the fewest for which EAGLE-3's default feature layers are three different ones
CONTEXT = 256
EOS = 0
SLIDING_WINDOW = 12

SENTENCES = (
    "The river bends twice before the mill, then runs straight to the grey harbour wall.",
    "A drafter guesses four words; the verifier keeps the three that it would have said.",
    "Über den Dächern hängt Nebel, und die Möwen hört man, ehe man sie sieht.",
    "Naïve café owners price crème brûlée at 9 €, then wonder where everyone went.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))\n",
    "Поезд ушёл в шесть утра, письмо пришло только к вечеру.",
    "朝の駅で、彼女は古い地図を広げて東へ歩き始めた。",
    "Seven, eleven, thirteen: the bells count odd hours only when the keeper sleeps.",
    "Tickets 🎟️ cost less on Tuesdays 🙂, so the queue 🐍 winds round the block.",
    "Nobody knew who had painted the door green, yet everyone had an opinion about it.",
    "for row in table:\n    total += row.price\n    if total > limit:\n        break\n",
    "In winter the ferry stops, the inn shuts, and the island keeps its own calendar.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
TARGETS = ("llama", "qwen3", "mistral", "random_llama")
HEADS = ("good", "random", "other")


class ModelShelf:
    """Directories of targets and heads, each made at its first use; test processes may share a root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def target(self, name: str) -> Path:
        """Return the directory of a target: `llama`, or with random weights `random_llama`, `qwen3` or `mistral`."""
        return self._once(name, lambda directory: _write_target(name, directory))

    def head(self, target: str, name: str) -> Path:
        """Return the directory of the head `good`, `random` or `other` of a target."""
        target_dir = self.target(target)
        return self._once(f"{target}-{name}", lambda directory: _write_head(name, target, target_dir, directory))

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        directory = self._root / name
        with (self._root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                unfinished = self._root / f"{name}.unfinished"
                unfinished.mkdir()
                write(unfinished)
                unfinished.rename(directory)
        return directory


def session_shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    """Return the shelf that all processes of a test session share."""
    base = tmp_path_factory.getbasetemp()
    return ModelShelf((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models")


def load_reference(directory: Path) -> torch.nn.Module:
    """Return transformers' own model of a target: float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def random_prompts(count: int, seed: int, shortest: int = 3, longest: int = 24) -> list[list[int]]:
    """Return prompts of different lengths, without the end token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@cache
def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer with few merges: most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence for sentence in SENTENCES if sentence.isascii()], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _write_tokenizer(directory: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    fast.save_pretrained(directory)


def _write_target(name: str, directory: Path) -> None:
    _write_tokenizer(directory)
    torch.manual_seed(TARGETS.index(name))
    model: Any
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, initializer_range=0.05))
        _recite(model, [[*make_tokenizer().encode(sentence).ids, EOS] for sentence in SENTENCES])
    elif name == "random_llama":
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, initializer_range=0.15))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_COMMON, initializer_range=0.15))
    else:
        model = MistralForCausalLM(MistralConfig(**_COMMON, initializer_range=0.15, sliding_window=SLIDING_WINDOW))
    model.save_pretrained(directory)


def _recite(model: torch.nn.Module, rows: list[list[int]], steps: int = 90) -> None:
    """Train the model to continue each row from its beginning."""
    tokens, lengths = _padded(rows)
    is_label = torch.arange(1, tokens.shape[1]) < lengths[:, None]
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits[is_label], tokens[:, 1:][is_label])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the rows, padded with end tokens to one length, and their lengths before padding."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [EOS] * (longest - len(row)) for row in rows])
    return tokens, torch.tensor([len(row) for row in rows])


def _write_head(name: str, target_name: str, target_dir: Path, directory: Path) -> None:
    target = load_reference(target_dir)
    rows = _continuations(target, prompts_of(target_name))
    torch.manual_seed(HEADS.index(name))
    shape = HeadShape(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
    )
    head = Eagle3Head(shape, HIDDEN_SIZE, DRAFT_VOCAB_SIZE)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    frequent = torch.bincount(_padded(rows)[0].flatten(), minlength=VOCAB_SIZE).argsort(descending=True, stable=True)
    head.set_draft_vocabulary(frequent[:DRAFT_VOCAB_SIZE].sort().values)
    if name == "good":
        _train_head(head, target, rows)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        **shape.as_dict(),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = {key: value.contiguous() for key, value in exported_weights(head).items()}
    save_file(weights, directory / "model.safetensors")


def prompts_of(target_name: str) -> list[list[int]]:
    """Return 24 prompts that the good head is trained on: random tokens and, for the Llama, beginnings of sentences."""
    prompts = random_prompts(24, seed=7)
    if target_name == "llama":
        tokenizer = make_tokenizer()
        beginnings = [tokenizer.encode(text).ids[: 4 + i] for i, text in enumerate(SENTENCES)]
        prompts = [prompt for pair in zip(beginnings, prompts, strict=False) for prompt in pair]
    return prompts


@torch.no_grad()
def _continuations(target: Any, prompts: list[list[int]], length: int = 56) -> list[list[int]]:
    """Return each prompt with the target's greedy continuation."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[EOS] * (longest - len(prompt)) + prompt for prompt in prompts])
    is_given = torch.arange(longest) >= longest - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    out = target.generate(
        tokens, attention_mask=is_given.long(), max_new_tokens=length, do_sample=False, pad_token_id=EOS
    )
    rows = [row[longest - len(prompt) :] for row, prompt in zip(out.tolist(), prompts, strict=True)]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def _train_head(head: Eagle3Head, target: Any, rows: list[list[int]], steps: int = 80, depth: int = 7) -> None:
    """Train the head on its own states, `depth` drafts deep (EAGLE-3's training-time test)."""
    tokens, lengths = _padded(rows)
    with torch.no_grad():
        hidden = target(tokens, output_hidden_states=True, use_cache=False).hidden_states
        embedding = target.get_input_embeddings().weight
    states = torch.cat([hidden[layer] for layer in feature_layers(NUM_LAYERS)], dim=-1)
    draft_id = torch.full((VOCAB_SIZE,), -100)
    draft_id[head.draft_ids] = torch.arange(DRAFT_VOCAB_SIZE)
    labels = draft_id[tokens].where(torch.arange(tokens.shape[1]) < lengths[:, None], -100)
    count = tokens.shape[1] - depth - 1
    optimizer = torch.optim.Adam(head.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=steps)
    for _ in range(steps):
        batch = torch.randperm(len(rows))[:12]

        def given(step: int, _: Tensor, batch: Tensor = batch) -> Tensor:
            return tokens[batch, 1 + step : 1 + step + count]

        outputs = [head.lm_head(normed) for normed in head.chain(states[batch, :count], embedding, given, depth)]
        loss = torch.stack(
            [
                F.cross_entropy(logits.flatten(0, 1), labels[batch, 2 + step : 2 + step + count].flatten())
                for step, logits in enumerate(outputs)
            ]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
