"""Sampling: warm-up, log probabilities, and the tokens that penalties count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting_scene import make_request

from draftwire.contract.validation import speculative_config_from_mapping
from draftwire_kernels import Penalties
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import AnswerLogits, ReadyDrafts, Request
from verifier_service.sampling import sampler
from verifier_service.sampling.sampler import TokenSampler
from verifier_service.sampling.sampling_spec import SamplingSpec
from verifier_service.sampling.token_history import TokenHistory

VOCAB = 20
MANY = 50000
GUMBEL = {"draft_sample_method": "gumbel"}
FEW = 12  # tokens, fewer than the top tokens that a request may ask for


def make_sampler(vocab_size: int, max_num_seqs: int = 5, **config: Any) -> TokenSampler:
    settings = speculative_config_from_mapping({"num_speculative_tokens": 3, **config})
    return TokenSampler(settings, vocab_size, frozenset(), max_num_seqs, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "widths", "methods"),
    [
        ({}, [], ["standard", "coupled"]),
        ({"rejection_sample_method": "coupled"}, [], ["coupled"]),
        ({**GUMBEL, "draft_logits": "dense"}, [VOCAB, 16], ["standard"]),
        ({**GUMBEL, "draft_logits": {"top_n": 6}}, [6], ["standard"]),
        ({**GUMBEL, "draft_logits": "dense", "rejection_sample_method": "block"}, [VOCAB, 16], ["block"]),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, [], ["synthetic"]),
    ],
    ids=str,
)
def test_warming_up_draws_from_batches_of_every_size_and_form(config, widths, methods, monkeypatch):
    forms = []

    def draw(logits, drafts, cu_rows, temperature, *args, **options):
        sizes = cu_rows.diff().tolist()
        assert logits.shape == (sum(sizes), VOCAB)
        draft = options["draft_logits"]
        columns = None if draft is None else draft.logits.shape[1]
        assert draft is None or len(draft.logits) == len(drafts)
        forms.append((logits.dtype, sizes, columns, options["method"]))
        return real(logits, drafts, cu_rows, temperature, *args, **options)

    real = sampler.rejection_sample
    monkeypatch.setattr(sampler, "rejection_sample", draw)
    monkeypatch.setattr(sampler, "PART_OF_VOCABULARY", 16)
    made = make_sampler(VOCAB, 3, **{"num_speculative_tokens": 2, **config})
    made.warm_up(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):  # of the target, and after penalties
        for expected in ([1], [3], [1, 1], [3, 3], [3, 1], [1, 1, 1], [3, 3, 3], [3, 1, 1]):
            for method in methods:
                assert (dtype, expected, None, method) in forms
                for width in widths:
                    assert ((dtype, expected, width, method) in forms) == (sum(expected) > len(expected))
    assert {method for *_, method in forms} == set(methods)


def test_log_probabilities_are_of_each_requests_rows_and_tokens():
    """Requests with and without log probabilities, with different numbers of drafts and columns of draft logits."""
    made = make_sampler(FEW)
    torch.manual_seed(2)
    columns = torch.arange(FEW)
    works = []
    for i, (count, likeliest) in enumerate([(0, 2), (3, None), (2, 0), (3, 20), (1, 1)]):
        # At temperature 0, draft logits only separate the second and fourth request from the others.
        logits = AnswerLogits(torch.randn(count, FEW), None, columns) if i in (1, 3) else None
        drafts = ReadyDrafts(1, 0, [0] * count, logits) if count else None
        asked = {} if likeliest is None else {"logprobs": likeliest}
        works.append(ScheduledRows(make_request([5], keys=10 * i, **asked), 0, [5] + [0] * count, drafts, samples=True))
    num_rows = [work.num_logit_rows for work in works]
    logits = torch.randn(sum(num_rows), FEW)
    logits[:, 0] += 2.0 * (torch.arange(sum(num_rows)) % 2 == 1)  # some of the drafts are the likeliest
    drawn = made.finish(made.launch(works, logits.clone()))
    expected = logits.log_softmax(-1).split(num_rows)
    assert len({len(one.tokens) for one in drawn}) > 1
    assert drawn[1].logprobs is None
    for i, likeliest in ((0, 2), (2, 0), (3, FEW), (4, 1)):
        tokens, logprobs = drawn[i]
        assert len(tokens) > 0
        assert logprobs is not None
        for row, token, entry in zip(expected[i], tokens, logprobs.messages(len(tokens)), strict=False):
            assert entry.logprob == pytest.approx(row[token].item())
            assert entry.rank == int((row > row[token]).sum()) + 1
            assert list(entry.top_ids) == row.topk(likeliest).indices.tolist()
            assert list(entry.top_logprobs) == pytest.approx(row.topk(likeliest).values.tolist())


def test_ties_among_reported_tokens_do_not_depend_on_the_batch():
    def top_ids_of(*counts: int) -> list[int]:
        """Return the first request's top tokens in a batch with these numbers of log probabilities."""
        made = make_sampler(MANY)
        works = [
            ScheduledRows(make_request([5], keys=10 * i, logprobs=count), 0, [5], None, samples=True)
            for i, count in enumerate(counts)
        ]
        logprobs = made.finish(made.launch(works, logits[: len(works)]))[0].logprobs
        assert logprobs is not None
        return list(logprobs.messages(1)[0].top_ids)

    for seed in range(20):
        torch.manual_seed(seed)
        logits = torch.randn(3, MANY).to(torch.bfloat16)
        assert top_ids_of(5) == top_ids_of(5, 20) == top_ids_of(5, 1, 12)


