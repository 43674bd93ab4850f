"""DFlash, DSpark and P-EAGLE heads give the same states, logits and confidences as the peers' code.

block_reference.npz has the peers' results for the checkpoints of block_checkpoints.py, made with torch 2.13.0 (CPU,
float32) and transformers 5.23.0 by the models of

- deepseek-ai/DeepSpec, commit afdfa7c9382a3341a3e6f17756dd816da79f132c: `Qwen3DSparkModel._forward_backbone`,
  `markov_head.apply_block_logits` and `predict_confidence_step`
- sgl-project/SpecForge, commit a6b6b0230009d15ec2a97a57384e6f53f0f96946: `DFlashDraftModel.forward`, with
  `create_dflash_sdpa_mask` for windows, and the same heads of `DSparkDraftModel`
- vllm-project/speculators, commit c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b: `DFlashDraftModel._backbone_forward` with
  the loss mask set only at the anchors, `MarkovHead.block_bias`, `ConfidenceHead`, and `PEagleDraftModel.forward` at
  depth 0 for all rows and at depths 1 to 3 for the rows before the anchors

The arrays of each case, for the A anchors n of `ANCHORS`: `hidden` [A, 4, 32] of the block's slots after the final norm
(before the norm for P-EAGLE), `logits` [A, N, V_draft] and `confidences` [A, N] of the slots that predict. Each slot
follows the tokens of `inputs`, not the head's drafts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_checkpoints import ANCHORS, CASES, inputs
from head_checkpoints import stored_numbers
from pairs import BLOCKS, CPU, loaded

from drafter_service.heads.dflash import DFlashHead
from drafter_service.heads.spec import DraftContext, Rows
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows

NUMBERS = stored_numbers("block_reference.npz")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def rows_of(tokens: torch.Tensor, pieces: list[tuple[int, int, int]]) -> Rows:
    """Return rows start .. start + count - 1 of each (sequence, start, count)."""
    batch = RaggedBatch([SequenceRows(BLOCKS[which], start, count) for which, start, count in pieces], CPU)
    places = torch.cat([torch.arange(start, start + count) for _, start, count in pieces])
    return Rows(tokens[places + 1], places, batch)


class Scene(DraftContext):
    """Three sequences with their anchors. Each draw records the logits and returns the next tokens of `inputs`."""

    def __init__(self, name: str, held_back: int = 1) -> None:
        """Put the last `held_back` rows of each sequence in the step, and enter earlier rows before."""
        self.head = loaded(name)
        self.tokens, features = inputs(CASES[name])
        self.cache = KVCache(self.head.spec.layer_shapes, 8, torch.float32, CPU)
        self.wants_confidences = True
        first = [max(n - held_back, 0) for n in ANCHORS]
        before = [(which, 0, count) for which, count in enumerate(first) if count]
        fused = self.head.fuse(features)
        if before:
            rows = rows_of(self.tokens, before)
            self.head.enter(rows, fused[rows.positions], self.cache)
        pieces = [(which, start, n - start) for which, (start, n) in enumerate(zip(first, ANCHORS, strict=True))]
        self.rows = rows_of(self.tokens, pieces)
        self.states = fused[self.rows.positions]
        self.last_rows = self.rows.batch.cu_rows[1:].long() - 1
        self.logits: list[torch.Tensor] = []
        self.confidences: list[Any] = []

    def draw(self, offset: int, logits: torch.Tensor, confidences: torch.Tensor | None = None) -> torch.Tensor:
        assert offset == len(self.logits)
        self.logits.append(logits)
        self.confidences.append(confidences)
        return self.tokens[torch.tensor(ANCHORS) + 1 + offset]

    def next_rows(self) -> Rows:
        raise NotImplementedError

    def block(self, num_rows: int) -> Rows:
        rows = rows_of(self.tokens, [(which, n, num_rows) for which, n in enumerate(ANCHORS)])
        return rows._replace(tokens=torch.zeros_like(rows.tokens))

    def check(self, name: str, num_drafts: int) -> None:
        """Compare the recorded logits and confidences with the reference."""
        expected = NUMBERS[f"{name}.logits"][:, :num_drafts]
        torch.testing.assert_close(torch.stack(self.logits, 1), expected, **TOLERANCE)
        if f"{name}.confidences" in NUMBERS:
            expected = NUMBERS[f"{name}.confidences"][:, :num_drafts]
            torch.testing.assert_close(torch.stack(self.confidences, 1), expected, **TOLERANCE)
        else:
            assert self.confidences == [None] * num_drafts


@pytest.mark.parametrize("held_back", [1, 3, 20])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_confidences(name: str, held_back: int) -> None:
    scene = Scene(name, held_back)
    most = NUMBERS[f"{name}.logits"].shape[1]
    assert scene.head.spec.max_drafts in (most, 16)
    scene.head.draft(scene, most)
    scene.check(name, most)


@pytest.mark.parametrize("name", CASES)
def test_fewer_drafts_are_the_first_ones(name: str) -> None:
    scene = Scene(name)
    scene.head.draft(scene, 2)
    scene.check(name, 2)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.layout != "peagle"])
def test_states_of_a_block(name: str) -> None:
    scene = Scene(name)
    assert isinstance(scene.head, DFlashHead)
    scene.head.enter(scene.rows, scene.states, scene.cache)
    block = scene.block(4)
    hidden = scene.head.forward(scene.tokens[list(ANCHORS)], block.positions, scene.cache, block.batch)
    torch.testing.assert_close(hidden, NUMBERS[f"{name}.hidden"], **TOLERANCE)


@pytest.mark.parametrize("name", ["deepseek_dspark", "speculators_windows", "peagle"])
def test_rejected_drafts_leave_nothing_behind(name: str) -> None:
    """The next rows overwrite the rows of a rejected block."""
    scene = Scene(name)
    scene.head.draft(scene, 3)
    again = Scene(name)
    again.cache = scene.cache
    again.head.draft(again, 3)
    again.check(name, 3)


def test_the_comparison_notices_positions_shifted_by_one() -> None:
    scene = Scene("deepseek_dspark", held_back=20)
    scene.rows = scene.rows._replace(positions=scene.rows.positions + 1)
    scene.head.draft(scene, 4)
    with pytest.raises(AssertionError, match="not close"):
        scene.check("deepseek_dspark", 4)
