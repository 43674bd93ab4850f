"""The training data: conversations that the target writes with itself, in files of one batch each.

The target writes user turns from the chat template's prefix and a short opening (the method of Magpie, 2406.08464), and
answers them. No data set is needed, and no prompt of the evaluation is seen.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.chat import opening_prompts, read_turns
from training.generate import Texts, write
from training.target import Target

# Of the answers: greedy text, text as it is mostly served, and text of the target's own distribution.
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)


def write_conversations(
    target: Target, tokenizer: Any, folder: Path, *, rows: int, length: int, seconds: float, most: int, seed: int
) -> None:
    """Write up to `most` files of `rows` conversations of `length` tokens; begin none after `seconds`.

    Files that are there already count, so that a run goes on where it was cut off.
    """
    folder.mkdir(parents=True, exist_ok=True)
    turns = read_turns(tokenizer)
    prompts = opening_prompts(tokenizer, turns)
    began, made = time.monotonic(), 0
    for number in range(most):
        path = folder / f"conversations-{seed:03d}-{number:03d}.npz"
        if path.exists():
            continue
        if time.monotonic() - began > seconds:
            break
        chooser = random.Random(f"{seed} {number}")
        chosen = [chooser.choice(prompts) for _ in range(rows)]
        warmth = [chooser.choice(TEMPERATURES) for _ in range(rows)]
        texts = write(
            target,
            chosen,
            warmth,
            length,
            chooser.getrandbits(31),
            end=turns.before_next[0],
            turns=turns,
        )
        save_texts(texts, path, target.config.vocab_size)
        made += rows * length
        elapsed = time.monotonic() - began
        own = texts.own.float().mean().item()
        print(f"{path.name}: {made / elapsed:.0f} tokens/s, {own:.3f} of them in answers", flush=True)
        if number == 0:
            samples = [tokenizer.decode(row) for row in texts.tokens[:8].tolist()]
            (folder / f"samples-{seed:03d}.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False))


def save_texts(texts: Texts, path: Path, vocab_size: int) -> None:
    """Write a file that `Conversations` reads."""
    kind = np.uint16 if vocab_size <= 65536 else np.int32
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, tokens=texts.tokens.cpu().numpy().astype(kind), own=np.packbits(texts.own.cpu().numpy(), axis=1))
    unfinished.rename(path)


class Conversations:
    """All conversations of a folder on a device, in batches shuffled anew every epoch."""

    def __init__(self, folder: Path, batch: int, device: torch.device) -> None:
        files = sorted(folder.glob("conversations-*.npz"))
        if not files:
            raise SystemExit(f"{folder} has no conversations; run the stage `data` first")
        tokens, own = [], []
        for file in files:
            with np.load(file) as arrays:
                tokens.append(torch.from_numpy(arrays["tokens"].astype(np.int32)))
                own.append(torch.from_numpy(np.unpackbits(arrays["own"], axis=1).astype(bool)))
        self.tokens = torch.cat(tokens).to(device)
        self.own = torch.cat([part[:, : self.tokens.shape[1]] for part in own]).to(device)
        self.batch = min(batch, len(self.tokens))
        self.batches = len(self.tokens) // self.batch
        self.epoch = -1

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Batch number `step` of an endless run: tokens [batch, L] int64, and which are answers [batch, L] bool."""
        epoch, index = divmod(step, self.batches)
        if epoch != self.epoch:
            order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(epoch))
            self.order, self.epoch = order.to(self.tokens.device), epoch
        rows = self.order[index * self.batch : (index + 1) * self.batch]
        return self.tokens[rows].long(), self.own[rows]
