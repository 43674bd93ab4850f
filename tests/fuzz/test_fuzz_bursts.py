"""Half-sent messages and bursts that exceed every queue of both services; `make test-fuzz` plays many more cases.

test_fuzz.py explains FUZZ_CASES, FUZZ_SEED and FUZZ_ONLY; one of these cases counts as 250.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fuzz_bursts import BURSTS, MAX_NUM_SEQS, MAX_QUEUE, Scene
from fuzz_world import PATIENCE_S, START_S

from draftwire_bench.processes import start_drafter, start_verifier
from models import session_shelf

COUNT = max(len(BURSTS), int(os.environ.get("FUZZ_CASES", "1500")) // 250)
SEED = os.environ.get("FUZZ_SEED", "1")
ONLY = os.environ.get("FUZZ_ONLY")

pytestmark = pytest.mark.timeout(7200)


async def play(scene: Scene) -> Counter[str]:
    """Play the kinds of cases in turn; return the number of cases by outcome."""
    kinds, ends = list(BURSTS), Counter[str]()
    await scene.check()
    for index in range(COUNT) if ONLY is None else [int(ONLY)]:
        kind = kinds[index % len(kinds)]
        try:
            end = await asyncio.wait_for(BURSTS[kind](scene, Random(f"{SEED}/{index}")), 5 * PATIENCE_S)
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={SEED} FUZZ_ONLY={index} ({kind}): {error!r}") from error
        ends[f"{kind}: {end}"] += 1
    return ends


def test_bursts_are_refused_in_order_and_take_little(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    shelf = session_shelf(tmp_path_factory)
    target, head = shelf.target("random_llama"), shelf.head("random_llama", "random")
    common = ("--device", "cpu", "--metrics-listen", "127.0.0.1:0")
    sizes = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue", str(MAX_QUEUE))
    drafter = start_drafter(head, target, *common, log_path=tmp_path / "drafter.log", timeout_s=START_S)
    with drafter:
        verifier = start_verifier(
            target, [drafter.address], *common, *sizes, log_path=tmp_path / "verifier.log", timeout_s=START_S
        )
        with verifier:
            scene = Scene({"drafter": drafter, "verifier": verifier})
            ends = asyncio.run(play(scene))
            memory = {name: f"at first {size >> 20} MiB" for name, size in scene.base.items()}
    print("\n".join([str(memory), *(f"{end} {count}" for end, count in ends.items())]), file=sys.stderr, flush=True)
