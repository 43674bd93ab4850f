"""The command `draftwire status`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from draftwire.client import Client
from draftwire.server.cli_options import client_security, client_security_options
from draftwire.server.memory_table import memory_table
from draftwire.v1 import draft_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire_cli.output import visible

Info = pb.GetVerifierInfoResponse

_PHASES = ("draft", "wire", "verify", "sample", "host", "idle")
# Width of rows in a file or a pipe.
_LEAST_PIPE_WIDTH = 160
# Columns that are wrapped in a narrow terminal, so that the others are not.
_FOLDED = ("address", "features", "head", "last error")
_FINGERPRINT_DIGITS = 12


@click.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the verifier.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between updates.")
@click.option("--count", type=click.IntRange(1), help="Number of updates.  [default: no limit in a terminal, else 1]")
@client_security_options
def status(server: str, interval: float, count: int | None, **given: Any) -> None:
    """Show a verifier and its drafters.

    Rates are over the last interval.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _LEAST_PIPE_WIDTH))
        count = count or 1
    with Client(server, client_security(given)) as client:
        before = client.info()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            for _ in itertools.count() if count is None else range(count):
                began = time.monotonic()
                time.sleep(interval)
                now = client.info()
                live.update(_tables(server, before, now, time.monotonic() - began), refresh=True)
                before = now


def _tables(server: str, before: Info, now: Info, seconds: float) -> Group:
    return Group(
        _verifier(server, before, now, seconds),
        _drafters(before, now, seconds),
        *_plans(now),
        _fallbacks(before, now, seconds),
        memory_table(now),
    )


def _verifier(server: str, before: Info, now: Info, seconds: float) -> Table:
    title = f"verifier {server}: {visible(now.target)} on {now.device} in {now.dtype}"
    table = Table(title=title, title_justify="left")
    rates = ("running", "waiting", "steps/s", "rows/s", "drafts/s", "length")
    for column in (*rates, *(f"{phase} %" for phase in _PHASES)):
        table.add_column(column, justify="right", overflow="fold")
    old, new = before.counters, now.counters
    rows = new.prompt_rows + new.verify_rows - old.prompt_rows - old.verify_rows
    verify_steps = new.verify_steps - old.verify_steps
    drafts = new.verify_rows - old.verify_rows - verify_steps
    spent = [getattr(new.times, f"{phase}_s") - getattr(old.times, f"{phase}_s") for phase in _PHASES]
    table.add_row(
        f"{now.requests_running} of {now.max_num_seqs}",
        f"{now.requests_waiting} of {now.max_queue}",
        *(f"{number / seconds:.0f}" for number in (new.steps - old.steps, rows, drafts)),
        _ratio(new.accepted_drafts - old.accepted_drafts + verify_steps, verify_steps, "{:.2f}"),
        *(f"{100 * part / max(sum(spent), 1e-9):.0f}" for part in spent),
    )
    return table


def _drafters(before: Info, now: Info, seconds: float) -> Table:
    table = Table(title="drafters" if now.drafters else "no drafters", title_justify="left")
    columns = ("address", "state", "sequences", "cache %", "drafts/s", "accepted %", "features", "head", "last error")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in _FOLDED)
    earlier = {drafter.address: drafter for drafter in before.drafters}
    for drafter in now.drafters:
        old = earlier.get(drafter.address, pb.DrafterStatus())
        drafted = drafter.drafted - old.drafted
        others = f" + {drafter.other_sequences} of others" if drafter.other_sequences else ""
        table.add_row(
            drafter.address,
            pb.DrafterState.Name(drafter.state).removeprefix("DRAFTER_STATE_").lower(),
            f"{drafter.sequences}{others}",
            f"{100 * drafter.kv_cache_usage:.0f}",
            f"{drafted / seconds:.0f}",
            _ratio(100 * (drafter.accepted - old.accepted), drafted, "{:.0f}"),
            _features(drafter),
            drafter.head_fingerprint[:_FINGERPRINT_DIGITS],
            visible(drafter.detail),
        )
    return table


def _plans(now: Info) -> list[Table]:
    """Return the requested drafts, and the throughput that was measured with each number of drafts."""
    planned = [drafter for drafter in now.drafters if drafter.HasField("plan")]
    if not planned:
        return []
    table = Table(title="drafts requested, and tokens/s of a request by number of drafts", title_justify="left")
    table.add_column("address", overflow="fold")
    for column in ("requested", "fastest", "gain", "answer, ms", "step, ms"):
        table.add_column(column, justify="right")
    most = max(len(drafter.plan.tokens_per_s) for drafter in planned)
    for number in range(most):
        table.add_column(str(number), justify="right")
    for drafter in planned:
        plan = drafter.plan
        table.add_row(
            drafter.address,
            str(plan.num_drafts),
            str(plan.best_num_drafts),
            f"{plan.expected_gain:.2f}" if plan.expected_gain else "-",
            *(f"{1e3 * seconds:.2f}" for seconds in (plan.answer_s, plan.step_s)),
            *(f"{speed:.0f}" if speed else "-" for speed in plan.tokens_per_s),
        )
    return [table]


def _features(drafter: pb.DrafterStatus) -> str:
    """Return the format and carrier of the features: `fused by shm`."""
    if drafter.features_carrier == draft_pb2.CARRIER_UNSPECIFIED:
        return ""
    carrier = draft_pb2.Carrier.Name(drafter.features_carrier).removeprefix("CARRIER_").lower()
    return f"{'fused' if drafter.features_are_fused else 'raw'} by {carrier}"


def _fallbacks(before: Info, now: Info, seconds: float) -> Table:
    """Return the tokens decoded without drafts by cause."""
    table = Table(title="tokens without drafts", title_justify="left")
    earlier = {fallback.cause: fallback.tokens for fallback in before.counters.fallbacks}
    for column in ("cause", "tokens/s", "total"):
        table.add_column(column, justify="left" if column == "cause" else "right")
    for fallback in sorted(now.counters.fallbacks, key=lambda one: -one.tokens):
        name = pb.FallbackCause.Name(fallback.cause).removeprefix("FALLBACK_CAUSE_").lower()
        tokens = fallback.tokens - earlier.get(fallback.cause, 0)
        table.add_row(name, f"{tokens / seconds:.0f}", str(fallback.tokens))
    return table


def _ratio(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole else "-"
