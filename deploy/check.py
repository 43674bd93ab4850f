"""Brings the stack up, scales and kills drafters under load, and checks that no client noticed.

    python -m deploy.check                 builds the images first; --no-build takes those that are there
    python -m deploy.check --tls           with deploy/tls.yml, and certificates and tokens made for it

Drafters go 1 -> 3 -> 0 -> 1 while clients on the host generate greedily; containers are killed in between. Then two
verifiers share two drafters, one verifier is taken away while it works, and the drafters change to another head, one
after the other. In plain text, clients of OpenAI's HTTP API then chat through the gateway while verifiers come and go,
and Prometheus scrapes all of them; with TLS, authorities and certificates are replaced at last. Every request must
succeed, and every output must equal the earlier output without drafts. Exits with status 1 otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from safetensors.torch import load_file, save_file

from deploy.gateway_check import check_gateway
from deploy.stack import HERE, Secrets, Stack, run, wait_until
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


def _make_models(directory: Path) -> None:
    """Write the demo pair, and its head with other weights, readable by the containers' user."""
    for name, source in (("target", "target"), ("eagle3", "eagle3"), (NEW_HEAD, "eagle3")):
        shutil.copytree(DEMO / source, directory / name)
    file = directory / NEW_HEAD / "model.safetensors"
    weights = load_file(file)
    weights["norm.weight"] *= 1.125
    save_file(weights, file)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class Load:
    """Clients that generate greedily, one request after another."""

    def __init__(self, security: ClientSecurity, expected: list[list[int]]) -> None:
        self._security = security
        self._expected = expected
        self._is_stopped = False
        self.requests = self.drafted = self.accepted = 0
        self.problems: list[str] = []

    @asynccontextmanager
    async def running(self, servers: Sequence[str]) -> AsyncIterator[None]:
        """Run the clients, spread over the servers; leave when their last requests have ended."""
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
        """Start no further requests; running ones continue."""
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
        """Print the counts of a stage, with the remarks appended to the yielded list."""
        requests, drafted = self.requests, self.drafted
        remarks: list[str] = []
        yield remarks
        counts = [f"{self.requests - requests} requests", f"{self.drafted - drafted} drafts"]
        click.echo(f"{name}: {', '.join([*remarks, *counts])}, {len(self.problems)} problems so far")


@click.command()
@click.option("--build/--no-build", default=True, show_default=True, help="Build the images first.")
@click.option("--build-args", default="", help="Arguments of `docker build`, as its secrets.")
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
            stack.inspect(*SERVICES)
            if tls:
                _check_refusal(stack)
            _check_sharing(stack)
            load = Load(stack.security, _expected(stack))
            asyncio.run(_scale_drafters(stack, load, requests))
            asyncio.run(_scale_verifiers(stack, load, requests))
            asyncio.run(_upgrade_head(stack, load, requests))
            if given is None:
                load.problems += check_gateway(stack, requests)
            else:
                asyncio.run(_renew(stack, load, requests, given, Secrets(other)))
                stack.inspect(*SERVICES)
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
    """Two verifiers share two drafters; then one is taken away while requests run at both."""
    stack.scale(2, verifiers=2)
    _wait_for_drafters(stack, 2, verifiers=2)
    async with load.running(stack.servers()):
        with load.stage("2 verifiers, 2 drafters"):
            await load.wait_for(requests)
        with load.stage("1 verifier, the other drains"):
            load.stop()
            await asyncio.to_thread(stack.scale, 2, 1)


async def _upgrade_head(stack: Stack, load: Load, requests: int) -> None:
    """Both drafters change to another head, in the order of docs/operations.md: the new ones start beside the old."""
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
    """Return the fingerprints of the heads of the drafters that are ready at the first verifier."""
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
        stack.down()


def _build(arguments: Sequence[str]) -> None:
    """Build all images; by docker itself, since docker-compose 1.29 passes no secrets on."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    # Without a value docker takes that of the environment, and the Dockerfile's where there is none.
    variables = [part for name in ("BASE_IMAGE", "PIP_ARGS", "APT_PACKAGES") for part in ("--build-arg", name)]
    for service in (*SERVICES, "gateway"):
        names = ["--target", service, "--tag", f"draftwire-{service}"]
        given = [*names, "--file", str(HERE / "Dockerfile"), *variables, *arguments]
        run(["docker", "build", *given, str(HERE.parent)], environment)


def _check_sharing(stack: Stack) -> None:
    """Check that containers of one host share memory."""
    with Client(stack.servers()[0], stack.security) as client:
        carriers = {drafter.features_carrier for drafter in client.info().drafters}
    if carriers != {draft_pb2.CARRIER_SHM}:
        raise click.ClickException(f"the features' carriers are {carriers}, not shared memory alone")
    click.echo("features travel in shared memory")


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
        raise click.ClickException(f"{who} was let in")
    click.echo(f"{who}: refused")


def _expected(stack: Stack) -> list[list[int]]:
    """Return greedy outputs without drafts."""
    with Client(stack.servers()[0], stack.security) as client:
        done = [
            client.complete(
                prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, num_speculative_tokens=0
            )
            for prompt in PROMPTS
        ]
    return [list(completion.token_ids) for completion in done]


def _ready_drafters(stack: Stack) -> list[int] | str:
    """Return how many drafters are ready at each verifier, or why one does not answer."""
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
    """Wait until each verifier has this many ready drafters, and return the seconds."""
    return wait_until(partial(_ready_drafters, stack), [count] * verifiers, "ready drafters at each verifier")


if __name__ == "__main__":
    main()
