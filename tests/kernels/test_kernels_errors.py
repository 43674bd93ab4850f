"""Bad input raises a ValueError with the argument's name, its value and the expected value."""

from typing import Any

import pytest
import torch

from draftwire_kernels import (
    DraftLogits,
    LogitBias,
    LogitsSampling,
    Penalties,
    Suppression,
    derive_stream_keys,
    gumbel_sample,
    process_logits,
    rejection_sample,
)

KEYS = derive_stream_keys([1, 2])


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable Triton's interpreter, so that its kernels need CUDA."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


CU_ROWS = torch.tensor([0, 3, 4], dtype=torch.int32)


def gumbel(**changes: Any) -> None:
    positional = {
        "logits": torch.zeros(2, 5),
        "temperature": torch.ones(2),
        "key": KEYS.proposal,
        "position": torch.arange(2),
    }
    gumbel_sample(**(positional | changes))


def rejection(**changes: Any) -> None:
    arguments = {
        "target_logits": torch.zeros(4, 5),
        "draft_tokens": torch.tensor([1, 2]),
        "cu_rows": CU_ROWS,
        "temperature": torch.ones(2),
        "keys": KEYS,
        "position": torch.arange(2),
    }
    rejection_sample(**(arguments | changes))


def logits(**changes: Any) -> None:
    values = changes.pop("logits", torch.zeros(4, 5))
    process_logits(values, LogitsSampling(**({"cu_rows": CU_ROWS, "temperature": torch.ones(2)} | changes)))


