"""Losses computed in pieces equal the plain losses, and so do their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses import DSPARK, EAGLE3, Mixture, Rows, distil

ROWS, HIDDEN, VOCAB, RANK = 70, 12, 30, 3


def plain(rows: Rows, output: Tensor, teacher_output: Tensor, mixture: Mixture) -> Tensor:
    scores = (rows.inputs @ output.T).log_softmax(-1)
    p = (rows.teacher @ teacher_output.T).softmax(-1)
    token = F.nll_loss(scores, rows.tokens, reduction="none")
    losses = mixture.token * token - mixture.soft * (p * scores).sum(-1)
    return (rows.weights * (losses + mixture.distance * (scores.exp() - p).abs().sum(-1))).sum()


@pytest.mark.parametrize("mixture", [EAGLE3, DSPARK], ids=["eagle3", "dspark"])
@pytest.mark.parametrize("width", [0, HIDDEN], ids=["trained lm_head", "frozen lm_head and Markov head"])
def test_loss_and_gradients_are_the_plain_ones(mixture: Mixture, width: int) -> None:
    torch.manual_seed(0)
    inputs, trained = torch.randn(ROWS, width + RANK, requires_grad=True), torch.randn(VOCAB, RANK, requires_grad=True)
    frozen = torch.randn(VOCAB, width) if width else None
    output = trained if frozen is None else torch.cat([frozen, trained], dim=1)
    teacher_output = torch.randn(VOCAB, HIDDEN)
    rows = Rows(inputs, torch.randn(ROWS, HIDDEN), torch.randint(VOCAB, (ROWS,)), torch.rand(ROWS))
    loss, accept, hit = distil(rows, frozen, trained, teacher_output, mixture)
    expected = plain(rows, output, teacher_output, mixture)
    torch.testing.assert_close(loss, expected)
    weights = [inputs, trained]
    for mine, own in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    q = (inputs @ output.T).softmax(-1)
    p = (rows.teacher @ teacher_output.T).softmax(-1)
    torch.testing.assert_close(accept, torch.minimum(p, q).sum(-1))
    assert torch.equal(hit > 0, p.argmax(-1) == q.argmax(-1))


def test_a_frozen_output_gets_no_gradient() -> None:
    states, output = torch.randn(5, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=True)
    rows = Rows(states, torch.randn(5, HIDDEN), torch.zeros(5, dtype=torch.long), torch.ones(5))
    loss, _, _ = distil(rows, output, None, output.detach(), EAGLE3)
    loss.backward()
    assert states.grad is not None
    assert output.grad is None


def test_a_batch_without_answers_has_no_loss() -> None:
    states, output = torch.empty(0, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN)
    rows = Rows(states, torch.empty(0, HIDDEN), torch.empty(0, dtype=torch.long), torch.empty(0))
    loss, accept, _ = distil(rows, output, None, output, DSPARK)
    assert (loss.item(), len(accept)) == (0.0, 0)
