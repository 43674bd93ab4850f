"""Convert a conversation of the contract to arguments of a chat template."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.json_fields import parse_object
from draftwire.v1 import generate_pb2 as pb

# Names that transformers passes to templates or their rendering; `template_arguments` must not replace them.
RESERVED_NAMES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


def texts_of(chat: pb.Chat) -> list[str]:
    """Return all texts of a conversation that the prompt may contain."""
    texts = [chat.template_arguments, *chat.tools]
    for message in chat.messages:
        texts += (message.content, message.name, *message.tool_calls, message.tool_call_id, message.reasoning)
    return texts


def template_inputs(chat: pb.Chat) -> dict[str, Any]:
    """Return the arguments of transformers' `apply_chat_template` for a conversation.

    Raises:
        InvalidArgumentError: If there is no message, a message has no role, JSON is not an object, a template argument
            has a reserved name, or the last message cannot be continued.
    """
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", [], "at least one message is required")
    arguments = {}
    if chat.HasField("template_arguments"):
        arguments = parse_object("chat.template_arguments", chat.template_arguments)
    for name in sorted(RESERVED_NAMES.intersection(arguments)):
        raise InvalidArgumentError(f"chat.template_arguments.{name}", arguments[name], "this name is reserved")
    last = chat.messages[-1]
    if chat.continue_final_message and not (last.role == "assistant" and last.content.strip()):
        allowed = "allowed only if the last message is an assistant's with text"
        raise InvalidArgumentError("chat.continue_final_message", True, allowed)
    return {
        **arguments,
        "conversation": [_message(message) for message in chat.messages],
        "tools": [parse_object("chat.tools", tool) for tool in chat.tools] or None,
        "add_generation_prompt": not chat.continue_final_message,
        "continue_final_message": chat.continue_final_message,
    }


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    if not message.role:
        raise InvalidArgumentError("chat.messages.role", "", "allowed length 1 to 64 bytes, got 0")
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    for field, name in (("name", "name"), ("tool_call_id", "tool_call_id"), ("reasoning", "reasoning_content")):
        if message.HasField(field):
            given[name] = getattr(message, field)
    if message.tool_calls:
        given["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return given


def _tool_call(text: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as in templates; in OpenAI's API they are text."""
    call = parse_object("chat.messages.tool_calls", text)
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        function["arguments"] = parse_object("chat.messages.tool_calls.function.arguments", function["arguments"])
    return call
