"""The target model: loading through transformers, refusal of unsupported models, the forward pass over a batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftwire.contract.errors import CheckpointError
from draftwire.model.block_pool import blocks_for
from draftwire.model.checkpoints import fingerprint, read_config, reason_of, weight_files
from draftwire.model.kv_cache import KVCache, RaggedBatch, SequenceRows
from draftwire.model.quantised import refuse_quantised_config, refuse_quantised_files
from verifier_service.target import attention_hook
from verifier_service.target.merged_linears import find_projections, merge_projections
from verifier_service.target.tensor_parallel import ALONE, Rank, split_target

logger = logging.getLogger(__name__)

# Frequencies depend on the longest sequence of the batch, so that a sequence's output would depend on other sequences.
_REFUSED_ROPE_TYPES = {"dynamic", "longrope"}
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_GENERATION_CONFIG = "generation_config.json"


class TargetOutput(NamedTuple):
    """Output of the model's forward pass over T rows."""

    logits: Tensor
    """[R, vocab_size] of the requested rows, in the model's dtype."""
    states: tuple[Tensor, ...]
    """num_layers + 1 tensors [T, hidden_size]: each layer's input states, and the states after the final norm."""


class Target:
    """A decoder-only model of transformers over a paged cache.

    Attributes:
        vocab_size, hidden_size, num_layers, max_model_len: Sizes of the model; max_model_len in positions.
        layer_shapes: (kv_heads, key head size, value head size) of each layer; of this rank if the target is split.
        eos_token_ids: Tokens that end an output.
    """

    def __init__(self, model: Any, name: str, eos_token_ids: frozenset[int], max_model_len: int | None = None) -> None:
        """Take a model in evaluation mode with the attention hook, and merge its projections; see `load_target`.

        Raises:
            CheckpointError: If the model has state other than attention keys and values, or max_model_len is too large.
        """
        config = model.config
        self.name = name
        self.fingerprint = fingerprint(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
        self.vocab_size = _vocab_size(model)
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        longest = getattr(config, "max_position_embeddings", None)
        if longest is None:
            longest = 1 << 20
        if not isinstance(longest, int) or longest < 1:
            raise CheckpointError(f"{name}: max_position_embeddings = {longest!r}: must be a positive integer")
        self.max_model_len: int = longest if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= longest:
            raise CheckpointError(f"max_model_len = {max_model_len}: {name} has {longest} positions")
        self.eos_token_ids = eos_token_ids
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._model = model
        self._states: list[Tensor] = []  # empty between forward passes, so that compiled code needs no check
        layers = _find_layers(model, self.num_layers)
        self._register_captures(layers)
        self._run: Callable[[Tensor, Tensor, Tensor], TargetOutput] = self._run_model
        # Refuse an unsupported model at start, not at the first request.
        self.layer_shapes = self._measure_layers()
        merge_projections(find_projections(model, self._probe))
        self._probe()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the separate weights' memory for the cache

    def _register_captures(self, layers: Sequence[torch.nn.Module]) -> None:
        def entering(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            self._states.append(args[0][0])

        def after_norm(_module: torch.nn.Module, _args: Any, output: Tensor) -> None:
            if len(self._states) == self.num_layers:  # some models also call the final norm before their layers
                self._states.append(output[0])

        for layer in layers:
            layer.register_forward_pre_hook(entering)
        self._model.base_model.norm.register_forward_hook(after_norm)

    def _measure_layers(self) -> list[tuple[int, int, int]]:
        """Return the shape of every layer's keys and values, from the calls of the attention hook."""
        with attention_hook.measuring() as calls, self._refusing():
            states = self._run_rows(2, 1).states
        if [state.shape for state in states] != [(2, self.hidden_size)] * (self.num_layers + 1):
            raise CheckpointError(
                f"{self.name}: its layers do not take one state of {self.hidden_size} elements per row; not served"
            )
        layers = [call.layer for call in calls]
        if sorted(layers) != list(range(self.num_layers)):
            raise CheckpointError(
                f"{self.name}: only models whose every layer is attention are served; "
                f"layers {sorted(set(layers))} of {self.num_layers} are"
            )
        calls.sort()
        windows = _windows(self._model.config, self.num_layers)
        for call, window in zip(calls, windows, strict=True):
            # Some models pass the window only to the mask, which is not used here, or only to the attention.
            lengths = {given for given in (call.window, window) if given is not None and given < self.max_model_len}
            if lengths and call.window != window:
                raise CheckpointError(
                    f"{self.name}: the window of layer {call.layer} is {call.window} to its attention and {window} by "
                    f"its config; served up to max_model_len = {min(lengths)}"
                )
        return [call.shape for call in calls]

    def _probe(self) -> None:
        """Run two rows of padding through the paged attention."""
        cache = KVCache(self.layer_shapes, 1, self.dtype, self.device)
        batch = RaggedBatch([SequenceRows([0] * blocks_for(2), 0, 2)], self.device)
        with attention_hook.attending(cache, batch), self._refusing():
            self._run_rows(2, 1)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Convert errors of a forward pass within this context to CheckpointError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
            raise CheckpointError(f"{self.name}: its forward pass is not served: {error}") from error

    @torch.inference_mode()
    def _run_rows(self, num_rows: int, num_logit_rows: int) -> TargetOutput:
        """Run rows of padding, within `attending` or `measuring`."""
        # Separate tensors, because code compiled for views, or for one tensor twice, is compiled again for others.
        token_ids, positions, rows = (
            torch.zeros(count, dtype=torch.int64, device=self.device) for count in (num_rows, num_rows, num_logit_rows)
        )
        return self._run(token_ids, positions, rows)

    def compile(self, backend: str = "inductor") -> None:
        """Compile the forward pass once for all numbers of rows.

        The compiler treats sizes 0 and 1 as constants. So `forward` needs at least two rows, at least two of them with
        logits, in tensors that were created in inference mode.

        Raises:
            CheckpointError: If the model cannot be compiled as a whole, or would not run as a CUDA graph.
        """
        if self.device.type == "cuda" and self.dtype != torch.bfloat16 and has_experts(self._model):
            # With other dtypes transformers reads the rows of each expert from the device, unsupported in graphs.
            raise CheckpointError(f"{self.name}: models with experts are served on a GPU only in bfloat16")
        self._run = torch.compile(self._run_model, fullgraph=True, dynamic=True, backend=backend)
        with attention_hook.measuring(), self._refusing():
            # Different numbers, because equal numbers would be compiled as one size; small, like most steps.
            self._run_rows(16, 8)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, batch: RaggedBatch, rows: Tensor
    ) -> TargetOutput:
        """Run a step's rows and fill the cache.

        Args:
            token_ids, positions: [T] int64, grouped by sequence.
            cache, batch: The cache, and the slots that the rows write and attend to.
            rows: [R] int64, the rows with logits.
        """
        with attention_hook.attending(cache, batch):
            return self._run(token_ids, positions, rows)

    def _run_model(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> TargetOutput:
        self._states.clear()
        output = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        )
        states = tuple(self._states)
        self._states.clear()
        return TargetOutput(output.logits[0], states)


def _vocab_size(model: Any) -> int:
    layer = model.get_output_embeddings()
    size: int | None = getattr(layer, "out_features", None)
    if size is None:
        raise CheckpointError(f"{type(model).__name__}: its logits are of a {type(layer).__name__}; not served")
    return size


def has_experts(model: Any) -> bool:
    """Return whether a model has modules of transformers' `use_experts_implementation`."""
    return any(hasattr(module, "has_gate") and hasattr(module, "is_concatenated") for module in model.modules())


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """Return the window of each layer according to the config."""
    # Configs accept unknown fields.
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types = {kinds!r}: must name the kind of each of {num_layers} layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _find_layers(model: Any, count: int) -> Sequence[torch.nn.Module]:
    layers = getattr(model.base_model, "layers", None)
    if layers is None or len(layers) != count or not hasattr(model.base_model, "norm"):
        raise CheckpointError(f"{type(model).__name__}: its layers are not laid out as `layers` and `norm`; not served")
    return layers


def load_target(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
    dummy: bool = False,
    rank: Rank = ALONE,
) -> Target:
    """Load the target from a model directory, or one rank's part of a split target.

    Args:
        directory: With config.json and, unless `dummy`, weights.
        name: The operator's name of the target, for messages and information.
        max_model_len: Maximum number of positions of a sequence; None for the model's limit.
        dummy: Use random weights for the shapes of config.json, to measure speed. The whole model is created before it
            is split.
        rank: This process among the ranks of the target; their process group exists.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of a kind that is not served.
        InvalidArgumentError: If the target cannot be split over this number of ranks.
    """
    config = _read_served_config(directory, name)
    generation = _read_generation_config(directory)  # first, because transformers' errors do not name the file
    if dummy:
        model = _random_model(config, dtype, device)
    else:
        refuse_quantised_files(weight_files(directory))
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention_hook.NAME,
                output_loading_info=True,
            )
            model, report = loaded
        except Exception as error:  # safetensors, torch and transformers raise many types for a damaged file
            raise CheckpointError(f"{directory}: cannot be loaded: {reason_of(error)}") from error
        missing = sorted(set(report["missing_keys"]) | {str(key) for key in report["mismatched_keys"]})
        if missing:
            raise CheckpointError(f"{directory}: tensors are missing or of another shape: {', '.join(missing[:5])}")
    split_target(model, name, rank, device)
    model = model.to(device)
    eos_token_ids = _eos_token_ids(directory, config, generation, _vocab_size(model))
    return Target(model.eval(), name, eos_token_ids, max_model_len)


