"""The compose project of the check, with its certificates and tokens."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import trustme

from draftwire.contract.client_security import LOOPBACK, ClientSecurity

HERE = Path(__file__).parent
PROJECT = "draftwire-check"
PORTS = "127.0.0.1:50951-50952"
GATEWAY = "127.0.0.1:50960"
PROMETHEUS = "127.0.0.1:50961"
TIMEOUT_S = 300.0
# What each container must print: its user, no capability, and that a folder which is open to all refuses writes.
INSPECTION = "id -u; grep CapEff /proc/self/status | cut -f 2; touch /var/tmp/file 2>/dev/null || echo read-only"
INSPECTED = ["10001", "0000000000000000", "read-only"]
# By authority: the names in each certificate.
CERTIFICATES = {
    "ca": {"verifier": ["127.0.0.1"], "client": ["client"]},
    "drafter-ca": {"drafter": ["drafter", "127.0.0.1"], "drafter-client": ["drafter-client"]},
}


class Secrets:
    """The secrets of deploy/tls.yml, readable by the containers' user, and a client's certificate."""

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
        """Write the trusted authorities to the files that compose has mounted, as `issue` does."""
        for name in CERTIFICATES:
            pems = [trusted._authorities[name].cert_pem.bytes() for trusted in all_trusted]
            (self.directory / f"{name}.pem").write_bytes(b"".join(pems))

    def issue(self, issuer: Secrets) -> None:
        """Write certificates of the issuer's authorities."""
        for authority, certificates in CERTIFICATES.items():
            for name, hosts in certificates.items():
                issued = issuer._authorities[authority].issue_cert(*hosts)
                (self.directory / f"{name}.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
                (self.directory / f"{name}.key").write_bytes(issued.private_key_pem.bytes())


class Stack:
    """The compose project."""

    def __init__(self, models: Path, given: Secrets | None) -> None:
        """Serves the models; with secrets the services run with TLS and tokens."""
        self._command = compose_command()
        self._files = [HERE / "docker-compose.yml"]
        # A busy machine has all the time that it needs to end its requests.
        drain = {"VERIFIER_ARGS": "--drain-timeout 300 --kv-events", "VERIFIER_STOP_GRACE": "310s"}
        served = {"MODELS": str(models), "TARGET": "target", "HEAD": "eagle3"}
        ports = {"VERIFIER_PORTS": PORTS, "GATEWAY_PORT": GATEWAY, "PROMETHEUS_PORT": PROMETHEUS}
        self._environment = {**os.environ, **drain, **served, **ports}
        self.security = LOOPBACK
        if given is not None:
            self._files.append(HERE / "tls.yml")
            self._environment["SECRETS"] = str(given.directory)
            self.security = given.client

    def compose(self, *arguments: str) -> str:
        """Run compose and return its output; a failure's error has the output too."""
        files = [part for file in self._files for part in ("-f", str(file))]
        return run([*self._command, *files, "-p", PROJECT, *arguments], self._environment)

    def scale(self, drafters: int, verifiers: int = 1) -> None:
        """Set the numbers of containers."""
        counts = ["--scale", f"drafter={drafters}", "--scale", f"verifier={verifiers}"]
        self.compose("up", "-d", "--no-build", "--no-recreate", *counts)

    def start(self, *services: str) -> None:
        """Start services of profiles beside the others."""
        self.compose("up", "-d", "--no-build", "--no-recreate", "--no-deps", *services)

    def remove(self, *services: str) -> None:
        """Stop and remove all containers of services."""
        self.compose("rm", "--stop", "--force", *services)

    def down(self) -> None:
        """Remove everything, the services of profiles too."""
        self.compose("--profile", "gateway", "--profile", "monitoring", "down", "--volumes", "--timeout", "5")

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        return run(["docker", "ps", "-q", *filters]).split()

    def inspect(self, *services: str) -> None:
        """Check that every container of the services runs as the image's user without capabilities, cannot write to
        its root, and becomes healthy.
        """
        for service in services:
            for container in self.containers(service):
                found = run(["docker", "exec", container, "sh", "-c", INSPECTION]).split()
                if found != INSPECTED:
                    raise click.ClickException(f"{service}: user, capabilities, root are {found}, not {INSPECTED}")
                wait_until(partial(_health, container), "healthy", f"the health of {service}")
        user = f"user {INSPECTED[0]}, no capabilities, read-only root file system"
        click.echo(f"{' and '.join(services)}: healthy; {user}")

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
        """Let a container drain, and remove it."""
        run(["docker", "stop", "--time", "30", container])
        run(["docker", "rm", container])


def _health(container: str) -> str:
    return run(["docker", "inspect", "-f", "{{.State.Health.Status}}", container]).strip()


def wait_until(look: Callable[[], object], wanted: object, what: str) -> float:
    """Poll `look` until it returns the wanted value, and return the seconds."""
    began = time.monotonic()
    while (found := look()) != wanted:
        if time.monotonic() - began > TIMEOUT_S:
            raise click.ClickException(f"{what}: {found} after {TIMEOUT_S:.0f} s, not {wanted}")
        time.sleep(0.1)
    return time.monotonic() - began


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Return the output of a command.

    Raises:
        ClickException: If the command fails; the error has its output.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def compose_command() -> list[str]:
    """Return the plugin of version 2 where there is one, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise click.ClickException("neither `docker compose` nor `docker-compose` is installed")
