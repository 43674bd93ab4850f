"""Errors that reach users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DraftwireError(Exception):
    """Base of the errors that users can act on; the message has the given value, the allowed ones and what to do.

    Pickling keeps all attributes, independently of the constructor, because errors are sent between processes.
    """

    def __reduce__(self) -> tuple[Callable[..., DraftwireError], tuple[Any, ...]]:
        return _restore, (type(self), self.args, self.__dict__)


class Described(str):
    """A description that replaces a value in an error message; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class InvalidArgumentError(DraftwireError, ValueError):
    """A value that breaks the contract. gRPC status INVALID_ARGUMENT."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    @classmethod
    def from_text(cls, text: str) -> InvalidArgumentError:
        """Return the error of a text that a server sent; `value` is then text."""
        field, _, rest = text.partition(" = ")
        value, _, allowed = rest.partition(": ")
        error = cls(field if rest else "", value, allowed or text)
        error.args = (text,)
        return error


class CheckpointError(DraftwireError):
    """A checkpoint that is missing, damaged, or not of a kind that is served."""


class MismatchError(DraftwireError):
    """A drafter and a verifier, or a head and a target, that do not fit. gRPC status FAILED_PRECONDITION."""


class BenchmarkError(DraftwireError):
    """A measurement that cannot be made, or whose result must not be trusted."""


class QueueFullError(DraftwireError):
    """No room for another request now. gRPC status RESOURCE_EXHAUSTED.

    `retry_after_s` is the time to wait before the next try, seconds; None if the server did not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(DraftwireError):
    """A server that is about to end. gRPC status UNAVAILABLE."""


class StalledClientError(DraftwireError):
    """A client that does not read its output. gRPC status ABORTED."""


class ServerError(DraftwireError):
    """A server that cannot start: its address is in use or malformed, or its device is missing."""


class RequestError(DraftwireError):
    """A request that failed on its way or in the server.

    `status` is the name of the gRPC status: "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", ...
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def _restore(kind: type[DraftwireError], args: tuple[Any, ...], attributes: dict[str, Any]) -> DraftwireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
