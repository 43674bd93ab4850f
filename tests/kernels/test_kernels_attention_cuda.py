"""Paged attention in CUDA graphs and with offsets of more than 32 bits."""

import pytest
import torch
from attention_oracle import DEVICE, Scene, Shape, check_close

from draftwire_kernels import BLOCK_SIZE, BatchBuffers, RaggedBatch, SequenceRows, paged_attention

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(heads=32, kv_heads=8, size=128, size_v=128, dtype=torch.bfloat16),
    Shape(heads=16, kv_heads=8, size=64, size_v=64),
    Shape(heads=8, kv_heads=4, size=256, size_v=256, dtype=torch.float16, window=40, softcap=50.0),
]
STEPS = [
    [(512, 5), (40, 3), (17, 1), (1, 1)],
    [(5, 5), (300, 5)],
    [(1000, 1), (2, 2), (90, 5), (16, 4)],
]


@pytest.mark.parametrize("capacity", [1024, 16384])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replayed_graph_gives_what_eager_gives(shape, capacity) -> None:
    buffers = BatchBuffers(24, 6, capacity // BLOCK_SIZE, DEVICE)
    scenes = [Scene(shape, sequences, seed) for seed, sequences in enumerate(STEPS)]
    slots = max(len(scene.keys) for scene in scenes)
    keys, values = (
        torch.full((slots, shape.kv_heads, size), torch.nan, dtype=shape.dtype, device=DEVICE)
        for size in (shape.size, shape.size_v)
    )
    q, k, v = (x.clone() for x in scenes[0].inputs(20)[:3])

    def load(scene: Scene) -> RaggedBatch:
        for static, given in zip((q, k, v, keys, values), scene.inputs(20), strict=True):
            static[: len(given)].copy_(given)
        return buffers.load(scene.rows(), 20, 4)

    def attend(batch: RaggedBatch) -> torch.Tensor:
        return paged_attention(
            q, k, v, keys, values, batch, scale=shape.scale, window=shape.window, softcap=shape.softcap
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(load(scenes[0]))
        graph = torch.cuda.CUDAGraph()
        batch = load(scenes[0])
        with torch.cuda.graph(graph, stream=stream):
            outs = [attend(batch), attend(batch)]  # the second reuses the first's counters
        for scene in [*scenes[::-1], *scenes]:
            eager = attend(load(scene)).clone()
            load(scene)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(outs[0], eager)
            assert torch.equal(outs[1], eager)
            rows = sum(scene.counts)
            scene.check(outs[0][:rows], keys[: len(scene.keys)], values[: len(scene.values)])
            assert torch.equal(outs[0][rows:], torch.zeros_like(outs[0][rows:]))
    stream.synchronize()


def test_caches_of_more_than_2_to_the_31_elements() -> None:
    shape = Shape(heads=16, kv_heads=8, size=128, size_v=128, dtype=torch.bfloat16)
    scene = Scene(shape, [(100, 40), (50, 5)])
    first_block = 2**31 // (BLOCK_SIZE * shape.kv_heads * shape.size) + 1
    slots = first_block * BLOCK_SIZE + len(scene.keys)
    keys, values = (torch.empty(slots, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    q, k, v, own_keys, own_values = scene.inputs()
    keys[-len(own_keys) :], values[-len(own_values) :] = own_keys, own_values
    rows = [SequenceRows([first_block + b for b in s.blocks], s.start, s.count) for s in scene.rows()]
    out = paged_attention(q, k, v, keys, values, RaggedBatch(rows, DEVICE), scale=shape.scale)
    check_close(out, scene.expected())


def test_a_pinned_batch_is_not_overwritten_before_its_copy() -> None:
    """Batches created while the device is busy keep their own values."""
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    batches = [RaggedBatch([SequenceRows([i + 1], 0, 1)], DEVICE) for i in range(200)]
    assert [batch.slot_mapping.item() for batch in batches] == [(i + 1) * BLOCK_SIZE for i in range(200)]
