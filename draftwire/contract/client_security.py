"""A client's security: TLS, a certificate, a bearer token, and plain text only if allowed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from draftwire.contract.addresses import is_loopback
from draftwire.contract.errors import Described, InvalidArgumentError, ServerError

AUTHORIZATION = "authorization"
SCHEME = "Bearer "
# Environment variable of the token, read if the token is given neither as text nor in a file.
TOKEN_VARIABLE = "DRAFTWIRE_TOKEN"


@dataclass(frozen=True)
class ClientSecurity:
    """A client's certificate and token, and the authorities that it trusts.

    Attributes:
        tls: Whether the connection uses TLS; any of the files implies it.
        ca: PEM file of the trusted authorities; None for those of the system.
        certificate, key: PEM files of the client's own certificate and key, for mutual TLS; both or neither.
        token_file: Text file whose first token is sent; the server's token file works too.
        insecure: Whether plain text is allowed outside of the loopback interface.
        token: The bearer token itself; not shown in the object's text. Without it and `token_file`, the token is that
            of the environment variable DRAFTWIRE_TOKEN, if it is set and not empty.

    Raises:
        InvalidArgumentError: For a certificate without its key, the reverse, and `token` together with `token_file`.
    """

    tls: bool = False
    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    token_file: str | Path | None = None
    insecure: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError("tls_cert", str(self.certificate), "needs tls_key beside it, and the reverse")
        if self.token is not None and self.token_file is not None:
            raise InvalidArgumentError("token_file", str(self.token_file), "must be left out where token is given")

    @property
    def uses_tls(self) -> bool:
        """Return whether the client connects with TLS."""
        return bool(self.tls or self.ca or self.certificate)

    def credentials(self, address: str, name: str = "address") -> grpc.ChannelCredentials | None:
        """Return the credentials for a channel to `address`, read from the files now; None for plain text.

        Raises:
            InvalidArgumentError: If the address is outside of loopback, without TLS and
                without `insecure`.
            ServerError: If a file cannot be read.
        """
        if not self.uses_tls:
            refuse_plain_text(name, address, self.insecure, "tls")
            return None
        ca, key, certificate = (
            None if path is None else read_file(path) for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return metadata of a call: the bearer token, if there is one. File and environment are read now.

        Raises:
            InvalidArgumentError: If the file has no token, or a token cannot be sent.
            ServerError: If the file cannot be read.
        """
        if self.token_file is not None:
            tokens = parse_tokens(self.token_file, read_file(self.token_file))
            if not tokens:
                raise InvalidArgumentError("token_file", str(self.token_file), "must have a bearer token on a line")
            return _bearer(tokens[0])
        if self.token is not None:
            return _bearer(_checked_token("token", self.token))
        variable = os.environ.get(TOKEN_VARIABLE, "")
        return _bearer(_checked_token(TOKEN_VARIABLE, variable)) if variable else ()


# Plain text, only on loopback.
LOOPBACK = ClientSecurity()


def open_channel(address: str, security: ClientSecurity, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """Return a channel to `address`; see `ClientSecurity.credentials` for the errors."""
    credentials = security.credentials(address)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(address: str, security: ClientSecurity, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """Return a channel of the running event loop to `address`; see `ClientSecurity.credentials` for the errors."""
    credentials = security.credentials(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def parse_tokens(path: str | Path, text: bytes) -> list[str]:
    """Return the bearer tokens of a file, one a line, without empty lines and lines that begin with #.

    Raises:
        InvalidArgumentError: If a token cannot be sent. The error does not quote it.
    """
    lines = [line.strip() for line in text.splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not all(_is_sendable(token) for token in tokens):
        raise InvalidArgumentError("token_file", str(path), "must be printable ASCII, one token per line")
    return [token.decode() for token in tokens]


def _checked_token(name: str, token: str) -> str:
    stripped = token.strip()
    if not stripped or not _is_sendable(stripped.encode()):
        raise InvalidArgumentError(name, Described("(not shown)"), "must be printable ASCII, not empty")
    return stripped


def _is_sendable(token: bytes) -> bool:
    return all(0x20 <= byte <= 0x7E for byte in token)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return ((AUTHORIZATION, SCHEME + token),)


def read_file(path: str | Path) -> bytes:
    """Return the contents of a file of certificates, keys or tokens.

    Raises:
        ServerError: If the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ServerError(f"{path} cannot be read: {error.strerror}") from error


def refuse_plain_text(name: str, address: str, insecure: bool, instead: str) -> None:
    """Check that plain text is allowed at an address.

    Raises:
        InvalidArgumentError: If the address is outside of loopback and `insecure` is false;
            recommends `instead`.
    """
    if not insecure and not is_loopback(address, name):
        raise InvalidArgumentError(name, address, f"plain text outside of loopback needs insecure; or give {instead}")
