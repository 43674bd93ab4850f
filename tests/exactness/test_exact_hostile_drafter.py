"""Hostile drafters: without draft logits they cannot change the output's law; with logits, mismatches expel them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from exact_law import LENGTH, Law, Sampling
from exact_pair import VOCAB
from exact_services import Sample, sample, serve_verifier, wait_for_drafters
from hostile_drafter import HostileDrafter, Proposal, Wish, propose, serve_hostile

from draftwire.v1 import draft_pb2, generate_pb2
from draftwire_kernels import gumbel_sample
from verifier_service.target.target import Target

pytestmark = pytest.mark.xdist_group("exactness_wrong")

K = 3
REQUESTS = 700
READY, EXPELLED = generate_pb2.DRAFTER_STATE_READY, generate_pb2.DRAFTER_STATE_EXPELLED
# States of a drafter that is not expelled; after late answers it may be slow or on trial at the end.
BELIEVED = (READY, generate_pb2.DRAFTER_STATE_SLOW, generate_pb2.DRAFTER_STATE_PROBING)
DEADLINE_S = 0.05


def constant(_law: Law, wish: Wish) -> Proposal:
    return propose(wish, [3] * K)


def likeliest(law: Law, wish: Wish, *, sign: int = 1) -> Proposal:
    """Draft the target's most (or least) likely tokens; this drafter knows the target and the prompt."""
    output = list(wish.tokens[len(law.prompt) - 1 :])
    for _ in range(wish.num_drafts):
        number = 0
        for token in output:
            number = number * VOCAB + token
        output.append(int((sign * law.target_rows(Sampling(), len(output))[number]).argmax()))
    return propose(wish, output[-wish.num_drafts :])


def unlikeliest(law: Law, wish: Wish) -> Proposal:
    return likeliest(law, wish, sign=-1)


def as_many_as_it_likes(law: Law, wish: Wish) -> Proposal:
    """Let the number of drafts depend on the drafts."""
    tokens = likeliest(law, wish).tokens
    return propose(wish, tokens[: tokens[0] % (K + 1)])


def wrong_committed_length(law: Law, wish: Wish) -> Proposal:
    return propose(wish, likeliest(law, wish).tokens, committed_length=wish.position + 1)


def wrong_last_token(law: Law, wish: Wish) -> Proposal:
    return propose(wish, likeliest(law, wish).tokens, last_token=(wish.tokens[-1] + 1) % VOCAB)


def another_sequence(law: Law, wish: Wish) -> Proposal:
    return propose(wish, likeliest(law, wish).tokens, sequence_id=max(1, wish.sequence_id - 1))


def outside_the_vocabulary(_law: Law, wish: Wish) -> Proposal:
    return propose(wish, [VOCAB] * K)


def more_than_asked(_law: Law, wish: Wish) -> Proposal:
    return replace(propose(wish, [3] * K), tokens=(3,) * (wish.num_drafts + 1))


async def late(answers: list[draft_pb2.Drafts]) -> AsyncIterator[draft_pb2.Drafts]:
    """Deliver some answers after the deadline, depending on their drafts."""
    if sum(answers[-1].tokens.data) % 4 == 0:
        await asyncio.sleep(1.2 * DEADLINE_S)
    yield answers[-1]


async def twice(answers: list[draft_pb2.Drafts]) -> AsyncIterator[draft_pb2.Drafts]:
    yield answers[-1]
    yield answers[-1]


async def an_old_one_again(answers: list[draft_pb2.Drafts]) -> AsyncIterator[draft_pb2.Drafts]:
    """Deliver the previous step's drafts with this step's id, unless they are for more sequences."""
    if len(answers) > 1 and len(answers[-2].sequence_ids) <= len(answers[-1].sequence_ids):
        drafts = draft_pb2.Drafts()
        drafts.CopyFrom(answers[-2])
        drafts.step_id = answers[-1].step_id
        yield drafts
    else:
        yield answers[-1]


ONE_HOT = [
    (constant, {}, False, 0.02),
    (likeliest, {}, False, 0.4),
    (unlikeliest, {}, False, 0.0),
    (as_many_as_it_likes, {}, False, 0.2),
    (wrong_committed_length, {}, False, None),
    (wrong_last_token, {}, False, None),
    (another_sequence, {}, False, None),
    (outside_the_vocabulary, {}, True, None),
    (more_than_asked, {}, True, None),
    (likeliest, {"deliver": late}, False, None),
    (likeliest, {"deliver": twice}, True, None),
    (likeliest, {"deliver": an_old_one_again}, False, None),
]


