"""Bits per byte on files the model was not trained on."""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.llama import Llama
from training.paths import TARGET, WORK
from training.tokens import bits, load_tokens


def split_files(tokens: Tensor, end: int) -> list[Tensor]:
    """The files of a token stream, each with the <|endoftext|> before it."""
    starts = (tokens == end).nonzero().flatten().tolist()
    return [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


@torch.no_grad()
def bits_per_byte(model: Llama, split: str, device: str, max_bytes: int, batch: int = 16) -> dict[str, float]:
    """Scores whole files in windows of the model's context that overlap by half; each token is scored once.

    The first window of a file starts at its <|endoftext|>; a later one scores its second half only, so every token
    past the first window has at least half the context before it.
    """
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    context = model.shape.max_position_embeddings
    windows: list[tuple[Tensor, int]] = []  # tokens, first scored prediction
    size = count = files = 0
    for file in split_files(load_tokens(WORK / f"{split}.bin", "cpu").long(), end=0):
        if size >= max_bytes:
            break
        size += len(tokenizer.decode(file[1:].tolist()).encode())
        count += len(file) - 1
        files += 1
        windows.append((file[: context + 1], 0))
        for start in range(context // 2, len(file) - 1 - context // 2, context // 2):
            windows.append((file[start : start + context + 1], context // 2))
    windows.sort(key=lambda window: len(window[0]))
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(windows), batch):
        group = windows[start : start + batch]
        longest = max(len(tokens) for tokens, _ in group)
        padded = torch.zeros(len(group), longest, dtype=torch.long)
        labels = torch.full((len(group), longest - 1), -100)
        for row, (tokens, first) in enumerate(group):
            padded[row, : len(tokens)] = tokens
            labels[row, first : len(tokens) - 1] = tokens[first + 1 :]
        logits = model(padded[:, :-1].to(device))
        nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten().to(device), reduction="sum").double()
    return {
        "bits_per_byte": round(bits(nats.item()) / size, 4),
        "bits_per_token": round(bits(nats.item()) / count, 4),
        "bytes": size,
        "files": files,
        "context": context,
    }
