"""Brings the stack up, scales and kills drafters under load, and checks that no client noticed.

    python deploy/check.py                 builds the images first; --no-build takes those that are there

Drafters go 1 -> 3 -> 0 -> 1 while clients on the host generate greedily; containers are killed in between. Every
request must succeed, and every output must be what it was before, without drafts. Exits with status 1 otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from draftwire import AsyncClient, Client
from draftwire.errors import DraftwireError
from draftwire.v1 import generate_pb2 as pb

HERE = Path(__file__).parent
PROJECT = "draftwire-check"
PORT = 50951
SERVER = f"127.0.0.1:{PORT}"
PROMPTS = [
    "def read_lines(path):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "for index, value in enumerate(",
]
OUTPUT_TOKENS = 200
NUM_CLIENTS = 4
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0


class Stack:
    """The compose project."""

    def __init__(self) -> None:
        self._command = _compose_command()
        self._environment = {**os.environ, "VERIFIER_PORTS": str(PORT)}

    def compose(self, *arguments: str) -> None:
        """Runs compose; its output is shown when it fails."""
        files = ["-f", str(HERE / "docker-compose.yml"), "-p", PROJECT]
        done = subprocess.run(
            [*self._command, *files, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise click.ClickException(f"compose {' '.join(arguments)}:\n{done.stdout}{done.stderr}")

    def scale(self, drafters: int) -> None:
        """Sets the number of drafters."""
        self.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"drafter={drafters}")

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        listed = subprocess.run(["docker", "ps", "-q", *filters], capture_output=True, text=True, check=True)
        return listed.stdout.split()

    def kill(self, service: str) -> None:
        """Kills one container of a service."""
        subprocess.run(["docker", "kill", self.containers(service)[0]], capture_output=True, check=True)

    def replace(self) -> None:
        """Kills the only drafter and starts another."""
        self.kill("drafter")
        self.scale(1)


@contextmanager
def running_stack(stack: Stack) -> Iterator[None]:
    """The stack with one drafter; torn down at the end."""
    try:
        stack.scale(1)
        yield
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


class Load:
    """Clients that generate greedily, one request after another, until stopped."""

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected = expected
        self._is_stopped = False
        self.requests = self.drafted = self.accepted = 0
        self.problems: list[str] = []

    async def run(self) -> None:
        """Runs all clients."""
        async with AsyncClient(SERVER) as client:
            await asyncio.gather(*(self._generate(client, number) for number in range(NUM_CLIENTS)))

    def stop(self) -> None:
        """Lets the running requests end."""
        self._is_stopped = True

    async def _generate(self, client: AsyncClient, number: int) -> None:
        for turn in itertools.count(number):
            if self._is_stopped:
                return
            which = turn % len(PROMPTS)
            try:
                done = await client.complete(
                    PROMPTS[which], max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
                )
            except DraftwireError as error:
                self.problems.append(f"a request failed: {error}")
                continue
            self.requests += 1
            self.drafted += sum(done.statistics.drafted)
            self.accepted += sum(done.statistics.accepted)
            if list(done.token_ids) != self._expected[which]:
                self.problems.append(f"the output of prompt {which} changed")


@click.command()
@click.option("--build/--no-build", default=True, show_default=True, help="Build the images first.")
@click.option("--seconds", default=8.0, show_default=True, help="Load in each stage.")
def main(build: bool, seconds: float) -> None:
    """Runs the check and prints a line for each stage."""
    stack = Stack()
    if build:
        stack.compose("build")
    with running_stack(stack):
        _wait_for_server()
        expected = _expected()
        load = asyncio.run(_stages(stack, expected, seconds))
    click.echo(f"{load.requests} requests, {len(load.problems)} problems, {load.accepted} of {load.drafted} accepted")
    for problem in load.problems:
        click.echo(problem)
    if load.problems or load.drafted == 0:
        raise SystemExit(1)


async def _stages(stack: Stack, expected: list[list[int]], seconds: float) -> Load:
    load = Load(expected)
    running = asyncio.create_task(load.run())
    stages = [
        ("1 drafter", lambda: None, 1),
        ("3 drafters", lambda: stack.scale(3), 3),
        ("a drafter killed", lambda: stack.kill("drafter"), 2),
        ("no drafter", lambda: stack.scale(0), 0),
        ("1 drafter again", lambda: stack.scale(1), 1),
        ("the last drafter killed and restarted", stack.replace, 1),
    ]
    try:
        for name, change, ready in stages:
            requests, drafted = load.requests, load.drafted
            await asyncio.to_thread(change)
            settled_s = await asyncio.to_thread(_wait_for_drafters, ready)
            await asyncio.sleep(seconds)
            click.echo(
                f"{name}: {ready} ready after {settled_s:.1f} s; {load.requests - requests} requests, "
                f"{load.drafted - drafted} drafts, {len(load.problems)} problems so far"
            )
    finally:
        load.stop()
        await running
    return load


def _expected() -> list[list[int]]:
    """Greedy outputs without drafts."""
    with Client(SERVER) as client:
        done = [
            client.complete(
                prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, num_speculative_tokens=0
            )
            for prompt in PROMPTS
        ]
    return [list(completion.token_ids) for completion in done]


def _drafters() -> int:
    with Client(SERVER) as client:
        return sum(drafter.state == pb.DRAFTER_STATE_READY for drafter in client.info().drafters)


def _wait_for_drafters(count: int) -> float:
    """Waits until that many are ready; the seconds that it took."""
    began = time.monotonic()
    while (ready := _drafters()) != count:
        if time.monotonic() - began > SETTLE_TIMEOUT_S:
            raise click.ClickException(f"{ready} drafters are ready after {SETTLE_TIMEOUT_S:.0f} s, not {count}")
        time.sleep(0.1)
    return time.monotonic() - began


def _wait_for_server() -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            _drafters()
            return
        except DraftwireError as error:
            if time.monotonic() > deadline:
                raise click.ClickException(f"the verifier does not answer: {error}") from error
            time.sleep(0.5)


def _compose_command() -> list[str]:
    """The plugin of version 2 where there is one, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise click.ClickException("neither `docker compose` nor `docker-compose` is there")


if __name__ == "__main__":
    main()
