"""Counters that tell the programs of a launch which one is last; zero before and after each launch.

Setting the counters to zero before each launch would need another launch. Instead, their memory is set to zero once,
outside of any capture, and launches that may run concurrently use different pieces: eager launches share one piece per
stream, and every captured launch keeps its own piece, because its graph may be replayed on any stream.
"""

from threading import Lock

import torch
from torch import Tensor

_ARENA_SIZE = 1 << 20
"""Counters per device, 4 MiB; 256 requests in 6 waves need two thousand."""


class _Arena:
    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_ARENA_SIZE, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams read the memory too
        self._used = 0
        self._of_stream: dict[int, Tensor] = {}

    def of_capture(self, count: int) -> Tensor | None:
        size = -(-count // 32) * 32  # whole lines of the cache
        if self._used + size > _ARENA_SIZE:
            return None
        self._used += size
        return self._memory[self._used - size : self._used]

    def of_stream(self, stream: int, count: int) -> Tensor | None:
        piece = self._of_stream.get(stream)
        if piece is None or piece.shape[0] < count:
            piece = self.of_capture(max(1024, 2 * count))
            if piece is not None:
                self._of_stream[stream] = piece
        return piece


_arenas: dict[torch.device, _Arena] = {}
_lock = Lock()


def zeros(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 zeros for one launch on the current stream; the launch leaves them at zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    is_captured = torch.cuda.is_current_stream_capturing()
    piece = None
    with _lock:
        if device not in _arenas and not is_captured:
            _arenas[device] = _Arena(device)
        arena = _arenas.get(device)
        if arena is not None:
            piece = arena.of_capture(count) if is_captured else arena.of_stream(stream, count)
    # A first call during capture, or a full arena: separate memory, set to zero before every launch.
    return torch.zeros(count, dtype=torch.int32, device=device) if piece is None else piece
