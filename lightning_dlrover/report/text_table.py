"""Lay out all tables of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(alignment: str, rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """Return the lines of a table. Each column is as wide as its longest cell.

    Args:
        alignment: ``<`` (left) or ``>`` (right) for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True))
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines
