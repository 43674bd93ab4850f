"""A draft step's work besides the head's passes; padding does not change the results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import SAME_LOGITS, Reply, Rows, Text, connect, make_engine, opened
from tiny_head import TinyHead

from drafter_service.draft_loop import advance
from drafter_service.draft_loop.confidence import max_probability
from drafter_service.draft_loop.graphs import batch_sizes
from drafter_service.draft_loop.inputs import LoopInputs, PackedInputs, fill, fill_rows
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.loop import DraftLoop, LoopShape
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.draft_loop.state import LoopState
from drafter_service.engine.engine import DraftEngine

MAX_BLOCKS, MAX_DRAFTS, NUM_SLOTS = 300, 4, 9
CPU = torch.device("cpu")


def make_inputs(device: torch.device) -> tuple[LoopInputs, torch.Tensor]:
    """Return inputs of three sequences with 5, 1 and 2 rows at places 14, 31 and 4785, and their block tables.

    The inputs are padded to four sequences and ten rows.
    """
    packed = PackedInputs(8, 40, 2 * MAX_DRAFTS, device)
    for column in packed.host(4, 10):
        column[:] = 99  # values of an earlier step
    fill(
        packed.host(4, 10),
        proposal_keys=np.array([-7, 2**40, 0]),
        first_positions=np.array([14, 131, 4785]),  # the second begins at position 100
        first_places=np.array([14, 31, 4785]),
        slots=np.array([8, 0, 3]),
        num_drafts=np.array([4, 1, 2]),
        temperatures=np.array([1.0, 0.5, 0.0]),
        new_blocks=np.array([[40, 41], [51, 52], [299, 0]]),
    )
    fill_rows(packed.host(4, 10), np.array([5, 1, 2]), np.array([10, 11, 12, 13, 14, 20, 30, 31]))
    packed.send(4, 10)
    tables = torch.zeros(NUM_SLOTS, MAX_BLOCKS, dtype=torch.int32)
    tables[0, 0] = 50
    tables[3, :299] = torch.arange(299) + 1000
    return packed.device(4, 10), tables.to(device)


def make_state(device: torch.device) -> LoopState:
    state = LoopState.allocate(8, 40, MAX_BLOCKS, MAX_DRAFTS, device)
    for part in state:
        part.fill_(77)  # values of an earlier step
    return state.view(4, 10)


def test_the_pass_over_the_accepted_rows() -> None:
    inputs, tables = make_inputs(CPU)
    state = make_state(CPU)
    advance.begin(inputs, tables, state)
    assert state.tokens.tolist() == [10, 11, 12, 13, 14, 20, 30, 31, 0, 0]
    assert state.positions.tolist() == [14, 15, 16, 17, 18, 131, 4785, 4786, 0, 0]
    # Places 14 and 15 lie in block 40, 16 to 18 in block 41; padding lies in block 0.
    assert state.slot_mapping.tolist() == [654, 655, 656, 657, 658, 831, 4785, 4786, 8, 9]
    assert state.lengths.tolist() == [19, 32, 4787, 0]
    assert state.last_rows.tolist() == [4, 5, 7, 7]
    assert state.draw_positions[:3].tolist() == [20, 133, 4788]
    assert state.block_tables[:, :2].tolist() == [[40, 41], [50, 51], [1000, 1001], [0, 0]]
    assert state.block_tables[2, 297:300].tolist() == [1297, 1298, 299]
    # The tables keep the new blocks for later steps.
    assert tables[8, :3].tolist() == [40, 41, 0]
    assert tables[0, :3].tolist() == [50, 51, 52]
    assert tables[3, 299] == 299


def test_the_passes_over_the_drafts() -> None:
    inputs, tables = make_inputs(CPU)
    state = make_state(CPU)
    draft_token_ids = torch.tensor([0, 2, 4, 6])
    advance.begin(inputs, tables, state)
    confidences = torch.tensor([0.9, 0.25, 0.0, 1.0])
    advance.record(torch.tensor([3, 1, -1, 0]), 0, inputs, state, draft_token_ids, confidences)
    assert torch.equal(state.confidences[:, 0], confidences)
    assert state.drafts[:, 0].tolist() == [6, 2, -1, -1]  # no distribution, and padding
    assert state.next_tokens.tolist() == [6, 2, 0, 0]
    assert state.draw_positions[:3].tolist() == [21, 134, 4789]
    # The second sequence wants no more drafts, the fourth is padding: they write to block 0.
    assert state.next_positions.tolist() == [19, 0, 4787, 0]
    assert state.next_slots.tolist() == [41 * 16 + 3, 1, 299 * 16 + 3, 3]
    assert state.next_lengths.tolist() == [20, 1, 4788, 1]
    advance.record(torch.tensor([2, 1, 1, 0]), 1, inputs, state, None)
    # No draft follows a missing draft, and the second sequence wants one draft.
    assert state.drafts[:, :2].tolist() == [[6, 2], [2, -1], [-1, -1], [-1, -1]]
    assert state.next_positions.tolist() == [20, 0, 0, 0]
    assert state.next_slots.tolist() == [41 * 16 + 4, 1, 2, 3]


def test_a_block_behind_the_true_rows() -> None:
    inputs, tables = make_inputs(CPU)
    state = make_state(CPU)
    advance.begin(inputs, tables, state)
    block = advance.begin_block(inputs, state, 3)
    assert block.tokens.tolist() == [0] * 12
    assert block.positions.tolist() == [19, 20, 21, 132, 133, 134, 4787, 4788, 4789, 0, 0, 0]
    # Places 19 to 21 lie in block 41, 32 to 34 in block 52, 4787 to 4789 in block 299; padding lies in block 0.
    slots = [659, 660, 661, 832, 833, 834, 4787, 4788, 4789, 9, 10, 11]
    assert block.slots.tolist() == slots
    assert block.lengths.tolist() == [22, 35, 4790, 3]
    inputs.num_drafts[1] = 0
    block = advance.begin_block(inputs, state, 3)
    assert block.slots.tolist() == [*slots[:3], 3, 4, 5, *slots[6:]]
    assert block.lengths.tolist() == [22, 3, 4790, 3]


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_the_kernel_makes_the_block_that_torch_makes(num_rows: int) -> None:
    kernels = pytest.importorskip("drafter_service.draft_loop.kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs, tables = make_inputs(CPU)
    state = make_state(CPU)
    inputs.num_drafts[1] = 0
    advance.begin(inputs, tables, state)
    expected = advance.begin_block(inputs, state, num_rows)
    block = type(expected)(*(torch.full_like(part, 7, device=device) for part in expected))
    inputs, state = (type(of)(*(part.to(device) for part in of)) for of in (inputs, state))
    kernels.begin_block(inputs, state, block, num_rows)
    for given, wanted in zip(block, expected, strict=True):
        assert torch.equal(given.cpu(), wanted)


@pytest.mark.parametrize("sure", [None, torch.tensor([0.5, 0.25, 0.0, 1.0])], ids=["", "confidences"])
@pytest.mark.parametrize("reduced_vocabulary", [True, False])
def test_the_kernels_compute_what_torch_computes(reduced_vocabulary: bool, sure: torch.Tensor | None) -> None:
    kernels = pytest.importorskip("drafter_service.draft_loop.kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.tensor([0, 2, 4, 6]) if reduced_vocabulary else None
    columns = [torch.tensor([3, 1, -1, 0]), torch.tensor([2, -1, 1, 3])]
    inputs, expected_tables = make_inputs(CPU)
    expected = make_state(CPU)
    advance.begin(inputs, expected_tables, expected)
    inputs, tables = make_inputs(device)
    state = make_state(device)
    kernels.begin(inputs, tables, state)
    for offset in range(2):
        advance.record(columns[offset], offset, make_inputs(CPU)[0], expected, ids, sure)
        given = (columns[offset].to(device), offset, inputs, state)
        on_device = None if sure is None else sure.to(device)
        kernels.record(*given, None if ids is None else ids.to(device), on_device)
    assert torch.equal(tables.cpu(), expected_tables)
    for name, given, wanted in zip(LoopState._fields, state, expected, strict=True):
        if name != "block_tables":
            assert torch.equal(given.cpu(), wanted), name
    for index, count in enumerate((2, 2, 300, 1)):  # the blocks that the step can read
        assert torch.equal(state.block_tables[index, :count].cpu(), expected.block_tables[index, :count])


@pytest.mark.parametrize("vocabulary", [3, 1024, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_highest_probability_is_that_of_the_softmax(vocabulary: int, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("drafter_service.draft_loop.kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = (5 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[1, : vocabulary // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    expected = logits.float().softmax(-1).amax(-1)
    expected[3:6] = 0.0  # rows without a distribution
    logits[3, 1], logits[4, 2], logits[5] = torch.nan, torch.inf, -torch.inf
    for found in (kernels.max_probability(logits.to(device)).cpu(), max_probability(logits)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert found.max() <= 1.0


class PaddingGraphs:
    """A substitute for captured graphs that pads steps like graphs and runs them."""

    def __init__(self, loop: DraftLoop, k: int) -> None:
        self._loop, self._k = loop, k

    def shape_for(self, mode: SamplingMode, num_sequences: int, num_rows: int, num_drafts: int) -> LoopShape:
        size = next(s for s in batch_sizes(32) if s >= num_sequences and s * (self._k + 1) >= num_rows)
        return LoopShape(mode, size, size * (self._k + 1), self._k + 1, num_drafts)

    def replay(self, shape: LoopShape) -> None:
        self._loop.run(shape)

    def capture(self, mode: SamplingMode, k: int) -> None:
        """Capture nothing."""

    def drop_stale(self) -> None:
        pass


def converse(engine: DraftEngine, mode: SamplingMode) -> list[dict[int, Reply]]:
    """Return the replies to six steps of five sequences with different lengths, rows and numbers of drafts."""
    texts = [Text(i) for i in range(5)]
    lengths = [3, 11, 16, 29, 45]
    stream = connect(engine, mode)
    answered = []
    for turn in range(6):
        counts = lengths if turn == 0 else [(i + turn) % 5 + 1 for i in range(5)]
        firsts = [0] * 5 if turn == 0 else lengths
        rows = [Rows(i, texts[i], firsts[i], counts[i], drafts=(i * turn) % 5) for i in range(5)]
        new = [opened(i, 0.8, key=i) for i in range(5)] if turn == 0 else []
        answered.append(stream.step(rows, new))
        lengths = [first + count for first, count in zip(firsts, counts, strict=True)]
    return answered


@pytest.mark.parametrize(
    "mode",
    [SamplingMode(confidences=True), SamplingMode(gumbel=True, dense=True), SamplingMode(gumbel=True, top_n=5)],
    ids=str,
)
def test_padded_steps_draft_what_exact_ones_draft(head: TinyHead, mode: SamplingMode) -> None:
    exact = converse(make_engine(head), mode)
    padded = make_engine(head, make_graphs=lambda loop, *_: PaddingGraphs(loop, k=4))
    for given, expected in zip(converse(padded, mode), exact, strict=True):
        assert given.keys() == expected.keys()
        for i, reply in expected.items():
            assert (given[i].tokens, given[i].committed_length) == (reply.tokens, reply.committed_length)
            if reply.logits is not None:
                torch.testing.assert_close(given[i].logits, reply.logits, **SAME_LOGITS)
            if reply.confidences is not None:
                np.testing.assert_allclose(given[i].confidences, reply.confidences, rtol=1e-3)


class FullMemory(PaddingGraphs):
    """Graphs whose capture runs out of memory."""

    def capture(self, mode: SamplingMode, k: int) -> None:
        raise torch.OutOfMemoryError(f"{mode}, {k}")


def test_a_session_that_there_is_no_memory_for_leaves_no_buffers(head: TinyHead) -> None:
    engine = make_engine(head, make_graphs=lambda loop, *_: FullMemory(loop, k=4))
    with pytest.raises(torch.OutOfMemoryError):
        connect(engine, SamplingMode(gumbel=True, dense=True))
    assert engine.logits_bytes == 0
    assert engine.load.sessions == 0


def test_a_buffer_that_there_is_no_memory_for_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both buffers of a mode stay, because captured steps still write to them."""
    mode, zeros = SamplingMode(gumbel=True, top_n=3), torch.zeros
    buffers = LogitsBuffers(2, 8, CPU)
    buffers.keep([SessionTerms("one draft", mode, 1, 2)])
    before = buffers.of(mode)

    def no_memory_for_ids(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype == torch.int32:
            raise torch.OutOfMemoryError
        return zeros(*size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", no_memory_for_ids)
    with pytest.raises(torch.OutOfMemoryError):
        buffers.keep([SessionTerms("four drafts", mode, 4, 2)])
    assert all(kept is buffer for kept, buffer in zip(buffers.of(mode), before, strict=True))


def test_batch_sizes_end_with_the_most_sequences() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(60) == [1, 2, 4, 8, 16, 24, 32, 48, 60]
    assert batch_sizes(256)[-4:] == [160, 192, 224, 256]
