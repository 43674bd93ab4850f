"""The draft engine gives the same drafts on CUDA as on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from device_record import copies_to_host
from harness import Reply, Rows, Text, connect, make_engine, opened, replies, run
from tiny_head import TinyHead
from torch.profiler import ProfilerActivity, profile

from drafter_service.draft_loop.sampling_mode import SamplingMode

pytestmark = pytest.mark.gpu

MODES = [
    SamplingMode(),
    SamplingMode(gumbel=True),
    SamplingMode(gumbel=True, use_fp64=True),
    SamplingMode(gumbel=True, dense=True),
    SamplingMode(gumbel=True, top_n=5),
]


def crowd(device: str, mode: SamplingMode) -> dict[int, Reply]:
    stream = connect(make_engine(TinyHead(device=device)), mode)
    rows = [Rows(i, Text(i), 0, 3 + 5 * i, drafts=i % 5) for i in range(9)]
    stream.step(rows, [opened(i, 0.7, key=i) for i in range(9)])
    return stream.step([Rows(i, Text(i), 3 + 5 * i, 2, drafts=4) for i in range(9)])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drafts_are_those_of_the_cpu(mode: SamplingMode) -> None:
    on_cpu, on_cuda = crowd("cpu", mode), crowd("cuda", mode)
    for i, reply in on_cpu.items():
        assert on_cuda[i].tokens == reply.tokens
        if reply.logits is not None:
            torch.testing.assert_close(on_cuda[i].logits, reply.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("counts", [(40, 30), (40, 30, 3)])
def test_drafts_behind_waiting_steps_are_those_of_the_cpu(counts: tuple[int, ...]) -> None:
    """Rows attend to the rows of earlier steps in the same batch."""

    def drafts(device: str) -> dict[int, Reply]:
        stream = connect(make_engine(TinyHead(device=device)), SamplingMode(gumbel=True, dense=True))
        texts = [Text(i) for i in range(8)]
        stream.step(new=[opened(i, 0.7, key=i) for i in range(8)])
        for j, count in enumerate(counts):
            stream.send([Rows(i, texts[i], sum(counts[:j]), count, drafts=4) for i in range(8)])
        run(stream.engine)
        return replies(stream.answers[-1])

    on_cpu, on_cuda = drafts("cpu"), drafts("cuda")
    assert all(len(reply.tokens) == 4 for reply in on_cpu.values())
    for i, reply in on_cpu.items():
        assert on_cuda[i].tokens == reply.tokens
        torch.testing.assert_close(on_cuda[i].logits, reply.logits, rtol=1e-3, atol=1e-3)


def test_prompts_find_all_kernels_compiled() -> None:
    from draftwire_kernels.gpu.paged_attention import attention_kernel, combine_kernel

    def count_forms() -> int:
        kernels = (attention_kernel, combine_kernel)
        return sum(len(forms) for kernel in kernels for forms, *_ in kernel.device_caches.values())

    draw = random.Random(1)
    engine = make_engine(TinyHead(device="cuda"), max_num_seqs=32, max_batch_rows=512)
    engine.warm_up()
    stream = connect(engine)
    before = count_forms()
    assert before > 0
    for turn in range(40):
        ids = range(32 * turn, 32 * turn + draw.randint(1, 32))
        stream.step(new=[opened(i) for i in ids])
        stream.step([Rows(i, Text(i), 0, draw.randint(1, 90)) for i in ids])
        stream.step(closed=list(ids))
    assert count_forms() == before


def test_features_that_are_not_finite_do_not_stop_the_device() -> None:
    stream = connect(make_engine(TinyHead(device="cuda")), SamplingMode(gumbel=True, dense=True))
    sick = Text(1)
    sick.features[0] = torch.nan
    answered = stream.step([Rows(1, sick, 0, 3, 4), Rows(2, Text(2), 0, 3, 4)], [opened(1), opened(2)])
    assert (answered[1].tokens, len(answered[2].tokens)) == ([], 4)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_brings_its_drafts_to_the_host_in_one_copy(mode: SamplingMode) -> None:
    """Logits stay on the device until the answer is sent."""
    stream = connect(make_engine(TinyHead(device="cuda")), mode)
    texts = [Text(i) for i in range(3)]
    stream.step([Rows(i, texts[i], 0, 4, drafts=4) for i in range(3)], [opened(i, 0.7, key=i) for i in range(3)])
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for turn in range(5):
            stream.send([Rows(i, texts[i], 4 + 2 * turn, 2, drafts=1 + turn % 4) for i in range(3)])
            run(stream.engine)
        torch.cuda.synchronize()
    assert len(stream.answers) == 6
    assert copies_to_host(record) == 5
