"""Derives the keys of a request's three noise streams from its seed."""

from collections.abc import Sequence
from hashlib import blake2b

import torch

from draftwire_kernels.types import StreamKeys

_STREAMS = StreamKeys._fields


def derive_stream_keys(seeds: Sequence[int]) -> StreamKeys:
    """Derive the stream keys of requests from their seeds, on the host, once per request.

    Each key is eight bytes of BLAKE2b over the seed, personalised with the stream's name. A key reveals neither the
    seed nor the other keys if the seed has 64 random bits; a seed that can be guessed can be found by trial.

    Parameters
    ----------
    seeds : sequence of int
        Each a signed 64-bit integer.

    Returns
    -------
    StreamKeys
        int64 [len(seeds)] on the CPU.

    Raises
    ------
    ValueError
        If a seed is not an integer in [-2**63, 2**63 - 1].

    Examples
    --------
    >>> keys = derive_stream_keys([0, 7])
    >>> keys.proposal.shape, keys.proposal.dtype
    (torch.Size([2]), torch.int64)
    """
    for i, seed in enumerate(seeds):
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seeds[{i}]: got {seed!r}, expected an integer in [-2**63, 2**63 - 1]")
    return StreamKeys(*(torch.tensor([_key(stream, s) for s in seeds], dtype=torch.int64) for stream in _STREAMS))


def _key(stream: str, seed: int) -> int:
    person = f"dw1:{stream}".encode()
    digest = blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8, person=person).digest()
    return int.from_bytes(digest, "little", signed=True)
