"""Batches have the target's states, computed at every step or kept; training continues from an exported head."""

from pathlib import Path

import pytest
import torch
from chat_target import END, SLOT, write_chat_target

from draftwire.contract.errors import CheckpointError
from training.batches import Batches
from training.families import DSpark, Eagle3, Family, Sizes
from training.generate import Texts
from training.losses import row_terms
from training.target import Target

SMALL = Sizes(draft_layers=2, intermediate_size=40, block_size=4, markov_rank=6, anchors=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_chat_target(tmp_path_factory.mktemp("target")), "cpu", torch.float32)


def make_batches(target: Target, entered: list[int], most_bytes: float = 0) -> Batches:
    tokens = torch.randint(4, 200, (7, 30), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return Batches(Texts(tokens, tokens % 5 > 0), target, entered, 2, most_bytes)


def make_family(name: str, target: Target) -> Family:
    return Eagle3(target, SMALL, END) if name == "eagle3" else DSpark(target, SMALL, END, SLOT)


def test_kept_states_are_the_computed_ones(target: Target) -> None:
    computed, kept = make_batches(target, [1, 3]), make_batches(target, [1, 3], most_bytes=1e9)
    for step in range(9):  # three epochs of three steps, each of which leaves out one conversation
        for mine, expected in zip(kept[step], computed[step], strict=True):
            torch.testing.assert_close(mine, expected)
    assert kept.known.all()


def test_kept_states_are_computed_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(target, [1, 3], most_bytes=1e9)
    for step in range(9):
        batches[step]
    monkeypatch.setattr(target, "states", None)
    assert batches[9].states.shape == (2, 30, 64)


def test_states_that_do_not_fit_are_not_kept(target: Target) -> None:
    bytes_needed = 7 * 30 * 3 * 32 * 4
    assert make_batches(target, [1, 3], bytes_needed).kept is not None
    assert make_batches(target, [1, 3], bytes_needed - 1).kept is None


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_training_goes_on_from_an_exported_head(target: Target, tmp_path: Path, name: str) -> None:
    trained, resumed = make_family(name, target), make_family(name, target)
    batches = make_batches(target, trained.entered)
    with torch.no_grad():
        for weight in trained.head.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
            weight.copy_(weight.bfloat16())
    trained.export(tmp_path)
    resumed.prepare(batches)
    resumed.load(tmp_path)
    assert resumed.head.fc.scale.unique().numel() > 1, "the scale of the states is measured"
    losses = []
    for family in (trained, resumed):
        torch.manual_seed(0)  # the same anchors
        losses.append(family.objective(row_terms).loss(batches[0]).loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_a_head_of_another_shape_is_rejected(target: Target, tmp_path: Path) -> None:
    DSpark(target, SMALL, END, SLOT).export(tmp_path)
    other = DSpark(target, Sizes(draft_layers=2, intermediate_size=40, block_size=5, markov_rank=6), END, SLOT)
    with pytest.raises(CheckpointError, match="block_size = 4, but must be 5"):
        other.load(tmp_path)
