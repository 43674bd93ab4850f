"""Starts the stack, scales and kills drafters under load, and checks that clients are not affected.

    python -m deploy.check                 builds the images first; --no-build uses existing images
    python -m deploy.check --tls           with deploy/tls.yml and new certificates and tokens

The number of drafters goes 1 -> 3 -> 0 -> 1 while clients on the host generate greedily; containers are killed in
between. Then two verifiers share two drafters, one verifier is removed while requests run, and the drafters change to
another head one by one; with TLS, authorities and certificates are replaced last. Every request must succeed, and every
output must equal the output without drafts. Otherwise the exit status is 1.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from safetensors.torch import load_file, save_file

from deploy.stack import HERE, Secrets, Stack, run
from draftwire import AsyncClient, Client
from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import DraftwireError, RequestError
from draftwire.v1 import draft_pb2
from draftwire.v1 import generate_pb2 as pb

DEMO = HERE.parent / "models" / "demo"
NEW_HEAD = "new-head"
SERVICES = ("drafter", "verifier")
PROMPTS = [
    "def read_lines(path):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "for index, value in enumerate(",
]
OUTPUT_TOKENS = 200
NUM_CLIENTS = 4
TIMEOUT_S = 300.0

# Prints a container's user and capabilities, and whether a world-writable folder refuses writes.
INSPECTION = "id -u; grep CapEff /proc/self/status | cut -f 2; touch /var/tmp/file 2>/dev/null || echo read-only"
INSPECTED = ["10001", "0000000000000000", "read-only"]


def _make_models(directory: Path) -> None:
    """Write the demo pair and a second head with changed weights, readable by the containers' user."""
    for name, source in (("target", "target"), ("head", "head"), (NEW_HEAD, "head")):
        shutil.copytree(DEMO / source, directory / name)
    file = directory / NEW_HEAD / "model.safetensors"
    weights = load_file(file)
    weights["norm.weight"] *= 1.125
    save_file(weights, file)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class Load:
    """Clients that generate greedily, each one request at a time."""

    def __init__(self, security: ClientSecurity, expected: list[list[int]]) -> None:
        self._security = security
        self._expected = expected
        self._is_stopped = False
        self.requests = self.drafted = self.accepted = 0
        self.problems: list[str] = []

    @asynccontextmanager
    async def running(self, servers: Sequence[str]) -> AsyncIterator[None]:
        """Run the clients, spread over the servers; on exit wait for their last requests."""
        self._is_stopped = False
        async with AsyncExitStack() as opened:
            clients = [await opened.enter_async_context(AsyncClient(server, self._security)) for server in servers]
            work = asyncio.gather(*(self._generate(clients[n % len(clients)], n) for n in range(NUM_CLIENTS)))
            try:
                yield
            finally:
                self.stop()
                await work

    def stop(self) -> None:
        """Start no further requests; running requests continue."""
        self._is_stopped = True

    async def wait_for(self, requests: int) -> None:
        """Wait until `requests` more requests have ended."""
        wanted = self.requests + len(self.problems) + requests
        while self.requests + len(self.problems) < wanted:
            await asyncio.sleep(0.1)

    async def _generate(self, client: AsyncClient, number: int) -> None:
        for turn in itertools.count(number):
            if self._is_stopped:
                return
            which = turn % len(PROMPTS)
            try:
                done = await client.complete(PROMPTS[which], max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            except DraftwireError as error:
                self.problems.append(f"a request failed: {error}")
                await asyncio.sleep(1.0)
                continue
            self.requests += 1
            self.drafted += sum(done.statistics.drafted)
            self.accepted += sum(done.statistics.accepted)
            if list(done.token_ids) != self._expected[which]:
                self.problems.append(f"the output of prompt {which} changed")

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Print the counts of a stage, after the remarks that the caller appends to the yielded list."""
        requests, drafted = self.requests, self.drafted
        remarks: list[str] = []
        yield remarks
        counts = [f"{self.requests - requests} requests", f"{self.drafted - drafted} drafts"]
        click.echo(f"{name}: {', '.join([*remarks, *counts])}, {len(self.problems)} problems so far")


@click.command()
@click.option("--build/--no-build", default=True, show_default=True, help="Build the images first.")
@click.option("--build-args", default="", help="Arguments of `docker build`, such as secrets.")
@click.option("--tls", is_flag=True, help="With mutual TLS and tokens.")
@click.option("--requests", default=8, show_default=True, type=click.IntRange(1), help="Requests in each stage.")
def main(build: bool, build_args: str, tls: bool, requests: int) -> None:
    """Run the check and print a line for each stage."""
    if build:
        _build(shlex.split(build_args))
    with ExitStack() as directories:
        models, own, other = (Path(directories.enter_context(tempfile.TemporaryDirectory())) for _ in range(3))
        _make_models(models)
        given = Secrets(own) if tls else None
        stack = Stack(models, given)
        with _running(stack):
            _inspect(stack)
            if tls:
                _check_refusal(stack)
            _check_sharing(stack)
            load = Load(stack.security, _expected(stack))
            asyncio.run(_scale_drafters(stack, load, requests))
            asyncio.run(_scale_verifiers(stack, load, requests))
            asyncio.run(_upgrade_head(stack, load, requests))
            if given is not None:
                asyncio.run(_renew(stack, load, requests, given, Secrets(other)))
                _inspect(stack)
    click.echo(f"{load.requests} requests, {len(load.problems)} problems, {load.accepted} of {load.drafted} accepted")
    for problem in load.problems:
        click.echo(problem)
    if load.problems or load.drafted == 0:
        raise SystemExit(1)


async def _scale_drafters(stack: Stack, load: Load, requests: int) -> None:
    stages = [
        ("1 drafter", lambda: None, 1),
        ("3 drafters", lambda: stack.scale(3), 3),
        ("a drafter killed", lambda: stack.kill("drafter"), 2),
        ("no drafter", lambda: stack.scale(0), 0),
        ("1 drafter again", lambda: stack.scale(1), 1),
        ("the last drafter killed and restarted", stack.replace, 1),
    ]
    async with load.running(stack.servers()):
        for name, change, ready in stages:
            with load.stage(name) as remarks:
                await asyncio.to_thread(change)
                settled_s = await asyncio.to_thread(_wait_for_drafters, stack, ready)
                remarks.append(f"{ready} ready after {settled_s:.1f} s")
                await load.wait_for(requests)


async def _scale_verifiers(stack: Stack, load: Load, requests: int) -> None:
    """Let two verifiers share two drafters; then remove one verifier while requests run on both."""
    stack.scale(2, verifiers=2)
    _wait_for_drafters(stack, 2, verifiers=2)
    async with load.running(stack.servers()):
        with load.stage("2 verifiers, 2 drafters"):
            await load.wait_for(requests)
        with load.stage("1 verifier, the other drains"):
            load.stop()
            await asyncio.to_thread(stack.scale, 2, 1)


async def _upgrade_head(stack: Stack, load: Load, requests: int) -> None:
    """Change both drafters to another head, in the order of docs/operations.md: new ones start before old ones stop."""
    old = stack.containers("drafter")
    (old_head,) = _heads(stack)
    stack.serve_head(NEW_HEAD)
    async with load.running(stack.servers()):
        for number, container in enumerate(old, 1):
            with load.stage(f"{number} of 2 drafters with a new head") as remarks:
                await asyncio.to_thread(stack.scale, 3)
                settled_s = await asyncio.to_thread(_wait_for_drafters, stack, 3)
                remarks.append(f"3 ready after {settled_s:.1f} s with {len(_heads(stack))} heads")
                await load.wait_for(requests)
                await asyncio.to_thread(stack.end, container)
                await asyncio.to_thread(_wait_for_drafters, stack, 2)
                await load.wait_for(requests)
    heads = _heads(stack)
    if len(heads) != 1 or old_head in heads or set(old) & set(stack.containers("drafter")):
        raise click.ClickException(f"heads: {heads}, before: {old_head}; drafters before: {old}")


def _heads(stack: Stack) -> set[str]:
    """Return the head fingerprints of the first verifier's ready drafters."""
    with Client(stack.servers()[0], stack.security) as client:
        drafters = client.info().drafters
    return {drafter.head_fingerprint for drafter in drafters if drafter.state == pb.DRAFTER_STATE_READY}


async def _renew(stack: Stack, load: Load, requests: int, given: Secrets, new: Secrets) -> None:
    """Replace both authorities and all certificates, in the order of docs/deploy.md, and then the drafters."""
    async with load.running(stack.servers()):
        with load.stage("new authorities beside the old ones"):
            given.trust(given, new)
            await load.wait_for(requests)
        with load.stage("new certificates"):
            given.issue(new)
            await load.wait_for(requests)
        with load.stage("old authorities removed, both drafters replaced") as remarks:
            given.trust(new)
            for drafters in (0, 2):
                await asyncio.to_thread(stack.scale, drafters)
                settled_s = await asyncio.to_thread(_wait_for_drafters, stack, drafters)
            remarks.append(f"2 ready after {settled_s:.1f} s")
            await load.wait_for(requests)
    async with load.running(stack.servers()):
        with load.stage("new connections"):
            await load.wait_for(requests)
    new.issue(given)
    with Client(stack.servers()[0], new.client) as client:
        _expect_refusal(client, "UNAVAILABLE", "a client with an old certificate")


@contextmanager
def _running(stack: Stack) -> Iterator[None]:
    """Run the stack with one drafter while the context lasts."""
    try:
        stack.scale(1)
        _wait_for_drafters(stack, 1)
        yield
    except BaseException:
        click.echo(stack.compose("logs", "--tail=30"))
        raise
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


def _build(arguments: Sequence[str]) -> None:
    """Build both images with docker itself, because docker-compose 1.29 does not forward secrets."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    # A build argument without a value is read from the environment; its default is the Dockerfile's.
    variables = [part for name in ("BASE_IMAGE", "PIP_ARGS", "APT_PACKAGES") for part in ("--build-arg", name)]
    for service in SERVICES:
        names = ["--target", service, "--tag", f"draftwire-{service}"]
        given = [*names, "--file", str(HERE / "Dockerfile"), *variables, *arguments]
        run(["docker", "build", *given, str(HERE.parent)], environment)


def _inspect(stack: Stack) -> None:
    """Check that all containers are healthy and run as the image's user, without capabilities, on a read-only root."""
    for service in SERVICES:
        for container in stack.containers(service):
            found = run(["docker", "exec", container, "sh", "-c", INSPECTION]).split()
            if found != INSPECTED:
                raise click.ClickException(f"{service}: user, capabilities, root are {found}, not {INSPECTED}")
            _wait_until(partial(_health, container), "healthy", f"the health of {service}")
    click.echo(f"both services: healthy; user {INSPECTED[0]}, no capabilities, read-only root file system")


def _check_sharing(stack: Stack) -> None:
    """Check that containers of one host share memory."""
    with Client(stack.servers()[0], stack.security) as client:
        carriers = {drafter.features_carrier for drafter in client.info().drafters}
    if carriers != {draft_pb2.CARRIER_SHM}:
        raise click.ClickException(f"the features' carriers are {carriers}, not only shared memory")
    click.echo("features travel in shared memory")


def _health(container: str) -> str:
    return run(["docker", "inspect", "-f", "{{.State.Health.Status}}", container]).strip()


def _check_refusal(stack: Stack) -> None:
    """Check that a client without the token is refused."""
    with Client(stack.servers()[0], replace(stack.security, token_file=None)) as client:
        _expect_refusal(client, "UNAUTHENTICATED", "a client without a token")


def _expect_refusal(client: Client, status: str, who: str) -> None:
    try:
        client.info()
    except RequestError as error:
        if error.status != status:
            raise
    else:
        raise click.ClickException(f"{who} was accepted")
    click.echo(f"{who}: refused")


def _expected(stack: Stack) -> list[list[int]]:
    """Return the greedy outputs without drafts."""
    with Client(stack.servers()[0], stack.security) as client:
        done = [
            client.complete(
                prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, num_speculative_tokens=0
            )
            for prompt in PROMPTS
        ]
    return [list(completion.token_ids) for completion in done]


def _ready_drafters(stack: Stack) -> list[int] | str:
    """Return the number of ready drafters of each verifier, or why a verifier does not answer."""
    counts = []
    for server in stack.servers():
        try:
            with Client(server, stack.security) as client:
                drafters = client.info(timeout=5.0).drafters
        except DraftwireError as error:
            return str(error)
        counts.append(sum(drafter.state == pb.DRAFTER_STATE_READY for drafter in drafters))
    return counts


def _wait_for_drafters(stack: Stack, count: int, verifiers: int = 1) -> float:
    """Wait until each verifier has `count` ready drafters; return the seconds."""
    return _wait_until(partial(_ready_drafters, stack), [count] * verifiers, "ready drafters of each verifier")


def _wait_until(look: Callable[[], object], wanted: object, what: str) -> float:
    """Call `look` until it returns the wanted value; return the seconds."""
    began = time.monotonic()
    while (found := look()) != wanted:
        if time.monotonic() - began > TIMEOUT_S:
            raise click.ClickException(f"{what}: {found} after {TIMEOUT_S:.0f} s, not {wanted}")
        time.sleep(0.1)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
