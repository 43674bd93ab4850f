"""The command `draftwire status`."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from draftwire.cli.options import client_security, client_security_options
from draftwire.cli.output import visible
from draftwire.client import Client
from draftwire.v1 import generate_pb2 as pb

Info = pb.GetVerifierInfoResponse

_PHASES = ("draft", "wire", "verify", "sample", "host", "idle")


@click.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the verifier.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between looks.")
@click.option("--count", type=click.IntRange(1), help="Looks.  [default: in a terminal until Ctrl-C, else 1]")
@client_security_options
def status(server: str, interval: float, count: int | None, **given: Any) -> None:
    """Show a verifier and its drafters.

    Rates are those of the last interval.
    """
    console = Console()
    if count is None and not console.is_terminal:
        count = 1
    with Client(server, client_security(given)) as client:
        before = client.info()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            looks = 0
            while count is None or looks < count:
                began = time.monotonic()
                time.sleep(interval)
                now = client.info()
                live.update(_tables(server, before, now, time.monotonic() - began), refresh=True)
                before = now
                looks += 1


def _tables(server: str, before: Info, now: Info, seconds: float) -> Group:
    return Group(_verifier(server, before, now, seconds), _drafters(now))


def _verifier(server: str, before: Info, now: Info, seconds: float) -> Table:
    title = f"verifier {server}: {visible(now.target)} on {now.device} in {now.dtype}"
    table = Table(title=title, title_justify="left")
    for column in ("running", "waiting", "steps/s", "rows/s", "drafts/s", *(f"{phase} %" for phase in _PHASES)):
        table.add_column(column, justify="right")
    old, new = before.counters, now.counters
    rows = new.prompt_rows + new.verify_rows - old.prompt_rows - old.verify_rows
    drafts = (new.verify_rows - new.verify_steps) - (old.verify_rows - old.verify_steps)
    spent = [getattr(new.times, f"{phase}_s") - getattr(old.times, f"{phase}_s") for phase in _PHASES]
    table.add_row(
        f"{now.requests_running} of {now.max_num_seqs}",
        f"{now.requests_waiting} of {now.max_queue}",
        *(f"{number / seconds:.0f}" for number in (new.steps - old.steps, rows, drafts)),
        *(f"{100 * part / max(sum(spent), 1e-9):.0f}" for part in spent),
    )
    return table


def _drafters(now: Info) -> Table:
    table = Table(title="drafters" if now.drafters else "no drafters", title_justify="left")
    for column in ("address", "state", "sequences", "head", "last error"):
        table.add_column(column, overflow="fold")
    for drafter in now.drafters:
        table.add_row(
            drafter.address,
            pb.DrafterState.Name(drafter.state).removeprefix("DRAFTER_STATE_").lower(),
            str(drafter.sequences),
            drafter.head_fingerprint,
            visible(drafter.detail),
        )
    return table
