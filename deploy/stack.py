"""The compose project of the check, with its certificates and tokens."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import trustme

from draftwire.contract.client_security import LOOPBACK, ClientSecurity

HERE = Path(__file__).parent
PROJECT = "draftwire-check"
PORTS = "127.0.0.1:50951-50952"
# The names in each certificate, by authority.
CERTIFICATES = {
    "ca": {"verifier": ["127.0.0.1"], "client": ["client"]},
    "drafter-ca": {"drafter": ["drafter", "127.0.0.1"], "drafter-client": ["drafter-client"]},
}


class Secrets:
    """The files that deploy/tls.yml mounts, readable by the containers' user, and a client's certificate."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._authorities = {name: trustme.CA() for name in CERTIFICATES}
        self.trust(self)
        self.issue(self)
        (directory / "tokens").write_text(secrets.token_urlsafe() + "\n")
        directory.chmod(0o755)
        for file in directory.iterdir():
            file.chmod(0o644)

    @property
    def client(self) -> ClientSecurity:
        """Return the client's security settings."""
        names = ("ca.pem", "client.pem", "client.key", "tokens")
        ca, certificate, key, tokens = (self.directory / name for name in names)
        return ClientSecurity(ca=ca, certificate=certificate, key=key, token_file=tokens)

    def trust(self, *all_trusted: Secrets) -> None:
        """Write the trusted authorities into the files that compose mounts."""
        for name in CERTIFICATES:
            pems = [trusted._authorities[name].cert_pem.bytes() for trusted in all_trusted]
            (self.directory / f"{name}.pem").write_bytes(b"".join(pems))

    def issue(self, issuer: Secrets) -> None:
        """Write certificates of the issuer's authorities into the files that compose mounts."""
        for authority, certificates in CERTIFICATES.items():
            for name, hosts in certificates.items():
                issued = issuer._authorities[authority].issue_cert(*hosts)
                (self.directory / f"{name}.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
                (self.directory / f"{name}.key").write_bytes(issued.private_key_pem.bytes())


class Stack:
    """The compose project."""

    def __init__(self, models: Path, given: Secrets | None) -> None:
        """With secrets, the services run with TLS and tokens."""
        self._command = compose_command()
        self._files = [HERE / "docker-compose.yml"]
        # A drain may take long on a busy machine.
        drain = {"VERIFIER_ARGS": "--drain-timeout 300", "VERIFIER_STOP_GRACE": "310s"}
        served = {"MODELS": str(models), "TARGET": "target", "HEAD": "head"}
        self._environment = {**os.environ, **drain, **served, "VERIFIER_PORTS": PORTS}
        self.security = LOOPBACK
        if given is not None:
            self._files.append(HERE / "tls.yml")
            self._environment["SECRETS"] = str(given.directory)
            self.security = given.client

    def compose(self, *arguments: str) -> str:
        """Run compose and return its output; a failure's error contains the output."""
        files = [part for file in self._files for part in ("-f", str(file))]
        return run([*self._command, *files, "-p", PROJECT, *arguments], self._environment)

    def scale(self, drafters: int, verifiers: int = 1) -> None:
        """Set the numbers of drafters and verifiers."""
        counts = ["--scale", f"drafter={drafters}", "--scale", f"verifier={verifiers}"]
        self.compose("up", "-d", "--no-build", "--no-recreate", *counts)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        return run(["docker", "ps", "-q", *filters]).split()

    def servers(self) -> list[str]:
        """Return the addresses of the verifiers on the host."""
        published = [run(["docker", "port", container, "50051"]) for container in self.containers("verifier")]
        return [f"127.0.0.1:{ports.splitlines()[0].rpartition(':')[2]}" for ports in published]

    def kill(self, service: str) -> None:
        """Kill one container of a service."""
        run(["docker", "kill", self.containers(service)[0]])

    def replace(self) -> None:
        """Kill the only drafter and start another."""
        self.kill("drafter")
        self.scale(1)

    def serve_head(self, head: str) -> None:
        """Set the head of drafters that start from now on."""
        self._environment["HEAD"] = head

    def end(self, container: str) -> None:
        """Stop a container, which drains, and remove it."""
        run(["docker", "stop", "--time", "30", container])
        run(["docker", "rm", container])


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Return the output of a command; a failure's error contains the output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def compose_command() -> list[str]:
    """Return the command of Docker's compose plugin, or docker-compose without the plugin."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise click.ClickException("neither `docker compose` nor `docker-compose` is installed")
