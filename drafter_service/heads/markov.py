"""DSpark's additions to a block: a bias of each slot's logits by the previous token, and a confidence of each slot.

Source: deepseek-ai/DeepSpec (deepspec/modeling/dspark/markov_head.py, common.py), arXiv 2607.05147.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drafter_service.heads.block_config import BlockConfig
from drafter_service.heads.layers import Linear
from drafter_service.heads.tensors import TensorSource

_PREFIX = "markov_head"


class MarkovHead:
    """Adds W2 f(W1[previous token]), of rank r, to the logits of a slot. Slots are drawn from left to right.

    f is the identity ("vanilla"), a gate computed from the slot's state ("gated"), or a recurrent unit over the block
    ("rnn").
    """

    def __init__(self, config: BlockConfig, source: TensorSource) -> None:
        rank, spec = config.markov_rank, config.spec
        self._type = config.markov_type
        self._embedding = source.take(f"{_PREFIX}.markov_w1.weight", spec.target_vocab_size, rank)
        self._output = source.take(f"{_PREFIX}.markov_w2.weight", spec.draft_vocab_size, rank)
        self._joint: Linear | None = None
        if self._type != "vanilla":
            name, parts, given = ("gate_proj", 1, 1) if self._type == "gated" else ("joint_proj", 3, 2)
            width = spec.hidden_size + given * rank
            self._joint = Linear(source, [f"{_PREFIX}.{name}"], [parts * rank], width, bias=True)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return W1 of tokens: [N] int64 -> [N, r]."""
        return F.embedding(tokens, self._embedding)

    def start(self, num_sequences: int) -> torch.Tensor:
        """Return the recurrent state before the first slot, [N, r]."""
        return self._embedding.new_zeros(num_sequences, self._embedding.shape[1])

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f of a slot and the next recurrent state, [N, r] each.

        Args:
            embedded: [N, r], `embed` of the token before the slot.
            hidden: [N, hidden], the slot's state.
            state: [N, r], of `start` or the previous slot; only the recurrent type changes it.
        """
        if self._joint is None:
            return embedded, state
        if self._type == "gated":
            return torch.sigmoid(self._joint(torch.cat((hidden, embedded), -1))) * embedded, state
        gate, candidate, output = self._joint(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def add_bias(self, logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V_draft] of a slot plus the bias of f [N, r]."""
        return torch.addmm(logits, latent, self._output.T)


class ConfidenceHead:
    """Predicts the probability that a slot's draft is accepted if all earlier drafts are."""

    def __init__(self, config: BlockConfig, source: TensorSource) -> None:
        self._with_markov = config.confidence_with_markov
        width = config.spec.hidden_size + (config.markov_rank if self._with_markov else 0)
        self._linear = Linear(source, ["confidence_head.proj"], [1], width, bias=True)

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Return probabilities [N] float32 from a slot's states [N, hidden] and, if used, `MarkovHead.embed` [N, r]."""
        if self._with_markov:
            assert embedded is not None
            hidden = torch.cat((hidden, embedded), -1)
        return self._linear(hidden)[:, 0].float().sigmoid()
