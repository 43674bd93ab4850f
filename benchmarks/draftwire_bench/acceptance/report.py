"""The report of `draftwire bench acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwire_bench.acceptance.acceptance import FORMS, Cell
from draftwire_bench.output import make_table

# Largest deviation from a closed form that is attributed to chance, in standard errors.
MAX_Z = 5.0


def report(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the report as JSON-compatible values, without the environment."""
    return {"benchmark": "acceptance", "cells": [_cell(cell) for cell in cells]}


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "method": cell.method.name,
        "speculative_config": cell.method.config,
        "law": cell.method.law,
        "temperature": cell.temperature,
        "continuations": cell.continuations,
        "verify_steps": cell.steps,
        "steps_unlike": cell.unlike,
        "acceptance_length": cell.acceptance_length,
        "accepted_over_drafted": cell.rate,
        "accepted_over_drafted_closed_form": cell.expected_rate,
        "conditional": cell.conditional(closed=False),
        "conditional_closed_form": cell.conditional(closed=True),
        "positions": [
            {
                **asdict(position),
                "z": position.z,
                "forms": {name: total / max(position.reached, 1) for name, total in position.forms.items()},
            }
            for position in cell.positions
        ],
    }


def find_deviations(cells: Sequence[Cell]) -> list[str]:
    """Describe the positions that deviate from their closed forms by more than chance."""
    return [
        f"{cell.method.name}, temperature {cell.temperature:g}, position {number}: {position.accepted} of "
        f"{position.tested} accepted, {position.expected:.1f} expected, {position.z:+.1f} standard errors"
        for cell in cells
        for number, position in enumerate(cell.positions, start=1)
        if position.z is not None and abs(position.z) > MAX_Z
    ]


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Print two tables and the largest deviation."""
    console.print(_measured_table(cells))
    console.print(_forms_table(cells))
    deviations = [abs(p.z) for cell in cells for p in cell.positions if p.z is not None]
    if deviations:
        largest = max(deviations)
        console.print(f"largest deviation from a closed form: {largest:.2f} standard errors, of {len(deviations)}")
    certain = [cell for cell in cells if all(position.z is None for position in cell.positions)]
    if certain:
        off = sum(abs(position.accepted - position.expected) for cell in certain for position in cell.positions)
        tested = sum(position.tested for cell in certain for position in cell.positions)
        console.print(f"without randomness: {off:.0f} of {tested} tests differ (rounding)")
    unlike = sum(cell.unlike for cell in cells)
    steps = sum(cell.steps for cell in cells)
    console.print(f"omitted: {unlike} of {unlike + steps} steps, whose recomputed drafts differ")
    for text in find_deviations(cells):
        console.print(f"DEVIATES: {text}")


def _table(title: str, columns: Sequence[str]) -> Table:
    return make_table(title, ("method", "T", *columns), ["method"])


def _measured_table(cells: Sequence[Cell]) -> Table:
    positions = [f"position {number}" for number in range(1, cells[0].k + 1)]
    title = "Acceptance, measured and closed form; of each position if the previous draft was accepted"
    table = _table(title, ("steps", "length", "accepted / drafted", *positions))
    for cell in cells:
        pairs = zip(cell.conditional(closed=False), cell.conditional(closed=True), strict=True)
        table.add_row(
            cell.method.name,
            f"{cell.temperature:g}",
            str(cell.steps),
            f"{cell.acceptance_length:.3f}",
            f"{cell.rate:.4f} {cell.expected_rate:.4f}",
            *(f"{measured:.4f} {closed:.4f}" for measured, closed in pairs),
        )
    return table


def _forms_table(cells: Sequence[Cell]) -> Table:
    title = "The closed forms at position 1 of the same steps, and the method's law"
    table = _table(title, (*FORMS, "law"))
    for cell in cells:
        first = cell.positions[0]
        means = [first.forms[name] / max(first.reached, 1) for name in FORMS]
        table.add_row(cell.method.name, f"{cell.temperature:g}", *(f"{mean:.4f}" for mean in means), cell.method.law)
    return table
