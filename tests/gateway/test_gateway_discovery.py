"""The chart's gateway with a fake Kubernetes API: smg starts with the rendered arguments and finds the verifier."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest
from helm_chart import PLAIN, container, of_kind, pods, render

from draftwire_bench.processes import start_verifier
from draftwire_cli.demo_run import CPU, MODELS

pytest.importorskip("smg", reason="needs the gateway: pip install '.[gateway]'")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

GATEWAY_HOST, POD_HOST = "127.0.0.76", "127.0.0.77"
KEY = "secret"
WAIT_S = 120.0


class Cluster:
    """A fake Kubernetes API that serves the pods of one namespace and records the verb and path of every request."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.asked: set[tuple[str, str]] = set()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cluster.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tell(self, kind: str, pod: dict[str, Any]) -> None:
        """Send an event to the watcher."""
        self._events.put({"type": kind, "object": pod})

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        given = {name: values[0] for name, values in parse_qs(url.query).items()}
        is_watch = given.get("watch") in ("1", "true")
        self.asked.add(("watch" if is_watch else "list" if url.path.endswith("s") else "get", url.path))
        request.send_response(200)
        request.send_header("content-type", "application/json")
        request.end_headers()
        if not is_watch:
            listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}
            request.wfile.write(json.dumps(listed).encode())
            return
        wanted = dict(label.split("=") for label in given["labelSelector"].split(","))
        while event := self._events.get():
            if wanted.items() <= event["object"]["metadata"]["labels"].items():
                request.wfile.write(json.dumps(event).encode() + b"\n")
                request.wfile.flush()

    def close(self) -> None:
        self._events.put({})
        self._server.shutdown()
        self._server.server_close()


def running_pod(name: str, template: dict[str, Any], host: str) -> dict[str, Any]:
    """Return a ready pod of a rendered deployment."""
    metadata = {**template["metadata"], "name": name, "namespace": "prod", "uid": name, "resourceVersion": "2"}
    status = {"phase": "Running", "podIP": host, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": template["spec"], "status": status}


@contextmanager
def started_gateway(arguments: list[str], cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Run smg with the chart's arguments, on addresses of this host; yield the path of its log."""
    context = {"name": "one", "context": {"cluster": "one", "user": "one"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": cluster.url}}],
        "users": [{"name": "one", "user": {"token": "none"}}],
        "contexts": [context],
        "current-context": "one",
    }
    (tmp_path / "kube.json").write_text(json.dumps(config))
    own = ["--host", GATEWAY_HOST, "--prometheus-host", GATEWAY_HOST]
    command = [sys.executable, "-m", "smg", "launch", *own, *arguments]
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kube.json"), "NO_COLOR": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    try:
        yield tmp_path / "log"
    finally:
        process.kill()
        process.wait()


def fetch(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://{GATEWAY_HOST}:{port}{path}", data, {"authorization": f"Bearer {KEY}"})
    request.add_header("content-type", "application/json")
    with urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def wait_for(found: Callable[[], Any], wanted: Any, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            last = found()
        except URLError as error:
            last = error
        if last == wanted:
            return
        assert time.monotonic() < deadline, f"{last}, not {wanted}:\n{log.read_text()[-4000:]}"
        time.sleep(0.25)


def test_smg_with_the_chart_s_arguments_follows_the_pods(tmp_path: Path):
    manifests = render({**PLAIN, "gateway": {"enabled": True, "apiKeySecret": "key"}})
    templates = pods(manifests)
    gateway = container(templates["gateway"])
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    given = [argument.replace("$(API_KEY)", KEY) for argument in gateway["args"]]
    cluster = Cluster()

    def workers() -> list[tuple[str, str]]:
        known = json.loads(fetch(ports["http"], "/workers"))["workers"]
        return [(one["url"], one["status"]) for one in known]

    def ask(probe: str) -> bool:
        asked = gateway[probe]["httpGet"]
        fetch(ports[asked["port"]], asked["path"])
        return True

    (grpc,) = (port for port in container(templates["verifier"])["ports"] if port["name"] == "grpc")
    address = f"{POD_HOST}:{grpc['containerPort']}"
    model = ("--served-model-name", "demo", "--kv-events")
    with (
        start_verifier(MODELS / "demo" / "target", [], *CPU, *model, "--listen", address, timeout_s=300),
        started_gateway(given, cluster, tmp_path) as log,
    ):
        wait_for(workers, [], log)
        with pytest.raises(URLError, match="503"):
            ask("readinessProbe")
        cluster.tell("ADDED", running_pod("a-drafter", templates["drafter"], "127.0.0.78"))
        verifier = running_pod("a-verifier", templates["verifier"], POD_HOST)
        cluster.tell("ADDED", verifier)
        wait_for(workers, [(f"grpc://{address}", "ready")], log)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            wait_for(lambda probe=probe: ask(probe), True, log)
        answer = fetch(ports["http"], "/v1/completions", {"model": "demo", "prompt": "def", "max_tokens": 4})
        assert json.loads(answer)["usage"]["completion_tokens"] == 4
        cluster.tell("DELETED", verifier)
        wait_for(workers, [], log)
    cluster.close()
    (rule,) = of_kind(manifests, "Role")["gateway"]["rules"]
    allowed = {(verb, f"/api/v1/namespaces/prod/{what}") for verb in rule["verbs"] for what in rule["resources"]}
    assert cluster.asked <= allowed
