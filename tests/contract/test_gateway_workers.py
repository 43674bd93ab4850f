"""The script that starts smg in the compose network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deployment import DEPLOY, arguments, services

# A fake smg, which prints its arguments, then the file of workers as soon as the file exists.
FAKE = '#!/bin/sh\necho "$@"\nwhile [ ! -e "$TMPDIR/workers.json" ]; do sleep 0.1; done\ncat "$TMPDIR/workers.json"\n'


def test_smg_gets_a_worker_for_each_address_of_the_name(tmp_path: Path):
    (tmp_path / "smg").write_text(FAKE)
    (tmp_path / "smg").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(DEPLOY / "gateway_workers.py"), "localhost:50051", "--port", "1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        given, workers = process.communicate(timeout=60)[0].splitlines()
    discovery = ["--discovery-provider", "file", "--discovery-file", f"{tmp_path}/workers.json"]
    assert given.split() == ["launch", *discovery, "--port", "1"]
    assert json.loads(workers) == {"version": 1, "workers": [{"url": "grpc://127.0.0.1:50051"}]}


def test_compose_starts_it_for_the_verifiers():
    service = services("docker-compose")["gateway"]
    program, script, name = service["entrypoint"]
    assert (program, Path(script).name, name) == ("python3", "gateway_workers.py", "verifier:50051")
    assert f"COPY deploy/{Path(script).name} {Path(script).parent}/" in (DEPLOY / "Dockerfile").read_text()
    assert arguments(service["command"])[:4] == ["--host", "0.0.0.0", "--port", "30000"]
