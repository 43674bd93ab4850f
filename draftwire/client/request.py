"""Build checked requests from a call's arguments, and Draftwire's errors from gRPC's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import grpc

from draftwire.client.tls_mismatch import find_tls_mismatch
from draftwire.contract.addresses import CHANNEL_OPTIONS, MAX_REQUEST_BYTES
from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import (
    Described,
    DraftwireError,
    InvalidArgumentError,
    MismatchError,
    QueueFullError,
    RequestError,
)
from draftwire.contract.fields import build_message, check_limits
from draftwire.contract.retry import retry_after_s
from draftwire.contract.validation import build_sampling_params
from draftwire.v1 import generate_pb2 as pb

# Without retries no request runs twice.
CLIENT_CHANNEL_OPTIONS: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, ("grpc.enable_retries", 0)]


class ChatMessage(TypedDict, total=False):
    """One message of a conversation, with the fields of the contract's ChatMessage; `role` is required."""

    role: str
    content: str
    name: str
    tool_calls: Sequence[Mapping[str, Any] | str]
    tool_call_id: str
    reasoning: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]


class StructuredOutput(TypedDict, total=False):
    """The constraint on the output; exactly one key."""

    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    structural_tag: str | Mapping[str, Any]


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams; None means unset. The contract has their ranges and defaults."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    bad_word_ids: Sequence[Sequence[int]] | None
    skip_special_tokens: bool | None
    include_stop_text: bool | None
    prompt_logprobs: int | None
    structured_output: StructuredOutput | None


class ChatOptions(TypedDict, total=False):
    """Options of the chat template."""

    continue_final_message: bool | None
    """Continue the last message, an assistant's, instead of opening a new turn; default false."""
    template_arguments: Mapping[str, Any] | None
    """Further arguments of the chat template, such as {"enable_thinking": False}."""
    tools: Sequence[Mapping[str, Any] | str] | None
    """Tools that the template may offer, in OpenAI's form, as objects or their JSON."""


class Options(SamplingOptions, ChatOptions, total=False):
    """Every option of a request besides its prompt."""

    num_speculative_tokens: int | None
    """Draft tokens per verify step, 0 turns drafting off; default and maximum are the server's."""
    request_id: str | None
    """Id of the request in logs; default: chosen by the server."""
    truncate_prompt_tokens: int | None
    """Keep the last n tokens of the prompt; default: all."""
    n: int | None
    """Outputs of the prompt, 1 to 128; with a seed, output i has the seed + i. Default 1."""
    priority: int | None
    """Lower numbers go first, where the server schedules by priority; default 0."""
    cache_salt: str | None
    """The request shares the cache of its prompt only with requests of the same salt; default: none."""
    timeout: float | None
    """Seconds after which the request ends with DEADLINE_EXCEEDED; default: none."""


def build_request(prompt: Prompt, options: Mapping[str, Any]) -> tuple[pb.GenerateRequest, float | None]:
    """Build the request and its timeout; check all that a client can check.

    Raises:
        InvalidArgumentError: If a field is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    sampling = {name: value for name, value in given.items() if name in SamplingOptions.__annotations__}
    chat = {name: value for name, value in given.items() if name in ChatOptions.__annotations__}
    rest = {name: value for name, value in given.items() if name not in sampling and name not in chat}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    timeout = rest.pop("timeout", None)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise InvalidArgumentError("timeout", timeout, "must be a number of seconds above 0")
    unknown = [name for name in rest if name not in Options.__annotations__]
    if unknown:
        known = ", ".join(sorted(Options.__annotations__))
        raise InvalidArgumentError(unknown[0], rest[unknown[0]], f"unknown option; known: {known}")
    request = build_message(pb.GenerateRequest(), rest, "")
    request.sampling_params.CopyFrom(build_sampling_params(**sampling))
    _set_prompt(request, prompt, chat)
    check_limits(request)
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:  # gRPC's refusal looks like that of a full queue
        allowed = f"at most {MAX_REQUEST_BYTES} bytes"
        raise InvalidArgumentError("prompt", Described(f"a message of {size} bytes"), allowed)
    return request, timeout


def check_one_output(options: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if the options ask for several outputs."""
    if options.get("n") not in (None, 1):
        raise InvalidArgumentError("n", options["n"], "allowed: 1; complete_all returns several outputs")


