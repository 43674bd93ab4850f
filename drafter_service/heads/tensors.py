"""Weights of a head by name, with checked shapes; from a checkpoint, or random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch

from draftwire.contract.errors import CheckpointError, MismatchError
from draftwire.model.checkpoints import load_tensors
from draftwire.model.quantised import SERVED_WEIGHTS

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TARGET_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
MASK_EMBEDDING = "mask_embedding"
MASK_FILE = "mask_embedding.pt"


class TensorSource(Protocol):
    """Provides a head's weights by canonical name, on the head's device and in its dtype."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor `name` and check its shape."""
        ...

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return the tensor `name` as [size]; it may have leading dimensions of 1."""
        ...

    def mask_embedding(self, hidden_size: int) -> torch.Tensor | None:
        """Return the head's mask embedding, [hidden_size], if it has one."""
        ...

    def embedding(self, vocab_size: int, hidden_size: int) -> torch.Tensor:
        """Return the embedding, [vocab_size, hidden_size]: the head's, else the target's."""
        ...

    def output(self, vocab_size: int, hidden_size: int, *, shared: bool) -> torch.Tensor:
        """Return lm_head, [vocab_size, hidden_size]: the head's, else the target's if it may be `shared`."""
        ...

    def draft_vocabulary(self, draft_size: int, target_size: int) -> torch.Tensor | None:
        """Return the target's id of each draft id, [draft_size] int64; None if both vocabularies are the same."""
        ...


