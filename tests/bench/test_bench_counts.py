"""A run whose engine skipped work is detected."""

from __future__ import annotations

import pytest
from timelines import ROW_BYTES, counters, timeline

from draftwire_bench.serve.counts import expected_work, find_skipped

K, MAX_TOKENS = 2, 6
# Six tokens: the prompt's, then 2 (one draft accepted), then 3 (two accepted). Both steps have room for two drafts.
STEPS = [(2, 1), (2, 2)]


def honest():
    """Return two requests of 5 prompt tokens and the engine's counts for them: 2 steps of 3 rows each.

    The second step's drafts need feature rows 0 .. 6, of the five prompt tokens and the first two output tokens.
    """
    timelines = [timeline(STEPS), timeline(STEPS)]
    return timelines, {"prompt_rows": 10, "verify_steps": 4, "verify_rows": 12, "feature_rows": 14}


def problems(timelines, changes, k=K):
    return find_skipped(timelines, k, MAX_TOKENS, counters(**changes), ROW_BYTES)


def test_the_work_behind_a_stream():
    work = expected_work(timeline(STEPS), K, MAX_TOKENS)
    assert (work.verify_steps, work.drafted, work.feature_rows) == (2, (2, 2), 7)


def test_a_last_step_drafts_only_what_there_is_room_for():
    # Five tokens are emitted before the last step, and the last token needs no draft.
    work = expected_work(timeline([(2, 1), (2, 1), (0, 0)]), K, MAX_TOKENS)
    assert (work.verify_steps, work.drafted) == (3, (2, 2))
    # Four tokens are emitted before the last step: one draft.
    work = expected_work(timeline([(2, 2), (1, 1)]), K, MAX_TOKENS)
    assert (work.verify_steps, work.drafted) == (2, (2, 1))


def test_without_drafting_every_step_is_one_row():
    plain = timeline([(0, 0)] * 5, k=0)
    assert expected_work(plain, 0, MAX_TOKENS).drafted == ()
    assert problems([plain], {"prompt_rows": 5, "verify_steps": 5, "verify_rows": 5}, k=0) == []


def test_a_run_that_did_all_its_work_passes():
    assert problems(*honest()) == []


def test_rows_for_the_last_tokens_may_be_sent_or_not():
    timelines, given = honest()
    assert problems(timelines, given | {"feature_rows": 20}) == []


def test_requests_that_want_fewer_drafts_get_no_more():
    fewer = [(1, 1), (1, 0), (1, 1)]
    timelines = [timeline(STEPS), timeline(fewer, k=1, asked=1), timeline([(0, 0)] * 5, k=0, asked=0)]
    given = {"prompt_rows": 15, "verify_steps": 10, "verify_rows": 6 + 6 + 5, "feature_rows": 7 + 8}
    assert problems(timelines, given) == []
    timelines[1] = timeline(fewer, k=1)
    assert "2 drafts were verified at position 2 instead of 4" in problems(timelines, given)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verify_rows": 11}, "11 rows were verified instead of 12"),
        ({"verify_steps": 3}, "3 verify steps in the engine's counters instead of 4"),
        ({"prompt_rows": 6}, "6 prompt rows were computed (fewer with prefix hits) instead of 10"),
        ({"feature_rows": 13}, "13 feature rows were sent instead of 14 to 20"),
        ({"feature_rows": 21}, "21 feature rows were sent instead of 14 to 20"),
        (
            {"feature_bytes": 14 * ROW_BYTES - 1},
            "335 feature bytes were sent by bytes instead of 336, which are 14 rows of 24 bytes",
        ),
    ],
)
def test_what_the_engine_skipped_is_named(changes, text):
    timelines, given = honest()
    assert problems(timelines, given | changes) == [text]


def test_a_step_that_went_on_without_its_drafts_is_named():
    timelines = [timeline([(2, 1), (2, 2)]), timeline([(1, 1), (2, 2)])]
    found = problems(timelines, {"prompt_rows": 10, "verify_steps": 4, "verify_rows": 11, "feature_rows": 14})
    assert found == ["11 rows were verified instead of 12", "3 drafts were verified at position 2 instead of 4"]


def test_an_output_that_ended_early_is_named():
    timelines, given = honest()
    timelines[1] = timeline([(2, 1)])
    assert problems(timelines, given)[0] == "9 output tokens instead of 12"


def test_features_sent_with_drafting_off_are_named():
    plain = timeline([(0, 0)] * 5, k=0)
    given = {"prompt_rows": 5, "verify_steps": 5, "verify_rows": 5, "feature_rows": 3}
    assert problems([plain], given, k=0) == ["3 feature rows were sent instead of 0 to 0"]
