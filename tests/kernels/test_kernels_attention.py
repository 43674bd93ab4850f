"""Paged attention against a float64 oracle: in torch, and in Triton (its interpreter on the CPU, compiled on CUDA)."""

import pytest
import torch
from attention_oracle import CPU, DEVICE, Scene, Shape, check_close
from torch import Tensor

from draftwire_kernels import BatchBuffers, RaggedBatch, SequenceRows, paged_attention

pytest.importorskip("triton")

from draftwire_kernels.gpu import paged_attention_launch as launch
from draftwire_kernels.gpu.paged_attention_plan import Tuning

BACKENDS = ["reference", "triton"]
DECODE = [(1, 1), (16, 1), (17, 1), (50, 1)]
VERIFY = [(40, 5), (3, 3), (17, 2), (33, 5), (16, 1), (5, 5)]
MIXED = [(60, 36), (19, 1), (40, 6)]
# Small tiles, steps and shares, so that few rows have many of each.
FINE = Tuning(16, 16, warps=4, stages=2, programs_each=200, most_shares=8)
BOUNDED = Tuning(16, 16, warps=4, stages=2, programs_each=1, most_shares=8, share_rows=16)
PROMPT = Tuning(32, 16, warps=4, stages=2, programs_each=1)


def attend(scene: Scene, batch: RaggedBatch, inputs: tuple[Tensor, ...], backend: str) -> Tensor:
    shape = scene.shape
    return paged_attention(
        *inputs,
        batch,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        causal=shape.causal,
        anchored=shape.anchored,
        backend=backend,
    )


def run(scene: Scene, backend: str) -> Tensor:
    inputs = scene.inputs()
    out = attend(scene, scene.batch(), inputs, backend)
    scene.check(out, *inputs[3:])
    return out


def run_tuned(scene: Scene, batch: RaggedBatch, short: Tuning | None = None, long: Tuning | None = None) -> Tensor:
    shape, inputs = scene.shape, scene.inputs(batch.num_rows)
    return launch.paged_attention(
        *inputs,
        batch,
        shape.scale,
        shape.window,
        shape.softcap,
        shape.causal,
        shape.anchored,
        short,
        long,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [DECODE, VERIFY, MIXED, [(70, 50)]], ids=["decode", "verify", "mixed", "prompt"])
def test_every_row_sees_its_own_sequence_up_to_itself(sequences, backend) -> None:
    run(Scene(Shape(), sequences), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, kv_heads=2),
        Shape(heads=3, kv_heads=1),
        Shape(heads=7, kv_heads=1),
        Shape(heads=8, kv_heads=1),
        Shape(size=64, size_v=64),
        Shape(size=80, size_v=80),
        Shape(size=96, size_v=96, kv_heads=1),
        Shape(size=128, size_v=128),
        Shape(size=256, size_v=256, heads=2, kv_heads=1),
        Shape(size=48, size_v=24),
        Shape(window=1),
        Shape(window=5),
        Shape(window=17),
        Shape(softcap=2.0),
        Shape(softcap=30.0, window=9, heads=3, kv_heads=1),
        Shape(dtype=torch.bfloat16),
        Shape(dtype=torch.float16, softcap=20.0),
    ],
    ids=str,
)
def test_shapes(shape, backend) -> None:
    if backend == "triton" and shape.dtype == torch.bfloat16 and DEVICE == CPU:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    run(Scene(shape, [(40, 5), (3, 3), (36, 34)]), backend)


