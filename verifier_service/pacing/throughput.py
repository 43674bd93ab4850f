"""The throughput of one number of drafts at one load."""

from __future__ import annotations

from dataclasses import dataclass

# Rounds over which an arm's throughput is averaged.
MEMORY_ROUNDS = 16


@dataclass
class Arm:
    """Throughput of one number of drafts at one load: sums over its last rounds.

    Acceptance needs more rounds than times, so it is measured over all arms and not stored here.
    """

    rounds: int = 0
    drafted: float = 0.0  # verify steps of the drafter's sequences that had drafts
    other_tokens: float = 0.0  # expected tokens of everything else
    request_s: float = 0.0  # seconds times decoding requests

    def add(self, drafted: float, other_tokens: float, request_s: float) -> None:
        """Add one round."""
        keep = 1 - 1 / MEMORY_ROUNDS if self.rounds >= MEMORY_ROUNDS else 1.0
        self.rounds += 1
        self.drafted = keep * self.drafted + drafted
        self.other_tokens = keep * self.other_tokens + other_tokens
        self.request_s = keep * self.request_s + request_s

    def speed(self, expected_tokens: float) -> float:
        """Return tokens per second of one request if a verify step with drafts emits `expected_tokens`."""
        tokens = self.drafted * expected_tokens + self.other_tokens
        return tokens / self.request_s if self.request_s > 0.0 else 0.0
