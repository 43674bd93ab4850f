"""A simulated verifier whose prompts are computed in steps beside decoding requests: waves of requests on two GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from drafting_scene import Clock, Scene
from paced_world import Costs, Drafter, Places, World, use_rows_of_8b

from draftwire.v1 import draft_pb2 as pb
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.engine.step import Step
from verifier_service.pacing import Profile, backlog
from verifier_service.target.graph_sizes import Buckets

NUM_DRAFTS = 7
RATES = (0.80, 0.62, 0.47, 0.34, 0.24, 0.15, 0.10)
"""Unconditional acceptance rates by position."""
CONFIG = {
    "num_speculative_tokens": NUM_DRAFTS,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": list(RATES),
}
MAX_PREFILL_ROWS = 512
FREE_ROWS = 64


@dataclass
class GpuCosts(Costs):
    """Costs of a Qwen3-8B with a DSpark head on two H200s; `row_s` is the time of a row beyond the first FREE_ROWS."""

    step_s: float = 7.6e-3
    row_s: float = 20e-6
    trip_s: float = 0.3e-3
    feature_row_s: float = 0.1e-6
    draft_s: float = 1.5e-3
    draft_sequence_s: float = 50e-6
    draft_row_s: float = 2e-6  # for each row of features
    launch_s: float = 1e-3
    send_s: float = 1e-3
    send_row_s: float = 0.5e-6
    host_s: float = 2.5e-3  # between two steps, while the device waits
    host_drafts_s: float = 5e-3  # in addition if the step has drafts
    noise: float = 0.03

    def pass_s(self, rows: int) -> float:
        """Return the seconds of a pass with this number of rows."""
        return self.step_s + self.row_s * max(0, rows - FREE_ROWS)


class GpuDrafter(Drafter):
    """A drafter whose time depends on the number of sequences."""

    def draft_s(self, step: pb.DraftStep) -> float:
        costs, asked = self.costs, sum(drafts > 0 for drafts in step.num_drafts)
        assert isinstance(costs, GpuCosts)
        return (costs.draft_s + costs.draft_sequence_s * asked) * (asked > 0) + costs.draft_row_s * sum(step.num_rows)


class WaveWorld(World):
    """A verifier with at most `sequences` running requests; further requests wait until running ones have ended."""

    max_sequences = 512
    drafter_type = GpuDrafter

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, sequences: int, costs: GpuCosts, k: int) -> None:
        """With `k` = 0 no request has drafts."""
        use_rows_of_8b(monkeypatch)
        monkeypatch.setattr(backlog, "FIRST_BYTES", backlog.MOST_BYTES)  # as with shared memory
        self.most_running, self.num_waiting = sequences, 0
        self.gpu_costs = costs
        lengths: dict[str, Any] = {"prompt_length": 256, "output_length": 400}
        super().__init__(clock, 0, costs, config=CONFIG, replaces=False, k=k, **lengths)
        rates = np.array(RATES)
        self._conditional = rates / np.concatenate([[1.0], rates[:-1]])

    def _new_scene(self, config: dict[str, Any] | None, deadline_s: float | None) -> Scene:
        most = self.most_running
        buckets = Buckets(most, NUM_DRAFTS + 1, most * (NUM_DRAFTS + 1) + MAX_PREFILL_ROWS).decoding
        costs = self.gpu_costs
        table = {(one.num_sequences, one.num_rows): costs.pass_s(one.num_rows) for one in buckets}
        return Scene(config, deadline_s, adaptive_k=True, profile=Profile(table))

    def _new_places(self) -> Places:
        return _Queue(self.scene, self)

    def serve(self, requests: int) -> float:
        """Serve requests that arrive together; return the tokens per second."""
        self.num_waiting += requests
        began, before = self.clock.now, self.tokens
        self.admit()
        self.run(1000.0)
        return (self.tokens - before) / (self.clock.now - began)

    @property
    def num_admissible(self) -> int:
        return min(self.num_waiting, self.most_running - len(self.scene.requests))

    def admit(self) -> Request:
        """Admit a waiting request."""
        self.num_waiting -= 1
        return self.scene.admit(self.prompt_length, max_tokens=self.output_length, **self._request)

    def _seconds(self, rows: Sequence[ScheduledRows]) -> float:
        self.step_sizes.append(len(rows))
        return self.noisy(self.gpu_costs.pass_s(sum(len(one.tokens) for one in rows)))

    def _accepted(self, request: Request, num_drafts: int) -> int:  # noqa: ARG002
        accepted = 0
        while accepted < num_drafts and self.draw.random() < self._conditional[accepted]:
            accepted += 1
        return accepted

    def _launch(self, step: Step, device_free: float) -> Step:
        costs = self.gpu_costs
        has_drafts = any(row.offered is not None for row in step.rows)
        return super()._launch(step, device_free + self.noisy(costs.host_s + costs.host_drafts_s * has_drafts))


class _Queue(Places):
    """A scheduler that admits requests and computes their prompts."""

    def __init__(self, scene: Scene, world: WaveWorld) -> None:
        super().__init__(scene)
        self._world = world

    @property
    def may_admit(self) -> bool:
        return self._world.num_waiting > 0 and len(self.running) < self._world.most_running

    def schedule(
        self,
        is_ready: Callable[[Request], bool],
        following: Mapping[Request, int],
        *_: object,
        takes_prompts: bool = True,
        **options: Any,
    ) -> list[ScheduledRows]:
        rows = super().schedule(is_ready, following, **options)
        room = MAX_PREFILL_ROWS if takes_prompts else 0
        for request in self.running:
            if room > 0 and not request.is_decoding and not request.is_in_flight:
                rows.append(self._prefill(request, room))
                room -= len(rows[-1].tokens)
        while room > 0 and self.may_admit:
            rows.append(self._prefill(self._world.admit(), room))
            room -= len(rows[-1].tokens)
        return rows

    def _prefill(self, request: Request, room: int) -> ScheduledRows:
        start = request.num_computed
        tokens = request.tokens[start : start + room]
        return ScheduledRows(request, start, tokens, None, samples=start + len(tokens) == len(request.tokens))