def _first_acceptance(samples: list[Sample]) -> float:
    drafted = sum(one.statistics.drafted[0] for one in samples)
    return sum(one.statistics.accepted[0] for one in samples) / max(drafted, 1)


@pytest.mark.parametrize(
    ("proposer", "how", "is_expelled", "acceptance"),
    ONE_HOT,
    ids=[f"{proposer.__name__} {how['deliver'].__name__ if how else ''}".strip() for proposer, how, _, _ in ONE_HOT],
)
def test_without_logits_the_law_holds_whatever_is_drafted(
    proposer: Any, how: dict[str, Any], is_expelled: bool, acceptance: float | None, laws: list[Law], target: Target
) -> None:
    law = laws[0]
    with (
        serve_hostile(HostileDrafter(partial(proposer, law), **how)) as drafter,
        serve_verifier(target, {"num_speculative_tokens": K}, [drafter], DEADLINE_S if how else None) as address,
    ):
        samples = sample(address, law.prompt, [None] * REQUESTS, max_tokens=LENGTH)
        status = wait_for_drafters(address, *([EXPELLED] if is_expelled else BELIEVED))[0]
    assert law.refutation([one.tokens for one in samples], Sampling()) < 1
    assert status.detail.startswith("expelled: ") == is_expelled
    if acceptance is not None:  # its drafts were used
        assert sum(one.statistics.drafted[0] for one in samples) > 100
        assert _first_acceptance(samples) > acceptance


@pytest.mark.parametrize("drafts", ["greedy", "gumbel"])
@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_seeded_output_is_that_without_drafts(
    method: str, drafts: str, laws: list[Law], target: Target
) -> None:
    law, config = laws[1], {"num_speculative_tokens": K, "draft_sample_method": drafts}
    with (
        serve_hostile(HostileDrafter(partial(likeliest, law))) as drafter,
        serve_verifier(target, {**config, "rejection_sample_method": method}, [drafter]) as address,
    ):
        drafted = sample(address, law.prompt, range(400), max_tokens=LENGTH)
        alone = sample(address, law.prompt, range(400), max_tokens=LENGTH, num_speculative_tokens=0)
    assert [one.tokens for one in drafted] == [one.tokens for one in alone]
    assert 0.1 < _first_acceptance(drafted) < 0.9


def sampled_as_declared(wish: Wish) -> Proposal:
    """Sample honestly from the declared logits, with the noise of the request's proposal key."""
    logits = torch.zeros(wish.num_drafts, VOCAB)
    logits[:, wish.tokens[-1]] = 2.0
    positions = wish.position + torch.arange(wish.num_drafts)
    keys = torch.full_like(positions, wish.proposal_key)
    offsets = torch.arange(wish.num_drafts, dtype=torch.int32)
    drawn = gumbel_sample(logits, torch.ones(len(logits)), keys, positions, draft_offset=offsets)
    return propose(wish, drawn.tolist(), logits=logits)


def not_sampled_as_declared(wish: Wish) -> Proposal:
    """Always draft the same token but declare uniform logits, so that drafts are accepted too often."""
    return propose(wish, [3] * K, logits=torch.zeros(wish.num_drafts, VOCAB))


DENSE = {"num_speculative_tokens": K, "draft_sample_method": "gumbel", "draft_logits": "dense"}


def test_with_logits_drafts_that_are_sampled_from_them_are_taken(laws: list[Law], target: Target) -> None:
    with (
        serve_hostile(HostileDrafter(sampled_as_declared)) as drafter,
        serve_verifier(target, DENSE, [drafter]) as address,
    ):
        samples = sample(address, laws[0].prompt, range(REQUESTS), max_tokens=LENGTH)
        wait_for_drafters(address, READY)
    assert laws[0].refutation([one.tokens for one in samples], Sampling()) < 1
    assert _first_acceptance(samples) > 0.2


def test_drafts_not_sampled_from_their_logits_expel_the_drafter(
    laws: list[Law], target: Target
) -> None:
    law = laws[0]
    with (
        serve_hostile(HostileDrafter(not_sampled_as_declared)) as drafter,
        serve_verifier(target, DENSE, [drafter]) as address,
    ):
        samples = sample(address, law.prompt, range(REQUESTS), max_tokens=LENGTH)
        assert all(len(one.tokens) == LENGTH for one in samples)
        status = wait_for_drafters(address, EXPELLED)[0]
        later = sample(address, law.prompt, range(REQUESTS), max_tokens=LENGTH)
    assert "are not what its logits sample" in status.detail
    assert sum(one.statistics.drafted[0] for one in later) == 0
    assert law.refutation([one.tokens for one in later], Sampling()) < 1
