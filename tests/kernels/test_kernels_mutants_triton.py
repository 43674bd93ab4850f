"""Triton kernels with a known error draw other tokens, and on CUDA fail the chi-square test by a wide margin."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from markov import Case, chi_square_ratio, simulate
from test_kernels_groups import law_ratio
from test_kernels_mutants import BLOWN, previous_row, share_proposal
from test_kernels_rejection import Batch

from draftwire_kernels import rejection_sample

pytest.importorskip("triton")
import broken_kernels
from triton import JITFunction

from draftwire_kernels.gpu import block, draw, gumbel, launch, resolve, verify

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's about -inf and NaN, in the interpreter

CUDA = torch.cuda.is_available()


Break = Callable[[pytest.MonkeyPatch], None]


def _p_for_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resolve, "draw_residual", broken_kernels.draw_from_p)
    patch.setattr(block, "draw_residual", broken_kernels.draw_from_p)
    patch.setattr(resolve, "draw_without", broken_kernels.draw_with_the_draft)


def _no_offset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resolve, "accept_uniform", broken_kernels.uniform_without_offset)
    patch.setattr(block, "accept_uniform", broken_kernels.uniform_without_offset)
    patch.setattr(gumbel, "row_state", broken_kernels.state_without_offset)


def _noise_of_tokens_for_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draw, "group_state", broken_kernels.group_state_of_tokens)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Break], None]]:
    """Replace parts of the kernels; recompile after the change and after the test."""

    def compile_again() -> None:
        for module in (verify, block, resolve, draw, gumbel):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.hash = None
                    function.device_caches.clear()

    def apply(break_: Break) -> None:
        break_(monkeypatch)
        compile_again()

    yield apply
    monkeypatch.undo()
    compile_again()


@pytest.mark.skipif(CUDA, reason="shows through the interpreter that the mutants below are reached")
@pytest.mark.parametrize(
    ("break_", "method", "form"),
    [
        (_p_for_residual, "standard", "one-hot"),
        (_p_for_residual, "standard", "dense"),
        (_p_for_residual, "block", "dense"),
        (_no_offset, "block", "dense"),
        (_noise_of_tokens_for_groups, "standard", "one-hot"),
        (_noise_of_tokens_for_groups, "standard", "dense"),
        (_noise_of_tokens_for_groups, "block", "dense"),
    ],
)
def test_a_broken_kernel_gives_other_tokens(
    break_: Break, method: str, form: str, broken: Callable[[Break], None]
) -> None:
    vocab = 1600 if break_ is _noise_of_tokens_for_groups else 8
    batch = Batch(6, requests=16, vocab=vocab, spread=2.0, max_k=3)
    batch.temperature[:] = 1.0
    logits = batch.draft_logits(form)
    expected = rejection_sample(*batch.args(), draft_logits=logits, method=method, backend="reference")
    broken(break_)
    result = launch.rejection_sample(*batch.args(), logits, method, None, False)
    assert not torch.equal(result.tokens, expected.tokens)


def _ratio(case: Case) -> float:
    case = replace(case, sequences=200_000, backend="triton", device="cuda")
    return chi_square_ratio(simulate(case)[0], case.options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("break_", "case"),
    [
        (_p_for_residual, Case("one-hot")),
        (_p_for_residual, Case("greedy")),
        (_p_for_residual, Case("dense")),
        (_p_for_residual, Case("dense", "block")),
        (_no_offset, Case("dense", "block")),
    ],
)
def test_a_broken_kernel_fails(break_: Break, case: Case, broken: Callable[[Break], None]) -> None:
    broken(break_)
    assert _ratio(case) > BLOWN


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "form"), [("standard", "one-hot"), ("standard", "dense"), ("block", "dense")])
def test_groups_with_the_noise_of_tokens_fail(method: str, form: str, broken: Callable[[Break], None]) -> None:
    broken(_noise_of_tokens_for_groups)
    assert law_ratio(method, form, "triton", 200_000) > BLOWN


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("one-hot", edit_keys=share_proposal),
        Case("dense", edit_keys=share_proposal),
        Case("top-n", edit_keys=share_proposal),
        Case("dense", "block", edit_keys=share_proposal),
        Case("dense", edit_draft_logits=previous_row),
        Case("reduced", "block", edit_draft_logits=previous_row),
    ],
)
def test_shared_noise_and_stale_logits_fail(case: Case) -> None:
    assert _ratio(case) > BLOWN
