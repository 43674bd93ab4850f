"""Pairwise selection: a few rows of a product of options that contain every pair of values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of the product of `columns` that hold each pair of values of two columns at least once.

    These rows find every failure that depends on one value or on a pair of values.
    """
    pairs = list(combinations(range(len(columns)), 2))
    missing = {
        (i, a, j, b) for i, j in pairs for a, b in product(range(len(columns[i])), range(len(columns[j])))
    }
    rows = list(product(*(range(len(column)) for column in columns)))
    chosen = []
    while missing:
        new = {row: {(i, row[i], j, row[j]) for i, j in pairs} & missing for row in rows}
        best = max(rows, key=lambda row: len(new[row]))
        missing -= new[best]
        chosen.append(best)
    return [tuple(column[at] for column, at in zip(columns, row, strict=True)) for row in sorted(chosen)]
