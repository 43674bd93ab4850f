"""Early drafts: a commit takes them, a step that replaces the announced step drops them."""

from __future__ import annotations

import numpy as np
import pytest
from early_scene import (
    DEVICES,
    IDS,
    MODES,
    TEXTS,
    announced,
    announcer,
    assert_same,
    begin,
    begun,
    counts,
    prompted,
    verified,
    without,
)
from harness import NO_CAPACITY, UNKNOWN, Rows, Text, connect, make_engine, opened
from tiny_head import TARGET_VOCAB, TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine import early_drafts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_gets_the_drafts_that_were_begun_early(mode, device):
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    expected = without(verified(), mode, later, device=device)
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    verifier = announcer(stream, device)
    for number, rows in enumerate((verified(), later)):
        verifier.announce(rows)
        assert begin(stream.engine)
        found = verifier.committed()
        assert_same(found, expected[number])
        assert verifier.early() == {number + 1: [found[part.sequence_id].tokens for part in rows]}
    assert counts(stream.engine) == (2, 0)
    assert verifier.features_read == 2


@pytest.mark.parametrize("device", DEVICES)
def test_early_drafts_come_with_their_confidences(device):
    mode = SamplingMode(confidences=True)
    expected = without(verified(), mode, device=device)[0]
    _, verifier = begun(mode=mode, device=device)
    found = verifier.committed()
    assert_same(found, expected)
    (early,) = verifier.early().values()
    results = np.array(early, np.int32).reshape(len(IDS), 4, 2)
    for reply, (tokens, bits) in zip(found.values(), results.transpose(0, 2, 1), strict=True):
        assert tokens.tolist() == reply.tokens
        assert np.array_equal(bits.copy().view(np.float32), reply.confidences)
        assert (reply.confidences > 0).all()
    assert all(np.allclose(found[i].confidences, expected[i].confidences, rtol=1e-3) for i in IDS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_before_early_drafts_begin_is_a_step(mode, device):
    expected = without(verified(), mode, device=device)[0]
    stream, verifier = announced(mode=mode, device=device)
    assert_same(verifier.committed(), expected)
    assert counts(stream.engine) == (0, 0)
    assert verifier.early() == {}
    assert verifier.features_read == 1


def test_no_early_drafts_are_shown_without_room_for_all():
    """With fewer drafts for a sequence, the verifier would read drafts at wrong places."""
    stream = connect(make_engine(TinyHead(), max_model_len=18))
    stream.step([Rows(i, TEXTS[i], 0, 12) for i in (1, 2)], [opened(i, 0.7, key=i) for i in (1, 2)])
    verifier = announcer(stream)
    verifier.announce([Rows(i, TEXTS[i], 12, 3, 4) for i in (1, 2)])
    assert begin(stream.engine)
    found = verifier.committed()
    assert list(verifier.early().values()) == [[found[i].tokens for i in (1, 2)]]
    assert [len(found[i].tokens) for i in (1, 2)] == [4, 4]
    verifier.announce([Rows(i, TEXTS[i], 15, 1, 4) for i in (1, 2)])
    assert begin(stream.engine)
    assert 2 not in verifier.early()
    found = verifier.committed()
    assert [len(found[i].tokens) for i in (1, 2)] == [3, 3]


@pytest.mark.parametrize("begins", [True, False], ids=["early", "not early"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_without_closed_sequences_drafts_the_others(mode, device, begins):
    expected = without(verified([2, 4]), mode, device=device)[0]
    stream, verifier = announced(mode=mode, device=device)
    assert not begins or begin(stream.engine)
    assert_same(verifier.committed(closed=[1, 3, 5]), expected)
    assert counts(stream.engine) == (int(begins), 0)
    assert stream.session.slots.keys() == {2, 4}
    assert verifier.features_read == 1


@pytest.mark.parametrize("begins", [True, False], ids=["early", "not early"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_commit_that_wants_fewer_drafts_gets_so_many(mode, begins):
    rows = [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, i % 4) for i in IDS]
    stream, verifier = announced(mode=mode)
    assert not begins or begin(stream.engine)
    assert_same(verifier.committed([part.drafts for part in rows]), without(rows, mode)[0])
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    assert_same(stream.step(later), without(rows, mode, later)[1])
    assert counts(stream.engine) == (int(begins), 0)


def other_tokens() -> list[Rows]:
    text = Text(2)
    text.tokens = text.tokens.clone()
    text.tokens[10] = (text.tokens[10] + 1) % TARGET_VOCAB
    return [Rows(2, text, 9, 3, 4) if part.sequence_id == 2 else part for part in verified()]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(verified(), id="the same"),
        pytest.param(other_tokens(), id="other tokens"),
        pytest.param([Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS], id="fewer rows"),
        pytest.param(verified([*IDS, 6]), id="one sequence more"),
        pytest.param(verified(drafts=6), id="more drafts"),
    ],
)
def test_a_step_that_replaces_gets_its_own_drafts(rows):
    ids = [*IDS, 6]
    expected = prompted(make_engine(TinyHead()), ids=ids, k=6).step(rows)
    stream, verifier = begun(ids=ids, k=6)
    assert_same(verifier.replace(rows), expected)
    assert counts(stream.engine) == (0, 1)
    assert verifier.features_read == 1


def test_dropped_drafts_leave_no_trace_in_the_next_steps():
    short = [Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS]
    later = [Rows(i, TEXTS[i], 8 + i, 3, 4) for i in IDS]
    expected = without(short, None, later)
    stream, verifier = begun()
    assert_same(verifier.replace(short), expected[0])
    assert_same(stream.step(later), expected[1])


def test_a_step_of_other_sequences_drops_nothing():
    stream, verifier = begun(ids=[*IDS, 6])
    assert stream.step([Rows(6, TEXTS[6], 13, 2, 4)])[6].tokens
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (1, 0)


def test_nothing_begins_before_its_tokens_are_written():
    stream, verifier = announced(holds=True)
    assert not begin(stream.engine)
    verifier.marks.write()
    assert begin(stream.engine)


def test_nothing_begins_while_a_step_waits():
    stream = prompted(make_engine(TinyHead()), ids=[*IDS, 6])
    announcer(stream).announce(verified())
    stream.send([Rows(6, TEXTS[6], 13, 2, 4)])
    assert not begin(stream.engine)


@pytest.mark.parametrize("ends", ["committed", "replaced"])
def test_a_step_that_is_over_begins_nothing(ends):
    stream, verifier = announced(holds=ends == "replaced")
    found = verifier.committed() if ends == "committed" else verifier.replace(verified())
    assert_same(found, without(verified())[0])
    if ends == "replaced":
        verifier.marks.write()
    assert not begin(stream.engine)


def test_a_commit_drops_what_was_announced_before():
    stream, verifier = begun([Rows(i, TEXTS[i], 7 + i, 1, 4) for i in IDS])
    verifier.announce(verified())
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(stream.engine) == (0, 1)
    assert verifier.features_read == 2


def test_a_commit_outlives_its_early_drafts(monkeypatch):
    """Early drafts of another session replaced them; the commit's tokens and features are still readable."""
    monkeypatch.setattr(early_drafts, "STALE_S", 0.0)
    engine = make_engine(TinyHead())
    stream, other = prompted(engine), prompted(engine)
    verifier, second = announcer(stream), announcer(other)
    verifier.announce(verified())
    assert begin(engine)
    second.announce(verified())
    assert begin(engine)
    assert_same(second.committed(), without(verified())[0])
    assert_same(verifier.committed(), without(verified())[0])
    assert counts(engine) == (1, 1)


def test_a_commit_that_takes_several_batches_is_computed_anew():
    engine = make_engine(TinyHead(), max_batch_rows=8, max_sessions=4)
    stream, verifier = begun(engine=engine)
    verifier.commit()
    found: dict[int, list[int]] = {}
    while engine.has_work:
        engine.iterate()
    drafts = stream.answers[-1].drafts
    found = dict(zip(drafts.sequence_ids, drafts.num_drafts, strict=True))
    assert found == dict.fromkeys(IDS, 4)
    expected = prompted(make_engine(TinyHead(), max_batch_rows=8, max_sessions=4)).step(verified())
    assert counts(engine) == (0, 1)
    assert list(drafts.committed_lengths) == [expected[i].committed_length for i in drafts.sequence_ids]


def test_a_sequence_that_made_room_meanwhile_is_unknown():
    engine = make_engine(TinyHead(), max_num_seqs=5)
    _, verifier = begun(engine=engine)
    other = connect(engine)
    other.step([Rows(1, TEXTS[7], 0, 9)], [opened(1)])
    found = verifier.committed()
    assert {i for i, reply in found.items() if reply.status == UNKNOWN} == {5}
    expected = without(verified())[0]
    assert all(found[i].tokens == expected[i].tokens for i in (1, 2, 3, 4))
    assert counts(engine) == (1, 0)


def test_a_commit_that_a_newer_step_supersedes_drafts_nothing():
    later = [Rows(i, TEXTS[i], 8 + i + i % 4, 2, 4) for i in IDS]
    stream, verifier = begun()
    verifier.commit()
    assert_same(stream.step(later), without(verified(), None, later)[1])
    assert not any(stream.answers[-2].drafts.num_drafts)


def test_a_closed_sequence_of_no_room_is_not_answered():
    engine = make_engine(TinyHead(), max_model_len=16)
    stream = connect(engine)
    stream.step([Rows(i, TEXTS[i], 0, 14) for i in (1, 2)], [opened(1), opened(2)])
    verifier = announcer(stream)
    verifier.announce([Rows(i, TEXTS[i], 14, 4, 4) for i in (1, 2)])
    assert {i: reply.status for i, reply in verifier.committed(closed=[2]).items()} == {1: NO_CAPACITY}
