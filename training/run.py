"""Trains a draft head for a target: `python -m training.run --target DIR --head eagle3|dspark --out DIR`.

It has four stages, each of which can be resumed: `data` generates conversations with the target, `answers` generates
answers to held-out prompts, `train` trains the head, `evaluate` counts acceptance on the answers. Heads with the same
--work folder share the texts.
"""

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from training.batches import Batches
from training.conversations import load_conversations, write_conversations
from training.evaluate import draw_answers, evaluate
from training.families import DSpark, Eagle3, Family, Sizes
from training.losses import Mixture, RowStatistics, Terms, row_terms
from training.objectives import expected_length
from training.schedule import Optimizers, TimedRun, learning_rate
from training.target import Target

STAGES = ("data", "answers", "train", "evaluate")


def mask_token(tokenizer: Any) -> int:
    """Return the mask token of a DSpark head: the last special token that texts of the target do not contain."""
    usual = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    return max(set(tokenizer.added_tokens_decoder) - usual, default=tokenizer.eos_token_id)


def make_family(name: str, target: Target, tokenizer: Any, sizes: Sizes) -> Family:
    """Return a new head for a target."""
    if name == "eagle3":
        return Eagle3(target, sizes, tokenizer.eos_token_id)
    return DSpark(target, sizes, tokenizer.eos_token_id, mask_token(tokenizer))


def compiled_terms(device: torch.device) -> Terms:
    """Return `row_terms`, compiled on a GPU."""
    if device.type != "cuda":
        return row_terms
    compiled = torch.compile(row_terms, dynamic=False)

    def terms(
        logits: Tensor, teacher: Tensor, tokens: Tensor, weights: Tensor, mixture: Mixture
    ) -> tuple[Tensor, RowStatistics]:
        return compiled(logits, teacher, tokens, weights, mixture)

    return terms


def train(family: Family, batches: Batches, arguments: argparse.Namespace, deadline: float) -> None:
    """Train the head until the run is finished or `deadline` has passed, and export it."""
    objective = family.objective(compiled_terms(next(family.head.parameters()).device))
    optimizers = Optimizers(family.head, family.outer)
    checkpoint = arguments.work / f"{arguments.head}.pt"
    total = 60 * arguments.train_minutes
    run = TimedRun(checkpoint, family.head, optimizers, deadline, total, lambda: family.export(arguments.out))
    if run.step == 0:
        family.prepare(batches)
        if arguments.initial_head is not None:
            family.load(arguments.initial_head)
        objective.loss(batches[0]).loss.backward()  # compiles
        family.head.zero_grad(set_to_none=True)
    run.restart_clock()
    while run.unfinished():
        batch = batches[run.step]
        report = objective.loss(batch)
        report.loss.backward()
        optimizers.step(arguments.peak * learning_rate(run.progress))
        if run.advance(batch.tokens.numel(), report.loss.detach()):
            for name, rates in (("hits", report.hits), ("accepts", report.accepts)):
                shown = [round(rate, 3) for rate in rates.tolist()]
                print(f"  {name} {shown} length {expected_length(rates):.3f}", flush=True)
    run.save()
    print(json.dumps({"seconds": round(run.seconds), "steps": run.step, "tokens": run.tokens}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--head", choices=("eagle3", "dspark"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the head")
    parser.add_argument("--work", type=Path, default=Path("training/work"), help="directory of texts and checkpoints")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--minutes", type=float, default=8.5, help="stop training this long after the start")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the target")
    data = parser.add_argument_group("data")
    data.add_argument("--files", type=int, default=6, help="files of conversations")
    data.add_argument("--rows", type=int, default=3072, help="conversations per file")
    data.add_argument("--length", type=int, default=768, help="tokens per conversation")
    data.add_argument("--data-seconds", type=float, default=90, help="start no file after this time")
    data.add_argument("--seed", type=int, default=1, help="seed of the conversations; differs for parallel processes")
    training = parser.add_argument_group("train")
    training.add_argument("--train-minutes", type=float, default=4, help="duration of the whole run")
    training.add_argument(
        "--initial-head", type=Path, help="exported head with which a new run starts; default: random"
    )
    training.add_argument("--peak", type=float, default=1, help="factor of the peak learning rates")
    training.add_argument("--batch", type=int, default=32, help="conversations per step")
    training.add_argument(
        "--states-gib", type=float, default=0, help="keep the target's states on the device if they take at most this"
    )
    defaults = Sizes()
    training.add_argument("--draft-layers", type=int, default=defaults.draft_layers, help="DSpark: layers")
    training.add_argument("--intermediate-size", type=int, default=defaults.intermediate_size, help="DSpark: MLP size")
    training.add_argument("--block-size", type=int, default=defaults.block_size, help="DSpark: drafts per block")
    training.add_argument("--markov-rank", type=int, default=defaults.markov_rank, help="DSpark: Markov head's rank")
    training.add_argument("--anchors", type=int, default=defaults.anchors, help="DSpark: blocks per conversation")
    training.add_argument("--draft-vocab-size", type=int, help="EAGLE-3; default: the target's, with its lm_head")
    training.add_argument("--steps", type=int, default=defaults.steps, help="EAGLE-3: chained draft steps")
    evaluation = parser.add_argument_group("evaluate")
    evaluation.add_argument("--new-tokens", type=int, default=256, help="tokens per answer")
    evaluation.add_argument("--prompts", type=int, help="prompts per set; default: all")
    evaluation.add_argument("--json", type=Path, help="report; default: evaluation.json in --out")
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    arguments = parse_arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN attention builds a new plan for every shape
    arguments.work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = Target(arguments.target, arguments.device, getattr(torch, arguments.dtype))
    folder = arguments.work / "conversations"
    if "data" in arguments.stages:
        write_conversations(
            target,
            tokenizer,
            folder,
            rows=arguments.rows,
            length=arguments.length,
            seconds=arguments.data_seconds,
            most=arguments.files,
            seed=arguments.seed,
        )
    if {"answers", "evaluate"} & set(arguments.stages):
        answers = draw_answers(target, tokenizer, arguments.work, arguments.new_tokens, arguments.prompts)
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    family = make_family(arguments.head, target, tokenizer, sizes)
    if "train" in arguments.stages:
        texts = load_conversations(folder, target.device)
        batches = Batches(texts, target, family.entered, arguments.batch, arguments.states_gib * 2**30)
        train(family, batches, arguments, began + 60 * arguments.minutes)
    if "evaluate" in arguments.stages:
        family.load(arguments.out)
        report = evaluate(target, family, answers, arguments.new_tokens)
        (arguments.json or arguments.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    main()
