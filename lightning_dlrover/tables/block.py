"""The memory of one table's rows on one worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dlrover.tables.layout import Region

__all__ = ["Block", "part_of"]


@dataclass(frozen=True)
class Block:
    """One worker's part of one table: weights, or one of its optimizer states.

    Attributes:
        table: `{module}.{table}`.
        what: `weight`, or `state0`, `state1` in the fused optimizer's order.
        region: rows and columns of the table.
        values: shape ``(rows, cols)`` of the region, or ``(rows,)`` for a row-wise state. The live memory itself.
    """

    table: str
    what: str
    region: Region
    values: torch.Tensor


def part_of(block: Block, region: Region) -> torch.Tensor:
    """Return the values of `region`, which must be inside the block: a view, of rows only where the values are row-wise."""
    rows = block.values[region.row0 - block.region.row0 : region.row1 - block.region.row0]
    return rows if rows.dim() == 1 else rows[:, region.col0 - block.region.col0 : region.col1 - block.region.col0]
