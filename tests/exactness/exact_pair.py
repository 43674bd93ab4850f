"""A target with eight tokens and heads for it, trained in seconds: small enough to enumerate all outputs.

The target is a Llama with random weights, large enough that the next token depends on the whole context. The heads are
trained on its samples and stopped early, so that their drafts are often right, but not always.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from exact_dspark import train_dspark
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head, feature_layers
from training.export import dspark_config, eagle3_config, export_head
from training.layers import HeadShape

Head = TypeVar("Head", bound=torch.nn.Module)

VOCAB = 8
LAYERS = 7
FEATURES = feature_layers(LAYERS)
SHAPE = HeadShape(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
)
REDUCED = [0, 1, 2, 4, 5]
"""Target ids of the reduced draft vocabulary."""
LOOK_BACK = 8.0
"""Weight of the previous token in the target."""
TRAINED_LENGTH = 16
TRAINED_SEQUENCES = 1024
TRAINING_STEPS = 45
OVERCONFIDENCE = 2.0
"""Factor of a trained head's logits, so that drafts differ enough from the target to show verification errors."""


@dataclass(frozen=True)
class Pair:
    """Directories of a target and its heads, and the models in them."""

    target_dir: Path
    head_dirs: dict[str, Path]  # EAGLE-3 heads "full" and "reduced", by draft vocabulary, and "dspark"
    target: LlamaForCausalLM
    heads: dict[str, Eagle3Head]
    dspark: DSparkHead


def make_pair(directory: Path) -> Pair:
    """Make the target, train the heads and write all in the published layouts."""
    target = _make_target()
    target_dir = directory / "target"
    target.save_pretrained(target_dir)
    tokens = generate(target, TRAINED_SEQUENCES, TRAINED_LENGTH, seed=5)
    heads, head_dirs = {}, {}
    for name, ids in (("full", list(range(VOCAB))), ("reduced", REDUCED)):
        heads[name] = train_head(target, tokens, torch.tensor(ids))
        head_dirs[name] = directory / f"head-{name}"
        write_head(heads[name], head_dirs[name])
    dspark = _make_dspark(target, tokens)
    head_dirs["dspark"] = directory / "head-dspark"
    config = dspark_config(dspark, [layer - 1 for layer in FEATURES], LAYERS, end=0)
    export_head(dspark, config, head_dirs["dspark"])
    return Pair(target_dir, head_dirs, target, heads, dspark)


def _make_dspark(target: LlamaForCausalLM, tokens: Tensor) -> DSparkHead:
    logits, features = run_target(target, tokens)
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    head = train_dspark(SHAPE, features, tokens, logits.softmax(-1), embedding, output)
    for weight in (head.norm.weight, head.markov_head.markov_w2.weight):
        weight.data *= OVERCONFIDENCE
    return as_stored(head)


def write_head(head: Eagle3Head, directory: Path) -> None:
    """Write a head in the published layout."""
    export_head(head, eagle3_config(head, FEATURES, end=0), directory)


def _make_target() -> LlamaForCausalLM:
    shape = SHAPE.as_dict()
    theta = shape.pop("rope_theta")
    config = LlamaConfig(
        **shape,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).float().eval()
    draw = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.ndim < 2:
                continue
            deviation = {"embed_tokens": 0.3, "lm_head": 0.3}.get(name.split(".")[-2], 0.5 * weight.shape[1] ** -0.5)
            weight.copy_(torch.randn(weight.shape, generator=draw) * deviation)
        _look_back(target)
    return target.requires_grad_(False)


def _look_back(target: LlamaForCausalLM) -> None:
    """Make the first layer attend to the previous token, so that a head needs the features of exactly its row.

    Every embedding gets the same first element, which no layer changes. Only the key and the query of the first
    attention head read this element, so both are equal for all tokens. The key is rotated one position ahead.
    """
    for name, weight in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
        elif weight.ndim == 2:
            weight[:, 0] = 0
    target.get_input_embeddings().weight[:, 0] = 1.0
    attention = target.model.layers[0].self_attn
    half = SHAPE.head_dim // 2
    angles = SHAPE.rope_theta ** (-torch.arange(half) / half)
    attention.q_proj.weight[: SHAPE.head_dim] = 0
    attention.k_proj.weight[:] = 0
    attention.q_proj.weight[:half, 0] = 2.0
    attention.k_proj.weight[:half, 0] = 2.0 * angles.cos()
    attention.k_proj.weight[half:, 0] = 2.0 * angles.sin()
    attention.o_proj.weight[1:, : SHAPE.head_dim] *= LOOK_BACK


def generate(target: LlamaForCausalLM, count: int, length: int, seed: int) -> Tensor:
    """Sample `count` sequences from the target at temperature 1, each after a random token: [count, length]."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (count, 1), generator=draw)
    for _ in range(length - 1):
        probs = target(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=draw)], dim=1)
    return tokens


def run_target(target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [B, T, VOCAB] and the heads' features [B, T, width], as transformers computes them."""
    output = target(tokens, output_hidden_states=True)
    return output.logits, torch.cat([output.hidden_states[layer] for layer in FEATURES], dim=-1)


def train_head(target: LlamaForCausalLM, tokens: Tensor, ids: Tensor, seed: int = 3) -> Eagle3Head:
    """Train a head over the draft vocabulary `ids`; `seed` selects the initial weights."""
    torch.manual_seed(seed)
    head = Eagle3Head(SHAPE.resized(num_hidden_layers=1), SHAPE.hidden_size, len(ids))
    head.set_draft_vocabulary(ids)
    torch.nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    embedding = target.get_input_embeddings().weight
    for step in range(TRAINING_STEPS):
        batch = tokens[torch.arange(64) + 64 * step % len(tokens)]
        logits, features = run_target(target, batch)
        wanted = logits.softmax(-1)[..., ids]
        length = batch.shape[1] - 1
        inputs = F.pad(batch[:, 1:], (0, 1)).unfold(1, length, 1)  # [B, 2, length], tokens of both steps of the chain
        chain = head.chain(features[:, :-1], embedding, lambda s, _, inputs=inputs: inputs[:, s], 2)
        loss = torch.zeros(())
        for s, normed in enumerate(chain):
            rows = length - s  # row i of step s predicts x_{i + 2 + s}, which follows x_{i + 1 + s}
            log_q = head.lm_head(normed[:, :rows]).log_softmax(-1)
            loss = loss - (wanted[:, 1 + s : 1 + s + rows] * log_q).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.lm_head.weight.data *= OVERCONFIDENCE
    return as_stored(head)


def as_stored(head: Head) -> Head:
    """Return the head with its weights rounded to bfloat16, as on disk."""
    for weight in head.parameters():
        weight.data = weight.data.bfloat16().float()
    return head.requires_grad_(False).eval()
