"""An EAGLE-3 head (2503.01840) in the published checkpoint layout, for training and evaluation.

Row i of the head takes (embed(x_{i+1}), g_i) at rotary position i and predicts x_{i+2}. g_i of an accepted row is `fc`
of the target's three states at position i; a later draft row takes the head's own un-normed output instead. `chain`
computes the drafts after accepted rows 0..i for every i at once: draft row i + s attends to the accepted keys 0..i and
to s drafted keys. This is one attention over s + 1 blocks of keys, the first with a causal mask, the others diagonal.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import MLP, Attention, Fusion, HeadShape, RMSNorm, initialise, rotary_tables

Chooser = Callable[[int, Tensor], Tensor]


class MidLayer(nn.Module):
    """The decoder layer; its attention's input is the concatenation of embedding and feature."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def project(self, embedded: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, heads, T, D]."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        return self.self_attn.queries(x, cos, sin), *self.self_attn.keys_and_values(x, cos, sin)

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [B, T, hidden] from its residual g and the attention's output."""
        x = g + self.self_attn.merge(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return the attention of a chain's rows: causal over keys[0], and over the same row of each later step.

    q, keys[s] and values[s]: [B, heads, T, D].
    """
    length = q.shape[2]
    own = torch.eye(length, dtype=torch.bool, device=q.device)
    mask = torch.cat([torch.ones_like(own).tril(), *[own] * (len(keys) - 1)], dim=1)
    return F.scaled_dot_product_attention(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=mask)


class Eagle3Head(nn.Module):
    """The head, with the parameter names of the published checkpoints.

    With draft_vocab_size None the head uses the target's lm_head and whole vocabulary.
    """

    d2t: Tensor  # [V_draft] int64: target id - draft id
    t2d: Tensor  # [V] bool: whether the head can draft the target id

    def __init__(self, shape: HeadShape, target_width: int, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Fusion(3 * target_width, shape.hidden_size)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(shape.hidden_size, draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        initialise(self)

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids that the head can draft, ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids that the head can draft, ascending; None for all."""
        return None if self.lm_head is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def chain(self, states: Tensor, embedding: Tensor, next_input: Chooser, steps: int) -> list[Tensor]:
        """Return the input of lm_head, [B, T, hidden], for each of `steps` draft steps after every accepted row.

        Args:
            states: The target's states of positions 0..T-1, [B, T, 3 * target_width].
            embedding: The target's input embedding, [V, hidden].
            next_input: Given step s and the output of step s - 1, returns the tokens [B, T] that rows of step s embed:
                x_{i+1+s}.
            steps: Number of draft steps.
        """
        length = states.shape[1]
        tables = rotary_tables(self.shape, length + steps, states.device)
        g = self.fc(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        normed = torch.empty(0)
        for step in range(steps):
            embedded = F.embedding(next_input(step, normed), embedding).to(g.dtype)
            cos, sin = (table[step : step + length] for table in tables)
            q, k, v = self.midlayer.project(embedded, g, cos, sin)
            keys.append(k)
            values.append(v)
            g = self.midlayer.finish(g, attend(q, keys, values))
            normed = self.norm(g)
            outputs.append(normed)
        return outputs


def feature_layers(num_layers: int) -> list[int]:
    """Return EAGLE-3's default layers, whose inputs are the features: 2, n // 2 and n - 3; the last 3 if n < 7."""
    if num_layers < 7:
        return list(range(num_layers - 3, num_layers))
    return [2, num_layers // 2, num_layers - 3]
