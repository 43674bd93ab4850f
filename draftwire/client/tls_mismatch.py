"""Detect by a second connection that client and server disagree about TLS, which gRPC's error does not say."""

from __future__ import annotations

import socket
import ssl

from draftwire.contract.addresses import parse_address
from draftwire.contract.client_security import ClientSecurity

PROBE_TIMEOUT_S = 2.0
_IS_PLAIN = (
    "serves plain text, but this client speaks TLS: leave out the tls options, or start the server with --tls-cert and "
    "--tls-key"
)
_IS_TLS = (
    "serves TLS, but this client speaks plain text: give --tls, or --tls-ca FILE for authorities of your own (in "
    "Python ClientSecurity with tls or ca)"
)
_ASKS_FOR_CERTIFICATE = (
    "takes only clients with a certificate, and this client shows none: give --tls-cert and --tls-key (in Python "
    "certificate and key of ClientSecurity)"
)


def find_tls_mismatch(address: str, security: ClientSecurity) -> str | None:
    """Return the mismatch, as the rest of a sentence about the server; None if there is none.

    Each step blocks for at most `PROBE_TIMEOUT_S`. The probe sends a TLS handshake but no token.
    """
    host, port = parse_address(address, "address")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no secret is sent
    context.set_alpn_protocols(["h2"])
    has_handshake = False
    try:
        with (
            socket.create_connection((host.strip("[]"), port), PROBE_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")) as tls,
        ):
            has_handshake = True
            # A server that requires a certificate closes the connection after the client's part of the handshake.
            is_closed = security.uses_tls and not tls.recv(1)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
            return _IS_PLAIN if security.uses_tls else None
        is_alert = "ALERT" in (error.reason or "")
        if not is_alert and not has_handshake:
            return None
        is_closed = True
    except TimeoutError:
        is_closed = False
    except OSError:
        is_closed = has_handshake
    if not security.uses_tls:
        return _IS_TLS if has_handshake or is_closed else None
    return _ASKS_FOR_CERTIFICATE if is_closed and security.certificate is None else None
