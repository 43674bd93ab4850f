"""A DSpark head in training, and the exported head as the drafter serves it."""

from pathlib import Path

import torch
from chat_target import END, SLOT, write_chat_target

from drafter_service.heads import load_head
from drafter_service.heads.spec import DraftContext, Rows
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows
from training.dspark import DSparkHead, target_layers
from training.export import exported_weights
from training.families import DSpark, Sizes
from training.layers import HeadShape
from training.objectives import draw_anchors
from training.target import Target

ANCHOR, SIZE = 11, 4
CPU = torch.device("cpu")


class Step(DraftContext):
    """One sequence before its anchor; `draw` returns the next of `tokens`."""

    def __init__(self, tokens: torch.Tensor, states: torch.Tensor, cache: KVCache) -> None:
        self.tokens, self.states, self.cache, self.wants_confidences = tokens, states, cache, True
        self.rows = self.rows_from(0, ANCHOR)
        self.last_rows = torch.tensor([ANCHOR - 1])
        self.logits: list[torch.Tensor] = []
        self.confidences: list[torch.Tensor | None] = []

    def rows_from(self, start: int, count: int) -> Rows:
        places = torch.arange(start, start + count)
        return Rows(self.tokens[places + 1], places, RaggedBatch([SequenceRows([1, 3], start, count)], CPU))

    def draw(self, offset: int, logits: torch.Tensor, confidences: torch.Tensor | None = None) -> torch.Tensor:
        self.logits.append(logits[0])
        self.confidences.append(confidences)
        return self.tokens[ANCHOR + 1 + offset, None]

    def next_rows(self) -> Rows:
        raise NotImplementedError

    def block(self, num_rows: int) -> Rows:
        return self.rows_from(ANCHOR, num_rows)


@torch.no_grad()
def test_exported_head_drafts_as_in_training(tmp_path: Path) -> None:
    target = Target(write_chat_target(tmp_path / "target"), "cpu", torch.float32)
    family = DSpark(target, Sizes(draft_layers=2, intermediate_size=40, block_size=SIZE, markov_rank=6), END, SLOT)
    for weight in family.head.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
        weight.copy_(weight.bfloat16())
    family.head.fc.scale.copy_(2.0 ** torch.randint(-2, 3, family.head.fc.scale.shape))  # exact in bfloat16
    family.export(tmp_path / "head")
    tokens = torch.randint(4, 200, (20,))
    states, _ = target.states(tokens[None], [layer + 1 for layer in family.layers])
    block = family.head.block(states, tokens[None], torch.tensor([[ANCHOR]]), target.embedding)
    bias = block.latent[0, 0] @ family.head.markov_head.markov_w2.weight.T
    served = load_head(tmp_path / "head", tmp_path / "target", torch.float32, CPU)
    step = Step(tokens, served.fuse(states[0, :ANCHOR]), KVCache(served.spec.layer_shapes, 8, torch.float32, CPU))
    served.draft(step, SIZE)
    logits = block.hidden[0, 0] @ target.output.T + bias
    torch.testing.assert_close(torch.stack(step.logits), logits, rtol=1e-4, atol=1e-4)
    confidences = torch.cat([each for each in step.confidences if each is not None])
    torch.testing.assert_close(confidences, block.confidence[0, 0].sigmoid(), rtol=1e-4, atol=1e-4)


def test_blocks_do_not_see_each_other_nor_what_follows() -> None:
    torch.manual_seed(0)
    target_tokens, states = torch.randint(50, (1, 30)), torch.randn(1, 24, 64)
    head = DSparkHead(HeadShape(50, 32, 48, 2, 4, 2, 8), 64, SIZE, 4, mask_token=0)
    embedding = torch.randn(50, 32)
    alone = head.block(states, target_tokens, torch.tensor([[9]]), embedding)
    changed = states.clone()
    changed[:, 9:] += 1
    beside = head.block(changed, target_tokens, torch.tensor([[5, 9, 15]]), embedding)
    torch.testing.assert_close(beside.hidden[:, 1], alone.hidden[:, 0])


def test_anchors_are_different_usable_positions() -> None:
    usable = torch.arange(40).repeat(2, 1) >= torch.tensor([[30], [37]])
    anchors = draw_anchors(usable, 8).sort().values
    assert all(len(row.unique()) == 8 for row in anchors)
    assert (anchors[0] >= 30).all()
    assert anchors[1, -3:].tolist() == [37, 38, 39]
    assert draw_anchors(usable, 100).shape == (2, 40)


def test_the_exported_head_has_the_scale_of_the_channels() -> None:
    head = DSparkHead(HeadShape(50, 32, 48, 2, 4, 2, 8), 6, SIZE, 4, mask_token=0)
    states = torch.randn(50, 6) * torch.tensor([1.0, 300.0, 0.1, 2.0, 5.0, 40.0])
    head.fc.measure(states)
    scaled = states / states.square().mean(0).sqrt()
    torch.testing.assert_close(head.fc(states), scaled @ head.fc.weight.T)
    torch.testing.assert_close(exported_weights(head)["fc.weight"] @ states.T, head.fc.weight @ scaled.T)


def test_target_layers_are_spread_evenly() -> None:
    assert target_layers(30, 4) == [1, 10, 18, 27]
    assert target_layers(4, 4) == [0, 1, 2]
    assert target_layers(36, 5) == [1, 9, 17, 25, 33]  # of deepseek-ai's Qwen3-4B
