"""Limits of a drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drafter_service.options import MAX_SPECULATIVE_TOKENS, DrafterOptions
from draftwire.contract.errors import InvalidArgumentError
from draftwire.model.kv_cache import BLOCK_SIZE


@dataclass(frozen=True)
class EngineLimits:
    """Limits that the operator sets.

    Attributes:
        max_num_seqs: Sequences open at once, over all sessions.
        max_model_len: Rows of one sequence.
        kv_cache_tokens: Rows of all sequences together, speculative ones included.
        max_num_speculative_tokens: Drafts of one sequence in one step.
        max_batch_rows: Rows of one forward pass; longer steps are computed in several passes.
        max_sessions: Streams open at once.
    """

    max_num_seqs: int = 256
    max_model_len: int = 2048
    kv_cache_tokens: int = 65536
    max_num_speculative_tokens: int = 16
    max_batch_rows: int = 2048
    max_sessions: int = 64

    @classmethod
    def from_options(cls, options: DrafterOptions, **chosen: int) -> EngineLimits:
        """Return the limits of the options, with the chosen lengths."""
        return cls(
            max_num_seqs=options.max_num_seqs,
            max_num_speculative_tokens=options.max_num_speculative_tokens,
            max_batch_rows=options.max_batch_rows,
            max_sessions=options.max_sessions,
            **chosen,
        )

    def fit(self, max_drafts: int | None) -> EngineLimits:
        """Return the limits with no more drafts than a head makes; None is a head without a limit."""
        most = self.max_num_speculative_tokens
        return self if max_drafts is None else replace(self, max_num_speculative_tokens=min(most, max_drafts))

    def __post_init__(self) -> None:
        """Check the limits; InvalidArgumentError names the wrong limit."""
        ranges = {
            "max_num_seqs": (1, 2**16),
            "max_model_len": (1, 2**31 - 1),
            "kv_cache_tokens": (BLOCK_SIZE, 2**40),
            "max_num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
            "max_batch_rows": (self.max_sessions, 2**20),  # every session gets rows in every batch
            "max_sessions": (1, 2**16),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgumentError(name, value, f"allowed range [{low}, {high}]")
