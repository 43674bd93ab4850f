"""Default sampling parameters from a target's generation_config.json."""

from __future__ import annotations

from pathlib import Path

from draftwire.contract.errors import CheckpointError, InvalidArgumentError
from draftwire.contract.validation import build_sampling_params
from draftwire.model.checkpoints import read_config
from draftwire.v1 import config_pb2

FILE_NAME = "generation_config.json"
# The keys that vLLM's --generation-config reads, by their names in the contract.
KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


def read_sampling_defaults(choice: str, target: Path) -> config_pb2.SamplingParams | None:
    """Return the defaults of a generation_config.json; None keeps those of the contract.

    Args:
        choice: "auto" for the target's file, "none", or the directory of another file.
        target: The target's directory.

    Raises:
        CheckpointError: If the file of a named directory is missing, or the contract does not allow a value.
    """
    if choice == "none":
        return None
    directory = target if choice == "auto" else Path(choice)
    if choice == "auto" and not (directory / FILE_NAME).is_file():
        return None
    config = read_config(directory, FILE_NAME)
    try:
        return build_sampling_params(**{name: config.get(key) for name, key in KEYS.items()})
    except InvalidArgumentError as error:
        name = error.field.removeprefix("sampling_params.")
        text = f"{directory / FILE_NAME}: {KEYS.get(name, name)} = {error.value!r}: {error.allowed}"
        raise CheckpointError(f"{text}; --generation-config none ignores the file") from error
