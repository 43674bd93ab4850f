"""Terms of one stream, agreed between a verifier and this drafter."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.draft_loop.sampling_mode import SamplingMode


@dataclass(frozen=True)
class SessionTerms:
    """The result of the handshake."""

    verifier: str  # name for the logs
    mode: SamplingMode
    num_speculative_tokens: int  # most drafts of a sequence in a step
    max_sequences: int  # most sequences open at once
