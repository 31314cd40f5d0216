"""Data that a live job reads exactly once while workers come and go: `stream` over files or a source of one's own."""

from lightning_dlrover.data.parquet import parquet
from lightning_dlrover.data.rows import Row, Rows
from lightning_dlrover.data.source import DataError, Shard, Skipped, Source
from lightning_dlrover.data.stream import Stream, stream

__all__ = ["DataError", "Row", "Rows", "Shard", "Skipped", "Source", "Stream", "parquet", "stream"]
