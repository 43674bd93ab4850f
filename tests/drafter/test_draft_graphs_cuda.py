"""Every replay of a captured draft step gives the drafts and logits of a step without graphs."""

from __future__ import annotations

import pytest
import torch
from harness import SAME_LOGITS, Reply, Rows, Stream, Text, connect, make_engine, opened
from tiny_head import TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms

pytestmark = pytest.mark.gpu

DENSE = SamplingMode(gumbel=True, dense=True)
MODES = [
    SamplingMode(),
    SamplingMode(gumbel=True),
    SamplingMode(gumbel=True, use_fp64=True),
    SamplingMode(gumbel=True, coupled=True),
    DENSE,
    SamplingMode(gumbel=True, top_n=5),
]
SIZES = (1, 3, 5, 9)  # batches of 3 and 5 are padded


class CountedHead(TinyHead):
    """Counts the head's passes that Python launched; a replay launches none."""

    def passes(self) -> int:
        count = len(self.rows_of_forwards)
        self.rows_of_forwards.clear()
        return count


def connect_two(mode: SamplingMode, k: int = 4) -> tuple[Stream, Stream]:
    """Return a stream whose steps are replayed, and a stream whose steps run without graphs."""
    replayed = make_engine(CountedHead(device="cuda"), max_num_seqs=9)
    anew = make_engine(CountedHead(device="cuda"), make_graphs=lambda *_: None, max_num_seqs=9)
    return connect(replayed, mode, k), connect(anew, mode, k)


def open_sequences(stream: Stream, texts: list[Text]) -> None:
    count = len(texts)
    stream.step([Rows(i, texts[i], 0, 20 + i) for i in range(count)], [opened(i, 0.8, key=i) for i in range(count)])
    head: CountedHead = stream.engine.head
    head.passes()


def check(given: dict[int, Reply], expected: dict[int, Reply]) -> None:
    assert given.keys() == expected.keys()
    for i, reply in expected.items():
        assert given[i].tokens == reply.tokens
        if reply.logits is not None:
            assert len(given[i].logits) == len(reply.tokens)
            torch.testing.assert_close(given[i].logits, reply.logits, **SAME_LOGITS)
        if reply.logits_token_ids is not None:
            assert torch.equal(given[i].logits_token_ids, reply.logits_token_ids)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_replays_with_changed_inputs(mode: SamplingMode, count: int) -> None:
    """Rows, blocks, lengths and numbers of drafts change from step to step."""
    replayed, anew = connect_two(mode)
    texts = [Text(i) for i in range(count)]
    for stream in (replayed, anew):
        open_sequences(stream, texts)
    firsts = [20 + i for i in range(count)]
    for turn in range(7):
        counts = [(i + turn) % 5 + 1 for i in range(count)]
        rows = [Rows(i, texts[i], firsts[i], counts[i], drafts=(i + turn) % 4 + 1) for i in range(count)]
        given = replayed.step(rows)
        assert replayed.engine.head.passes() == 0
        check(given, anew.step(rows))
        assert anew.engine.head.passes() > 0
        firsts = [first + number for first, number in zip(firsts, counts, strict=True)]


def test_the_logits_of_every_draft_are_those_of_this_step() -> None:
    """Logits are not those of an earlier replay or of the capture (the bug of vLLM's PR 37639)."""
    replayed, anew = connect_two(DENSE)
    texts = [Text(i) for i in range(3)]
    for stream in (replayed, anew):
        open_sequences(stream, texts)
    seen: list[torch.Tensor] = []
    for turn in range(4):
        rows = [Rows(i, texts[i], 20 + i + turn, 1, drafts=4) for i in range(3)]
        given, expected = replayed.step(rows), anew.step(rows)
        for i in range(3):
            for offset in range(4):
                torch.testing.assert_close(given[i].logits[offset], expected[i].logits[offset], **SAME_LOGITS)
                assert all((given[i].logits[offset] - other).abs().max() > 1e-3 for other in seen)
                seen.append(given[i].logits[offset])


def test_sequences_that_leave_do_not_return() -> None:
    """A replay for fewer sequences writes nothing into the blocks of the previous step's other sequences."""
    replayed, anew = connect_two(DENSE)
    texts = [Text(i) for i in range(4)]
    for stream in (replayed, anew):
        open_sequences(stream, texts)
        stream.step([Rows(i, texts[i], 20 + i, 1, drafts=4) for i in range(4)])
        stream.step([Rows(0, texts[0], 21, 5, drafts=4)])
        stream.step([Rows(3, texts[3], 24, 2, drafts=4)], closed=[2])
        stream.step([Rows(9, texts[2], 0, 5, drafts=4)], [opened(9, 0.8, key=9)])
    rows = [Rows(1, texts[1], 22, 3, drafts=4), Rows(9, texts[2], 5, 1, drafts=4)]
    check(replayed.step(rows), anew.step(rows))


def test_a_session_with_more_drafts_is_captured_before_accepted() -> None:
    engine = make_engine(CountedHead(device="cuda"), max_num_seqs=4)
    connect(engine, DENSE, k=2)
    stream = connect(engine, DENSE, k=5)
    open_sequences(stream, [Text(1)])
    assert len(stream.step([Rows(0, Text(1), 20, 6, drafts=5)])[0].tokens) == 5
    assert engine.head.passes() == 0


def test_graphs_of_logits_go_with_their_buffers() -> None:
    engine = make_engine(CountedHead(device="cuda"), max_num_seqs=2)
    for _ in range(2):
        stream = connect(engine, DENSE)
        open_sequences(stream, [Text(1)])
        reply = stream.step([Rows(0, Text(1), 20, 2, drafts=4)])[0]
        assert engine.head.passes() == 0
        assert reply.logits.abs().sum(-1).min() > 0
        engine.close_session(stream.session)
        assert engine.logits_bytes == 0
        assert not [shape for shape in engine.graphs.shapes if shape.mode == DENSE]


def test_sessions_with_logits_leave_no_memory_taken() -> None:
    """Each closed session frees its buffers and its graphs."""
    engine = make_engine(CountedHead(device="cuda"), max_num_seqs=64)
    taken = []
    for _ in range(4):
        stream = connect(engine, DENSE, k=8)
        engine.close_session(stream.session)
        taken.append(torch.cuda.memory_reserved())
    assert taken[1:] == [taken[0]] * 3


def test_warm_up_captures_greedy_steps_and_reports_progress() -> None:
    engine = make_engine(CountedHead(device="cuda"), max_num_seqs=4)
    captured = []

    def track(shapes: list) -> list:
        captured.extend(shapes)
        return shapes

    engine.warm_up(track)
    assert [(shape.num_sequences, shape.num_drafts) for shape in captured] == [
        (size, drafts) for size in (4, 2, 1) for drafts in (4, 3, 2, 1)
    ]
    engine.head.passes()
    engine.open_session(SessionTerms("test", SamplingMode(), 4, 4), lambda _: None)
    assert engine.head.passes() == 0
