"""The services that are measured: running ones, or ones started for the measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from draftwire.client import Client
from draftwire.contract.errors import DraftwireError, ServerError
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

# Loading a large target, compiling it and capturing its graphs take their time.
START_TIMEOUT_S = 900.0
DRAFTER_TIMEOUT_S = 60.0
# A step waits for its drafts however long they take: a slow machine is measured, not its deadline.
NO_DEADLINE = ("--draft-deadline-ms", "off")


@dataclass(frozen=True)
class PairOptions:
    """How both services are started; the arguments are further ones of their command lines and come last."""

    target: str
    head: str
    verifier_device: str | None = None
    drafter_device: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    verifier_arguments: Sequence[str] = ()
    drafter_arguments: Sequence[str] = ()

    def with_room_for(self, num_requests: int) -> PairOptions:
        """Return the same settings with room for `count` requests, unless the arguments say otherwise."""
        room = ["--max-num-seqs", str(num_requests)]
        return replace(
            self,
            verifier_arguments=[*room, *self.verifier_arguments],
            drafter_arguments=[*room, *self.drafter_arguments],
        )

    def shared(self, device: str | None) -> list[str]:
        """Return the arguments that both services take."""
        place = [] if device is None else ["--device", device]
        return [*place, "--dtype", self.dtype, "--load-format", self.load_format, "--log-level", "warning"]


def drafter_process(options: PairOptions) -> ServiceProcess:
    """Return a drafter of the pair."""
    arguments = [*options.shared(options.drafter_device), *options.drafter_arguments]
    return start_drafter(options.head, options.target, *arguments, timeout_s=START_TIMEOUT_S)


def verifier_process(options: PairOptions, drafters: Sequence[str], speculative_config: str) -> ServiceProcess:
    """Return a verifier of the pair with the drafters at those addresses."""
    arguments = [*options.shared(options.verifier_device), *NO_DEADLINE, "--speculative-config", speculative_config]
    return start_verifier(
        options.target, drafters, *arguments, *options.verifier_arguments, timeout_s=START_TIMEOUT_S
    )


@contextmanager
def running_pair(options: PairOptions, speculative_config: str) -> Iterator[str]:
    """Run a verifier with one drafter while the context lasts; yields the verifier's address.

    Raises:
        ServerError: With its log, where the context fails because a service has ended by itself.
    """
    with (
        drafter_process(options) as drafter,
        verifier_process(options, [drafter.address], speculative_config) as verifier,
    ):
        try:
            yield verifier.address
        except DraftwireError:
            for service in (verifier, drafter):
                service.check_running()
            raise


def wait_for_drafters(client: Client, timeout_s: float = DRAFTER_TIMEOUT_S) -> pb.GetVerifierInfoResponse:
    """Wait until each drafter of a verifier is ready, and return what it serves.

    Raises:
        ServerError: If one is refused, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        info = client.info()
        missing = [drafter for drafter in info.drafters if drafter.state != pb.DRAFTER_STATE_READY]
        if not missing:
            return info
        refused = any(drafter.state == pb.DRAFTER_STATE_REFUSED for drafter in missing)
        if refused or time.monotonic() > deadline:
            reasons = "; ".join(f"{drafter.address}: {drafter.detail or 'no answer'}" for drafter in missing)
            raise ServerError(f"drafters of {client.address} are not ready: {reasons}")
        time.sleep(0.05)
