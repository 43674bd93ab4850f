"""Both services under mutual TLS, clients with tokens."""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from certificates import Authority
from services import DEMO, PATIENCE_S, wait_for

from draftwire import Client
from draftwire.errors import RequestError
from draftwire.processes import ServiceProcess, start_drafter, start_verifier
from draftwire.security import ClientSecurity
from draftwire.v1 import generate_pb2 as pb

TOKEN = "a-token-that-no-log-shows"


def flags(prefix: str, **files) -> list[str]:
    return [part for name, file in files.items() for part in (f"--{prefix}{name}", str(file))]


def scrape(service: ServiceProcess, authority: Authority, own: tuple[Path, Path] | None = None) -> str:
    url = re.search(r"metrics on (https://\S+)", service.log_text())[1]
    context = ssl.create_default_context(cafile=str(authority.file))
    if own is not None:
        context.load_cert_chain(*own)
    with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as response:
        return response.read().decode()


@pytest.mark.xdist_group("security")
def test_drafts_and_requests_over_mutual_tls_and_secrets_in_no_log(tmp_path):
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    drafter_files, verifier_files, client_files = (
        ours.issue("drafter.internal", "127.0.0.1"), ours.issue("verifier.internal", "127.0.0.1"), ours.issue("client")
    )
    user = ClientSecurity(
        ca=ours.file, certificate=client_files[0], key=client_files[1], token_file=tmp_path / "tokens"
    )
    own_ca = {"client-ca": ours.file}
    with (
        start_drafter(
            DEMO / "head", DEMO / "target", "--device", "cpu", "--metrics-listen", "127.0.0.1:0",
            *flags("tls-", cert=drafter_files[0], key=drafter_files[1], **own_ca), security=user,
        ) as drafter,
        start_verifier(
            DEMO / "target", [drafter.address], "--device", "cpu", "--draft-deadline-ms", "off",
            "--metrics-listen", "127.0.0.1:0", "--token-file", str(tmp_path / "tokens"),
            *flags("tls-", cert=verifier_files[0], key=verifier_files[1], **own_ca),
            *flags("drafter-tls-", ca=ours.file, cert=verifier_files[0], key=verifier_files[1]), security=user,
        ) as verifier,
    ):
        with Client(verifier.address, user) as client:
            wait_for(
                lambda: client.info().drafters[0].state == pb.DRAFTER_STATE_READY, "the drafter's stream", PATIENCE_S
            )
            done = client.complete("import os\n", temperature=0.0, max_tokens=24, ignore_eos=True)
        assert sum(done.statistics.drafted) > 0
        for service in (drafter, verifier):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                scrape(service, ours)
            assert "\ndraftwire_" in scrape(service, ours, client_files)
        certificate, key = strangers.issue("client")
        for stranger in (
            ClientSecurity(ca=ours.file),
            ClientSecurity(ca=ours.file, certificate=certificate, key=key, token_file=tmp_path / "tokens"),
            ClientSecurity(ca=ours.file, certificate=client_files[0], key=client_files[1]),
        ):
            with Client(verifier.address, stranger) as client, pytest.raises(RequestError):
                client.info(timeout=3)
        logs = drafter.log_text() + verifier.log_text()
    assert TOKEN not in logs
    assert "PRIVATE KEY" not in logs
