"""Services as child processes; a small service replaces both the drafter and the verifier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftwire.contract.errors import ServerError
from draftwire_bench.processes import ServiceProcess, start_drafter, start_verifier

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
SERVICE = """
import asyncio
import sys
import threading
import time
import click
from draftwire.contract.errors import CheckpointError
from draftwire.server.message_reading import MessageReader, ReadingLimits
from draftwire.server.security import ServerSecurity
from draftwire.server.bootstrap import serve

async def drained():
    print("drained", flush=True)

async def stopped():
    print("stopped", flush=True)

async def hanging():
    print("hanging", flush=True)
    while True:
        time.sleep(60)

def chatter():
    while True:
        sys.stderr.write("of another thread\\n")

async def run(arguments):
    if "chatters" in arguments:
        threading.Thread(target=chatter, daemon=True).start()
    drain = hanging if "hangs" in arguments else drained
    await serve(
        "127.0.0.1:0",
        ["draftwire.v1.Drafting"],
        lambda server: None,
        ServerSecurity(),
        MessageReader(ReadingLimits(1 << 20, 1, 1, 1, 1)),
        stop=asyncio.Event(),
        drain=drain,
        on_stop=stopped,
    )

@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def drafter(arguments):
    print(*arguments, flush=True)
    if "missing" in arguments:
        raise CheckpointError("head = 'missing': no such directory")
    if "slow" in arguments:
        time.sleep(60)
    asyncio.run(run(arguments))

verifier = drafter
"""


@pytest.fixture(autouse=True)
def small_services(tmp_path, monkeypatch):
    for name in ("drafter_service", "verifier_service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "cli.py").write_text(SERVICE)
    monkeypatch.chdir(tmp_path)  # the first entry of the child's sys.path
    paths = (ROOT, ROOT / "kernels", ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


def test_service_is_healthy_when_it_is_there_and_stops_cleanly():
    with start_drafter("h", "t", "--device", "cpu") as drafter:
        assert drafter.running
        assert drafter.address.startswith("127.0.0.1:")
        assert "--head h --target t --listen 127.0.0.1:0 --device cpu" in drafter.log_text()
    assert drafter.returncode == 0
    assert "stopped" in drafter.log_text()
    assert not drafter.log_path.exists()


def test_address_is_found_among_the_lines_of_other_threads():
    for _ in range(3):
        with start_drafter("chatters", "t", timeout_s=WAIT_S) as drafter:
            drafter.kill()


def test_verifier_gets_its_drafters():
    with start_verifier("t", ["a:1", "b:2"]) as verifier:
        assert "--target t --drafters a:1,b:2 --listen 127.0.0.1:0" in verifier.log_text()
    with start_verifier("t", []) as verifier:
        assert "--drafters" not in verifier.log_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_service_drains_before_it_stops(number):
    with start_drafter("h", "t") as drafter:
        drafter.send_signal(number)
        assert drafter.wait(WAIT_S) == 0
        assert "drained\nstopped" in drafter.log_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once_what_hangs(number):
    with start_drafter("hangs", "t") as drafter:
        drafter.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + WAIT_S
        while "hanging" not in drafter.log_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        drafter.send_signal(number)
        assert drafter.wait(WAIT_S) == -number


def test_killed_service_ends_at_once():
    with start_drafter("h", "t") as drafter:
        drafter.kill()
        assert drafter.returncode == -signal.SIGKILL
        assert "stopped" not in drafter.log_text()


def test_service_that_hangs_is_killed():
    drafter = start_drafter("h", "t")
    drafter.send_signal(signal.SIGSTOP)
    assert drafter.stop(timeout_s=0.2) == -signal.SIGKILL


def test_log_path_is_appended_to_and_kept(tmp_path):
    log = tmp_path / "drafter.log"
    log.write_text("listening on 127.0.0.1:1\n")
    with start_drafter("h", "t", log_path=log) as drafter:
        assert drafter.address != "127.0.0.1:1"
    assert log.read_text().startswith("listening on 127.0.0.1:1\n")
    assert "stopped" in log.read_text()


def test_service_that_fails_to_start_tells_why():
    with pytest.raises(ServerError, match=r"(?s)the drafter ended with status 1.*head = 'missing': no such directory"):
        start_drafter("missing", "t")


def test_service_that_is_late_is_stopped():
    with pytest.raises(ServerError, match="the drafter was not ready in time"):
        start_drafter("slow", "t", timeout_s=0.5)


def test_command_that_does_not_exist_is_reported():
    with pytest.raises(ServerError, match=r"(?s)ended with status 2.*No such command"):
        ServiceProcess(["nobody"])


def test_service_ends_with_its_parent():
    code = (
        "import os, signal; from draftwire_bench.processes import start_drafter; "
        "drafter = start_drafter('h', 't'); print(drafter.pid, drafter.log_path, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    pid, log_path = result.stdout.split()
    deadline = time.monotonic() + 60
    while _runs(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(pid))
    assert "stopped" in Path(log_path).read_text()
    Path(log_path).unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
