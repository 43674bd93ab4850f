"""Checks the monitoring with running services: python deploy/monitoring_check.py [--picture docs/dashboard.png].

Validates the configuration and the alerts, starts both services with the demo pair and a Prometheus (`prometheus` and
`promtool` must be on the PATH), generates load, stops the drafter for a while, and runs every query of the dashboard.
Fails if a query returns no data. --picture draws the dashboard's panels from the data.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwire import Client
from draftwire_bench.processes import start_drafter, start_verifier

DEPLOY = Path(__file__).resolve().parent
DEMO = DEPLOY.parent / "models" / "demo"
RATE_INTERVAL = "30s"  # replaces Grafana's $__rate_interval
STEP_S = 2
CLIENTS = 4
READY_TIMEOUT_S = 60.0
PROMPTS = ("def read_lines(path):\n", "import os\n\n\nclass Cache:\n", "for name, value in sorted(", "@property\ndef ")


@dataclass(frozen=True)
class Series:
    """One line of a panel: times in seconds since the load began, and values."""

    label: str
    times: list[float]
    values: list[float]


Panels = list[tuple[dict[str, Any], list[list[Series]]]]


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def promtool(*arguments: str) -> None:
    """Run promtool in the folder of the configuration."""
    print("$ promtool", *arguments, flush=True)
    subprocess.run(["promtool", *arguments], cwd=DEPLOY / "prometheus", check=True)


@contextlib.contextmanager
def prometheus(targets: Mapping[str, int], folder: Path) -> Iterator[str]:
    """Run a Prometheus with the alerts of deploy/ that scrapes the loopback port of each job, and yield its URL."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()
        ],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not _is_ready(url):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("prometheus did not become ready")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
        return bool(response.status == 200)
    return False


def ask(url: str, path: str, **parameters: str | float) -> Any:
    """Call Prometheus' HTTP API and return the response's data."""
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=30) as response:
        return json.load(response)["data"]


def load(address: str, stop: threading.Event) -> list[threading.Thread]:
    """Run clients that generate until `stop`, greedily and sampled, and sometimes without drafts."""

    def run(number: int) -> None:
        with Client(address) as client:
            turn = number
            while not stop.is_set():
                client.complete(
                    PROMPTS[turn % len(PROMPTS)],
                    max_tokens=48,
                    temperature=(0.0, 0.7)[turn % 2],
                    ignore_eos=True,
                    num_speculative_tokens=0 if turn % 7 == 0 else None,
                )
                turn += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    return threads


def read_panels(url: str, began: float) -> Panels:
    """Return each panel of the dashboard with its queries' series, from `began` (Unix time) to now."""
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "draftwire.json").read_text())
    panels = []
    for panel in board["panels"]:
        answers = []
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            found = ask(url, "query_range", query=query, start=began, end=time.time(), step=STEP_S)["result"]
            answers.append([_series(one, target["legendFormat"], began) for one in found])
        panels.append((panel, answers))
    return panels


def _series(found: dict[str, Any], legend: str, began: float) -> Series:
    label = legend
    for name, value in found["metric"].items():
        label = label.replace("{{" + name + "}}", value)
    points = [(float(at) - began, float(value)) for at, value in found["values"]]
    points = [point for point in points if math.isfinite(point[1])]
    return Series(label, [at for at, _ in points], [value for _, value in points])


def report(panels: Panels) -> int:
    """Print the result of each query, and return the number of queries without data."""
    empty = 0
    for panel, answers in panels:
        for target, series in zip(panel["targets"], answers, strict=True):
            points = sum(len(one.values) for one in series)
            empty += points == 0
            print(f"{'ok   ' if points else 'EMPTY'} {panel['title']}: {len(series)} series, {points} points")
            if not points:
                print(f"      {target['expr']}")
    return empty


def draw(panels: Panels, path: Path) -> None:
    """Draw the panels, two per row as in the dashboard."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(13, 2.5 * rows), squeeze=False, layout="constrained")
    figure.suptitle(
        "The panels and queries of deploy/grafana/dashboards/draftwire.json over data of a real Prometheus,\n"
        "drawn by deploy/monitoring_check.py (not a picture of Grafana): demo pair on CPU, drafter stopped for a while",
        fontsize=10,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, answers) in zip(axes.flat, panels, strict=False):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for one in (series for answer in answers for series in answer if any(series.values)):
            scale = 100 if unit == "percentunit" else 1
            axis.plot(one.times, [scale * value for value in one.values], label=one.label)
        title = {"percentunit": "%", "s": "seconds", "Bps": "bytes/s"}.get(unit)
        axis.set_title(panel["title"] + (f" ({title})" if title else ""), fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6, loc="upper left", ncols=2)
    figure.supxlabel("seconds since the load began; series that are always 0 are left out", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=72)
    Image.open(drawn).quantize(64).save(path, optimize=True)


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="seconds of load before and after the drafter stops")
    parser.add_argument("--picture", type=Path, help="PNG to draw; needs matplotlib")
    options = parser.parse_args()
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")
    ports = {"verifier": free_port(), "drafter": free_port()}
    listen = f"127.0.0.1:{free_port()}"

    def drafter() -> Any:
        metrics = f"127.0.0.1:{ports['drafter']}"
        own = ("--listen", listen, "--metrics-listen", metrics, "--device", "cpu", "--log-level", "warning")
        return start_drafter(DEMO / "eagle3", DEMO / "target", *own)

    own = ("--metrics-listen", f"127.0.0.1:{ports['verifier']}", "--device", "cpu", "--no-adaptive-k")
    with (
        tempfile.TemporaryDirectory() as folder,
        start_verifier(DEMO / "target", [listen], *own) as verifier,
        prometheus(ports, Path(folder)) as url,
    ):
        stop = threading.Event()
        with drafter():
            began = time.time()
            clients = load(verifier.address, stop)
            time.sleep(options.seconds)
        with drafter():
            time.sleep(options.seconds)
            panels = read_panels(url, began)
            health = {rule["name"]: rule["health"] for rule in ask(url, "rules")["groups"][0]["rules"]}
            stop.set()
            for client in clients:
                client.join()
    empty = report(panels)
    print("alerts:", ", ".join(f"{name} {state}" for name, state in health.items()))
    if options.picture:
        draw(panels, options.picture)
    if empty or set(health.values()) != {"ok"}:
        sys.exit(f"{empty} queries without data")
    print(f"{sum(len(answers) for _, answers in panels)} queries of {len(panels)} panels, all with data")


if __name__ == "__main__":
    main()
