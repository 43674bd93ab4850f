"""Sampling of drafts: the logits sent are those that the drafts were sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SAME_LOGITS, Reply, Rows, Text, connect, draft_alone, make_engine, opened, replies
from tiny_head import TinyHead

from drafter_service.draft_loop import sampling
from drafter_service.draft_loop.logits_buffers import LogitsBuffers
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from draftwire.contract.validation import speculative_config_from_mapping
from draftwire_kernels import gumbel_sample

KEY = 1234567890123
TEMPERATURE = 0.7
NUM_ROWS, K = 11, 4
GREEDY = SamplingMode()
MODES = [
    GREEDY,
    SamplingMode(gumbel=True),
    SamplingMode(gumbel=True, use_fp64=True),
    SamplingMode(gumbel=True, coupled=True),
    SamplingMode(gumbel=True, dense=True),
    SamplingMode(gumbel=True, top_n=5),
    SamplingMode(gumbel=True, top_n=9),
]


def draft(head: TinyHead, mode: SamplingMode, temperature: float = TEMPERATURE, key: int = KEY) -> Reply:
    return draft_alone(head, Text(1), NUM_ROWS, K, mode, opened(1, temperature, key))


def redraw(reply: Reply, head: TinyHead, temperature: float = TEMPERATURE, coupled: bool = False) -> list[int]:
    """Sample tokens from an answer's logits with the verifier's key and positions."""
    logits = reply.logits
    vocabulary = head.draft_token_ids if head.draft_token_ids is not None else torch.arange(head.spec.draft_vocab_size)
    if reply.logits_token_ids is not None:
        columns = torch.searchsorted(vocabulary, reply.logits_token_ids.long())
        logits = torch.full((len(logits), len(vocabulary)), -torch.inf).scatter_(1, columns, logits)
    count = len(logits)
    drawn = gumbel_sample(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), KEY),
        reply.committed_length + torch.arange(count),
        draft_offset=0 if coupled else torch.arange(count, dtype=torch.int32),
        token_ids=vocabulary,
    )
    return vocabulary[drawn].tolist()


@pytest.mark.parametrize("reduced_vocabulary", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 20.0])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.sends_logits], ids=str)
def test_drafts_are_drawn_from_the_logits_sent(
    reduced_vocabulary: bool, temperature: float, mode: SamplingMode
) -> None:
    """The noise is keyed by the draft's absolute position, its offset in the step and its target id."""
    head = TinyHead(reduced_vocabulary)
    reply = draft(head, mode, temperature)
    assert len(reply.tokens) == K
    assert redraw(reply, head, temperature) == reply.tokens


@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_a_confidence_is_the_highest_probability_of_the_draft(head: TinyHead, temperature: float) -> None:
    """The probability is at temperature 1, for any temperature of the request and any draft."""
    reply = draft(head, SamplingMode(gumbel=True, dense=True, confidences=True), temperature)
    expected = reply.logits.softmax(-1).amax(-1)
    torch.testing.assert_close(torch.from_numpy(reply.confidences), expected, rtol=1e-5, atol=1e-6)


def test_no_confidences_without_being_asked(head: TinyHead) -> None:
    assert draft(head, SamplingMode(gumbel=True, dense=True)).confidences is None


def test_top_n_sends_the_n_largest_logits_and_draws_from_them(head: TinyHead) -> None:
    dense = draft(head, SamplingMode(gumbel=True, dense=True), temperature=20.0)
    top = draft(head, SamplingMode(gumbel=True, top_n=2), temperature=20.0)
    largest, columns = dense.logits[0].topk(2)
    assert torch.equal(top.logits[0], largest)
    assert top.logits_token_ids[0].tolist() == head.draft_token_ids[columns].tolist()
    assert all(token in ids for token, ids in zip(top.tokens, top.logits_token_ids.tolist(), strict=True))


