"""The part that both clients share."""

from __future__ import annotations

from collections.abc import Sequence

from draftwire.contract.addresses import split_addresses
from draftwire.contract.client_security import LOOPBACK, ClientSecurity


class ClientBase:
    """Addresses and security of a client."""

    def __init__(self, address: str | Sequence[str], security: ClientSecurity = LOOPBACK) -> None:
        """
        Args:
            address: HOST:PORT of the verifier; for several, a list or one text with commas. Requests go to the
                addresses, and to the hosts that a name resolves to, in turn. Servers that cannot be reached or do not
                serve are skipped.
            security: TLS, certificates and token; by default plain text, only on loopback. The files are read now.

        Raises:
            InvalidArgumentError: If an address is malformed, or would be plain text outside of loopback.
            ServerError: If a file of `security` cannot be read.
        """
        self._addresses = split_addresses(address, "address")
        self.address = ",".join(self._addresses)
        self._security = security
        self._metadata = security.metadata()
