"""Kernels of speculative decoding: sampling, verification, logit processing, paged attention and gathering of rows.

All functions take and return tensors on the CPU or on CUDA; torch and numpy are the only dependencies.
"""

from draftwire_kernels.accepted_rows import gather_accepted_rows
from draftwire_kernels.attention import paged_attention
from draftwire_kernels.gumbel import gumbel_sample
from draftwire_kernels.keys import derive_stream_keys
from draftwire_kernels.logits_processing import process_logits
from draftwire_kernels.logits_sampling import (
    AllowedTokens,
    ForbiddenSequences,
    LogitBias,
    LogitsSampling,
    Penalties,
    Suppression,
)
from draftwire_kernels.noise import NOISE_VERSION
from draftwire_kernels.ragged_batch import BLOCK_SIZE, BatchBuffers, RaggedBatch, SequenceRows
from draftwire_kernels.rates import (
    acceptance_length_to_rates,
    draft_rates,
    spread_rates,
    unconditional_to_conditional_rates,
)
from draftwire_kernels.rejection import rejection_sample
from draftwire_kernels.token_bitmask import mask_logits
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys

__all__ = [
    "BLOCK_SIZE",
    "NOISE_VERSION",
    "AllowedTokens",
    "BatchBuffers",
    "DraftLogits",
    "ForbiddenSequences",
    "LogitBias",
    "LogitsSampling",
    "Penalties",
    "RaggedBatch",
    "RejectionResult",
    "SequenceRows",
    "StreamKeys",
    "Suppression",
    "acceptance_length_to_rates",
    "derive_stream_keys",
    "draft_rates",
    "gather_accepted_rows",
    "gumbel_sample",
    "mask_logits",
    "paged_attention",
    "process_logits",
    "rejection_sample",
    "spread_rates",
    "unconditional_to_conditional_rates",
]
