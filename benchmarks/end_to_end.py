"""Both services as processes on the devices given: greedy identity to transformers, and tokens per second.

    python benchmarks/end_to_end.py --pair demo --verifier-device cuda:0 --drafter-device cuda:0
    python benchmarks/end_to_end.py --pair llama-8b --verifier-device cuda:0 --drafter-device cuda:1

`demo` runs the bundled pair in float32 and compares greedy output with transformers' on the verifier's device.
`llama-8b` runs random weights of the Llama-3.1-8B and EAGLE-3 shapes in bfloat16 under synthetic acceptance: prompts
are random, end-of-sequence is ignored, and every step ships features, drafts k tokens and verifies them all.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table

from draftwire import AsyncClient, Client, Completion
from draftwire.processes import start_drafter, start_verifier
from draftwire.v1 import generate_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
SOURCES = sorted(path for folder in ("draftwire", "verifier_service") for path in (ROOT / folder).glob("*.py"))
START_TIMEOUT_S = 300.0

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
EAGLE3_8B = {**LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}


@click.command()
@click.option("--pair", type=click.Choice(["demo", "llama-8b"]), default="demo", show_default=True)
@click.option("--verifier-device", default="cpu", show_default=True)
@click.option("--drafter-device", default="cpu", show_default=True)
@click.option("--concurrency", default="1,16", show_default=True, help="Numbers of concurrent requests.")
@click.option("--output-tokens", default=128, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the results.")
def main(
    pair: str, verifier_device: str, drafter_device: str, concurrency: str, output_tokens: int, json_path: Path | None
) -> None:
    """Runs one pair and prints a table."""
    console = Console(width=120)
    levels = [int(level) for level in concurrency.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        target, head, extra, speculative = _pair(pair, Path(scratch))
        with (
            start_drafter(head, target, "--device", drafter_device, *extra, timeout_s=START_TIMEOUT_S) as drafter,
            start_verifier(
                target,
                [drafter.address],
                *["--device", verifier_device, "--draft-deadline-ms", "off", *extra],
                *["--speculative-config", json.dumps(speculative)],
                timeout_s=START_TIMEOUT_S,
            ) as verifier,
        ):
            _wait_until_ready(verifier.address)
            vocab_size = _info(verifier.address).vocab_size
            prompts = _prompts(target, vocab_size, max(levels), 256 if pair != "demo" else 64)
            options = {"temperature": 0.0} if pair == "demo" else {"temperature": 1.0}
            rows = asyncio.run(_sweep(verifier.address, prompts, levels, output_tokens, options))
            identity = None
            if pair == "demo":
                identity = asyncio.run(_identity(verifier.address, target, verifier_device, output_tokens, vocab_size))
    result = {
        "pair": pair,
        "verifier": _device_name(verifier_device),
        "drafter": _device_name(drafter_device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "output_tokens": output_tokens,
        "greedy_identity": identity,
        "throughput": rows,
    }
    _print(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if identity is not None and identity["identical"] != identity["requests"]:
        raise click.ClickException("greedy output differs from transformers'")


def _pair(pair: str, scratch: Path) -> tuple[Path, Path, list[str], dict[str, Any]]:
    """(target, head, further arguments of both services, speculative config)."""
    if pair == "demo":
        return DEMO / "target", DEMO / "head", ["--dtype", "float32"], {}
    for name, config in (("target", LLAMA_8B), ("head", EAGLE3_8B)):
        (scratch / name).mkdir()
        (scratch / name / "config.json").write_text(json.dumps(config))
    extra = ["--dtype", "bfloat16", "--load-format", "dummy", "--max-num-seqs", "64"]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    return scratch / "target", scratch / "head", extra, synthetic


def _info(address: str) -> pb.GetVerifierInfoResponse:
    with Client(address) as client:
        return client.info()


def _wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while any(drafter.state != pb.DRAFTER_STATE_READY for drafter in _info(address).drafters):
        if time.monotonic() > deadline:
            raise click.ClickException(f"the drafter is not ready: {_info(address)}")
        time.sleep(0.1)


def _prompts(target: Path, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Beginnings of our own source files, which the demo pair has never seen, else random tokens."""
    rng = random.Random(0)
    if (target / "tokenizer.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(target)
        texts = [path.read_text() for path in SOURCES if path.stat().st_size > 2000]
        return [tokenizer(texts[i % len(texts)]).input_ids[:length] for i in range(count)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


async def _sweep(
    address: str, prompts: list[list[int]], levels: list[int], output_tokens: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    rows = []
    async with AsyncClient(address) as client:

        async def run(count: int, k: int | None, tokens: int) -> tuple[float, list[Completion]]:
            began = time.monotonic()
            calls = [
                client.complete(prompt, max_tokens=tokens, ignore_eos=True, seed=i, num_speculative_tokens=k, **options)
                for i, prompt in enumerate(prompts[:count])
            ]
            done = await asyncio.gather(*calls)
            return time.monotonic() - began, list(done)

        for count in levels:
            row: dict[str, Any] = {"concurrency": count}
            for name, k in (("off", 0), ("on", None)):
                await run(count, k, 8)
                seconds, done = await run(count, k, output_tokens)
                row[f"tokens_per_s_{name}"] = sum(len(c.token_ids) for c in done) / seconds
            row["acceptance_length"] = sum(c.statistics.verify_tokens for c in done) / sum(
                c.statistics.verify_steps for c in done
            )
            row["drafted"] = sum(sum(c.statistics.drafted) for c in done)
            row["verify_steps"] = sum(c.statistics.verify_steps for c in done)
            rows.append(row)
    return rows


async def _identity(address: str, target: Path, device: str, output_tokens: int, vocab_size: int) -> dict[str, int]:
    """Greedy output of 16 requests that join and leave, beside transformers' on the same device, float32."""
    rng = random.Random(1)
    texts = _prompts(target, vocab_size, 16, 400)
    prompts = [text[: rng.choice([1, 7, 40, 130, 400])] for text in texts]
    lengths = [rng.randrange(output_tokens // 4, output_tokens) for _ in prompts]

    async with AsyncClient(address) as client:

        async def one(prompt: list[int], length: int) -> Completion:
            await asyncio.sleep(rng.random() / 2)
            return await client.complete(prompt, temperature=0.0, max_tokens=length)

        done = await asyncio.gather(*(one(p, n) for p, n in zip(prompts, lengths, strict=True)))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    model.to(device)
    identical = drafted = accepted = 0
    for prompt, length, completion in zip(prompts, lengths, done, strict=True):
        ids = torch.tensor([prompt], device=device)
        reference = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        identical += reference[0, len(prompt) :].tolist() == list(completion.token_ids)
        drafted += sum(completion.statistics.drafted)
        accepted += sum(completion.statistics.accepted)
    return {"requests": len(done), "identical": identical, "drafted": drafted, "accepted": accepted}


def _device_name(device: str) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device


def _print(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{result['pair']}: verifier on {result['verifier']}, drafter on {result['drafter']}")
    for column in ("concurrent requests", "tokens/s, drafting off", "tokens/s, drafting on", "acceptance length"):
        table.add_column(column, justify="right")
    for row in result["throughput"]:
        table.add_row(
            str(row["concurrency"]),
            f"{row['tokens_per_s_off']:.1f}",
            f"{row['tokens_per_s_on']:.1f}",
            f"{row['acceptance_length']:.2f}",
        )
    console.print(table)
    if result["greedy_identity"] is not None:
        counts = result["greedy_identity"]
        console.print(
            f"greedy output identical to transformers': {counts['identical']} of {counts['requests']} requests"
        )


if __name__ == "__main__":
    main()
