"""A DSpark head for the tiny target, written down on its own: trained in seconds, and the law of its first drafts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.layers import HeadShape

BLOCK_SIZE = 4
RANK = 4
THETA = 10000.0


class DSparkHead(nn.Module):
    """One layer, full attention; slot i of a block predicts the token behind it. Names are those of DeepSpec."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_dim
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        sizes = {
            "fc": (hidden, width),
            "layers.0.self_attn.q_proj": (heads * size, hidden),
            "layers.0.self_attn.k_proj": (kv_heads * size, hidden),
            "layers.0.self_attn.v_proj": (kv_heads * size, hidden),
            "layers.0.self_attn.o_proj": (hidden, heads * size),
            "layers.0.mlp.gate_proj": (inner, hidden),
            "layers.0.mlp.up_proj": (inner, hidden),
            "layers.0.mlp.down_proj": (hidden, inner),
            "lm_head": (shape.vocab_size, hidden),
            "markov_head.markov_w1": (shape.vocab_size, RANK),
            "markov_head.markov_w2": (shape.vocab_size, RANK),
            "confidence_head.proj": (1, hidden + RANK),
        }
        norms = ["hidden_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
        self.names = [f"{name}.weight" for name in (*sizes, *norms)] + ["confidence_head.proj.bias"]
        self.names += [f"layers.0.self_attn.{name}_norm.weight" for name in "qk"]
        values = [torch.randn(shape) * shape[1] ** -0.5 for shape in sizes.values()]
        values += [torch.ones(hidden) for _ in norms] + [torch.zeros(1), torch.ones(size), torch.ones(size)]
        self.weights = nn.ParameterList(values)

    def of(self, name: str) -> Tensor:
        """A weight by its published name."""
        weight: Tensor = self.weights[self.names.index(name)]
        return weight

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.of(f"{name}.weight"), 1e-6)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """[..., heads, S, D] at positions [..., S]."""
        half = x.shape[-1] // 2
        angles = positions[..., None, :, None] * THETA ** (-torch.arange(half) / half)
        first, second = x.chunk(2, -1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        x = F.linear(x, self.of(f"layers.0.self_attn.{name}_proj.weight"))
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(-3, -2)

    def block(self, features: Tensor, anchor: Tensor, position: int, embedding: Tensor) -> Tensor:
        """States [B, BLOCK_SIZE, hidden] of blocks at one position, of features [B, position, width]."""
        context = self._norm(F.linear(features, self.of("fc.weight")), "hidden_norm")
        mask = embedding[-1].expand(len(anchor), BLOCK_SIZE - 1, -1)
        x = torch.cat((embedding[anchor][:, None], mask), 1)
        inner = self._norm(x, "layers.0.input_layernorm")
        both, places = torch.cat((context, inner), 1), torch.arange(position + BLOCK_SIZE, dtype=torch.float32)
        attention = "layers.0.self_attn"
        q = self._rotated(self._norm(self._heads(inner, "q"), f"{attention}.q_norm"), places[position:])
        k = self._rotated(self._norm(self._heads(both, "k"), f"{attention}.k_norm"), places)
        attended = F.scaled_dot_product_attention(q, k, self._heads(both, "v"), enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.of(f"{attention}.o_proj.weight"))
        inner = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (F.linear(inner, self.of(f"layers.0.mlp.{name}_proj.weight")) for name in ("gate", "up"))
        return self._norm(x + F.linear(F.silu(gate) * up, self.of("layers.0.mlp.down_proj.weight")), "norm")

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """[..., V] of slots' states [..., hidden] behind the tokens `before` [...]."""
        bias = F.linear(self.of("markov_head.markov_w1.weight")[before], self.of("markov_head.markov_w2.weight"))
        return F.linear(states, self.of("lm_head.weight")) + bias

    def first_logits(self, features: Tensor, tokens: Tensor, first: int, embedding: Tensor) -> Tensor:
        """[B, T - first, V]: of the first draft behind x_p, for positions p from `first` on.

        `features` [B, T, width] are g_0 .. and `tokens` [B, T] are x_0 ...
        """
        rows = []
        for position in range(first, tokens.shape[1]):
            anchor = tokens[:, position]
            states = self.block(features[:, :position], anchor, position, embedding)
            rows.append(self.logits(states[:, 0], anchor))
        return torch.stack(rows, 1)


def train_dspark(head: DSparkHead, features: Tensor, tokens: Tensor, wanted: Tensor, embedding: Tensor) -> None:
    """Teach a head what the target says: features [N, T, width], tokens [N, T] and the target's laws [N, T, V]."""
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for step in range(60):
        chosen = torch.arange(64) + 64 * step % len(tokens)
        position = 2 + step % (tokens.shape[1] - BLOCK_SIZE - 2)
        before = tokens[chosen, position : position + BLOCK_SIZE]
        states = head.block(features[chosen, :position], before[:, 0], position, embedding)
        log_q = head.logits(states, before).log_softmax(-1)
        loss = -(wanted[chosen, position : position + BLOCK_SIZE] * log_q).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_dspark(head: DSparkHead, target_layer_ids: list[int], num_layers: int, directory: Path) -> None:
    """Write a head in the layout of deepseek-ai."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **head.shape.as_dict(),
        "num_hidden_layers": 1,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-6,
        "num_target_layers": num_layers,
        "block_size": BLOCK_SIZE,
        "mask_token_id": head.shape.vocab_size - 1,
        "target_layer_ids": target_layer_ids,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = zip(head.names, head.weights, strict=True)
    save_file({name: weight.detach().contiguous() for name, weight in weights}, directory / "model.safetensors")