def test_top_n_of_the_whole_vocabulary_is_dense(head: TinyHead) -> None:
    everything = SamplingMode(gumbel=True, top_n=head.spec.draft_vocab_size)
    assert draft(head, everything).tokens == draft(head, SamplingMode(gumbel=True, dense=True)).tokens


def test_logits_on_the_wire_do_not_change_the_drafts(head: TinyHead) -> None:
    assert draft(head, SamplingMode(gumbel=True)).tokens == draft(head, SamplingMode(gumbel=True, dense=True)).tokens


def test_logits_are_not_scaled_by_the_temperature(head: TinyHead) -> None:
    mode = SamplingMode(gumbel=True, dense=True)
    assert torch.equal(draft(head, mode, 0.5).logits[0], draft(head, mode, 2.0).logits[0])


def test_coupled_drafts_know_no_offset(head: TinyHead) -> None:
    """The noise of a position does not depend on the step, so the verifier draws with the same noise."""
    reply = draft(head, SamplingMode(gumbel=True, coupled=True, dense=True), temperature=20.0)
    assert redraw(reply, head, temperature=20.0, coupled=True) == reply.tokens
    assert redraw(reply, head, temperature=20.0, coupled=False) != reply.tokens


def test_greedy_drafts_ignore_the_temperature(head: TinyHead) -> None:
    assert draft(head, GREEDY, temperature=0).tokens == draft(head, GREEDY, temperature=5).tokens


def test_gumbel_drafts_at_temperature_0_are_greedy(head: TinyHead) -> None:
    for mode in MODES[1:]:
        assert draft(head, mode, temperature=0).tokens == draft(head, GREEDY).tokens


def test_gumbel_drafts_follow_their_key(head: TinyHead) -> None:
    mode = SamplingMode(gumbel=True)
    drawn = [draft(head, mode, temperature=20.0, key=key).tokens for key in (-1, 0, 1, 2**62)]
    assert len({tuple(tokens) for tokens in drawn}) == 4


def test_first_drafts_follow_the_heads_distribution(head: TinyHead) -> None:
    """A chi-square test over 4000 keys, one sequence each."""
    mode, num_samples = SamplingMode(gumbel=True, dense=True), 4000
    engine = make_engine(head, max_num_seqs=num_samples, kv_cache_tokens=num_samples * 16, max_batch_rows=num_samples)
    stream = connect(engine, mode, k=1, max_sequences=num_samples)
    news = [opened(i, TEMPERATURE, key=i * 7919 + 5) for i in range(num_samples)]
    answered = stream.step([Rows(i, Text(1), 0, 1, 1) for i in range(num_samples)], news)
    expected = (answered[0].logits[0].double() / TEMPERATURE).softmax(-1) * num_samples
    tokens = torch.tensor([reply.tokens[0] for reply in answered.values()])
    counts = tokens[:, None].eq(head.draft_token_ids).sum(0)
    common = expected >= 5
    rare = torch.stack([counts[~common].sum(), expected[~common].sum()])
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum() + (rare[0] - rare[1]) ** 2 / rare[1]
    assert statistic < 60  # 23 degrees of freedom: exceeded once in 30000


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_is_drawn_in_the_precision_asked_for(
    head: TinyHead, use_fp64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def record(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(options["use_fp64"])
        return gumbel_sample(*arguments, **options)

    monkeypatch.setattr(sampling, "gumbel_sample", record)
    draft(head, SamplingMode(gumbel=True, use_fp64=use_fp64))
    assert asked == [use_fp64] * K


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({}, SamplingMode()),
        ({"use_fp64_gumbel": True}, SamplingMode()),
        ({"draft_sample_method": "gumbel"}, SamplingMode(gumbel=True)),
        ({"draft_sample_method": "gumbel", "use_fp64_gumbel": True}, SamplingMode(gumbel=True, use_fp64=True)),
        ({"draft_sample_method": "gumbel", "draft_logits": "dense"}, SamplingMode(gumbel=True, dense=True)),
        ({"draft_sample_method": "gumbel", "draft_logits": {"top_n": 8}}, SamplingMode(gumbel=True, top_n=8)),
        (
            {"draft_sample_method": "gumbel", "rejection_sample_method": "coupled"},
            SamplingMode(gumbel=True, coupled=True),
        ),
    ],
)
def test_the_mode_is_what_the_config_says(config: dict[str, Any], mode: SamplingMode) -> None:
    assert SamplingMode.from_config(speculative_config_from_mapping(config)) == mode


