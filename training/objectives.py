"""The loss of each family of heads on a batch of conversations."""

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from training.batches import Batch
from training.dspark import DSparkHead
from training.eagle3 import Eagle3Head
from training.losses import DSPARK, EAGLE3, Rows, Terms, distil
from training.target import Target

STEP_DECAY = 0.8  # EAGLE-3: weight of a draft step relative to the preceding step
SLOT_DECAY = 4.0  # DSpark: gamma of exp(-(k - 1) / gamma)


class Report(NamedTuple):
    """Loss of a batch, and agreement with the target by draft position.

    Attributes:
        loss: The loss, a scalar.
        hits: Share of rows whose most likely token is the target's, [k].
        accepts: Mean of 1 - total variation, [k].
    """

    loss: Tensor
    hits: Tensor
    accepts: Tensor


class Objective(Protocol):
    """The training objective of a head."""

    def loss(self, batch: Batch) -> Report: ...


def _means(values: Tensor, weights: Tensor) -> Tensor:
    """Return the means of values [R, k] over the first dimension, weighted by weights [R, k]."""
    return (values * weights).sum(0) / weights.sum(0).clamp_min(1e-9)


class Eagle3Objective:
    """The training-time test of EAGLE-3 (2503.01840, section 3.1).

    `steps` chained steps use the head's own states and the target's tokens; step s has the weight 0.8^s.
    """

    def __init__(self, target: Target, head: Eagle3Head, steps: int, terms: Terms) -> None:
        self.target, self.head, self.steps, self.terms = target, head, steps, terms

    def loss(self, batch: Batch) -> Report:
        tokens, own, features, final = batch
        rows = tokens.shape[1] - 1
        padded = F.pad(tokens, (0, self.steps))

        def written(step: int, _: Tensor) -> Tensor:
            return padded[:, 1 + step : 1 + step + rows]

        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=final.dtype == torch.bfloat16):
            chain = self.head.chain(features[:, :rows], self.target.embedding, written, self.steps)
        # Row i of step s predicts x_{i+2+s}, as does the target's state of position i + 1 + s.
        places = torch.arange(rows, device=tokens.device)[:, None] + torch.arange(self.steps, device=tokens.device)
        teacher = F.pad(final, (0, 0, 0, self.steps))[:, 1 + places]
        labels = padded[:, 2 + places]
        counted = F.pad(own, (0, self.steps))[:, 2 + places].float()
        decay = STEP_DECAY ** torch.arange(self.steps, device=tokens.device)
        weights = counted * decay
        kept = weights.flatten().nonzero().squeeze(-1)
        ids = self.head.draft_ids
        frozen, trained = (self.target.output, None) if self.head.lm_head is None else (None, self.head.lm_head.weight)
        teacher_output = self.target.output if ids is None else self.target.output[ids]
        # This loss does not depend on the labels, which may be outside a reduced vocabulary.
        labels = labels if ids is None else torch.zeros_like(labels)
        selected = Rows(
            torch.stack(chain, dim=2).flatten(0, 2)[kept],
            teacher.flatten(0, 2)[kept],
            labels.flatten()[kept],
            (weights / weights.sum().clamp_min(1e-9)).flatten()[kept],
        )
        loss, accept, hit = distil(selected, frozen, trained, teacher_output, EAGLE3, self.terms)
        step_of = F.one_hot(kept % self.steps, self.steps).float()
        return Report(loss, _means(hit[:, None], step_of), _means(accept[:, None], step_of))


def draw_anchors(usable: Tensor, count: int) -> Tensor:
    """Return different random positions [B, count] of each row of `usable` [B, T] bool, at most T.

    Rows with fewer usable positions are filled up with other positions.
    """
    return torch.multinomial(usable.float() + 1e-9, min(count, usable.shape[1]))


class DSparkObjective:
    """DSpark's loss on blocks after random anchors (2607.05147; deepseek-ai/DeepSpec, modeling/dspark/loss.py).

    The loss of slot k is 0.1 cross entropy + 0.9 |q - p| + cross entropy between confidence and acceptance
    1 - |q - p| / 2, with the weight exp(-(k - 1) / 4). A slot counts if all tokens from its anchor to its own are
    answer tokens.
    """

    def __init__(self, target: Target, head: DSparkHead, anchors: int, terms: Terms) -> None:
        self.target, self.head, self.anchors, self.terms = target, head, anchors, terms

    def loss(self, batch: Batch) -> Report:
        tokens, own, states, final = batch
        size = self.head.block_size
        usable = own[:, :-1] & own[:, 1:]
        anchors = draw_anchors(usable, self.anchors)
        padded = F.pad(tokens, (0, size))
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=final.dtype == torch.bfloat16):
            block = self.head.block(states, padded, anchors, self.target.embedding)
        offsets = torch.arange(size, device=tokens.device)
        places = anchors[..., None] + offsets  # the target's state of this position predicts the slot
        row = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        answered = F.pad(own, (0, size))
        counted = (answered[row, places + 1] & usable.gather(1, anchors)[..., None]).float().cumprod(-1)
        weights = counted * torch.exp(-offsets / SLOT_DECAY)
        weights = weights / weights.sum().clamp_min(1e-9)
        rows = Rows(
            torch.cat([block.hidden, block.latent], dim=-1).flatten(0, 2),
            F.pad(final, (0, 0, 0, size))[row, places].flatten(0, 2),
            padded[row, places + 1].flatten(),
            weights.flatten(),
        )
        markov = self.head.markov_head.markov_w2.weight
        loss, accept, hit = distil(rows, self.target.output, markov, self.target.output, DSPARK, self.terms)
        sure = block.confidence.float().flatten()
        confidence = F.binary_cross_entropy_with_logits(sure, accept.clamp(0, 1), rows.weights, reduction="sum")
        by_slot = counted.flatten(0, 1)
        hits, accepts = (_means(values.view(-1, size), by_slot) for values in (hit, accept))
        return Report(loss + confidence, hits, accepts)


def expected_length(accepts: Tensor) -> float:
    """Return the expected tokens per step for acceptance rates by position, assuming independence."""
    total, survival = 1.0, 1.0
    for rate in accepts.tolist():
        survival *= rate
        total += survival
    return total if math.isfinite(total) else 0.0