class CheckpointTensors:
    """The tensors of a head's checkpoint, and shared tensors of its target.

    Args:
        tensors: Tensors by canonical name.
        originals: The checkpoint's name of each, for errors.
    """

    def __init__(
        self,
        head_dir: Path,
        target_dir: Path,
        tensors: Mapping[str, torch.Tensor],
        originals: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._head_dir, self._target_dir = head_dir, target_dir
        self._tensors, self._originals = dict(tensors), originals
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Remove a tensor from the source and return it."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self._head_dir}: the weights lack the tensor {name}, shape {list(shape)}")
        original = self._originals[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._head_dir}: tensor {original} has shape {list(tensor.shape)}, but its config.json asks for "
                f"{list(shape)}"
            )
        return self._placed(tensor, f"{self._head_dir}: tensor {original}")

    def vector(self, name: str, size: int) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.numel() == size == tensor.shape[-1]:
            self._tensors[name] = tensor.flatten()
        return self.take(name, size)

    def mask_embedding(self, hidden_size: int) -> torch.Tensor | None:
        return self.vector(MASK_EMBEDDING, hidden_size) if MASK_EMBEDDING in self._tensors else None

    def embedding(self, vocab_size: int, hidden_size: int) -> torch.Tensor:
        if _EMBEDDING in self._tensors:
            return self.take(_EMBEDDING, vocab_size, hidden_size)
        return self._of_target((_EMBEDDING,), vocab_size, hidden_size)

    def output(self, vocab_size: int, hidden_size: int, *, shared: bool) -> torch.Tensor:
        """Return lm_head; for a target without one, the embedding."""
        if _OUTPUT in self._tensors or not shared:
            return self.take(_OUTPUT, vocab_size, hidden_size)
        return self._of_target((_OUTPUT, _EMBEDDING), vocab_size, hidden_size)

    def draft_vocabulary(self, draft_size: int, target_size: int) -> torch.Tensor | None:
        """Return the target id of each draft id; d2t stores the differences target id - draft id."""
        offsets = self._tensors.pop("d2t", None)
        where = f"{self._head_dir}: tensor d2t"
        if offsets is None:
            if draft_size == target_size:
                return None
            raise CheckpointError(f"{where} is missing; draft_vocab_size {draft_size} is not vocab_size {target_size}")
        if tuple(offsets.shape) != (draft_size,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
            shape = list(offsets.shape)
            raise CheckpointError(f"{where} is {offsets.dtype} {shape}, must be integers of shape [{draft_size}]")
        ids = offsets.to(torch.int64) + torch.arange(draft_size)
        wrong = torch.nonzero((ids < 0) | (ids >= target_size))
        if len(wrong):
            draft_id = int(wrong[0])
            raise CheckpointError(
                f"{where} gives draft id {draft_id} the target id {int(ids[draft_id])}, not in 0..{target_size - 1}"
            )
        if len(ids.unique()) != draft_size:
            raise CheckpointError(f"{where} gives two draft ids the same target id")
        if draft_size == target_size:
            if offsets.any():
                raise CheckpointError(f"{where} renames tokens, but draft_vocab_size is vocab_size, {target_size}")
            return None
        return ids.to(self._device)

    def finish(self) -> None:
        """Check that every tensor has been taken.

        Raises:
            CheckpointError: If there are tensors that the head of its config.json does not have.
        """
        if self._tensors:
            names = sorted(self._originals[name] for name in self._tensors)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self._head_dir}: unexpected tensors {', '.join(names[:3])}{more}; the head that config.json "
                "describes has no place for them"
            )

    def _of_target(self, names: tuple[str, ...], *shape: int) -> torch.Tensor:
        candidates = [prefix + name for name in names for prefix in _TARGET_PREFIXES]
        found = load_tensors(self._target_dir, candidates)
        name = next((name for name in candidates if name in found), None)
        if name is None:
            raise MismatchError(f"neither {self._head_dir} nor its target {self._target_dir} has {names[0]}")
        tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise MismatchError(
                f"{self._head_dir} has no {names[0]} of its own and needs one of shape {list(shape)}, but {name} of "
                f"{self._target_dir} has shape {list(tensor.shape)}"
            )
        return self._placed(tensor, f"{self._target_dir}: tensor {name}")

    def _placed(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{what} is {tensor.dtype}; quantised weights are not served; {SERVED_WEIGHTS}")
        return tensor.to(self._device, self._dtype)


def load_mask_embedding(
    head_dir: Path, mask_token_id: int | None, tensors: dict[str, torch.Tensor], originals: dict[str, str]
) -> None:
    """Add the tensor of mask_embedding.pt, as vLLM reads it, if the head has that file.

    Raises:
        CheckpointError: If the file is damaged or of another mask token.
    """
    path = head_dir / MASK_FILE
    if not path.is_file():
        return
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(loaded, dict):
            made_for, loaded = loaded.get("mask_token_id", mask_token_id), loaded["embedding"]
            if made_for != mask_token_id:
                raise CheckpointError(f"{path} is of mask_token_id {made_for}, config.json has {mask_token_id}")
        tensors[MASK_EMBEDDING] = loaded.reshape(-1)
    except (UnpicklingError, OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged or holds no embedding: {error}") from error
    originals[MASK_EMBEDDING] = MASK_FILE


class RandomTensors:
    """Random weights, to measure speed without a checkpoint."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype, self.device = dtype, device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return ones for norms, and for other weights normal values with a standard deviation of 0.02."""
        if len(shape) == 1 and name.endswith("weight"):
            return torch.ones(shape, dtype=self._dtype, device=self.device)
        drawn = torch.empty(shape, dtype=self._dtype, device=self.device)
        return drawn.normal_(std=0.02, generator=self._generator)

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.take(name, size)

    def mask_embedding(self, hidden_size: int) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def embedding(self, vocab_size: int, hidden_size: int) -> torch.Tensor:
        return self.take(_EMBEDDING, vocab_size, hidden_size)

    def output(self, vocab_size: int, hidden_size: int, *, shared: bool) -> torch.Tensor:  # noqa: ARG002
        return self.take(_OUTPUT, vocab_size, hidden_size)

    def draft_vocabulary(self, draft_size: int, target_size: int) -> torch.Tensor | None:
        """Return evenly spaced target ids."""
        if draft_size == target_size:
            return None
        return torch.arange(draft_size, device=self.device) * target_size // draft_size
