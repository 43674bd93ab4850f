"""The tokens that penalties look at, as draws add them and as requests come, go and are preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from drafting_scene import make_request

from draftwire_kernels import Penalties
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.sampling.sampling_spec import SamplingSpec
from verifier_service.sampling.token_history import TokenHistory

VOCAB = 20


@pytest.fixture
def history() -> TokenHistory:
    return TokenHistory(3, VOCAB, torch.device("cpu"))


def works(*requests: Request) -> list[ScheduledRows]:
    return [ScheduledRows(one, 0, one.tokens[-1:], None, samples=True) for one in requests]


def drawn(*tokens: Sequence[int]) -> torch.Tensor:
    """As the rejection test gives them, -1 behind the last one of each."""
    most = max(map(len, tokens))
    return torch.tensor([[*own, *[-1] * (most - len(own))] for own in tokens])


def penalties_of(history: TokenHistory, *requests: Request) -> Penalties | None:
    return history.penalties(requests, [SamplingSpec.of(one.params, frozenset()).penalties for one in requests])


def counted(history: TokenHistory, request: Request) -> tuple[set[int], Counter[int]]:
    """Tokens of the prompt, and how often each token is in the output."""
    found = penalties_of(history, request)
    assert found is not None
    slot = int(found.slot)
    counts = {token: count for token, count in enumerate(found.output_counts[slot].tolist()) if count}
    return set(found.prompt_mask[slot].nonzero().flatten().tolist()), Counter(counts)


def test_draws_are_counted_for_the_requests_that_use_penalties(history):
    plain, first, second = (make_request([3, 4, 3], keys=10 * i) for i in range(3))
    for one in (first, second):
        one.params.presence_penalty = 0.5
    step = works(plain, first, second)
    penalties_of(history, plain, first, second)
    history.count(step, drawn([9, 9], [7, 0, 7], [5]))
    history.count(works(second), drawn([5, 6]))
    assert counted(history, first) == ({3, 4}, Counter({7: 2, 0: 1}))
    assert counted(history, second) == ({3, 4}, Counter({5: 2, 6: 1}))
    assert penalties_of(history, plain) is None


def test_a_draw_of_a_request_preempted_meanwhile_is_forgotten(history):
    request = make_request([3, 4], frequency_penalty=0.5)
    penalties_of(history, request)
    history.count(works(request), drawn([7, 8]))
    request.tokens += [7, 8]
    history.count(works(request), drawn([9]))  # in flight, and not taken
    history.release(request)
    assert counted(history, request) == ({3, 4}, Counter({7: 1, 8: 1}))
    history.count(works(request), drawn([8]))
    assert counted(history, request) == ({3, 4}, Counter({7: 1, 8: 2}))


def test_a_place_that_is_free_again_begins_empty(history):
    for i in range(8):
        request = make_request([i], keys=10 * i, repetition_penalty=1.5)
        assert counted(history, request) == ({i}, Counter())
        history.count(works(request), drawn([i + 1]))
        assert counted(history, request) == ({i}, Counter({i + 1: 1}))
        history.release(request)
