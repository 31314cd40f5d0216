"""Parquet files with an unreadable row group."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def spoil_row_group(path: Path, number: int) -> None:
    """Overwrite the header of a row group's first page."""
    column = pq.ParquetFile(path).metadata.row_group(number).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 16] = b"\xff" * 16
    path.write_bytes(content)
