"""The one validation of SamplingParams and SpeculativeConfig, and their JSON form.

Limits of single fields are read from the contract (`limits` options in proto/draftwire/v1), see `fields`. This module
adds the rules across fields. Both services, the client and the command line call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.fields import build_message, check_limits, enum_word, rounded, with_defaults
from draftwire.contract.json_fields import parse_object
from draftwire.contract.structured_output import check_structured_output, to_structured_output
from draftwire.v1 import config_pb2 as pb

GREEDY = pb.DRAFT_SAMPLE_METHOD_GREEDY
GUMBEL = pb.DRAFT_SAMPLE_METHOD_GUMBEL
NONE = pb.DRAFT_LOGITS_FORM_NONE
DENSE = pb.DRAFT_LOGITS_FORM_DENSE
TOP_N = pb.DRAFT_LOGITS_FORM_TOP_N
STANDARD = pb.REJECTION_SAMPLE_METHOD_STANDARD
SYNTHETIC = pb.REJECTION_SAMPLE_METHOD_SYNTHETIC
BLOCK = pb.REJECTION_SAMPLE_METHOD_BLOCK
COUPLED = pb.REJECTION_SAMPLE_METHOD_COUPLED

HEAD_METHODS = ("eagle", "eagle3", "peagle", "dflash", "dspark")


def resolve_sampling_params(
    params: pb.SamplingParams, vocab_size: int | None = None, defaults: pb.SamplingParams | None = None
) -> pb.SamplingParams:
    """Validate sampling parameters and fill in their defaults.

    Args:
        params: The user's parameters; not changed.
        vocab_size: Size of the target's vocabulary, to check token ids; None on clients, which do not know it.
        defaults: The server's valid defaults, which replace those of the contract.

    Raises:
        InvalidArgumentError: If a field is invalid.
    """
    check_limits(params, "sampling_params.")
    resolved = with_defaults(params, defaults)
    if resolved.min_tokens > resolved.max_tokens:
        raise InvalidArgumentError(
            "sampling_params.min_tokens", resolved.min_tokens, f"allowed range [0, max_tokens = {resolved.max_tokens}]"
        )
    _check_masks(resolved)
    if resolved.HasField("structured_output"):
        check_structured_output(resolved.structured_output)
    if vocab_size is not None:
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            check_token_ids(f"sampling_params.{field}", getattr(resolved, field), vocab_size)
        for word in resolved.bad_word_ids:
            check_token_ids("sampling_params.bad_word_ids", word.ids, vocab_size)
    return resolved


def _check_masks(params: pb.SamplingParams) -> None:
    if not all(word.ids for word in params.bad_word_ids):
        raise InvalidArgumentError("sampling_params.bad_word_ids", [], "at least one token is required in each")
    forbidden = {word.ids[0] for word in params.bad_word_ids if len(word.ids) == 1}
    if params.allowed_token_ids and forbidden.issuperset(params.allowed_token_ids):
        raise InvalidArgumentError(
            "sampling_params.allowed_token_ids",
            list(params.allowed_token_ids),
            "at least one token that is not a bad word is required",
        )


def check_token_ids(
    field: str, token_ids: Iterable[int], vocab_size: int, describe: Callable[[int], object] = int
) -> None:
    """Check that token ids are below `vocab_size`.

    Args:
        describe: Shows a token id as the value of the field; by default the id itself.

    Raises:
        InvalidArgumentError: If an id is larger; the error has the largest.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgumentError(field, describe(largest), f"token ids must be in [0, {vocab_size})")


def resolve_speculative_config(config: pb.SpeculativeConfig) -> pb.SpeculativeConfig:
    """Validate speculation settings and fill in their defaults.

    Raises:
        InvalidArgumentError: If a field is invalid.
    """
    prefix = "speculative_config."
    check_limits(config, prefix)
    resolved = with_defaults(config)
    resolved.draft_sample_method = resolved.draft_sample_method or GREEDY
    resolved.draft_logits.form = resolved.draft_logits.form or NONE
    resolved.rejection_sample_method = resolved.rejection_sample_method or STANDARD
    if resolved.HasField("method") and resolved.method not in HEAD_METHODS:
        raise InvalidArgumentError(f"{prefix}method", resolved.method, f"allowed: {', '.join(HEAD_METHODS)}")
    _check_draft_logits(resolved, prefix)
    _check_synthetic(resolved, prefix)
    if resolved.rejection_sample_method == COUPLED and resolved.draft_logits.form != NONE:
        raise InvalidArgumentError(
            f"{prefix}draft_logits", draft_logits_text(resolved.draft_logits), "coupled allows none"
        )
    return resolved


def _check_draft_logits(config: pb.SpeculativeConfig, prefix: str) -> None:
    logits = config.draft_logits
    shown = draft_logits_text(logits)
    if logits.form == TOP_N and not logits.HasField("n"):
        raise InvalidArgumentError(f"{prefix}draft_logits", shown, 'top_n needs n, as in {"top_n": 64}')
    if logits.form != TOP_N and logits.HasField("n"):
        raise InvalidArgumentError(f"{prefix}draft_logits.n", logits.n, "allowed only with top_n")
    if logits.form != NONE and config.draft_sample_method != GUMBEL:
        raise InvalidArgumentError(
            f"{prefix}draft_logits", shown, "only gumbel drafts have logits; set draft_sample_method to gumbel"
        )


