"""Both services under mutual TLS, clients with tokens: as deploy/tls.yml says, with the files of docs/deploy.md."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import deployment
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import DEMO, PATIENCE_S, wait_for_drafter

from draftwire import Client
from draftwire.errors import RequestError
from draftwire.processes import ServiceProcess, start_drafter, start_verifier
from draftwire.security import ClientSecurity, open_channel

pytestmark = pytest.mark.xdist_group("security")

# By service: its authority, and whose certificates let in.
LETS_IN = {"verifier": ("ca", {"verifier", "client"}), "drafter": ("drafter-ca", {"drafter", "drafter-client"})}
CERTIFICATES = [name for _, names in LETS_IN.values() for name in sorted(names)]


@dataclass(frozen=True)
class Stack:
    """The services of deploy/tls.yml as processes, and the directory of their secrets."""

    secrets: Path
    drafter: ServiceProcess
    verifier: ServiceProcess

    @property
    def services(self) -> dict[str, ServiceProcess]:
        return {"drafter": self.drafter, "verifier": self.verifier}

    def security(self, authority: str, certificate: str | None, token: bool = True) -> ClientSecurity:
        """A peer that trusts the authority and shows the certificate."""
        return peer(self.secrets, authority, certificate, self.secrets / "tokens" if token else None)

    def pages(self) -> dict[str, str]:
        """Where each service serves its metrics."""
        return {
            name: re.search(r"metrics on (https://\S+)", service.log_text())[1]
            for name, service in self.services.items()
        }


def peer(secrets: Path, authority: str, certificate: str | None, token_file: Path | None = None) -> ClientSecurity:
    own = [None, None] if certificate is None else [secrets / f"{certificate}{end}" for end in (".pem", ".key")]
    return ClientSecurity(ca=secrets / f"{authority}.pem", certificate=own[0], key=own[1], token_file=token_file)


def command(service: str, secrets: Path) -> list[str]:
    """Its arguments in deploy/tls.yml, with this machine's paths and a free port for metrics."""
    given = deployment.arguments(deployment.services("tls")[service]["command"])
    places = {"/run/secrets": str(secrets), "/models": str(DEMO), "0.0.0.0:9090": "127.0.0.1:0"}
    for place, here in places.items():
        given = [argument.replace(place, here) for argument in given]
    return [*given, "--device", "cpu", "--log-level", "debug"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which docs/deploy.md makes certificates with, is not on the PATH")
    directory = tmp_path_factory.mktemp("walk-through")
    subprocess.run(["bash", "-euc", deployment.walk_through("Secrets")], cwd=directory, check=True, capture_output=True)
    secrets = directory / "deploy" / "secrets"
    with (
        start_drafter(
            DEMO / "head", DEMO / "target", *command("drafter", secrets),
            security=peer(secrets, "drafter-ca", "drafter-client"),
        ) as drafter,
        start_verifier(
            DEMO / "target", [], *command("verifier", secrets), "--drafters", drafter.address,
            "--draft-deadline-ms", "off", security=peer(secrets, "ca", "client"),
        ) as verifier,
    ):  # fmt: skip
        with Client(verifier.address, peer(secrets, "ca", "client", secrets / "tokens")) as client:
            wait_for_drafter(client, drafter.address)
        yield Stack(secrets, drafter, verifier)


def is_let_in(address: str, security: ClientSecurity) -> bool:
    """Whether the health service, which needs no token, answers."""
    with open_channel(address, security, ()) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


def scrape(url: str, ca: Path, certificate: Path | None = None, key: Path | None = None) -> str:
    context = ssl.create_default_context(cafile=str(ca))
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as response:
        return response.read().decode()


def test_drafts_and_requests_travel_over_mutual_tls(stack):
    with Client(stack.verifier.address, stack.security("ca", "client")) as client:
        done = client.complete("import os\n", temperature=0.0, max_tokens=24, ignore_eos=True)
    assert sum(done.statistics.drafted) > 0


@pytest.mark.parametrize("service", LETS_IN)
@pytest.mark.parametrize("certificate", [None, *CERTIFICATES])
def test_a_port_lets_in_the_certificates_of_its_own_authority_alone(stack, service, certificate):
    authority, names = LETS_IN[service]
    security = stack.security(authority, certificate)
    assert is_let_in(stack.services[service].address, security) == (certificate in names)
    page = stack.pages()[service]
    if certificate in names:
        assert "\ndraftwire_" in scrape(page, security.ca, security.certificate, security.key)
    else:
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            scrape(page, security.ca, security.certificate, security.key)


def test_neither_service_is_taken_for_the_other(stack):
    assert not is_let_in(stack.verifier.address, stack.security("drafter-ca", "client"))
    assert not is_let_in(stack.drafter.address, stack.security("ca", "drafter-client"))


def test_prometheus_scrapes_with_the_files_that_it_is_given(stack):
    for job in deployment.read("prometheus/prometheus-tls.yml")["scrape_configs"]:
        files = [stack.secrets / Path(job["tls_config"][f"{name}_file"]).name for name in ("ca", "cert", "key")]
        assert "\ndraftwire_" in scrape(stack.pages()[job["job_name"]], *files)


def test_a_client_needs_a_token_beside_its_certificate(stack):
    for token in (False, True):
        with Client(stack.verifier.address, stack.security("ca", "client", token)) as client:
            if token:
                assert client.info().version
            else:
                with pytest.raises(RequestError, match="UNAUTHENTICATED"):
                    client.info()
