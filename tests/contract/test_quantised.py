"""Errors for quantised targets and heads name the served dtypes and contain no installation advice of libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafter_service.heads import load_head
from draftwire.contract.errors import CheckpointError
from draftwire.model.checkpoints import reason_of, resolve_directory, weight_files
from verifier_service.target.target import load_target

CPU = torch.device("cpu")
SERVED = "served are weights in float32, bfloat16 and float16"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
PACKED = {
    "gptq": {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(2, 2, dtype=torch.int32)},
    "compressed": {"model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(2, 2, dtype=torch.int32)},
    "scaled": {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(2, 2)},
    "fp8": {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)},
    "bytes": {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2, dtype=torch.uint8)},
}


def model(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors")
    return directory


def refused(directory: Path, *, dummy: bool = False) -> list[str]:
    """Return the errors of the verifier for a directory as target and of the drafter for it as head."""
    texts = []
    with pytest.raises(CheckpointError) as caught:
        load_target(directory, "organisation/model", torch.float32, CPU, dummy=dummy)
    texts.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        load_head(directory, directory, torch.float32, CPU, dummy=dummy)
    texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "a-new-one"])
def test_a_quantised_config_is_refused_by_its_method(tmp_path: Path, method: str, dummy: bool) -> None:
    directory = model(tmp_path / "model", {}, quantization_config={"quant_method": method, "bits": 4})
    expected = f"weights quantised by '{method}' (quantization_config) are not served; {SERVED}"
    assert [text.partition(": ")[2] for text in refused(directory, dummy=dummy)] == [expected] * 2


@pytest.mark.parametrize("kind", PACKED)
def test_packed_tensors_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    (name,) = PACKED[kind]
    for text in refused(model(tmp_path / "model", PACKED[kind])):
        assert f"the tensor {name} is " in text
        assert SERVED in text


def test_gguf_files_are_refused_by_name(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    assert all("no weights in *.safetensors or *.bin, the formats" in text for text in refused(directory))
    (directory / "model-q4.gguf").write_bytes(b"GGUF")
    for text in refused(directory):
        assert "model-q4.gguf is a GGUF file, which is not served; served are directories with config.json" in text
    with pytest.raises(CheckpointError, match=r"model-q4\.gguf' is a GGUF file, which is not served"):
        resolve_directory(str(directory / "model-q4.gguf"))
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        weight_files(directory)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Loading needs `accelerate`: run `pip install accelerate`.", "Loading needs `accelerate`"),
        ("Type x is unknown. Update with `pip install --upgrade transformers`", "Type x is unknown."),
        ("Shapes differ: [2] and [3]", "Shapes differ: [2] and [3]"),
        ("pip install gptqmodel", "ImportError"),
    ],
)
def test_advice_to_install_packages_is_left_out(message: str, reason: str) -> None:
    assert reason_of(ImportError(message)) == reason
