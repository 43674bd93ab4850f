"""Sessions of a draft engine that have computed prompts and an announced step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from announcing import Announcer
from harness import Reply, Rows, Stream, Text, connect, make_engine, opened
from tiny_head import TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.engine.engine import DraftEngine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [
    SamplingMode(),
    SamplingMode(gumbel=True, use_fp64=True),
    SamplingMode(gumbel=True, dense=True),
    SamplingMode(gumbel=True, top_n=5),
]
IDS = range(1, 6)
TEXTS = {i: Text(i) for i in range(1, 9)}


def begin(engine: DraftEngine) -> bool:
    """Begin early drafts if the engine is ready for them; return whether they have begun."""
    deadline = time.monotonic() + (5.0 if engine.device.type == "cuda" else 0.0)
    while not (can_begin := engine.poll_early()) and time.monotonic() < deadline:
        time.sleep(0.001)  # until the device has written the tokens
    if can_begin:
        engine.early.begin()
    return can_begin and engine.early.has_begun


def verified(ids: Iterable[int] = IDS, drafts: int = 4) -> list[Rows]:
    """Return the rows of a verify step after prompts of 7 + i rows."""
    return [Rows(i, TEXTS[i], 7 + i, 1 + i % 4, drafts) for i in ids]


def prompted(engine: DraftEngine, mode: SamplingMode | None = None, ids: Iterable[int] = IDS, k: int = 4) -> Stream:
    """Return a session whose sequences have computed prompts."""
    stream = connect(engine, mode, k=k)
    stream.step([Rows(i, TEXTS[i], 0, 7 + i) for i in ids], [opened(i, 0.7, key=i) for i in ids])
    return stream


def announcer(stream: Stream, device: str = "cpu", **options: Any) -> Announcer:
    return Announcer(stream, device=torch.device(device, 0) if device == "cuda" else torch.device(device), **options)


def announced(
    rows: list[Rows] | None = None,
    mode: SamplingMode | None = None,
    *,
    engine: DraftEngine | None = None,
    ids: Iterable[int] = IDS,
    k: int = 4,
    device: str = "cpu",
    **options: Any,
) -> tuple[Stream, Announcer]:
    """Return a session with computed prompts, and its verifier, which has announced `rows`."""
    stream = prompted(engine or make_engine(TinyHead(device=device)), mode, ids, k)
    verifier = announcer(stream, device, k=k, **options)
    verifier.announce(rows or verified())
    return stream, verifier


def begun(rows: list[Rows] | None = None, mode: SamplingMode | None = None, **options: Any) -> tuple[Stream, Announcer]:
    """Return the same as `announced`, after the step's early drafts have begun."""
    stream, verifier = announced(rows, mode, **options)
    assert begin(stream.engine)
    return stream, verifier


def assert_same(found: dict[int, Reply], expected: dict[int, Reply]) -> None:
    assert found.keys() == expected.keys()
    for i, reply in expected.items():
        assert (found[i].committed_length, found[i].last_token) == (reply.committed_length, reply.last_token)
        assert found[i].tokens == reply.tokens
        if reply.logits is not None:
            torch.testing.assert_close(found[i].logits, reply.logits, rtol=1e-4, atol=1e-4)


def without(rows: list[Rows], mode: SamplingMode | None = None, *later: list[Rows], device: str = "cpu") -> list:
    """Return the replies to the same steps, sent without announcements."""
    stream = prompted(make_engine(TinyHead(device=device)), mode)
    return [stream.step(one) for one in (rows, *later)]


def counts(engine: DraftEngine) -> tuple[int, int]:
    return engine.early.num_taken, engine.early.num_wasted
