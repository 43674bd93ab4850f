"""Starts the services for a measurement, and waits for drafters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from draftwire.client import Client
from draftwire.contract.errors import DraftwireError, ServerError
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

# Loading a large target, compilation and graph capture take long.
START_TIMEOUT_S = 900.0
DRAFTER_TIMEOUT_S = 60.0
# Steps wait for their drafts without a deadline, so that a slow machine is measured with drafts.
NO_DEADLINE = ("--draft-deadline-ms", "off")


@dataclass(frozen=True)
class PairOptions:
    """Options of both services; the arguments are appended to their command lines and override others."""

    target: str
    head: str
    verifier_device: str | None = None
    drafter_device: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None  # of the drafter
    verifier_arguments: Sequence[str] = ()
    drafter_arguments: Sequence[str] = ()

    def with_room_for(self, num_requests: int) -> PairOptions:
        """Return the same options with --max-num-seqs, which the arguments may override."""
        room = ["--max-num-seqs", str(num_requests)]
        return replace(
            self,
            verifier_arguments=[*room, *self.verifier_arguments],
            drafter_arguments=[*room, *self.drafter_arguments],
        )

    def shared(self, device: str | None) -> list[str]:
        """Return the arguments for either service."""
        place = [] if device is None else ["--device", device]
        return [*place, "--dtype", self.dtype, "--load-format", self.load_format, "--log-level", "warning"]


def drafter_process(options: PairOptions) -> ServiceProcess:
    """Start a drafter of the pair."""
    quantization = [] if options.quantization is None else ["--quantization", options.quantization]
    arguments = [*options.shared(options.drafter_device), *quantization, *options.drafter_arguments]
    return start_drafter(options.head, options.target, *arguments, timeout_s=START_TIMEOUT_S)


def verifier_process(options: PairOptions, drafters: Sequence[str], speculative_config: str) -> ServiceProcess:
    """Start a verifier of the pair with the drafters at these addresses."""
    arguments = [*options.shared(options.verifier_device), *NO_DEADLINE, "--speculative-config", speculative_config]
    return start_verifier(options.target, drafters, *arguments, *options.verifier_arguments, timeout_s=START_TIMEOUT_S)


@contextmanager
def running_pair(options: PairOptions, speculative_config: str) -> Iterator[str]:
    """Run a verifier with one drafter and yield the verifier's address.

    Raises:
        ServerError: With the service's log, if the context fails because a service has ended.
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
    """Wait until all drafters of a verifier are ready, and return the verifier's description.

    Raises:
        ServerError: If a drafter is refused or not ready in time.
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
