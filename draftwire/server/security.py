"""A server's security: TLS, clients' certificates, bearer tokens, and plain text only if allowed.

Files are read again when they change, so that certificates and tokens are renewed without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from draftwire.contract.addresses import is_loopback_host
from draftwire.contract.client_security import AUTHORIZATION, SCHEME, parse_tokens, read_file, refuse_plain_text
from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.server.method_handlers import HandlerInterceptor, refusing_handler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSecurity:
    """A server's certificate, and the clients that it accepts.

    Attributes:
        certificate, key: PEM files of the server's certificate chain and private key; both or neither.
        client_ca: PEM file of the authorities of accepted clients (mutual TLS); needs `certificate`.
        token_file: Text file with one accepted bearer token a line; empty lines and lines that begin with # are
            ignored. A file without tokens is an error at start; later it leaves the previous tokens in force.
        insecure: Whether plain text is allowed outside of the loopback interface.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError("tls_cert", str(self.certificate), "needs tls_key beside it, and the reverse")
        if self.client_ca is not None and self.certificate is None:
            raise InvalidArgumentError("tls_client_ca", str(self.client_ca), "needs tls_cert and tls_key")

    def check_tokens(self) -> None:
        """Check the token file, if there is one.

        Raises:
            InvalidArgumentError: If no client could send a token of the file.
            ServerError: If the file cannot be read or has no token.
        """
        if self.token_file is not None and not parse_tokens(self.token_file, read_file(self.token_file)):
            raise ServerError(f"token_file = {str(self.token_file)!r}: there is no token in it")

    def credentials(self, listen: str) -> grpc.ServerCredentials | None:
        """Return the credentials for a gRPC port at `listen`; None for plain text.

        Raises:
            InvalidArgumentError: If the address is outside of loopback, without TLS and without `insecure`.
            ServerError: If a file cannot be read or has wrong contents.
        """
        if self.certificate is None or self.key is None:
            refuse_plain_text("listen", listen, self.insecure, "tls_cert and tls_key")
            return None
        # Python checks the files first: for wrong files gRPC reports that the port cannot be bound, and with wrong
        # authorities it later refuses every client.
        tried = _RenewedContext(self.certificate, self.key, self.client_ca)
        files = [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]
        watched = _WatchedFiles(files)
        return grpc.dynamic_ssl_server_credentials(
            _certificate_configuration(watched.read()),
            lambda: _renewed(watched, tried),  # type: ignore[arg-type,return-value]  # None keeps the old one
            require_client_authentication=self.client_ca is not None,
        )

    def tls_context(self, listen: str, field: str) -> Callable[[], ssl.SSLContext] | None:
        """Return a function that gives the TLS context for the next connection to a port at `listen`; None for plain
        text.

        Raises:
            InvalidArgumentError: If the address is outside of loopback, without TLS and without
                `insecure`.
            ServerError: If a file cannot be read or has wrong contents.
        """
        if self.certificate is None or self.key is None:
            refuse_plain_text(field, listen, self.insecure, "tls_cert and tls_key")
            return None
        return _RenewedContext(self.certificate, self.key, self.client_ca).current


class TokenInterceptor(HandlerInterceptor):
    """Refuses calls of the named services without a token of the file, unread and with UNAUTHENTICATED."""

    def __init__(self, token_file: Path, service_names: Sequence[str]) -> None:
        """
        Raises:
            InvalidArgumentError: If no client could send a token of the file.
            ServerError: If the file cannot be read or has no token.
        """
        self._token_file = token_file
        self._watched = _WatchedFiles([token_file])
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self._digests = self._digest(self._watched.read()[0])
        if not self._digests:
            raise ServerError(f"token_file = {str(token_file)!r}: there is no token in it")

    def replace(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        given = dict(call.invocation_metadata or ()).get(AUTHORIZATION, "")
        if not call.method.startswith(self._prefixes) or self._is_known(given):
            return handler
        text = "a bearer token that this server knows is needed"
        return refusing_handler(handler, (grpc.StatusCode.UNAUTHENTICATED, text, ()))

    def _is_known(self, given: str | bytes) -> bool:
        changed = self._watched.changed()
        if changed is not None:
            try:
                digests = self._digest(changed[0])
            except InvalidArgumentError as error:
                logger.warning("keeping the previous tokens: %s", error)
            else:
                if digests:
                    self._digests = digests
                    logger.info("tokens reloaded: %d", len(digests))
                else:  # the file may be half written
                    logger.warning("keeping the previous tokens: the file has none")
        if not isinstance(given, str) or not given.startswith(SCHEME):
            return False
        digest = hashlib.sha256(given.removeprefix(SCHEME).encode()).digest()
        # Compare all digests, so that the time is independent of them.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def _digest(self, text: bytes) -> list[bytes]:
        return [hashlib.sha256(token.encode()).digest() for token in parse_tokens(self._token_file, text)]


class _WatchedFiles:
    """Files that are read again after one of them has changed."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._stamps: list[tuple[int, int, int]] | None = None

    def read(self) -> list[bytes]:
        """Return the contents."""
        self._stamps = [_stamp(path) for path in self._paths]
        return [read_file(path) for path in self._paths]

    def changed(self) -> list[bytes] | None:
        """Return the contents if they changed since the last read; None if not, or if a file cannot be read."""
        try:
            if [_stamp(path) for path in self._paths] == self._stamps:
                return None
            return self.read()
        except ServerError as error:
            logger.warning("keeping the previous contents: %s", error)
            return None


class _RenewedContext:
    """A server's TLS context, created again when its files have changed; thread-safe."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._lock = threading.Lock()
        self._watched = _WatchedFiles([certificate, key, *([client_ca] if client_ca else [])])
        self._watched.read()
        try:
            self._context = self._load()
        except OSError as error:
            raise ServerError(f"tls_cert = {str(certificate)!r}, or a file beside it: {error}") from error

    def current(self) -> ssl.SSLContext:
        """Return the context of the files' present contents, or of their last valid contents."""
        with self._lock:
            if self._watched.changed() is not None:
                self._reload()
            return self._context

    def reload(self) -> bool:
        """Create a context from the files' present contents, log the result, and return whether it worked."""
        with self._lock:
            return self._reload()

    def _reload(self) -> bool:
        try:
            self._context = self._load()
        except OSError as error:
            logger.warning("keeping the previous certificates: %s", error)
            return False
        logger.info("certificates reloaded")
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # An empty password keeps OpenSSL from asking for one at the terminal; keys must need none.
        context.load_cert_chain(self._certificate, self._key, password="")
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _renewed(watched: _WatchedFiles, tried: _RenewedContext) -> grpc.ServerCertificateConfiguration | None:
    """Return a new configuration if the files have changed and are valid; None keeps the old one."""
    contents = watched.changed()
    if contents is None or not tried.reload():
        return None
    return _certificate_configuration(contents)


def _certificate_configuration(contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, *client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ServerError(f"{path} cannot be read: {error.strerror}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_plain_url_outside(url: str) -> bool:
    """Return whether a URL has the scheme http and a host outside of loopback."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback_host(parts.hostname or "")
