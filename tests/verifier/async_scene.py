"""Engines whose launches and commits are written down."""

from __future__ import annotations

from typing import Any

from engine_scene import Served

from draftwire.v1 import generate_pb2
from verifier_service.engine.step import Stage
from verifier_service.target.target import Target


class Watched(Served):
    """An engine whose launches and landings are written down: ("launch" or "land", what each of the rows follows)."""

    def __init__(self, target: Target, config: dict[str, Any] | None = None, **limits: Any) -> None:
        super().__init__(target, config, **{"async_scheduling": True, **limits})
        self.log: list[tuple[str, list[int | None], list[int]]] = []
        self.decode: list[list[bool]] = []  # of each entry: whether a work does, or computes rows of a prompt
        self.on_stage(Stage.SAMPLED, lambda step: self._note("launch", step.rows))
        self.on_stage(Stage.COMMITTED, lambda step: self._note("land", step.rows))

    def _note(self, what: str, works: Any) -> None:
        self.log.append((what, [work.follows for work in works], [work.num_drafts for work in works]))
        self.decode.append([work.is_decoding for work in works])

    @property
    def num_prompts_before(self) -> int:
        """Launches of prompts alone while a step with decoding requests was in flight."""
        flying: list[list[bool]] = []
        count = 0
        for (what, _, _), decode in zip(self.log, self.decode, strict=True):
            if what == "land":
                flying.pop(0)
            else:
                count += any(map(any, flying)) and not any(decode)
                flying.append(decode)
        return count

    @property
    def num_ahead(self) -> int:
        """Launches while another step was in flight."""
        flying, ahead = 0, 0
        for what, _, _ in self.log:
            ahead += what == "launch" and flying > 0
            flying += 1 if what == "launch" else -1
            assert 0 <= flying <= 2
        return ahead


def run_all(
    target: Target, requests: list[dict[str, Any]], *, is_async: bool, **limits: Any
) -> tuple[list[Any], Watched]:
    """Return tokens and finish reasons of requests that arrive at once, and their engine."""
    own = Watched(target, async_scheduling=is_async, max_queue=100, **limits)
    made = [own.submit(**options) for options in requests]
    own.engine.start()
    ends = []
    for one in made:
        tokens: list[int] = []
        reason = generate_pb2.FINISH_REASON_UNSPECIFIED
        while reason == generate_pb2.FINISH_REASON_UNSPECIFIED:
            item = own.next(one)
            assert isinstance(item, generate_pb2.GenerateResponse), item
            tokens += item.token_ids
            reason = item.finish_reason
        ends.append((tokens, reason))
    own.engine.stop()
    return ends, own