def check_split(directory: Path, name: str, rank: Rank) -> None:
    """Check by config.json, before ranks are started, that the target can be split over this number of ranks.

    Raises:
        CheckpointError, InvalidArgumentError: As `load_target`.
    """
    device = torch.device("meta")
    config = _read_served_config(directory, name)
    split_target(_random_model(config, torch.get_default_dtype(), device), name, rank, device)


def _read_served_config(directory: Path, name: str) -> Any:
    refuse_quantised_config(read_config(directory), name)
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # transformers and its validation of fields raise many types
        raise CheckpointError(f"{directory}: transformers cannot read its config.json: {reason_of(error)}") from error
    _refuse(config, name)
    return config


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with small random weights, created on the device and equal in all processes."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_hook.NAME)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch and transformers raise many types for invalid sizes and ids
        raise CheckpointError(f"transformers cannot create a model from config.json: {reason_of(error)}") from error
    finally:
        torch.set_default_dtype(previous)
    return model


def _refuse(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name}: encoder-decoder models are not served")
    unknown = [size for size in ("hidden_size", "num_hidden_layers", "vocab_size") if not hasattr(config, size)]
    if unknown:
        raise CheckpointError(f"{name}: models of type {config.model_type!r} are not served: no {', '.join(unknown)}")
    if not getattr(config, "is_causal", True):
        raise CheckpointError(f"{name}: models whose attention is not causal are not served")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {part.get("rope_type", part.get("type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    refused = kinds & _REFUSED_ROPE_TYPES
    if refused:
        raise CheckpointError(
            f"{name}: rotary type {refused.pop()!r} is not served: it makes sequences of a batch depend on each other"
        )
    others = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if others:
        raise CheckpointError(f"{name}: layers of type {', '.join(sorted(others))} are not served")
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if isinstance(model_class, (list, tuple)):
        model_class = model_class[0]
    if model_class is None:
        raise CheckpointError(f"{name}: transformers has no causal language model of type {config.model_type!r}")
    if getattr(model_class, "_is_stateful", False):
        raise CheckpointError(f"{name}: models with recurrent state are not served")


def _read_generation_config(directory: Path) -> dict[str, Any] | None:
    return read_config(directory, _GENERATION_CONFIG) if (directory / _GENERATION_CONFIG).is_file() else None


def _eos_token_ids(directory: Path, config: Any, generation: dict[str, Any] | None, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence ids, as transformers' `generate`: of generation_config.json, else of config.json.

    Ids outside of the vocabulary are dropped and logged.
    """
    if generation is None:
        name, given = "config.json", getattr(config, "eos_token_id", None)
    else:
        name, given = _GENERATION_CONFIG, generation.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        allowed = "must be a token id, a list of token ids or null"
        raise CheckpointError(f"{directory / name}: eos_token_id = {given!r}: {allowed}")
    served = frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)
    if len(served) < len(set(ids)):
        logger.warning(
            "%s: eos_token_id = %s: ids outside of the target's vocabulary of %d tokens have no effect",
            directory / name,
            given,
            vocab_size,
        )
    return served
