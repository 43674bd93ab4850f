"""On a GPU a step copies its sampled tokens to the host in one copy. The only other copies are of sent features. All
kernels run on one stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_record import copies_to_host, streams_of_kernels
from engine_scene import K, Served
from torch.profiler import ProfilerActivity, profile

from draftwire.transport import TensorSender
from verifier_service.target.target import Target, load_target

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
HIDDEN = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))["hidden_size"]
MAX_TOKENS = 40
PENALTIES_AND_BIAS = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
    "logit_bias": {5: 4.0, 300: -100.0},
}
OPTIONS = [{}, {"temperature": 0.8, "top_k": 5}, {"logprobs": 2}, PENALTIES_AND_BIAS]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(DEMO, "demo", torch.float32, torch.device("cuda"), max_model_len=256)


@pytest.fixture
def served(target: Target) -> Iterator[Served]:
    own = Served(target, async_scheduling=True, max_num_seqs=4, num_blocks=100)
    yield own
    own.engine.stop()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_drafted", [False, True], ids=["off", "on"])
def test_one_copy_a_step(served: Served, is_drafted: bool, options: dict[str, Any]) -> None:
    stream = served.connect(row_bytes=2 * 4 * HIDDEN) if is_drafted else None
    if stream is not None:
        stream.sender = TensorSender(torch.device("cuda"))  # as of a real stream: sends from pinned memory
    k = K if is_drafted else 0
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        requests = [served.submit(prompt, max_tokens=MAX_TOKENS, k=k, **options) for prompt in ([7, 8, 9], [11, 12])]
        served.engine.start()
        assert [len(served.tokens(request)) for request in requests] == [MAX_TOKENS] * 2
        served.engine.stop()
        torch.cuda.synchronize()
    sent = 0 if stream is None else sum(bool(step.num_rows) for step in stream.steps)
    steps = served.engine.counters().steps
    assert (sent > 1) == is_drafted
    assert steps > MAX_TOKENS // (K + 1)
    # Features are copied before the host knows whether their request has ended; features of its last step are not sent.
    # The rows of each prompt are copied separately.
    assert 0 <= copies_to_host(run) - steps - sent <= 2 * len(requests)


def test_kernels_of_the_steps_stream_alone(served: Served, tmp_path: Path) -> None:
    stream = served.connect(row_bytes=2 * 4 * HIDDEN)
    prompts = [[7, 8, 9], list(range(5, 45))]
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        requests = [served.submit(prompt, max_tokens=MAX_TOKENS, k=K) for prompt in prompts]
        served.engine.start()
        assert [len(served.tokens(request)) for request in requests] == [MAX_TOKENS] * 2
        served.engine.stop()
        torch.cuda.synchronize()
    assert max(max(step.num_rows, default=0) for step in stream.steps) > K + 1  # rows of a prompt were sent
    streams = streams_of_kernels(run, tmp_path / "trace.json")
    assert len(streams) == 1, streams
