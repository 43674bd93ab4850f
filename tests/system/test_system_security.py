"""Mutual TLS and client tokens as in deploy/tls.yml, with secrets made as in docs/deploy.md."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import deployment
import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import DEMO, drafter_status, wait_for_drafter
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from waiting import PATIENCE_S, wait_for

from draftwire import Client
from draftwire.contract.client_security import ClientSecurity, open_channel
from draftwire.contract.errors import InvalidArgumentError, RequestError
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc as pb_grpc
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier
from draftwire_cli.main import main

pytestmark = pytest.mark.xdist_group("security")

# For each service: its certificate authority, and the certificates that it accepts.
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
        """Return the security of a peer that trusts the authority and shows the certificate."""
        return peer(self.secrets, authority, certificate, self.secrets / "tokens" if token else None)

    def pages(self) -> dict[str, str]:
        """Return the metrics URL of each service."""
        return {
            name: re.search(r"metrics on (https://\S+)", service.log_text())[1]
            for name, service in self.services.items()
        }


def peer(secrets: Path, authority: str, certificate: str | None, token_file: Path | None = None) -> ClientSecurity:
    own = [None, None] if certificate is None else [secrets / f"{certificate}{end}" for end in (".pem", ".key")]
    return ClientSecurity(ca=secrets / f"{authority}.pem", certificate=own[0], key=own[1], token_file=token_file)


def command(service: str, secrets: Path) -> list[str]:
    """Return the service's arguments in deploy/tls.yml, with local paths and a free port for metrics."""
    given = deployment.arguments(deployment.services("tls")[service]["command"])
    places = {"/run/secrets": str(secrets), "/models": str(DEMO), "0.0.0.0:9090": "127.0.0.1:0"}
    for place, here in places.items():
        given = [argument.replace(place, here) for argument in given]
    return [*given, "--device", "cpu", "--log-level", "debug"]


def make_secrets(directory: Path) -> Path:
    """Make the secrets with the commands of docs/deploy.md; return their directory."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which docs/deploy.md makes certificates with, is not on the PATH")
    directory.mkdir()
    subprocess.run(["bash", "-euc", deployment.walk_through("Secrets")], cwd=directory, check=True, capture_output=True)
    return directory / "deploy" / "secrets"


def start_the_drafter(secrets: Path, *options: str) -> ServiceProcess:
    security = peer(secrets, "drafter-ca", "drafter-client")
    return start_drafter(DEMO / "eagle3", DEMO / "target", *command("drafter", secrets), *options, security=security)


@contextmanager
def running(secrets: Path) -> Iterator[Stack]:
    """Yield both services, connected."""
    with start_the_drafter(secrets) as drafter:
        options = ["--drafters", drafter.address, "--draft-deadline-ms", "off"]
        security = peer(secrets, "ca", "client", secrets / "tokens")
        given = [*command("verifier", secrets), *options]
        with start_verifier(DEMO / "target", [], *given, security=security) as verifier:
            with Client(verifier.address, security) as client:
                wait_for_drafter(client, drafter.address)
            yield Stack(secrets, drafter, verifier)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(make_secrets(tmp_path_factory.mktemp("security") / "first")) as stack:
        yield stack


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path, Path]]:
    """Services whose files will be replaced, the directory of the same files, and a directory of new ones."""
    directory = tmp_path_factory.mktemp("renewed")
    old, new = make_secrets(directory / "old"), make_secrets(directory / "new")
    served = directory / "served"
    shutil.copytree(old, served)
    with running(served) as stack:
        yield stack, old, new


def is_let_in(address: str, security: ClientSecurity) -> bool:
    """Return whether the health service, which needs no token, answers this peer."""
    with open_channel(address, security, ()) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


def is_scraped(url: str, security: ClientSecurity) -> bool:
    """Return whether the metrics page is served to this peer."""
    try:
        return "\ndraftwire_" in scrape(url, security.ca, security.certificate, security.key)
    except (urllib.error.URLError, ConnectionError, ssl.SSLError):
        return False


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
def test_a_port_admits_only_certificates_of_its_own_authority(stack, service, certificate):
    authority, names = LETS_IN[service]
    security = stack.security(authority, certificate)
    assert is_let_in(stack.services[service].address, security) == (certificate in names)
    assert is_scraped(stack.pages()[service], security) == (certificate in names)


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


def test_gateways_need_a_token_too(stack):
    token = (stack.secrets / "tokens").read_text().strip()
    with open_channel(stack.verifier.address, stack.security("ca", "client", token=False), ()) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        calls = (
            (stub.GetModelInfo, vllm_engine_pb2.GetModelInfoRequest()),
            (stub.GetServerInfo, vllm_engine_pb2.GetServerInfoRequest()),
        )
        for call, request in calls:
            for metadata in ((), (("authorization", "Bearer a-token-that-is-not-known"),)):
                with pytest.raises(grpc.RpcError) as error:
                    call(request, metadata=metadata, timeout=PATIENCE_S)
                assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            call(request, metadata=(("authorization", f"Bearer {token}"),), timeout=PATIENCE_S)


def test_no_secret_is_in_a_log_command_line_environment_or_error(stack, tmp_path):
    """Both services log at level debug."""
    wrong, absent = tmp_path / "wrong", None
    wrong.write_text("a-token-that-is-not-known\n")
    shown = []
    for token_file in (wrong, absent):
        security = replace(stack.security("ca", "client"), token_file=token_file)
        with Client(stack.verifier.address, security) as client:
            for call in (client.info, lambda: client.complete("import os\n")):
                with pytest.raises(RequestError, match="UNAUTHENTICATED") as error:
                    call()
                shown.append(str(error.value))
        options = ["--tls-ca", security.ca, "--tls-cert", security.certificate, "--tls-key", security.key]
        options += ["--token-file", token_file] if token_file else []
        result = CliRunner().invoke(main, ["status", "--server", stack.verifier.address, *map(str, options)])
        assert (result.exit_code, "UNAUTHENTICATED" in result.output) == (1, True)
        shown.append(result.output)
    token = (stack.secrets / "tokens").read_text().strip()
    with open_channel(stack.verifier.address, stack.security("ca", "client"), ()) as channel:
        for scheme in ("Basic ", "Bearer  ", ""):
            call = pb_grpc.GenerationStub(channel).GetVerifierInfo
            with pytest.raises(grpc.RpcError) as error:
                call(pb.GetVerifierInfoRequest(), metadata=[("authorization", scheme + token)], timeout=PATIENCE_S)
            shown.append(str(error.value))
    with Client(stack.verifier.address, stack.security("ca", "client")) as client:
        assert client.complete("import os\n", max_tokens=2).token_ids
        with pytest.raises(InvalidArgumentError) as error:
            client.complete("import os\n", logit_bias={2**31 - 1: 1.0})
        shown.append(str(error.value))
    for service in stack.services.values():
        shown += [Path(f"/proc/{service.pid}/{file}").read_text() for file in ("cmdline", "environ")]
        shown.append(service.log_text())
    assert all("DEBUG" in service.log_text() for service in stack.services.values())
    keys = [line for file in stack.secrets.glob("*.key") for line in file.read_text().splitlines()]
    assert len(keys) > 3 * len(CERTIFICATES)
    for secret in (token, wrong.read_text().strip(), *keys):
        assert not [text for text in shown if secret in text]


def write(secrets: Path, *sources: Path) -> None:
    """Overwrite files in place, as compose's mounts require; sources of the same name are concatenated."""
    for name in {source.name for source in sources}:
        (secrets / name).write_bytes(b"".join(source.read_bytes() for source in sources if source.name == name))