def build_tokenize_request(prompt: str | Sequence[ChatMessage], options: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Return the request for a prompt's token ids; `options` are those of `ChatOptions`.

    Raises:
        InvalidArgumentError: If a field is invalid.
    """
    request, _ = build_request(prompt, options)
    kind = str(request.WhichOneof("prompt"))
    if kind == "token_ids":
        raise InvalidArgumentError("prompt", prompt, "must be text or messages")
    return pb.TokenizeRequest(**{kind: getattr(request, kind)})


def build_detokenize_request(token_ids: Sequence[int], *, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Return the request for the text of token ids; errors as of `build_tokenize_request`."""
    options = {"token_ids": token_ids, "skip_special_tokens": skip_special_tokens}
    return build_message(pb.DetokenizeRequest(), options, "")


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt, chat: Mapping[str, Any]) -> None:
    allowed = 'must be text, a list of token ids or a list of {"role", "content"} messages, not empty'
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence) or not prompt:
        raise InvalidArgumentError("prompt", prompt, allowed)
    try:
        if isinstance(prompt, str):
            request.text = prompt
        elif all(isinstance(entry, Mapping) for entry in prompt):
            request.chat.messages.extend(_chat_message(entry) for entry in prompt)  # type: ignore[arg-type]
            build_message(request.chat, {name: _json(value, name) for name, value in chat.items()}, "chat.")
        elif not any(issubclass(kind, (Mapping, str, bool)) for kind in set(map(type, prompt))):
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        else:
            raise InvalidArgumentError("prompt", prompt, allowed)
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("prompt", prompt, f"{allowed} ({error})") from error
    if chat and request.WhichOneof("prompt") != "chat":
        name, value = next(iter(chat.items()))
        raise InvalidArgumentError(f"chat.{name}", value, "allowed only with a prompt of messages")


def _json(value: Any, name: str) -> Any:
    """Return a value with each mapping replaced by its JSON."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [_json(entry, name) for entry in value]
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"chat.{name}", value, f"must have a JSON form ({error})") from error
    return value


def _chat_message(entry: Mapping[str, Any]) -> pb.ChatMessage:
    given = {name: _json(value, f"messages.{name}") for name, value in entry.items() if value is not None}
    message = build_message(pb.ChatMessage(), given, "chat.messages.")
    if not message.role:
        raise InvalidArgumentError("chat.messages.role", message.role, "needed: 1 to 64 bytes")
    return message


def to_error(
    error: grpc.RpcError, address: str, timeout: float | None, security: ClientSecurity | None = None
) -> DraftwireError:
    """Return Draftwire's error for an error of gRPC.

    With `security`, an unreachable server is probed for a TLS mismatch, which blocks for up to a few seconds. Pass
    `security` only if the connection has delivered nothing yet.
    """
    code: grpc.StatusCode = error.code()
    details: str = error.details() or "no details"
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgumentError.from_text(details)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError(details, retry_after_s(error.trailing_metadata() or ()))
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return MismatchError(details)
    if code == grpc.StatusCode.UNAVAILABLE and security is not None:
        mismatch = find_tls_mismatch(address, security)
        if mismatch is not None:
            return RequestError(code.name, f"{address} {mismatch}")
    messages = {
        grpc.StatusCode.UNAVAILABLE: f"{address} cannot be reached or is shutting down: {details}",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"not done within the timeout of {timeout} s",
        grpc.StatusCode.CANCELLED: "cancelled",
        grpc.StatusCode.UNIMPLEMENTED: f"{address} is not a verifier: it has no {pb.DESCRIPTOR.package}.Generation",
    }
    return RequestError(code.name, messages.get(code, f"{code.name}: {details}"))
