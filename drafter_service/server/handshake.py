"""The drafter's side of the handshake: check that a verifier and the head match."""

from __future__ import annotations

from pathlib import PurePosixPath

from google.protobuf.descriptor import EnumDescriptor

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from draftwire.contract.addresses import MAX_MESSAGE_BYTES
from draftwire.contract.errors import InvalidArgumentError, MismatchError
from draftwire.contract.validation import (
    DENSE,
    GUMBEL,
    TOP_N,
    check_limits,
    draft_logits_text,
    resolve_speculative_config,
)
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb


def settle_terms(request: pb.DraftRequest, info: pb.GetDrafterInfoResponse) -> SessionTerms:
    """Return the terms of a session with the verifier that sent `request`.

    Raises:
        InvalidArgumentError: If the message is not a hello, or its speculative config is invalid.
        MismatchError: If verifier and drafter do not match; names the field and both values.
    """
    if request.WhichOneof("message") != "hello":
        raise InvalidArgumentError("message", request.WhichOneof("message"), "the first message must be the hello")
    hello = request.hello
    _require_equal("protocol_version", hello.protocol_version, info.protocol_version)
    check_limits(hello)
    config = resolve_speculative_config(hello.speculative_config)
    _check_target(hello.target, info)
    _check_features(hello.features, info)
    _check_head(config, info)
    _check_config(config, hello, info)
    if not 1 <= hello.max_sequences <= info.max_sequences:
        _refuse("max_sequences", hello.max_sequences, f"allows 1 to {info.max_sequences}")
    if pb.CARRIER_BYTES not in hello.carriers:
        offered = ", ".join(_carrier_name(carrier) for carrier in hello.carriers) or "none"
        _refuse("carriers", offered, f"has {_carrier_name(pb.CARRIER_BYTES)}")
    return SessionTerms(
        verifier=hello.verifier,
        mode=SamplingMode.from_config(config, confidences=hello.confidences),
        num_speculative_tokens=config.num_speculative_tokens,
        max_sequences=hello.max_sequences,
    )


def _check_target(target: pb.TargetSpec, info: pb.GetDrafterInfoResponse) -> None:
    _require_equal("target.vocab_size", target.vocab_size, info.target_vocab_size)
    _require_equal("target.hidden_size", target.hidden_size, info.target_hidden_size)
    if info.target_num_layers:
        _require_equal("target.num_layers", target.num_layers, info.target_num_layers)


def _check_features(given: pb.FeatureSpec, info: pb.GetDrafterInfoResponse) -> None:
    wanted = info.features
    _require_equal("features.layers", list(given.layers), list(wanted.layers))
    width = wanted.width
    if given.fused_for:
        # Only the fingerprint distinguishes the states of different heads.
        own = info.head_fingerprint if info.HasField("fusion") else ""
        _require_equal("features.fused_for", given.fused_for, own)
        width = info.fusion.width
    _require_equal("features.width", given.width, width)
    _require_equal("features.dtype", _dtype_name(given.dtype), _dtype_name(wanted.dtype))


def _check_head(config: config_pb2.SpeculativeConfig, info: pb.GetDrafterInfoResponse) -> None:
    if config.HasField("method"):
        _require_equal("speculative_config.method", config.method, info.method)
    if config.HasField("model") and PurePosixPath(config.model).name != PurePosixPath(info.head).name:
        _require_equal("speculative_config.model", config.model, info.head)


def _check_config(
    config: config_pb2.SpeculativeConfig, hello: pb.VerifierHello, info: pb.GetDrafterInfoResponse
) -> None:
    k = config.num_speculative_tokens
    if k > info.max_num_speculative_tokens:
        _refuse("speculative_config.num_speculative_tokens", k, f"allows at most {info.max_num_speculative_tokens}")
    if config.draft_sample_method != GUMBEL:
        return
    _require_equal("noise_version", hello.noise_version, info.noise_version)
    logits = config.draft_logits
    if logits.form not in info.draft_logits_forms:
        forms = ", ".join(draft_logits_text(config_pb2.DraftLogits(form=form)) for form in info.draft_logits_forms)
        _refuse("speculative_config.draft_logits", draft_logits_text(logits), f"has {forms}")
    if logits.form == TOP_N and logits.n > info.draft_vocab_size:
        _refuse("speculative_config.draft_logits", draft_logits_text(logits), f"has {info.draft_vocab_size} tokens")
    if logits.form in (DENSE, TOP_N):
        # One message carries a step's logits.
        largest = hello.max_sequences * k * SamplingMode.from_config(config).row_bytes(info.draft_vocab_size)
        if largest > MAX_MESSAGE_BYTES:
            needs = f"{draft_logits_text(logits)}, up to {largest} bytes a step"
            advice = "lower max_sequences or num_speculative_tokens, or send top_n"
            _refuse("speculative_config.draft_logits", needs, f"sends at most {MAX_MESSAGE_BYTES}; {advice}")


def _require_equal(field: str, verifier: object, drafter: object) -> None:
    if verifier != drafter:
        _refuse(field, verifier, f"has {drafter}")


def _refuse(field: str, verifier: object, drafter: str) -> None:
    raise MismatchError(f"{field}: the verifier has {verifier}, the drafter {drafter}")


def _dtype_name(dtype: int) -> str:
    return _word(pb.DType.DESCRIPTOR, dtype)


def _carrier_name(carrier: int) -> str:
    return _word(pb.Carrier.DESCRIPTOR, carrier)


def _word(enum: EnumDescriptor, number: int) -> str:
    """Return the lower-case name of an enum value without its prefix, such as `float32`; an unknown number as text."""
    value = enum.values_by_number.get(number)
    return value.name.partition("_")[2].lower() if value else str(number)
