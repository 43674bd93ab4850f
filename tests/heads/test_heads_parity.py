"""Heads give the states and logits of EAGLE's and speculators' code, from reference.npz of make_reference.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from head_checkpoints import CASES, NUM_DRAFTS, NUM_ROWS, inputs, stored_numbers
from pairs import BLOCKS, CPU, loaded

from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows

NUMBERS = stored_numbers("reference.npz")
TOLERANCE = {"rtol": 2e-6, "atol": 2e-5}


class Rig:
    """A head with its cache and inputs, and the peer's results."""

    def __init__(self, name: str) -> None:
        self.head = loaded(name)
        self.tokens, features = inputs(CASES[name])
        self.g = self.head.fuse(features)
        self.positions = torch.arange(2 * NUM_ROWS)
        self.cache = KVCache(self.head.spec.layer_shapes, 8, torch.float32, CPU)
        self.hidden, self.logits = NUMBERS[f"{name}.hidden"], NUMBERS[f"{name}.logits"]
        self.depth = len(self.hidden) - 1  # draft steps of the reference

    def run(self, pieces: list[tuple[int, int, int]], g: torch.Tensor | None = None) -> torch.Tensor:
        """Run rows start .. start + count - 1 of each (sequence, start, count), on their features or else on `g`."""
        batch = RaggedBatch([SequenceRows(BLOCKS[which], start, count) for which, start, count in pieces], CPU)
        rows = torch.cat([torch.arange(start, start + count) for _, start, count in pieces])
        g = self.g[rows] if g is None else g
        return self.head.forward(self.tokens[rows], g, self.positions[rows], self.cache, batch)

    def check(self, out: torch.Tensor, step: int, rows: slice | list[int]) -> None:
        """Compare states and their logits with the reference's rows of a step."""
        torch.testing.assert_close(out, self.hidden[step, rows], **TOLERANCE)
        torch.testing.assert_close(self.head.logits(out), self.logits[step, rows], **TOLERANCE)


@pytest.fixture(params=CASES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_all_rows_in_one_batch(rig: Rig) -> None:
    rig.check(rig.run([(0, 0, NUM_ROWS)]), 0, slice(None))


def test_row_by_row_through_the_cache(rig: Rig) -> None:
    for row in range(NUM_ROWS):
        rig.check(rig.run([(0, row, 1)]), 0, [row])


def test_chain_of_drafts_behind_the_last_row(rig: Rig) -> None:
    out = rig.run([(0, 0, NUM_ROWS)])[-1:]
    for step in range(1, rig.depth + 1):
        out = rig.run([(0, NUM_ROWS - 1 + step, 1)], out)
        rig.check(out, step, [NUM_ROWS - 1])


def test_accepted_rows_after_roll_backs(rig: Rig) -> None:
    """A chain of drafts follows every row; the next accepted rows overwrite the chain."""
    for row in range(NUM_ROWS):
        out = rig.run([(0, row, 1)])
        rig.check(out, 0, [row])
        for step in range(1, NUM_DRAFTS + 1):
            out = rig.run([(0, row + step, 1)], out)
            if step <= rig.depth:
                rig.check(out, step, [row])


def test_several_rows_at_once_after_a_roll_back(rig: Rig) -> None:
    """As after a verify step: a chain of three drafts, then two accepted rows over the chain, then further rows."""
    out = rig.run([(0, 0, 10)])[-1:]
    for step in range(1, NUM_DRAFTS + 1):
        out = rig.run([(0, 9 + step, 1)], out)
    rig.check(rig.run([(0, 10, 2)]), 0, slice(10, 12))
    rig.check(rig.run([(0, 12, NUM_ROWS - 12)]), 0, slice(12, NUM_ROWS))


def test_ragged_batches_of_several_sequences(rig: Rig) -> None:
    counts = (17, 1, 5)
    rig.check(rig.run([(i, 0, n) for i, n in enumerate(counts)]), 0, [row for n in counts for row in range(n)])
    rig.check(rig.run([(0, 17, 1), (2, 5, 13), (1, 1, 2)]), 0, [17, *range(5, 18), 1, 2])
    ends, out = [17, 2, 17], rig.run([(0, 17, 1), (1, 2, 1), (2, 17, 1)])
    for step in range(1, rig.depth + 1):
        out = rig.run([(i, end + step, 1) for i, end in enumerate(ends)], out)
        rig.check(out, step, ends)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda rig: setattr(rig, "g", rig.g.roll(1, 0)),
        lambda rig: setattr(rig, "tokens", rig.tokens.roll(1)),
        lambda rig: setattr(rig, "positions", rig.positions // 2),
    ],
    ids=["states off by a row", "tokens off by a row", "positions halved"],
)
def test_the_comparison_notices(mutate: Callable[[Rig], None]) -> None:
    rig = Rig("eagle3")
    mutate(rig)
    with pytest.raises(AssertionError, match="not close"):
        rig.check(rig.run([(0, 0, NUM_ROWS)]), 0, slice(None))


@pytest.mark.parametrize(("published", "other"), [("eagle3", "speculators_eagle3"), ("eagle1", "speculators_eagle1")])
def test_both_layouts_of_the_same_weights_are_the_same_head(published: str, other: str) -> None:
    first, second = Rig(published), Rig(other)
    one, two = first.run([(0, 0, NUM_ROWS)]), second.run([(0, 0, NUM_ROWS)])
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close(first.head.logits(one), second.head.logits(two), rtol=0, atol=0)
    assert replace(first.head.spec) == second.head.spec
