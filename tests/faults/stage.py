"""The services of one test of a fault: drafters, and verifiers under load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters import Drafter
from exact_law import Law
from exact_pair import Pair
from exact_services import wait_for_drafters
from load import Load
from services import Reference

from draftwire.v1 import generate_pb2
from draftwire_bench.processes import DRAFTWIRE, ServiceProcess, start_verifier

NUM_DRAFTS = 3


@dataclass
class Stage:
    """Start drafters, and verifiers under load; end them with the test."""

    pair: Pair
    other_head: Path  # over all tokens, like the pair's "full" head
    reference: Reference
    law: Law
    undisturbed: float  # acceptance of a round of the load in which all drafts arrive
    logs: Path
    _close: contextlib.ExitStack

    def drafter(self, *, host: str = "127.0.0.1", program: Sequence[str] = DRAFTWIRE) -> Drafter:
        """Start a drafter with the head over all tokens."""
        models = self.pair.head_dirs["full"], self.pair.target_dir
        drafter = Drafter(*models, self.logs / "drafter.log", host=host, program=program)
        self._close.callback(lambda: drafter.process.kill())
        return drafter

    def verifier(self, drafters: Sequence[str], *options: str, **config: Any) -> ServiceProcess:
        """Start a verifier and wait until these drafters are ready."""
        config = {"num_speculative_tokens": NUM_DRAFTS, **config}
        verifier = start_verifier(
            self.pair.target_dir,
            drafters,
            # The configured number of drafts in every step, so that acceptance can be compared; default deadline.
            *("--device", "cpu", "--no-adaptive-k", "--speculative-config", json.dumps(config)),
            *options,
            log_path=self.logs / "verifier.log",
        )
        self._close.callback(verifier.kill)
        wait_for_drafters(verifier.address, generate_pb2.DRAFTER_STATE_READY, count=len(drafters))
        return verifier

    def load_on(self, *verifiers: ServiceProcess) -> Load:
        """Return a load that these verifiers share; it begins when its context is entered."""
        return Load([one.address for one in verifiers], self.reference.continuations, self.law, self.undisturbed)

    def load(self, drafters: Sequence[str], *options: str, **config: Any) -> Load:
        """Start a verifier and a load on it."""
        return self._close.enter_context(self.load_on(self.verifier(drafters, *options, **config)))
