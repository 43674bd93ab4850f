"""How a session's drafts are sampled, and which logits are sent."""

from __future__ import annotations

from typing import NamedTuple

from draftwire.contract.validation import COUPLED, DENSE, GUMBEL, TOP_N
from draftwire.v1 import config_pb2


class SamplingMode(NamedTuple):
    """Sampling mode of a session. Rows of equal modes are sampled together, across sessions."""

    gumbel: bool = False  # Gumbel-max at the request's temperature; else argmax
    coupled: bool = False  # the verifier draws the same noise, which is independent of the offset in the step
    use_fp64: bool = False
    dense: bool = False  # send every logit
    top_n: int = 0  # sample from, and send, this many logits; 0 for all
    confidences: bool = False  # send a confidence of each draft

    @classmethod
    def from_config(cls, config: config_pb2.SpeculativeConfig, *, confidences: bool = False) -> SamplingMode:
        """Return the mode of a resolved SpeculativeConfig, with or without `confidences`."""
        if config.draft_sample_method != GUMBEL:
            return cls(confidences=confidences)
        form = config.draft_logits.form
        return cls(
            gumbel=True,
            coupled=config.rejection_sample_method == COUPLED,
            use_fp64=config.use_fp64_gumbel,
            dense=form == DENSE,
            top_n=config.draft_logits.n if form == TOP_N else 0,
            confidences=confidences,
        )

    @property
    def sends_logits(self) -> bool:
        """Return whether logits are sent with the drafts."""
        return self.dense or self.top_n > 0

    def logits_width(self, draft_vocab_size: int) -> int:
        """Return the number of logits sent with each draft."""
        return self.top_n or (draft_vocab_size if self.dense else 0)

    def row_bytes(self, draft_vocab_size: int) -> int:
        """Return the bytes sent with each draft: float32 logits, and int32 ids for top_n."""
        return (8 if self.top_n else 4) * self.logits_width(draft_vocab_size)
