"""A service that is process 1 of a container ends at a signal, even while it starts or hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "models" / "demo" / "target"
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")
WAIT_S = 60.0
SERVICES = {
    "verifier": ("verifier", "--target", str(TARGET), "--device", "cpu"),
    "verifier with an engine's process": ("verifier", "--target", str(TARGET), "--device", "cpu", "--engine-process"),
    "drafter": ("drafter", "--target", str(TARGET), "--head", str(TARGET.with_name("eagle3")), "--device", "cpu"),
}


@pytest.fixture(scope="module", autouse=True)
def _may_unshare() -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of processes")


def ended_by(number: signal.Signals, command: Sequence[str], *, says_when: bool = False) -> int:
    """Return the status of a process 1 that gets the signal once it handles SIGTERM or, with `says_when`, prints."""
    with subprocess.Popen([*UNSHARE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as outer:
        try:
            first = _child(outer.pid)
            if says_when:
                assert outer.stdout is not None
                assert outer.stdout.readline()
            else:
                _wait_for_handler(first, signal.SIGTERM)
            subprocess.run(["kill", f"-{number.value}", str(first)], check=True)
            return outer.wait(WAIT_S)
        finally:
            outer.kill()


def _child(pid: int) -> int:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    end = time.monotonic() + WAIT_S
    while not (children := path.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(children[0])


def _wait_for_handler(pid: int, number: signal.Signals) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught, 16) >> (number.value - 1) & 1:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("service", SERVICES)
def test_one_that_starts_ends_at_once(service: str) -> None:
    """A service that starts ends without loading its libraries. Later it would drain and end with status 0."""
    command = [sys.executable, "-m", "draftwire_cli", *SERVICES[service], "--listen", "127.0.0.1:0"]
    assert ended_by(signal.SIGTERM, command) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_hangs_ends_at_the_second_signal(number: signal.Signals) -> None:
    program = (
        "import time; from draftwire.server.stop_signals import end_at_signals; "
        "end_at_signals(); print(1, flush=True); time.sleep(600)"
    )
    assert ended_by(number, [sys.executable, "-c", program], says_when=True) == 128 + number