def authorities(secrets: Path) -> list[Path]:
    return [secrets / "ca.pem", secrets / "drafter-ca.pem"]


def certificates(secrets: Path) -> list[Path]:
    return [secrets / f"{name}{end}" for name in CERTIFICATES for end in (".pem", ".key")]


def test_certificates_are_replaced_while_the_services_run(renewed):
    stack, old, new = renewed
    served = stack.secrets
    pages, peers = stack.pages(), {"verifier": ("ca", "client"), "drafter": ("drafter-ca", "drafter-client")}

    def let_in(shown: Path, trusted: Path) -> set[str]:
        """Return the endpoints that accept a peer with certificates of `shown` that trusts authorities of `trusted`."""
        found = set()
        for name, (authority, certificate) in peers.items():
            security = replace(peer(shown, authority, certificate), ca=trusted / f"{authority}.pem")
            found |= {name} if is_let_in(stack.services[name].address, security) else set()
            found |= {f"{name}'s metrics"} if is_scraped(pages[name], security) else set()
        return found

    every = {"drafter", "drafter's metrics", "verifier", "verifier's metrics"}
    assert (let_in(old, old), let_in(new, old)) == (every, set())
    write(served, *authorities(old), *authorities(new))
    assert (let_in(old, old), let_in(new, old)) == (every, every)
    write(served, *certificates(new))
    assert (let_in(old, new), let_in(new, new), let_in(new, old)) == (every, every, set())
    write(served, *authorities(new))
    assert (let_in(old, new), let_in(new, new)) == (set(), every)
    with Client(stack.verifier.address, stack.security("ca", "client")) as client:
        done = client.complete("import os\n", temperature=0.0, max_tokens=24, ignore_eos=True)
    assert sum(done.statistics.drafted) > 0


def test_a_verifier_returns_to_a_drafter_with_the_current_files(renewed, tmp_path):
    stack, new = renewed[0], make_secrets(tmp_path / "new")
    served, refused = stack.secrets, "CERTIFICATE_VERIFY_FAILED"
    num_refused = stack.verifier.log_text().count(refused)
    with Client(stack.verifier.address, stack.security("ca", "client")) as client:
        stack.drafter.kill()
        wait_for_drafter(client, stack.drafter.address, pb.DRAFTER_STATE_CONNECTING)
        # The new drafter uses only new files, and the verifier is not restarted.
        with start_the_drafter(new, "--listen", stack.drafter.address):
            files = [new / name for name in ("drafter-ca.pem", "drafter-client.pem", "drafter-client.key")]
            write(served, *files[1:])
            log_text = stack.verifier.log_text
            wait_for(lambda: log_text().count(refused) > num_refused, "the drafter is not trusted")
            assert drafter_status(client, stack.drafter.address).state == pb.DRAFTER_STATE_CONNECTING
            write(served, files[0])
            wait_for_drafter(client, stack.drafter.address)
            done = client.complete("import os\n", temperature=0.0, max_tokens=24, ignore_eos=True)
            assert sum(done.statistics.drafted) > 0
