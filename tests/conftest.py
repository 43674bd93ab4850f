"""Settings that every test runs under."""

import os

# Before torch or tokenizers are imported: two test processes share the machine's cores, and nothing is downloaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Triton reads it when it is first imported, which transformers does too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
