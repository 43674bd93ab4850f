"""A verifier's steps to a draft engine, and the engine's replies by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tiny_head import TARGET_VOCAB, WIDTH

from drafter_service.draft_loop import graphs
from drafter_service.draft_loop.prefill import RowFeed
from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.engine.answer import Answer
from drafter_service.engine.engine import DraftEngine
from drafter_service.engine.session import Session
from drafter_service.engine.step import OpenedSequence, Step
from drafter_service.limits import EngineLimits
from draftwire.transport import Incoming
from draftwire.v1 import draft_pb2 as pb

# The order of summation depends on the shape of the batch. Real errors are at least 1e-2.
SAME_LOGITS = {"rtol": 1e-4, "atol": 1e-4}

OK = pb.SEQUENCE_STATUS_OK
UNKNOWN = pb.SEQUENCE_STATUS_UNKNOWN
NO_CAPACITY = pb.SEQUENCE_STATUS_NO_CAPACITY


class Text:
    """Random committed tokens x_i and features g_i of one sequence; the first `num_alike` rows are those of `alike`."""

    def __init__(self, seed: int, length: int = 128, alike: Text | None = None, num_alike: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(TARGET_VOCAB, (length + 1,), generator=draw, dtype=torch.int32)
        self.features = torch.randn(length, WIDTH, generator=draw)
        if alike is not None:
            self.tokens[: num_alike + 1] = alike.tokens[: num_alike + 1]
            self.features[:num_alike] = alike.features[:num_alike]

    def rows(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x_{i+1} and g_i of the rows."""
        return self.tokens[first + 1 : first + count + 1], self.features[first : first + count]


@dataclass
class Rows:
    """Rows of one sequence in a step."""

    sequence_id: int
    text: Text
    first: int
    count: int
    drafts: int = 0


@dataclass
class Reply:
    """One sequence's part of the answer to a step."""

    status: int
    committed_length: int
    last_token: int
    tokens: list[int]
    logits: Any = None  # float32 [num_drafts, n]
    logits_token_ids: Any = None  # int32 [num_drafts, n]
    confidences: Any = None  # float32 [num_drafts]


def opened(sequence_id: int, temperature: float = 1.0, key: int = 7, first_row: int = 0) -> OpenedSequence:
    return OpenedSequence(sequence_id, temperature, key, first_row)


def make_step(
    step_id: int, rows: Sequence[Rows] = (), new: Sequence[OpenedSequence] = (), closed: Sequence[int] = ()
) -> Step:
    pieces = [part.text.rows(part.first, part.count) for part in rows]
    tokens = torch.cat([piece[0] for piece in pieces]) if pieces else torch.empty(0, dtype=torch.int32)
    features = torch.cat([piece[1] for piece in pieces]) if pieces else torch.empty(0, WIDTH)
    return Step(
        step_id=step_id,
        opened=list(new),
        closed_ids=list(closed),
        sequence_ids=[part.sequence_id for part in rows],
        first_rows=np.array([part.first for part in rows], np.int64),
        num_rows=np.array([part.count for part in rows], np.int64),
        num_drafts=np.array([part.drafts for part in rows], np.int64),
        tokens=tokens.numpy(),
        features=Incoming(features, torch.device("cpu")),
    )


def replies(answer: Answer) -> dict[int, Reply]:
    """Return the replies of an answer, by sequence."""
    tokens = np.concatenate(answer.tokens) if answer.tokens else np.empty(0, np.int32)
    logits = torch.cat(answer.logits).cpu() if answer.logits else None
    token_ids = torch.cat(answer.logits_token_ids).cpu() if answer.logits_token_ids else None
    confidences = np.concatenate(answer.confidences) if answer.confidences else None
    drafts = answer.drafts
    ends = np.cumsum(drafts.num_drafts).tolist()
    assert len(tokens) == (ends[-1] if ends else 0)
    assert len(set(drafts.sequence_ids)) == len(drafts.sequence_ids)
    found = {}
    for i, end in enumerate(ends):
        own = slice(end - drafts.num_drafts[i], end)
        found[drafts.sequence_ids[i]] = Reply(
            drafts.statuses[i],
            drafts.committed_lengths[i],
            drafts.last_tokens[i],
            tokens[own].tolist(),
            None if logits is None else logits[own],
            None if token_ids is None else token_ids[own],
            None if confidences is None else confidences[own],
        )
    return found


@dataclass
class Stream:
    """One session of an engine, driven by the test."""

    engine: DraftEngine
    session: Session
    answers: list[Any]
    num_steps: int = field(default=0)

    def send(
        self, rows: Sequence[Rows] = (), new: Sequence[OpenedSequence] = (), closed: Sequence[int] = ()
    ) -> None:
        """Queue a step."""
        self.num_steps += 1
        self.engine.submit(self.session, make_step(self.num_steps, rows, new, closed))

    def step(
        self, rows: Sequence[Rows] = (), new: Sequence[OpenedSequence] = (), closed: Sequence[int] = ()
    ) -> dict[int, Reply]:
        """Send a step, run the engine and return the replies."""
        self.send(rows, new, closed)
        run(self.engine)
        assert self.answers[-1].step_id == self.num_steps
        return replies(self.answers[-1])


def run(engine: DraftEngine) -> None:
    """Run the engine until no step waits."""
    while engine.has_work:
        engine.iterate()


def make_engine(
    head: Any,
    *,
    make_graphs: Callable[..., Any] = graphs.make_graphs,
    make_row_feed: Callable[..., RowFeed] = RowFeed,
    **limits: int,
) -> DraftEngine:
    settings = {"max_num_seqs": 32, "max_model_len": 96, "kv_cache_tokens": 4096, **limits}
    device = head.fusion.weight.device
    return DraftEngine(head, EngineLimits(**settings), torch.float32, device, make_graphs, make_row_feed)


def connect(engine: DraftEngine, mode: SamplingMode | None = None, k: int = 4, max_sequences: int = 32) -> Stream:
    answers: list[Any] = []
    terms = SessionTerms("test", mode or SamplingMode(), k, max_sequences)
    return Stream(engine, engine.open_session(terms, answers.append), answers)


def draft_alone(
    head: Any, text: Text, num_rows: int, k: int, mode: SamplingMode | None = None, new: OpenedSequence | None = None
) -> Reply:
    """Return the reply of a fresh engine that gets all rows in one step."""
    new = new or opened(1)
    first = new.first_row
    stream = connect(make_engine(head), mode, k)
    return stream.step([Rows(new.sequence_id, text, first, num_rows - first, k)], [new])[new.sequence_id]
