"""Trains the target: `python -m training.target --minutes 8`; run it again to go on.

The learning rate follows the share of --total-minutes that has been trained, over all invocations. The first half of
the run sees windows of 1024 tokens, the second of 2048. The state of the run lies in work/target.pt.
"""

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.bits import bits_per_byte
from training.export import bf16_exact, export_target
from training.llama import Llama, LlamaShape, load_llama
from training.paths import TARGET, WORK
from training.run import Optimizers, TimedRun
from training.tokens import Windows, learning_rate, load_tokens

SHORT, LONG = 1024, 2048


def train(arguments: argparse.Namespace) -> None:
    device = arguments.device
    torch.manual_seed(0)
    shape = LlamaShape(**json.loads(arguments.shape))
    model = Llama(shape).to(device)
    tokens = load_tokens(WORK / "train.bin", device)
    optimizers = Optimizers(model, outer=("model.embed_tokens",))

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    compiled = torch.compile(loss_of, dynamic=False) if arguments.compile else loss_of
    run = TimedRun(WORK / "target.pt", model, optimizers, arguments.minutes, arguments.total_minutes)
    if arguments.warm_start and not run.step:
        model.load_state_dict(load_llama(TARGET, device).state_dict())
        run.seconds = arguments.warm_start * run.total
    windows: Windows | None = None
    while run.unfinished():
        context = min(SHORT if run.progress < 0.5 else LONG, shape.max_position_embeddings)
        if windows is None or windows.length != context + 1:
            windows = Windows(tokens, context + 1, arguments.batch_tokens // context)
            batch = windows[run.step]
            compiled(batch[:, :-1], batch[:, 1:]).backward()  # compiles
            model.zero_grad(set_to_none=True)
            run.restart_clock()
        batch = windows[run.step]
        loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizers.step(learning_rate(run.progress))
        run.advance(batch.shape[0] * context, loss)
    run.save()
    bf16_exact(model)
    export_target(model, TARGET, end=0)
    report: dict[str, Any] = {
        "seconds": round(run.seconds),
        "steps": run.step,
        "tokens": run.tokens,
        "progress": run.progress,
    }
    for split in ("heldout", "unseen"):
        report[split] = bits_per_byte(model.eval(), split, device, arguments.score_bytes)
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8, help="wall clock of this invocation")
    parser.add_argument("--total-minutes", type=float, default=16, help="training time of the whole run")
    parser.add_argument("--warm-start", type=float, default=0, help="progress of the exported weights to go on from")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--score-bytes", type=int, default=2_000_000, help="held-out bytes scored at the end")
    parser.add_argument("--shape", default="{}", help="JSON of sizes that differ from LlamaShape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
