from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Pair]:
    """A function that writes the checkpoints of a case."""
    torch.set_num_threads(1)

    def write(case: Any = "eagle3", folder: str = "pair") -> Pair:
        return Pair(case, tmp_path / folder)

    return write
