"""Settings and selection of all tests."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Set before torch or tokenizers are imported: test processes share the CPU cores, and nothing is downloaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

if TYPE_CHECKING:
    from draftwire_bench.link import Link


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False  # decided without torch, which the xdist controller does not need otherwise
    import torch

    return torch.cuda.is_available()


# Triton reads the variable at its first import; transformers and the folders' conftest.py import it too.
if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `make test` leaves these to `make test-full`: whole services, statistics over many samples, kernels in Triton's
# interpreter, simulated workloads, and tests of more than about ten seconds.
FULL_FOLDERS = ("carriers", "exactness", "faults", "fuzz", "kernels", "system")
FULL_FILES = (
    *("test_bench_acceptance", "test_bench_link", "test_bench_serve", "test_bench_timeline", "test_bench_transport"),
    *("test_bench_forward", "test_served_targets"),
    *("test_call_admission", "test_command_line", "test_demo", "test_memory", "test_metrics_server"),
    *("test_block_drafts", "test_processes", "test_stop_signals"),
    *("test_verifier_async_scheduling", "test_verifier_engine_process"),
    *("test_verifier_grammar_compiler", "test_verifier_pacing_worlds"),
    *("test_verifier_prelaunch", "test_verifier_target"),
    *("test_verifier_target_runner", "test_verifier_tensor_parallel"),
    *("test_training_demo", "test_training_run"),
)
# But these files of the folders above belong to `make test`: reference kernels, shared memory, one path through both
# processes.
QUICK = (
    *("test_kernels_keys_and_rates", "test_kernels_noise", "test_kernels_rejection", "test_kernels_errors"),
    *("test_carriers_ring", "test_carriers_transfer", "test_end_to_end"),
)
# `make test` runs every n-th case of these tests; `make test-full` runs the others.
STRIDES = {
    "test_draft_sampling": {"test_drafts_are_drawn_from_the_logits_sent": 4},
    "test_drafting_channel": {"test_a_malformed_announcement_is_named": 4, "test_a_malformed_commit_is_named": 3},
    "test_drafting_service_refusals": {
        "test_a_mismatched_verifier_is_refused_with_both_values": 4,
        "test_end_their_stream_naming_the_field_and_no_other": 4,
    },
    "test_early_drafts": {"test_a_commit_that_wants_fewer_drafts_gets_so_many": 3},
    "test_heads_operations": {"test_rotation_in_place_beside_the_values": 3},
    "test_heads_parity": {
        "test_all_rows_in_one_batch": 2,
        "test_ragged_batches_of_several_sequences": 2,
        "test_row_by_row_through_the_cache": 2,
        "test_several_rows_at_once_after_a_roll_back": 2,
        "test_accepted_rows_after_roll_backs": 2,
    },
    "test_kernels_rejection": {
        "test_a_bad_row_ends_its_own_request_before_it": 5,
        "test_tokens_are_those_of_the_oracle": 5,
    },
    "test_verifier_answers": {"test_drafts_that_are_drawn_from_their_logits_never_expel": 2},
    "test_verifier_checkpoints": {"test_end_tokens_are_those_of_generate": 3},
    "test_verifier_link_refusals": {
        "test_a_drafter_that_does_not_fit_is_refused_with_both_values": 4,
        "test_a_hello_that_does_not_fit_is_refused_until_it_does": 4,
        "test_a_too_large_message_of_a_drafter_expels_it": 3,
    },
    "test_verifier_output": {
        "test_gives_out_what_trying_every_overlap_does": 7,
        "test_text_of_any_bytes_is_that_of_all_pending_tokens": 7,
    },
}


def _belongs_to_full(path: Path) -> bool:
    return path.stem not in QUICK and (path.parent.name in FULL_FOLDERS or path.stem in FULL_FILES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that `make test` leaves out."""
    is_left_out = "not full" in config.option.markexpr and _belongs_to_full(collection_path)
    return True if is_left_out and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make test-full` runs, and skip tests that need more GPUs than there are."""
    import torch

    cases: Counter[tuple[str, str]] = Counter()
    for item in items:
        key = item.path.stem, getattr(item, "originalname", item.name)
        is_passed_over = cases[key] % STRIDES.get(key[0], {}).get(key[1], 1) != 0
        cases[key] += 1
        if is_passed_over or _belongs_to_full(item.path):
            item.add_marker(pytest.mark.full)
        mark = item.get_closest_marker("gpu")
        needed = 0 if mark is None else max(mark.args, default=1)
        if needed > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason="needs a GPU" if needed == 1 else f"needs {needed} GPUs"))


@pytest.fixture
def link() -> Iterator["Link"]:
    from draftwire_bench.link import Link

    try:
        link = Link()
    except OSError as error:
        pytest.skip(f"a link to a network namespace needs Linux, root and iproute2: {error}")
    with link:
        yield link


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of encodings of drafting messages by kind; ByteSize also encodes and counts.

    Only stubs and servers that are made after this fixture are counted.
    """
    from draftwire.v1 import draft_pb2

    counts: Counter[str] = Counter()

    def counted(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def count(message: Any) -> Any:
            counts[message.DESCRIPTOR.name] += 1
            return encode(message)

        return count

    for kind in (draft_pb2.DraftRequest, draft_pb2.DraftResponse):
        for method in ("SerializeToString", "ByteSize"):
            monkeypatch.setattr(kind, method, counted(getattr(kind, method)))
    return counts
