"""Generic handling of message fields: limits and defaults of the contract, and messages from keyword options."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.v1 import config_pb2 as pb

M = TypeVar("M", bound=Message)


def check_limits(message: Message, prefix: str = "") -> None:
    """Check every set field, recursively, against its `limits` option in the contract.

    Raises:
        InvalidArgumentError: If a value is out of its range; the error names the field with `prefix`.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        limits = _limits(field)
        if limits.HasField("max_items") and len(value) > limits.max_items:
            raise InvalidArgumentError(path, Described(f"{len(value)} entries"), f"at most {limits.max_items} entries")
        limits_values = any(map(limits.HasField, ("min", "max", "max_bytes")))
        if field.message_type is None and field.enum_type is None and not limits_values:
            continue  # for example the ids of a long prompt
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for entry in value.values() if is_map else value if field.is_repeated else [value]:
            if field.enum_type is not None:
                _check_enum(field.enum_type, entry, path)
            elif isinstance(entry, Message):
                check_limits(entry, path + ".")
            else:
                _check_value(entry, limits, path)


def _fields(message: Message) -> list[FieldDescriptor]:
    # The type stubs also allow the descriptor class of one protobuf implementation.
    return cast("list[FieldDescriptor]", list(message.DESCRIPTOR.fields))


def limits_of(message: Message, name: str) -> pb.Limits:
    """Return the limits of a message's field in the contract; empty if it has none."""
    return next(_limits(field) for field in _fields(message) if field.name == name)


@cache
def _limits(field: FieldDescriptor) -> pb.Limits:
    extensions: Any = field.GetOptions().Extensions
    return cast(pb.Limits, extensions[pb.limits])


def _check_enum(enum: EnumDescriptor, value: int, path: str) -> None:
    if value not in enum.values_by_number:
        allowed = ", ".join(f"{v.number} ({v.name})" for v in enum.values)
        raise InvalidArgumentError(path, value, f"allowed: {allowed}")


def _check_value(value: Any, limits: pb.Limits, path: str) -> None:
    if isinstance(value, str):
        size = len(value.encode())
        if limits.HasField("max_bytes") and not 1 <= size <= limits.max_bytes:
            raise InvalidArgumentError(path, value, f"allowed length 1 to {limits.max_bytes} bytes, got {size}")
        return
    if not (limits.HasField("min") or limits.HasField("max")) or isinstance(value, bool):
        return
    too_low = limits.HasField("min") and (value <= limits.min if limits.exclusive_min else value < limits.min)
    too_high = limits.HasField("max") and value > limits.max
    if too_low or too_high or not math.isfinite(value):
        raise InvalidArgumentError(path, rounded(value), f"allowed range {range_text(limits)}")


def range_text(limits: pb.Limits) -> str:
    """Return the allowed range in interval notation: `(0, 1]`, `[0, inf)`."""
    low = f"{'(' if limits.exclusive_min else '['}{limits.min:.10g}" if limits.HasField("min") else "(-inf"
    return f"{low}, {limits.max:.10g}]" if limits.HasField("max") else f"{low}, inf)"


def rounded(value: float) -> float:
    """Return the decimal number without the digits that float32 adds."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def with_defaults(message: M, defaults: M | None = None) -> M:
    """Return a copy in which unset fields are set to their defaults: those of `defaults`, then those of the contract.

    `defaults` has only numeric fields.
    """
    filled = type(message)()
    filled.CopyFrom(message)
    for field, value in () if defaults is None else defaults.ListFields():
        if not filled.HasField(field.name):
            setattr(filled, field.name, value)
    for field in _fields(filled):
        limits = _limits(field)
        if limits.HasField("default") and not filled.HasField(field.name):
            setattr(filled, field.name, _cast(field, limits.default))
    return filled


def _cast(field: FieldDescriptor, value: float) -> float | int | bool:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return bool(value)
    return value if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE) else int(value)


def build_message(message: M, options: Mapping[str, Any], prefix: str) -> M:
    """Set fields of `message` by name; nested messages are mappings, enum values lower-case words.

    Raises:
        InvalidArgumentError: If a name is unknown or a type is wrong; the error names the field with `prefix`.
    """
    fields = {field.name: field for field in _fields(message)}
    for name, value in options.items():
        if name not in fields:
            raise InvalidArgumentError(prefix + name, value, f"unknown name; known: {', '.join(sorted(fields))}")
        field = fields[name]
        try:
            if field.enum_type is not None:
                setattr(message, name, _enum_number(field.enum_type, value, prefix + name))
            elif field.message_type is not None and field.message_type.GetOptions().map_entry:
                getattr(message, name).update({_map_key(key): _number(entry) for key, entry in value.items()})
            elif field.message_type is not None and field.is_repeated:
                for entry in value:
                    _build_entry(getattr(message, name).add(), entry, f"{prefix}{name}.")
            elif field.message_type is not None:
                build_message(getattr(message, name), value, f"{prefix}{name}.")
            elif field.is_repeated:
                if isinstance(value, str):
                    raise TypeError("expected a list")
                getattr(message, name).extend(_not_boolean(entry) for entry in value)
            else:
                if isinstance(value, bool) != (field.type == FieldDescriptor.TYPE_BOOL):
                    raise TypeError(f"expected {'true or false' if not isinstance(value, bool) else 'a number'}")
                setattr(message, name, value)
        except InvalidArgumentError:
            raise
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            limits = _limits(field)
            has_range = limits.HasField("min") or limits.HasField("max")
            allowed = f"allowed range {range_text(limits)}" if has_range else _type_text(field)
            raise InvalidArgumentError(prefix + name, value, f"{allowed} ({error})") from error
    return message


def _build_entry(message: Message, entry: Any, prefix: str) -> None:
    """Set the fields of an entry of a repeated field; a message of one field may be given as that field's value."""
    only, *others = _fields(message)
    build_message(message, entry if others or isinstance(entry, Mapping) else {only.name: entry}, prefix)


def _not_boolean(value: Any) -> Any:
    """Return a value, but raise TypeError for a boolean: protobuf would take true for the number 1."""
    if isinstance(value, bool):
        raise TypeError("expected no true or false")
    return value


def _number(value: Any) -> float:
    return float(_not_boolean(value))


def _map_key(value: Any) -> int:
    """Return an integer key; in JSON objects keys are strings of digits."""
    return int(value) if isinstance(value, str) else operator.index(_not_boolean(value))


def _type_text(field: FieldDescriptor) -> str:
    words = {FieldDescriptor.TYPE_BOOL: "true or false", FieldDescriptor.TYPE_STRING: "text"}
    words[FieldDescriptor.TYPE_MESSAGE] = "lists of token ids"
    word = words.get(field.type, "a 64-bit integer" if field.type == FieldDescriptor.TYPE_INT64 else "a number")
    return f"must be {'a list of ' if field.is_repeated else ''}{word}"


def _enum_prefix(enum: EnumDescriptor) -> str:
    return enum.values[0].name.removesuffix("UNSPECIFIED")


def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Return the name of an enum value in lower case, without the enum's prefix."""
    return enum.values_by_number[number].name.removeprefix(_enum_prefix(enum)).lower()


def _enum_number(enum: EnumDescriptor, word: Any, path: str) -> int:
    prefix = _enum_prefix(enum)
    words = {v.name.removeprefix(prefix).lower(): v.number for v in enum.values if v.number != 0}
    if not isinstance(word, str) or word not in words:
        raise InvalidArgumentError(path, word, f"allowed: {', '.join(words)}")
    return words[word]