PENALTIES = Penalties(
    *(torch.ones(2) for _ in range(3)),
    torch.zeros(2, dtype=torch.int64),
    torch.zeros(1, 5, dtype=torch.bool),
    torch.zeros(1, 5, dtype=torch.int32),
)
INT = torch.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(5)}, r"logits: got shape \[5\], expected \[rows, V\]"),
        ({"logits": torch.zeros(2, 0)}, r"logits: got shape \[2, 0\], expected at least one column"),
        (
            {"logits": torch.zeros(2, 5, dtype=torch.float64)},
            "logits: got dtype torch.float64, expected torch.float32",
        ),
        ({"logits": [[0.0]]}, r"logits: got list, expected a tensor \[rows, V\]"),
        ({"temperature": torch.ones(3)}, r"temperature: got shape \[3\], expected \[2\]"),
        ({"temperature": torch.ones(2).double()}, "temperature: got dtype torch.float64, expected torch.float32"),
        ({"key": torch.ones(2)}, "key: got dtype torch.float32, expected torch.int64"),
        ({"position": torch.arange(2).int()}, "position: got dtype torch.int32, expected torch.int64"),
        ({"position": torch.empty(2, dtype=INT, device="meta")}, "position: got device meta, expected cpu"),
        ({"draft_offset": -1}, "draft_offset: got -1, expected an int of at least 0"),
        ({"draft_offset": 0.5}, "draft_offset: got 0.5"),
        ({"draft_offset": torch.arange(2)}, "draft_offset: got dtype torch.int64, expected torch.int32"),
        ({"token_ids": torch.arange(4)}, r"token_ids: got shape \[4\], expected \[5\]"),
        ({"backend": "triton"}, "backend: got 'triton'"),
        ({"backend": "cuda"}, "backend: got 'cuda', expected one of 'auto', 'reference', 'triton'"),
    ],
)
def test_gumbel_sample(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gumbel(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": torch.zeros(3, 5)}, r"cu_rows: got \[0, 3, 4\], expected increasing values from 0 to 3"),
        ({"cu_rows": CU_ROWS.long()}, "cu_rows: got dtype torch.int64, expected torch.int32"),
        ({"cu_rows": torch.tensor([0, 4, 4]).int()}, r"cu_rows: got \[0, 4, 4\], expected increasing"),
        ({"cu_rows": torch.tensor([1, 3, 4]).int()}, r"cu_rows: got \[1, 3, 4\]"),
        ({"cu_rows": torch.tensor([0]).int()}, r"cu_rows: got 1 entries, expected B \+ 1"),
        ({"cu_rows": torch.arange(6).int()}, r"cu_rows: got 6 entries, expected B \+ 1 for 1 <= B <= 4"),
        ({"draft_tokens": torch.tensor([1])}, r"draft_tokens: got shape \[1\], expected \[2\]"),
        ({"draft_tokens": torch.tensor([1, 2]).int()}, "draft_tokens: got dtype torch.int32"),
        ({"temperature": torch.ones(1)}, r"temperature: got shape \[1\], expected \[2\]"),
        ({"keys": tuple(KEYS)}, "keys: got tuple, expected StreamKeys"),
        ({"keys": KEYS._replace(accept=torch.ones(2))}, "keys.accept: got dtype torch.float32"),
        ({"keys": derive_stream_keys([1])}, r"keys.accept: got shape \[1\], expected \[2\]"),
        ({"position": torch.arange(3)}, r"position: got shape \[3\], expected \[2\]"),
        ({"method": "strict"}, "method: got 'strict', expected one of 'standard', 'synthetic', 'block', 'coupled'"),
        ({"draft_logits": torch.zeros(2, 5)}, "draft_logits: got Tensor, expected DraftLogits"),
        (
            {"draft_logits": DraftLogits(torch.zeros(2, 4))},
            r"draft_logits.logits: got shape \[2, 4\], expected \[2, 5",
        ),
        (
            {"draft_logits": DraftLogits(torch.zeros(3, 5))},
            r"draft_logits.logits: got shape \[3, 5\], expected \[2, 5",
        ),
        ({"draft_logits": DraftLogits(torch.zeros(2, 5).half())}, "draft_logits.logits: got dtype torch.float16"),
        (
            {"draft_logits": DraftLogits(torch.zeros(2, 3), torch.arange(4))},
            r"draft_logits.token_ids: got shape \[4\], expected \[3\]",
        ),
        (
            {"draft_logits": DraftLogits(torch.zeros(2, 3), torch.zeros(3, 3, dtype=INT))},
            r"draft_logits.token_ids: got shape \[3, 3\], expected \[2, 3\]",
        ),
        (
            {"draft_logits": DraftLogits(torch.zeros(2, 0), torch.zeros(0, dtype=INT))},
            "draft_logits.logits: .*at least one column",
        ),
        (
            {"draft_logits": DraftLogits(torch.zeros(2, 5)), "method": "coupled"},
            "draft_logits: got DraftLogits with method 'coupled', expected None",
        ),
        (
            {"method": "synthetic"},
            "synthetic_rates: got none with method 'synthetic', expected conditional rates",
        ),
        ({"synthetic_rates": torch.ones(2)}, "synthetic_rates: got rates with method 'standard', expected None"),
        (
            {"synthetic_rates": torch.ones(1), "method": "synthetic"},
            "synthetic_rates: got 1 rates, expected at least k_max = 2",
        ),
        ({"backend": "triton"}, "backend: got 'triton'"),
    ],
)
def test_rejection_sample(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rejection(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4, 5).int()}, "logits: got dtype torch.int32"),
        ({"cu_rows": torch.tensor([0, 2, 3]).int()}, r"cu_rows: got \[0, 2, 3\]"),
        ({"temperature": torch.ones(4)}, r"sampling.temperature: got shape \[4\], expected \[2\]"),
        ({"top_k": torch.ones(2)}, "sampling.top_k: got dtype torch.float32, expected torch.int32"),
        ({"top_p": torch.ones(1)}, r"sampling.top_p: got shape \[1\], expected \[2\]"),
        ({"draft_tokens": torch.arange(3)}, r"sampling.draft_tokens: got shape \[3\], expected \[2\]"),
        ({"penalties": PENALTIES}, r"sampling.draft_tokens: got None with penalties, expected a tensor \[2\]"),
        (
            {"bias": LogitBias(torch.zeros(2, dtype=INT), torch.zeros(1, 3, dtype=INT), torch.zeros(1, 2))},
            r"sampling.bias.value: got shape \[1, 2\], expected \[1, 3\]",
        ),
        (
            {"bias": LogitBias(torch.zeros(1, dtype=INT), torch.zeros(1, 3, dtype=INT), torch.zeros(1, 3))},
            r"sampling.bias.slot: got shape \[1\], expected \[2\]",
        ),
        (
            {"suppression": Suppression(torch.zeros(1, dtype=INT), torch.zeros(1, dtype=INT), torch.zeros(1, 1))},
            "sampling.suppression.token: got dtype torch.float32",
        ),
    ],
)
def test_process_logits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logits(**changes)


def test_process_logits_takes_its_own_struct() -> None:
    with pytest.raises(ValueError, match="sampling: got dict, expected LogitsSampling"):
        process_logits(torch.zeros(1, 2), {})  # type: ignore[arg-type]


def test_the_arguments_unchanged_are_good() -> None:
    gumbel()
    rejection()
    logits()