def _check_synthetic(config: pb.SpeculativeConfig, prefix: str) -> None:
    k = config.num_speculative_tokens
    rates = [rounded(rate) for rate in config.synthetic_acceptance_rates]
    has_length = config.HasField("synthetic_acceptance_length")
    if config.rejection_sample_method != SYNTHETIC:
        length = rounded(config.synthetic_acceptance_length) if has_length else None
        for name, given in (("rates", rates), ("length", length)):
            if given:
                raise InvalidArgumentError(
                    f"{prefix}synthetic_acceptance_{name}", given, "needs rejection_sample_method synthetic"
                )
        if config.synthetic_confidence_skill:
            skill = rounded(config.synthetic_confidence_skill)
            raise InvalidArgumentError(
                f"{prefix}synthetic_confidence_skill", skill, "needs rejection_sample_method synthetic"
            )
        return
    if bool(rates) == has_length:
        raise InvalidArgumentError(
            f"{prefix}rejection_sample_method",
            "synthetic",
            "needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length, "
            f"got {'both' if has_length else 'neither'}",
        )
    if has_length and config.synthetic_acceptance_length > k + 1:
        raise InvalidArgumentError(
            f"{prefix}synthetic_acceptance_length",
            rounded(config.synthetic_acceptance_length),
            f"allowed range [1, num_speculative_tokens + 1 = {k + 1}]",
        )
    if rates and len(rates) != k:
        raise InvalidArgumentError(
            f"{prefix}synthetic_acceptance_rates", rates, f"needs num_speculative_tokens = {k} values, got {len(rates)}"
        )
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise InvalidArgumentError(f"{prefix}synthetic_acceptance_rates", rates, "must not increase")


def build_sampling_params(**options: Any) -> pb.SamplingParams:
    """Return SamplingParams from keyword options; None means unset.

    Raises:
        InvalidArgumentError: For an unknown name, a wrong type or a value out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    structured_output = given.pop("structured_output", None)
    params = build_message(pb.SamplingParams(), given, "sampling_params.")
    if structured_output is not None:
        params.structured_output.CopyFrom(to_structured_output(structured_output))
    resolve_sampling_params(params)
    return params


RETIRED_VALUES = {
    "strict": 'use "standard" (with draft_sample_method "gumbel" for the same drafts)',
    "probabilistic": 'use "standard" with draft_sample_method "gumbel" and draft_logits "dense"',
}
RETIRED_KEYS = {
    "synthetic_acceptance_rate": "use synthetic_acceptance_rates (a list of k) or synthetic_acceptance_length"
}


def speculative_config_from_mapping(options: Mapping[str, Any]) -> pb.SpeculativeConfig:
    """Return a validated SpeculativeConfig with defaults, from vLLM-style keys and values.

    `draft_logits` is "none", "dense" or {"top_n": n}; enum values are lower-case names; `probabilistic` is read as
    gumbel in `draft_sample_method`, its newer spelling in vLLM.

    Raises:
        InvalidArgumentError: For an unknown or retired name, a wrong type or a broken rule.
    """
    prefix = "speculative_config."
    given = {name: value for name, value in options.items() if value is not None}
    for name, successor in RETIRED_KEYS.items():
        if name in given:
            raise InvalidArgumentError(prefix + name, given[name], f"this name is retired: {successor}")
    method = given.get("rejection_sample_method")
    if isinstance(method, str) and method in RETIRED_VALUES:
        raise InvalidArgumentError(
            f"{prefix}rejection_sample_method", method, f"this name is retired: {RETIRED_VALUES[method]}"
        )
    if given.get("draft_sample_method") == "probabilistic":
        given["draft_sample_method"] = "gumbel"
    if "draft_logits" in given:
        given["draft_logits"] = _draft_logits_mapping(given["draft_logits"], f"{prefix}draft_logits")
    return resolve_speculative_config(build_message(pb.SpeculativeConfig(), given, prefix))


def _draft_logits_mapping(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, str) and value in ("none", "dense"):
        return {"form": value}
    if isinstance(value, Mapping) and list(value) == ["top_n"]:
        return {"form": "top_n", "n": value["top_n"]}
    raise InvalidArgumentError(path, value, 'allowed: "none", "dense", {"top_n": n}')


def parse_speculative_config(argument: str) -> pb.SpeculativeConfig:
    """Return a validated SpeculativeConfig from a JSON object or from the path of a file with one.

    Raises:
        InvalidArgumentError: As `parse_json_object` and `speculative_config_from_mapping` do.
    """
    return speculative_config_from_mapping(parse_json_object("speculative_config", argument))


def parse_json_object(name: str, argument: str) -> dict[str, Any]:
    """Parse a JSON object, or a file with one at the path `argument`.

    Raises:
        InvalidArgumentError: If there is no such file, or its text is not a JSON object or repeats a key.
    """
    text = argument.strip()
    if not text.startswith("{"):
        try:
            text = Path(argument).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                name, argument, f"must be a JSON object or the path of a file with one ({error})"
            ) from error
    return parse_object(name, text)


def speculative_config_to_mapping(config: pb.SpeculativeConfig) -> dict[str, Any]:
    """Return the vLLM-style form of a resolved config, which `speculative_config_from_mapping` reads."""
    mapping: dict[str, Any] = {}
    for field, value in config.ListFields():
        if field.name == "draft_logits":
            mapping[field.name] = {"top_n": value.n} if value.form == TOP_N else draft_logits_text(value)
        elif field.enum_type is not None:
            mapping[field.name] = enum_word(field.enum_type, value)
        elif field.is_repeated:
            mapping[field.name] = [rounded(entry) for entry in value]
        else:
            mapping[field.name] = rounded(value)
    return mapping


def draft_logits_text(logits: pb.DraftLogits) -> str:
    """Return `none`, `dense` or, for example, `top_n=64`."""
    if logits.form == TOP_N:
        return f"top_n={logits.n}"
    return enum_word(pb.DraftLogitsForm.DESCRIPTOR, logits.form or NONE)
