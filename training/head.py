"""Trains the EAGLE-3 head: `python -m training.head --minutes 7`; run it again to go on.

First the target continues windows of its training text (work/continuations.bin): acceptance is counted on what the
target writes, so that is what the head mostly learns from, besides real text in long windows. Then the head is trained
with the paper's training-time test (2503.01840, section 3.1): `--steps` chained steps, each fed with the head's own
hidden states, each matched to the target's distribution over the draft vocabulary, step s weighing 0.8^s.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from training.eagle3 import Eagle3Head, feature_layers
from training.export import bf16_exact, export_head
from training.generate import continuations
from training.llama import Llama, LlamaShape, load_llama
from training.paths import HEAD, TARGET, WORK
from training.run import Optimizers, TimedRun
from training.tokens import Sequences, Windows, learning_rate, load_tokens

ROWS = 512  # head rows of a generated sequence, which has one token more
# Temperature and prompt length of successive batches; greedy text loops when it runs long, so its prompts are long.
PLANS = [(1.0, 64), (0.0, 192), (1.0, 160), (0.0, 320), (0.7, 128), (1.0, 256), (0.0, 256), (0.7, 224)]
STEP_DECAY = 0.8


def generate(target: Llama, tokens: Tensor, sequences: int, batch: int, seconds: float, seed: int) -> None:
    """Writes the target's continuations of random training windows, ROWS + 1 tokens each; computed in bf16.

    Stops at `sequences`, or after the first full round of PLANS that ends past `seconds`.
    """
    cos, sin = target.cos, target.sin
    target = target.bfloat16()
    target.cos, target.sin = cos, sin
    generator = torch.Generator().manual_seed(seed)
    started, made = time.monotonic(), 0
    parts = []
    for number in range(sequences // batch):
        if number % len(PLANS) == 0 and time.monotonic() - started > seconds:
            break
        temperature, prompt = PLANS[number % len(PLANS)]
        starts = torch.randint(len(tokens) - prompt, (batch, 1), generator=generator).to(tokens.device)
        prompts = tokens[starts + torch.arange(prompt, device=tokens.device)].long()
        texts = continuations(target, prompts, ROWS + 1 - prompt, temperature)
        parts.append(texts.cpu().numpy().astype(np.uint16))
        made += texts.numel() - prompts.numel()
    print(f"generated {made / 1e6:.1f} M tokens in {time.monotonic() - started:.0f} s", flush=True)
    joined = np.concatenate(parts)[np.random.default_rng(0).permutation(len(parts) * batch)]
    joined.tofile(WORK / "continuations.bin")


def draft_vocabulary(written: Tensor, vocab_size: int, size: int) -> Tensor:
    """The tokens that the target writes most often, ids ascending."""
    counts = torch.bincount(written.long().cpu(), minlength=vocab_size)
    ids = counts.topk(size).indices.sort().values
    print(f"draft vocabulary of {size} covers {counts[ids].sum() / counts.sum():.4f} of the continuations", flush=True)
    return ids


def go_on_from(head: Eagle3Head, directory: Path) -> None:
    """Takes the weights of an exported head, whose draft vocabulary may be another."""
    weights = load_file(directory / "model.safetensors")
    old = weights.pop("d2t") + torch.arange(len(weights["lm_head.weight"]))
    del weights["t2d"]
    place = torch.full((head.shape.vocab_size,), -1)
    place[old] = torch.arange(len(old))
    rows = place[head.draft_ids.cpu()]
    output = head.lm_head.weight.detach().cpu().clone()
    output[rows >= 0] = weights["lm_head.weight"].float()[rows[rows >= 0]]
    weights["lm_head.weight"] = output
    head.load_state_dict(weights, strict=False)


class Teacher:
    """The loss of the head on a batch of tokens [B, T + 1], the target's forward included."""

    def __init__(self, target: Llama, head: Eagle3Head, layers: list[int], steps: int) -> None:
        self.target, self.head, self.layers, self.steps = target, head, layers, steps
        self.ids = head.draft_ids
        self.device_type = target.model.embed_tokens.weight.device.type

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss, and per step the share of rows whose argmax is the target's, over the whole vocabulary."""
        with torch.no_grad():
            states = self.target.states(tokens)
            logits = self.target.logits_of(states[-1]).float()
            best = logits.argmax(-1)
            wanted = logits[..., self.ids].softmax(-1)
            features = torch.cat([states[layer][:, :-1] for layer in self.layers], dim=-1)
            padded = F.pad(tokens, (0, self.steps))
        rows = features.shape[1]
        with torch.autocast(self.device_type, torch.bfloat16):
            chain = self.head.chain(
                features,
                self.target.model.embed_tokens.weight,
                lambda step, _: padded[:, 1 + step : 1 + step + rows],
                self.steps,
            )
        loss = torch.zeros((), device=tokens.device)
        hits = []
        for step, drafted in enumerate(chain):
            valid = rows - step  # row i of this step predicts x_{i+2+s}; the target must have seen x_{i+1+s}
            scores = drafted[:, :valid].float().log_softmax(-1)
            loss = loss - STEP_DECAY**step * (wanted[:, 1 + step :] * scores).sum(-1).mean()
            with torch.no_grad():
                hits.append((self.ids[scores.argmax(-1)] == best[:, 1 + step :]).float().mean())
        return loss / sum(STEP_DECAY**step for step in range(self.steps)), torch.stack(hits)


