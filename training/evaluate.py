"""Scores the demo pair: `python -m training.evaluate`.

Reads the shipped bf16 weights, computes in float32, and prints and stores bits per byte on held-out files and
acceptance on held-out prompts (models/demo/prompts.jsonl, or more of them drawn the same way).
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.acceptance import count_acceptance
from training.bits import bits_per_byte
from training.eagle3 import Eagle3Head
from training.generate import continuations
from training.llama import Llama, LlamaShape, load_llama
from training.paths import DEMO, HEAD, PROMPTS, TARGET


def load_head(directory: Path, target: Llama, device: str) -> tuple[Eagle3Head, list[int]]:
    """The head of a published-layout directory and its feature layers."""
    config = json.loads((directory / "config.json").read_text())
    shape = LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__ if name in config})
    head = Eagle3Head(shape, target.shape.hidden_size, config["draft_vocab_size"])
    weights = load_file(directory / "model.safetensors")
    head.load_state_dict({name: w.float() if w.is_floating_point() else w for name, w in weights.items()})
    return head.to(device).eval(), config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def read_prompts(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with a `text` of one token length")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="continuations a prompt at temperatures above 0")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--score-bytes", type=int, default=12_000_000, help="held-out bytes scored; 0 skips them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=DEMO / "evaluation.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = arguments.device
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    target = load_llama(TARGET, device)
    head, layers = load_head(HEAD, target, device)
    rows = [tokenizer.encode(prompt["text"]).ids for prompt in read_prompts(arguments.prompts)]
    prompts = torch.tensor(rows, device=device)
    length = prompts.shape[1]
    report: dict = {"prompts": len(rows), "prompt_tokens": length, "new_tokens": arguments.new_tokens, "k": arguments.k}
    for temperature in arguments.temperatures:
        repeats = 1 if temperature == 0 else arguments.samples
        # k more tokens than asked for, so that the last verify step is whole.
        tokens = continuations(target, prompts.repeat(repeats, 1), arguments.new_tokens + arguments.k + 1, temperature)
        everything, varied = count_acceptance(target, head, layers, tokens, length, arguments.k, end=0)
        covered = head.t2d[tokens[:, length:]].float().mean().item()
        report[f"temperature {temperature:g}"] = {
            "all": everything.report(),
            "without repeats": varied.report(),
            "draft_vocabulary_coverage": round(covered, 4),
        }
        if temperature == arguments.temperatures[0]:
            report["samples"] = [tokenizer.decode(row) for row in tokens[:4].tolist()]
    if arguments.score_bytes:
        for split in ("heldout", "unseen"):
            report[split] = bits_per_byte(target, split, device, arguments.score_bytes)
    samples = report.pop("samples")
    print("\n-----\n".join(samples))
    print(json.dumps(report, indent=1))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