def test_where_nothing_could_be_drawn_nothing_is_reported():
    made = make_sampler(VOCAB)
    works = [ScheduledRows(make_request([5], keys=10 * i, logprobs=1), 0, [5], None, samples=True) for i in range(2)]
    logits = torch.randn(2, VOCAB)
    logits[0] = torch.nan
    sick, well = made.finish(made.launch(works, logits))
    assert (len(sick.tokens), len(well.tokens)) == (0, 1)
    for drawn in (sick, well):
        assert drawn.logprobs is not None
        assert len(drawn.logprobs.messages(len(drawn.tokens))) == len(drawn.tokens)


@pytest.mark.parametrize("top_n", [None, 3])
def test_a_request_without_drafts_beside_logits_draws_plainly(top_n):
    """One request is beside drafts of another answer; one is alone, as the other requests of its answer have ended."""
    made = make_sampler(FEW, **GUMBEL, draft_logits={"top_n": top_n} if top_n else "dense")
    torch.manual_seed(3)
    ids = torch.arange(2 * (top_n or 0), dtype=torch.int32).reshape(2, -1) if top_n else None
    answers = [AnswerLogits(torch.randn(2, top_n or FEW), ids, None) for _ in range(2)]
    logits = torch.randn(5, FEW)

    def drawn(*drafts: ReadyDrafts | None) -> list[list[int]]:
        works = [
            ScheduledRows(make_request([5], keys=10 * i), 0, [5, *(one.tokens if one else [])], one, samples=True)
            for i, one in enumerate(drafts)
        ]
        num_rows = sum(work.num_logit_rows for work in works)
        return [one.tokens for one in made.finish(made.launch(works, logits[:num_rows].clone()))]

    some, none = ReadyDrafts(1, 0, [1, 4], answers[1], 0), ReadyDrafts(1, 0, [], answers[0], 0)
    assert drawn(none, some, none) == drawn(None, some, None)
    assert drawn(none) == drawn(None)


@pytest.fixture
def history() -> TokenHistory:
    return TokenHistory(3, VOCAB, torch.device("cpu"))


def works(*requests: Request) -> list[ScheduledRows]:
    return [ScheduledRows(one, 0, one.tokens[-1:], None, samples=True) for one in requests]


def drawn(*tokens: Sequence[int]) -> torch.Tensor:
    """Return tokens in the form of the rejection test, with -1 after the last of each request."""
    most = max(map(len, tokens))
    return torch.tensor([[*own, *[-1] * (most - len(own))] for own in tokens])


def penalties_of(history: TokenHistory, *requests: Request) -> Penalties | None:
    return history.penalties(requests, [SamplingSpec.of(one.params, frozenset()).penalties for one in requests])


def counted(history: TokenHistory, request: Request) -> tuple[set[int], Counter[int]]:
    """Return the tokens of the prompt, and the count of each token in the output."""
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
    history.count(works(request), drawn([9]))  # in flight, and not appended
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