def train(arguments: argparse.Namespace) -> None:
    device = arguments.device
    began = time.monotonic()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash and memory-efficient attention alone, for every shape
    text = load_tokens(WORK / "train.bin", device)
    if not (WORK / "continuations.bin").exists():
        limits = (arguments.sequences, arguments.generate_batch, arguments.generate_seconds, arguments.seed)
        generate(load_llama(TARGET, device), text, *limits)
    target = load_llama(TARGET, device)
    target.requires_grad_(False)
    written = load_tokens(WORK / "continuations.bin", device).view(-1, ROWS + 1)
    layers = feature_layers(target.shape.num_hidden_layers)
    names = {"intermediate_size": arguments.intermediate_size}
    shape = LlamaShape(**target.shape.as_dict() | names | {"num_hidden_layers": 1})
    head = Eagle3Head(shape, target.shape.hidden_size, arguments.draft_vocab_size).to(device)
    ids = draft_vocabulary(written.flatten(), shape.vocab_size, arguments.draft_vocab_size)
    head.set_draft_vocabulary(ids.to(device))
    teacher = Teacher(target, head, layers, arguments.steps)
    compiled = torch.compile(teacher.loss, dynamic=False) if arguments.compile else teacher.loss
    optimizers = Optimizers(head, outer=("lm_head",))
    left = arguments.minutes - (time.monotonic() - began) / 60
    run = TimedRun(WORK / "head.pt", head, optimizers, left, arguments.total_minutes)
    if arguments.warm_start and not run.step:
        go_on_from(head, HEAD)
        run.seconds = arguments.warm_start * run.total
    context = arguments.text_context
    real = Windows(text, context + 1, arguments.batch_tokens // context)
    own = Sequences(written, arguments.batch_tokens // ROWS)
    for batch in (real[0], own[0]):
        compiled(batch)[0].backward()  # compiles
    head.zero_grad(set_to_none=True)
    run.restart_clock()
    while run.unfinished():
        batch = real[run.step] if run.step % arguments.text_every == 0 else own[run.step]
        loss, hits = compiled(batch)
        loss.backward()
        optimizers.step(learning_rate(run.progress, decay_from=0.3))
        run.advance(batch.shape[0] * (batch.shape[1] - 1), loss.detach())
        if run.step % 500 == 0:
            print(f"step {run.step} agreement by draft step {[round(x, 4) for x in hits.tolist()]}", flush=True)
    run.save()
    bf16_exact(head)
    export_head(head.state_dict(), shape, layers, HEAD, end=0)
    print(json.dumps({"seconds": round(run.seconds), "steps": run.step, "rows": run.tokens}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=7, help="wall clock of this invocation")
    parser.add_argument("--total-minutes", type=float, default=5, help="training time of the whole run")
    parser.add_argument("--sequences", type=int, default=98304, help="continuations to generate")
    parser.add_argument("--generate-batch", type=int, default=4096)
    parser.add_argument("--generate-seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=5, help="chained steps of the training-time test")
    parser.add_argument("--draft-vocab-size", type=int, default=1920)
    parser.add_argument("--intermediate-size", type=int, default=1536)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--text-every", type=int, default=8, help="one step in so many learns from real text")
    parser.add_argument("--warm-start", type=float, default=0, help="progress of the exported head to go on from")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts that the target continues")
    parser.add_argument("--text-context", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
