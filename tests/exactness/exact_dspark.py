"""A DSpark head for the tiny target, trained in seconds, and the logits of its first drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.dspark import DSparkHead
from training.layers import HeadShape

BLOCK_SIZE = 4
RANK = 4
STEPS = 150


def train_dspark(
    shape: HeadShape, features: Tensor, tokens: Tensor, wanted: Tensor, embedding: Tensor, output: Tensor
) -> DSparkHead:
    """Train a head on the target's distributions.

    `features` [N, T, width], `tokens` [N, T], the target's distributions `wanted` [N, T, V], its `embedding` and
    `output` [V, hidden].
    """
    torch.manual_seed(4)
    one_layer = shape.resized(num_hidden_layers=1)
    head = DSparkHead(one_layer, features.shape[-1], BLOCK_SIZE, RANK, mask_token=shape.vocab_size - 1)
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for step in range(STEPS):
        chosen = torch.arange(64) + 64 * step % len(tokens)
        anchors = torch.randint(2, tokens.shape[1] - BLOCK_SIZE, (64, 1))
        log_q = _logits(head, features[chosen], tokens[chosen], anchors, embedding, output).log_softmax(-1)
        slots = anchors + torch.arange(BLOCK_SIZE)
        loss = -(wanted[chosen[:, None], slots] * log_q[:, 0]).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


def first_logits(
    head: DSparkHead, features: Tensor, tokens: Tensor, first: int, embedding: Tensor, output: Tensor
) -> Tensor:
    """Return the logits of the first draft after x_p, for positions p from `first` on: [B, T - first, V].

    `features` [B, T, width] are g_0 .. and `tokens` [B, T] are x_0 ...
    """
    anchors = torch.arange(first, tokens.shape[1]).expand(len(tokens), -1)
    return _logits(head, features, F.pad(tokens, (0, BLOCK_SIZE - 1)), anchors, embedding, output)[:, :, 0]


def _logits(
    head: DSparkHead, features: Tensor, tokens: Tensor, anchors: Tensor, embedding: Tensor, output: Tensor
) -> Tensor:
    """Return the logits of every slot of the blocks after `anchors` [B, A]: [B, A, BLOCK_SIZE, V]."""
    block = head.block(features, tokens, anchors, embedding)
    return F.linear(block.hidden, output) + head.markov_head.markov_w2(block.latent)
