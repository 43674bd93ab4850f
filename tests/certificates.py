"""Certificate authorities for tests, as files."""

from __future__ import annotations

from pathlib import Path

import trustme


class Authority:
    """A certificate authority with its files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        self._ca = trustme.CA()
        self.file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, *names: str) -> tuple[Path, Path]:
        """Return (certificate file, key file) for host names, addresses or both."""
        issued = self._ca.issue_cert(*names)
        certificate, key = self._directory / f"{names[0]}.pem", self._directory / f"{names[0]}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key
