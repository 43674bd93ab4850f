"""Trains the target of the test pair, a small Llama for Python code: `python -m training.pair --out DIR --work DIR`.

The target is trained from scratch on the source of Python's standard library, and then continues windows of that
source; `python -m training.run --stages train` with the same --work trains heads on these texts.
"""

import argparse
import json
import math
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from training.conversations import TEMPERATURES, save_texts
from training.generate import write
from training.schedule import Optimizers, TimedRun, learning_rate
from training.target import Target

VOCAB_SIZE = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
END = 0  # <|endoftext|>, which precedes every file
WINDOW = 1024
HELD_OUT = 50  # one in 50 files is held out
LARGEST_FILE = 400_000


def read_source(folder: Path) -> tuple[list[str], list[str]]:
    """Return the text of the Python files below a folder, in two lists: for training, and held out."""
    parts: tuple[list[str], list[str]] = ([], [])
    files = [file for file in sorted(folder.rglob("*.py")) if "site-packages" not in file.parts]
    for number, file in enumerate(files):
        if 300 <= file.stat().st_size <= LARGEST_FILE:
            parts[number % HELD_OUT == 0].append(file.read_text(errors="ignore"))
    if not parts[0]:
        raise SystemExit(f"source = {folder}: has no Python files of 300 to {LARGEST_FILE} bytes")
    return parts


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the tokens [N] of all texts, each preceded by END."""
    encodings = tokenizer.encode_batch_fast(texts)
    return torch.tensor([token for encoding in encodings for token in (END, *encoding.ids)])


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the cross entropy of tokens [B, T + 1] in nats per token."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(tokens: Tensor, tokenizer: Path, arguments: argparse.Namespace) -> LlamaForCausalLM:
    """Train the target on random windows of tokens [N] and export it in bfloat16."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, dtype="bfloat16")).float().to(arguments.device)
    optimizers = Optimizers(model, ("model.embed_tokens",))

    def export() -> None:
        weights = {name: w.detach().bfloat16().cpu().contiguous() for name, w in model.named_parameters()}
        save_file(weights, arguments.out / "model.safetensors", metadata={"format": "pt"})
        (arguments.out / "model.safetensors").chmod(0o644)
        model.config.save_pretrained(arguments.out)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if tokenizer.resolve() != arguments.out.resolve():
                shutil.copy(tokenizer / name, arguments.out / name)

    total = 60 * arguments.minutes
    run = TimedRun(arguments.work / "pair.pt", model, optimizers, math.inf, total, export)
    offsets = torch.arange(WINDOW + 1, device=arguments.device)
    while run.unfinished():
        starts = torch.randint(len(tokens) - WINDOW - 1, (arguments.batch, 1), device=arguments.device)
        loss = loss_of(model, tokens[starts + offsets])
        loss.backward()
        optimizers.step(learning_rate(run.progress))
        run.advance(arguments.batch * WINDOW, loss.detach())
    run.save()
    return model


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """Return the mean cross entropy over windows of held-out tokens [N] in bits per token."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [loss_of(model, part).item() * len(part) for part in windows.split(16)]
    return sum(losses) / len(windows) / math.log(2)


def write_texts(target: Target, tokens: Tensor, arguments: argparse.Namespace) -> None:
    """Let the target continue windows of tokens [N], and write one file per batch."""
    folder = arguments.work / "conversations"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(arguments.seed)
    for number in range(arguments.files):
        starts = torch.randint(len(tokens) - 256, (arguments.rows,), generator=generator).tolist()
        lengths = torch.randint(8, 160, (arguments.rows,), generator=generator).tolist()
        prompts = [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
        warmth = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(arguments.rows)]
        texts = write(target, prompts, warmth, arguments.length, arguments.seed + number, end=END)
        save_texts(texts, folder / f"conversations-{arguments.seed:03d}-{number:03d}.npz", VOCAB_SIZE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the target")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/demo/target"), help="directory of its tokenizer")
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of Python files"
    )
    parser.add_argument("--work", type=Path, default=Path("training/work/pair"), help="directory of checkpoint, texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=1.2, help="duration of the training")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens per step")
    parser.add_argument("--files", type=int, default=2, help="files of texts")
    parser.add_argument("--rows", type=int, default=8192, help="texts per file")
    parser.add_argument("--length", type=int, default=384, help="tokens per text")
    parser.add_argument("--seed", type=int, default=1, help="seed of the texts")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    began = time.monotonic()
    trained, held_out = (encode(tokenizer, texts) for texts in read_source(arguments.source))
    print(f"{len(trained)} and {len(held_out)} tokens in {time.monotonic() - began:.0f} s", flush=True)
    model = train(trained.to(arguments.device), arguments.tokenizer, arguments)
    bits = held_out_loss(model.eval(), held_out.to(arguments.device))
    print(json.dumps({"held-out tokens": len(held_out), "bits per token": round(bits, 4)}), flush=True)
    write_texts(Target(arguments.out, arguments.device, torch.float32), trained, arguments)


if __name__ == "__main__":
    main()