def test_sessions_of_one_mode_get_their_own_logits(head: TinyHead) -> None:
    mode, engine = SamplingMode(gumbel=True, top_n=5), make_engine(head)
    streams = [connect(engine, mode) for _ in range(3)]
    for i, stream in enumerate(streams):
        stream.send([Rows(1, Text(i), 0, 5 + i, drafts=4 - i)], [opened(1)])
    engine.iterate()
    for i, stream in enumerate(streams):
        reply, alone = replies(stream.answers[0])[1], draft_alone(head, Text(i), 5 + i, 4 - i, mode)
        assert reply.tokens == alone.tokens
        torch.testing.assert_close(reply.logits, alone.logits, **SAME_LOGITS)
        assert torch.equal(reply.logits_token_ids, alone.logits_token_ids)


def test_sessions_of_every_mode_share_a_batch(head: TinyHead) -> None:
    """In one ragged batch with separate passes for each mode, each session gets the same drafts as alone."""
    engine = make_engine(head)
    streams = [connect(engine, mode) for mode in MODES]
    texts = [Text(20 + i) for i in range(3)]
    for number, stream in enumerate(streams):
        rows = [Rows(i, texts[i], 0, 5 + i + number, drafts=(i + number) % 5) for i in range(3)]
        stream.send(rows, [opened(i, TEMPERATURE, KEY + i) for i in range(3)])
    engine.iterate()
    for number, (stream, mode) in enumerate(zip(streams, MODES, strict=True)):
        answered = replies(stream.answers[0])
        assert list(answered) == [i for i in range(3) if (i + number) % 5]
        for i, reply in answered.items():
            new = opened(i, TEMPERATURE, KEY + i)
            alone = draft_alone(head, texts[i], 5 + i + number, (i + number) % 5, mode, new)
            assert reply.tokens == alone.tokens
            torch.testing.assert_close(reply.logits, alone.logits, **SAME_LOGITS)
            torch.testing.assert_close(reply.logits_token_ids, alone.logits_token_ids)


def test_logit_buffers_live_as_long_as_a_session_that_needs_them(head: TinyHead) -> None:
    engine = make_engine(head)
    plain = connect(engine, SamplingMode(gumbel=True))
    assert engine.logits_bytes == 0
    streams = [connect(engine, SamplingMode(gumbel=True, dense=True), k=k) for k in (2, 4)]
    assert engine.logits_bytes == 32 * 4 * head.spec.draft_vocab_size * 4
    top = connect(engine, SamplingMode(gumbel=True, top_n=5), k=3)
    assert engine.logits_bytes == 32 * 4 * head.spec.draft_vocab_size * 4 + 32 * 3 * 5 * 8
    for stream in (plain, top, *streams):
        engine.close_session(stream.session)
    assert engine.logits_bytes == 0


def test_the_docs_size_of_the_buffers_is_what_is_allocated() -> None:
    buffers = LogitsBuffers(max_num_seqs=64, draft_vocab_size=32000, device=torch.device("meta"))
    buffers.keep([SessionTerms("verifier", SamplingMode(gumbel=True, dense=True), 4, 64)])
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"64 x 4 x 32000 x 4 = {buffers.num_bytes} bytes" in page
    buffers.keep([SessionTerms("verifier", SamplingMode(gumbel=True), 4, 64)])
    assert buffers.num_bytes == 0
