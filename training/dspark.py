"""A DSpark head (2607.05147) with the parameter names of `Qwen3DSparkModel` (deepseek-ai/DeepSpec).

A block drafts `block_size` tokens after an anchor x_a, the last committed token, in one pass: its queries are the
anchor's embedding and mask embeddings at positions a, a + 1, ... Slot j predicts x_{a+1+j}. The queries attend to the
context, `hidden_norm(fc(states))` of the positions before a, and to each other in both directions. A recurrent Markov
head adds a low-rank bias to the logits of slot j, computed from the block's tokens up to x_{a+j} and the slot's state;
a confidence head predicts the probability that slot j is accepted. Embedding and lm_head are the target's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import MLP, Attention, Fusion, HeadShape, RMSNorm, initialise, rotary_tables


class Block(NamedTuple):
    """Outputs of the head for the slots of A blocks per row.

    Attributes:
        hidden: Input of lm_head, [B, A, block_size, hidden].
        latent: Output of the Markov head before W2, [B, A, block_size, rank].
        confidence: Logits of the probability that the slot is accepted, [B, A, block_size].
    """

    hidden: Tensor
    latent: Tensor
    confidence: Tensor


class DraftLayer(nn.Module):
    """A decoder layer whose attention covers the context and the block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Return the output [B, S, hidden] for slots x [B, S, hidden] and context [B, T, hidden].

        tables and slots: cosines and sines of the context and of the slots. mask: [B, 1, S, T + S] bool.
        """
        inner = self.input_layernorm(x)
        k_context, v_context = self.self_attn.keys_and_values(context, *tables)
        k_block, v_block = self.self_attn.keys_and_values(inner, *slots)
        keys, values = torch.cat([k_context, k_block], dim=2), torch.cat([v_context, v_block], dim=2)
        queries = self.self_attn.queries(inner, *slots)
        x = x + self.self_attn.merge(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """The `rnn` Markov head: a low-rank bias of a slot's logits, computed from the block's preceding tokens."""

    def __init__(self, shape: HeadShape, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocab_size, bias=False)
        self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)

    def latents(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return latents [..., block_size, rank] from each preceding token's W1 row and the slots' states."""
        state = torch.zeros_like(embedded[..., 0, :])
        outputs = []
        for token, slot in zip(embedded.unbind(-2), hidden.unbind(-2), strict=True):
            joint = torch.cat([state, token, slot], dim=-1)
            gate, candidate, output = self.joint_proj(joint).chunk(3, dim=-1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs, dim=-2)


class ConfidenceHead(nn.Module):
    """Predicts the acceptance of a slot from its state and the Markov embedding of the preceding token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkHead(nn.Module):
    """The head without embedding and lm_head."""

    def __init__(self, shape: HeadShape, fused_width: int, block_size: int, markov_rank: int, mask_token: int) -> None:
        super().__init__()
        self.shape, self.block_size, self.mask_token = shape, block_size, mask_token
        self.fc = Fusion(fused_width, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.markov_head = MarkovHead(shape, markov_rank)
        self.confidence_head = ConfidenceHead(shape.hidden_size + markov_rank)
        initialise(self)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.markov_head.joint_proj.bias)
        nn.init.zeros_(self.confidence_head.proj.bias)

    def block(self, states: Tensor, tokens: Tensor, anchors: Tensor, embedding: Tensor) -> Block:
        """Return the blocks after the anchors, with teacher forcing: `tokens` precede the slots.

        states: [B, T, fused_width]. tokens: [B, at least T + block_size - 1]. anchors: positions below T, [B, A].
        """
        size, count = self.block_size, anchors.shape[1]
        offsets = torch.arange(size, device=tokens.device)
        positions = (anchors[..., None] + offsets).flatten(1)  # [B, A * size]
        before = tokens.gather(1, positions)
        inputs = torch.where((offsets == 0).repeat(count), before, self.mask_token)
        context = self.hidden_norm(self.fc(states))
        length = states.shape[1]
        cos, sin = rotary_tables(self.shape, length + size, tokens.device)
        slots = (cos[positions][:, None], sin[positions][:, None])
        mask = block_mask(anchors, size, length)
        x = F.embedding(inputs, embedding).to(context.dtype)
        for layer in self.layers:
            x = layer(x, context, (cos[:length], sin[:length]), slots, mask)
        hidden = self.norm(x).unflatten(1, (count, size))
        embedded = self.markov_head.markov_w1(before).to(hidden.dtype).unflatten(1, (count, size))
        confidence = self.confidence_head.proj(torch.cat([hidden, embedded], dim=-1)).squeeze(-1)
        return Block(hidden, self.markov_head.latents(embedded, hidden), confidence)


def block_mask(anchors: Tensor, size: int, length: int) -> Tensor:
    """Return the mask [B, 1, A * size, length + A * size]: the context before the anchor, and the slot's own block."""
    slots = anchors.repeat_interleave(size, dim=1)
    context = torch.arange(length, device=anchors.device) < slots[..., None]
    number = torch.arange(slots.shape[1], device=anchors.device) // size
    own = (number[:, None] == number).expand(len(anchors), -1, -1)
    return torch.cat([context, own], dim=2)[:, None]


def target_layers(num_layers: int, count: int) -> list[int]:
    """Return `target_layer_ids`: `count` layers, evenly spaced from the second to the third from the end.

    A target with fewer than count + 3 layers has its last `count` layers before the final one.
    """
    if num_layers < count + 3:
        return list(range(num_layers - 1))[-count:]
    last = num_layers - 3
    return sorted({round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count)})
