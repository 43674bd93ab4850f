"""Sampling mathematics of speculative decoding: Gumbel-max sampling, rejection sampling and logit processing.

Every function takes and returns tensors, on the CPU or CUDA; torch and numpy are the only dependencies.
"""

from draftwire_kernels.gumbel import gumbel_sample
from draftwire_kernels.keys import derive_stream_keys
from draftwire_kernels.logits_processing import process_logits
from draftwire_kernels.logits_sampling import LogitBias, LogitsSampling, Penalties, Suppression
from draftwire_kernels.noise import NOISE_VERSION
from draftwire_kernels.rates import acceptance_length_to_rates, unconditional_to_conditional_rates
from draftwire_kernels.rejection import rejection_sample
from draftwire_kernels.types import DraftLogits, RejectionResult, StreamKeys

__all__ = [
    "NOISE_VERSION",
    "DraftLogits",
    "LogitBias",
    "LogitsSampling",
    "Penalties",
    "RejectionResult",
    "StreamKeys",
    "Suppression",
    "acceptance_length_to_rates",
    "derive_stream_keys",
    "gumbel_sample",
    "process_logits",
    "rejection_sample",
    "unconditional_to_conditional_rates",
]
