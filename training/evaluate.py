"""Scores the demo pair: `python -m training.evaluate`.

Reads the shipped bf16 weights, computes in float32, and prints and stores bits per byte on held-out files and
acceptance on held-out prompts (those that `python -m training.prompts` draws), counted exactly in one
process. With --server the acceptance is what the real system counts: HOST:PORT asks a verifier that serves the demo
pair, `auto` starts drafter and verifier itself.

The two differ at the end of a continuation. In one process every step drafts k tokens. A verifier asks for fewer when
max_tokens leaves no room for k, so its last steps emit fewer tokens and the acceptance length comes out slightly lower.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from draftwire import Client
from training.acceptance import count_acceptance
from training.bits import bits_per_byte
from training.eagle3 import Eagle3Head
from training.generate import continuations
from training.llama import Llama, LlamaShape, load_llama
from training.paths import DEMO, HEAD, PROMPTS, TARGET
from training.system import complete_all, count_completions, services, wait_for_drafter


def load_head(directory: Path, target: Llama, device: str) -> tuple[Eagle3Head, list[int]]:
    """The head of a published-layout directory and its feature layers."""
    config = json.loads((directory / "config.json").read_text())
    shape = LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__ if name in config})
    head = Eagle3Head(shape, target.shape.hidden_size, config["draft_vocab_size"])
    weights = load_file(directory / "model.safetensors")
    head.load_state_dict({name: w.float() if w.is_floating_point() else w for name, w in weights.items()})
    return head.to(device).eval(), config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def read_prompts(path: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The first `length` tokens of every prompt."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run `python -m training.data` and `python -m training.prompts` first")
    prompts = [tokenizer.encode(json.loads(line)["text"]).ids[:length] for line in path.read_text().splitlines()]
    shortest = min(map(len, prompts), default=0)
    if shortest < length:
        raise SystemExit(f"{path}: its shortest prompt has {shortest} tokens, --prompt-tokens asks for {length}")
    return prompts


def evaluate_in_process(prompts: list[list[int]], tokenizer: Tokenizer, arguments: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    device, k = arguments.device, arguments.k
    target = load_llama(TARGET, device)
    head, layers = load_head(HEAD, target, device)
    rows = torch.tensor(prompts, device=device)
    length = rows.shape[1]
    report: dict[str, Any] = {}
    samples: list[str] = []
    for temperature in arguments.temperatures or [0.0, 0.7, 1.0]:
        repeats = 1 if temperature == 0 else arguments.samples
        # k more tokens than asked for, so that the last verify step is whole.
        tokens = continuations(target, rows.repeat(repeats, 1), arguments.new_tokens + k + 1, temperature)
        everything, varied = count_acceptance(target, head, layers, tokens, length, k, end=0)
        covered = head.t2d[tokens[:, length:]].float().mean().item()
        report[f"temperature {temperature:g}"] = {
            "all": everything.report(),
            "without repeats": varied.report(),
            "draft_vocabulary_coverage": round(covered, 4),
        }
        samples = samples or [tokenizer.decode(row) for row in tokens[:4].tolist()]
    if arguments.score_bytes:
        for split in ("heldout", "unseen"):
            report[split] = bits_per_byte(target, split, device, arguments.score_bytes)
    print("\n-----\n".join(samples))
    return report


def evaluate_system(prompts: list[list[int]], address: str, arguments: argparse.Namespace) -> dict:
    report: dict[str, Any] = {}
    with Client(address) as client:
        info = wait_for_drafter(client)
        report |= {"device": info.device, "dtype": info.dtype, "concurrency": arguments.concurrency}
        for temperature in arguments.temperatures or [0.0, 1.0]:
            completions = complete_all(
                client, prompts, arguments.concurrency, temperature, arguments.new_tokens, arguments.k
            )
            everything, varied = count_completions(completions, arguments.k)
            report[f"temperature {temperature:g}"] = {
                "all": everything.report() | {"drafted": everything.drafted},
                "without repeats": varied.report() | {"drafted": varied.drafted},
            }
    return report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with a `text`")
    parser.add_argument("--prompt-tokens", type=int, default=192, help="tokens that prompts are cut to")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=4, help="drafts per verify step")
    parser.add_argument("--temperatures", type=float, nargs="+", help="default: 0 0.7 1; of the system: 0 1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="default: evaluation.json or evaluation_system.json in models/demo")
    local = parser.add_argument_group("in one process")
    local.add_argument("--samples", type=int, default=4, help="continuations a prompt at temperatures above 0")
    local.add_argument("--score-bytes", type=int, default=12_000_000, help="held-out bytes scored; 0 skips them")
    system = parser.add_argument_group("the real system")
    system.add_argument("--server", metavar="HOST:PORT|auto", help="a verifier, or auto: start both services")
    system.add_argument("--concurrency", type=int, default=16, help="requests at once")
    system.add_argument("--dtype", default="float32", help="compute type of both services that auto starts")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = read_prompts(arguments.prompts, tokenizer, arguments.prompt_tokens)
    report: dict[str, Any] = {
        "prompts": len(prompts),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "k": arguments.k,
    }
    if arguments.server is None:
        report |= evaluate_in_process(prompts, tokenizer, arguments)
    elif arguments.server == "auto":
        with services(arguments.device, arguments.dtype, arguments.k) as address:
            report |= evaluate_system(prompts, address, arguments)
    else:
        report |= evaluate_system(prompts, arguments.server, arguments)
    print(json.dumps(report, indent=1))
    name = "evaluation.json" if arguments.server is None else "evaluation_system.json"
    (arguments.json or DEMO / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
