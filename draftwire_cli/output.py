"""Formats text and statistics for a terminal or a pipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from draftwire.client import Chunk, Completion, Statistics

DRAFTED_COLOUR = "green"

# Control characters that generated text may not send to the terminal: C0 except tab and newline, DEL, C1.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def has_colour() -> bool:
    """Return whether standard output is a terminal with colours, and colours are not disabled."""
    console = Console()
    return console.is_terminal and console.color_system is not None and not console.no_color


def write_chunk(chunk: Chunk, show_drafts: bool, terminal: bool) -> None:
    """Write new text to standard output; `show_drafts` colours accepted drafts."""
    if not terminal:
        click.echo(chunk.text, nl=False)
        return
    for text, drafted in chunk.pieces() if show_drafts else [(chunk.text, False)]:
        click.echo(click.style(visible(text), fg=DRAFTED_COLOUR) if drafted else visible(text), nl=False)


def visible(text: str) -> str:
    """Return the text without control characters of terminals."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def interrupted_text(chunks: Sequence[Chunk], arrivals: Sequence[float], now: float) -> str:
    """Return `interrupted after 12 tokens in 3.2 s, first token 35 ms, 7 tokens were accepted drafts`.

    Args:
        chunks: The chunks that have arrived.
        arrivals: Seconds from sending the request to each chunk's arrival.
        now: Seconds from sending the request to the interrupt.
    """
    count = sum(len(chunk.token_ids) for chunk in chunks)
    parts = [f"interrupted after {count} tokens in {now:.1f} s"]
    first = next((at for chunk, at in zip(chunks, arrivals, strict=True) if chunk.token_ids), None)
    if first is not None:
        accepted = sum(sum(chunk.drafted) for chunk in chunks)
        parts += [f"first token {first * 1000:.0f} ms", f"{accepted} tokens were accepted drafts"]
    return ", ".join(parts)


def statistics_text(statistics: Statistics) -> str:
    """Return `64 tokens, 120.5 tokens/s, first token 35 ms, acceptance length 2.91 (per position 0.80 0.62)`."""
    parts = [
        f"{statistics.output_tokens} tokens",
        f"{statistics.tokens_per_second:.1f} tokens/s",
        f"first token {statistics.time_to_first_token_s * 1000:.0f} ms",
    ]
    if statistics.queue_time_s >= 1:
        parts.append(f"{statistics.queue_time_s:.1f} s in the queue")
    if statistics.acceptance_length is not None and any(statistics.drafted):
        parts.append(f"acceptance length {statistics.acceptance_length:.2f} (per position {rates_text(statistics)})")
    else:
        parts.append("no drafts")
    if statistics.synthetic_acceptance:
        parts.append("SYNTHETIC acceptance: the text does not follow the target")
    return ", ".join(parts)


def rates_text(statistics: Statistics) -> str:
    """Return the acceptance rate of each draft position, - without drafts: `0.80 0.62 0.31 -`."""
    rates = zip(statistics.acceptance_rates, statistics.drafted, strict=True)
    return " ".join(f"{rate:.2f}" if drafted else "-" for rate, drafted in rates)


def completion_mapping(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON-compatible values."""
    statistics = completion.statistics
    return {
        **asdict(completion),
        "statistics": {
            **asdict(statistics),
            "acceptance_length": statistics.acceptance_length,
            "acceptance_rates": statistics.acceptance_rates,
            "tokens_per_second": statistics.tokens_per_second,
        },
    }
