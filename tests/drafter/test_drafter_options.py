"""The drafter's options, and the limits, device and dtype derived from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_head import TinyHead

from drafter_service.choices import CPU_KV_CACHE_TOKENS, choose_limits, run_largest_step
from drafter_service.cli import drafter
from drafter_service.limits import EngineLimits
from drafter_service.main import head_name
from drafter_service.options import DrafterOptions
from draftwire.contract.errors import CheckpointError, DraftwireError, InvalidArgumentError, ServerError
from draftwire.model.devices import choose_device, choose_dtype

CPU = torch.device("cpu")
ROW_BYTES = 2 * 2 * 8 * 4  # keys and values of the tiny head's two layers, width 8, float32


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "torch_dtype": "float16"}))
    return tmp_path


class Memory:
    """GPU memory that leaves `left` bytes for the cache after the largest step."""

    def __init__(self, left: int) -> None:
        self._left = left
        self.utilization = 0.0

    def left_for_cache(self, utilization: float, largest_step: Callable[[], object]) -> int:
        largest_step()
        self.utilization = utilization
        return self._left


def limits(target_dir: Path, memory: Memory | None = None, **options: Any) -> EngineLimits:
    given = DrafterOptions("head", "target", **options)
    return choose_limits(given, TinyHead(), torch.float32, CPU, target_dir, memory)  # type: ignore[arg-type]


def test_the_longest_sequence_is_what_head_and_target_allow(target_dir: Path) -> None:
    assert limits(target_dir).max_model_len == 64
    assert limits(target_dir, max_model_len=80).max_model_len == 80


def test_a_multimodal_targets_positions_are_its_text_models(target_dir: Path) -> None:
    (target_dir / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 48}}))
    assert limits(target_dir).max_model_len == 48


def test_a_sequence_longer_than_the_heads_positions_is_refused(target_dir: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len = 97: the head's positions end at 96"):
        limits(target_dir, max_model_len=97)


def test_the_cache_is_no_larger_than_its_use(target_dir: Path) -> None:
    assert limits(target_dir, max_num_seqs=2).kv_cache_tokens == 2 * (64 + 16)
    assert limits(target_dir, max_num_seqs=4096).kv_cache_tokens == CPU_KV_CACHE_TOKENS
    assert limits(target_dir, kv_cache_tokens=160).kv_cache_tokens == 160


def test_the_cache_of_a_gpu_takes_what_its_memory_leaves(target_dir: Path) -> None:
    memory = Memory(ROW_BYTES * 1016)
    assert limits(target_dir, memory, gpu_memory_utilization=0.5).kv_cache_tokens == 1000  # one block is padding
    assert memory.utilization == 0.5
    assert limits(target_dir, memory, max_num_seqs=2).kv_cache_tokens == 2 * (64 + 16)
    assert limits(target_dir, Memory(0), kv_cache_tokens=160).kv_cache_tokens == 160


def test_a_gpu_that_leaves_no_room_for_a_sequence_is_refused(target_dir: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"gpu_memory_utilization = 0\.9: leaves a cache of 63 positions"):
        limits(target_dir, Memory(ROW_BYTES * 79))


def test_the_largest_step_has_a_full_batch_and_drafts() -> None:
    for options, most in (({"max_num_seqs": 3, "max_batch_rows": 100}, 100), ({"max_num_seqs": 8}, 2048)):
        head = TinyHead()
        run_largest_step(head, DrafterOptions("head", "target", **options), 64, torch.float32, CPU)
        count = options["max_num_seqs"]
        assert head.rows_of_forwards == [most, count * 5, count, count, count]
    head = TinyHead()
    given = DrafterOptions("head", "target", max_num_seqs=8, max_batch_rows=100, max_num_speculative_tokens=16)
    run_largest_step(head, given, 64, torch.float32, CPU)
    assert head.rows_of_forwards[0] == 8 * 17


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_speculative_tokens", "max_sessions", "max_batch_rows"])
def test_limits_out_of_range_are_named(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} = 0: allowed range"):
        EngineLimits(**{name: 0})


def test_every_session_gets_rows_in_every_batch() -> None:
    with pytest.raises(InvalidArgumentError, match="max_batch_rows = 63: allowed range \\[64"):
        EngineLimits(max_batch_rows=63, max_sessions=64)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None) == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == CPU
    with pytest.raises(ServerError, match="device = 'cuda:2': this machine has 2 CUDA devices"):
        choose_device("cuda:2")
    for wrong in ("tpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(InvalidArgumentError, match="allowed: cpu, cuda, cuda:INDEX"):
            choose_device(wrong)


def test_compute_types(target_dir: Path) -> None:
    assert choose_dtype("auto", CPU, target_dir) == torch.float32
    assert choose_dtype("auto", torch.device("cuda:0"), target_dir) == torch.float16
    (target_dir / "config.json").write_text(json.dumps({"dtype": "float32"}))
    assert choose_dtype("auto", torch.device("cuda:0"), target_dir) == torch.bfloat16
    assert choose_dtype("bfloat16", CPU, target_dir) == torch.bfloat16


def test_heads_are_called_by_their_directory_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "my-head").mkdir()
    assert head_name(f"{tmp_path}/my-head/") == "my-head"
    assert head_name("organisation/model") == "organisation/model"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--listen", "nowhere"], InvalidArgumentError),
        (["--metrics-listen", "0.0.0.0:9090"], InvalidArgumentError),
        (["--health-listen", "nowhere"], InvalidArgumentError),
        (["--otlp-endpoint", "http://collector:4317"], InvalidArgumentError),
        (["--device", "tpu"], InvalidArgumentError),
        (["--max-num-seqs", "0"], InvalidArgumentError),
        (["--head", "./missing"], CheckpointError),
    ],
)
def test_wrong_options_are_refused_before_serving(
    target_dir: Path, arguments: list[str], error: type[DraftwireError]
) -> None:
    directory = str(target_dir)
    result = CliRunner().invoke(drafter, ["--head", directory, "--target", directory, "--device", "cpu", *arguments])
    assert isinstance(result.exception, error)