BLOCKS = [
    Shape(causal=False),
    Shape(causal=False, heads=7, kv_heads=1, window=9),
    Shape(causal=False, anchored=True, window=6),
    Shape(anchored=True, window=6),
    Shape(anchored=True, window=20, heads=3, kv_heads=1, dtype=torch.float16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_blocks_whose_rows_see_each_other(shape, backend) -> None:
    run(Scene(shape, [(40, 5), (33, 17), (36, 32), (5, 5)]), backend)


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_blocks_over_a_context_in_shares(shape) -> None:
    scene = Scene(shape, [(130, 5), (16, 1), (100, 17)])
    check_close(run_tuned(scene, scene.batch(), FINE), scene.expected())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("tuning", [FINE, BOUNDED], ids=["filling", "bounded"])
def test_context_split_in_shares(tuning, window) -> None:
    scene = Scene(Shape(heads=3, kv_heads=1, window=window), [(130, 5), (16, 1), (17, 3), (100, 17)])
    check_close(run_tuned(scene, scene.batch(), tuning), scene.expected())


def test_prompts_in_several_tiles_between_short_sequences() -> None:
    scene = Scene(Shape(heads=3, kv_heads=1), [(2, 1), (80, 60), (5, 5), (40, 33), (33, 32)])
    check_close(run_tuned(scene, scene.batch(), FINE, PROMPT), scene.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_need_not_be_contiguous(backend) -> None:
    """Models pass transposed rows of [1, heads, T, D], or views of one merged projection."""
    scene = Scene(Shape(), VERIFY)
    q, k, v, keys, values = scene.inputs()
    merged = torch.cat([q, k, v], 1)
    q, k, v = merged.split([4, 2, 2], 1)
    out = attend(scene, scene.batch(), (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, keys, values), backend)
    scene.check(out, keys, values)


def test_result_does_not_depend_on_company_or_place() -> None:
    """The result is bit-identical if the batch's bounds are the same."""
    company = [(60, 2), (9, 1), (60, 5), (1, 1)]
    scene = Scene(Shape(), [(37, 4), *company])
    alone = run_tuned(scene, scene.batch(), FINE)[:4]
    moved = Scene(Shape(), [*company[::-1], (37, 4)], seed=1)
    moved.sequences[4].q, moved.sequences[4].k, moved.sequences[4].v = (
        getattr(scene.sequences[0], name) for name in "qkv"
    )
    assert moved.sequences[4].blocks != scene.sequences[0].blocks
    slots = moved.sequences[4].slots
    moved.keys[slots[:33]], moved.values[slots[:33]] = scene.sequences[0].k[:33], scene.sequences[0].v[:33]
    assert torch.equal(run_tuned(moved, moved.batch(), FINE)[-4:], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_zeros_and_changes_nothing_but_block_0(backend) -> None:
    scene = Scene(Shape(), [(40, 5), (19, 1), (36, 3)])
    buffers = BatchBuffers(32, 8, 64, DEVICE)
    buffers.load([SequenceRows([9, 8, 7], 40, 5)] * 4, 20, 4)  # its blocks remain in the buffers
    batch = buffers.load(scene.rows(), 20, 4)
    inputs = scene.inputs(20)
    out = attend(scene, batch, inputs, backend)
    scene.check(out[:9], *inputs[3:])
    assert torch.equal(out[9:], torch.zeros_like(out[9:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_without_rows(backend) -> None:
    _, _, _, keys, values = Scene(Shape(), [(3, 1)]).inputs()
    rows = torch.empty(0, 4, 16, device=DEVICE)
    batch = RaggedBatch([], DEVICE)
    out = paged_attention(rows, rows[:, :2], rows[:, :2], keys, values, batch, scale=1.0, backend=backend)
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_batches(backend) -> None:
    generator = torch.Generator().manual_seed(5)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for seed in range(40 if DEVICE.type == "cuda" else 2):
        kv_heads, group = 1 + below(2), 1 + below(8)
        size = (16, 32, 64, 80)[below(4)]
        window = (None, 1 + below(60))[below(2)]
        shape = Shape(kv_heads * group, kv_heads, size, size, window=window, softcap=(None, 10.0)[below(2)])
        lengths = [1 + below(90) for _ in range(1 + below(5))]
        run(Scene(shape, [(length, 1 + below(min(length, 45))) for length in lengths], seed), backend)


GOOD = Scene(Shape(), [(20, 3), (4, 1)])
_GOOD = GOOD.batch()
LONG = RaggedBatch.from_tensors(
    _GOOD.slot_mapping, _GOOD.cu_rows, _GOOD.lengths, _GOOD.block_tables, max_rows=33, max_length=20
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4, 16)}, r"query: got shape \[5, 4, 16\], expected \[4, H, D\]"),
        ({"query": torch.zeros(4, 3, 16)}, "query: got 3 heads, expected a multiple of key's 2"),
        ({"query": torch.zeros(4, 4, 16, dtype=torch.float64)}, "query: got dtype torch.float64"),
        ({"key": torch.zeros(4, 2, 8)}, "key: got shape"),
        ({"value": torch.zeros(4, 1, 16)}, "value: got shape"),
        ({"keys": torch.zeros(112, 2, 16, dtype=torch.float16)}, "keys: got dtype torch.float16"),
        ({"keys": torch.zeros(112, 16, 2).transpose(1, 2)}, "keys: got strides"),
        ({"values": torch.zeros(80, 2, 16)}, "values: got shape"),
        ({"window": 0}, "window: got 0"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"causal": False, "batch": LONG}, "batch: got up to 33 rows of a sequence, expected at most 32"),
        ({"anchored": True, "window": 4, "batch": LONG}, "batch: got up to 33 rows"),
        ({"backend": "cuda"}, "backend: got 'cuda'"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message) -> None:
    arguments = dict(zip(("query", "key", "value", "keys", "values"), GOOD.inputs(), strict=True))
    change = {name: given.to(DEVICE) if isinstance(given, Tensor) else given for name, given in change.items()}
    with pytest.raises(ValueError, match=message):
        paged_attention(**{"batch": GOOD.batch(), "scale": 0.25, **arguments, **change})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(size=257), "query: got heads of 257 elements, expected at most 256"),
        (Shape(heads=258, kv_heads=2), "query: got 258 heads, expected at most 128 for each of key's 2"),
    ],
    ids=["head size", "group"],
)
def test_heads_beyond_the_kernels_are_refused_by_name(shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(Scene(shape, [(4, 1)]), "triton")
