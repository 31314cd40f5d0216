"""Streams of data: each row of an epoch is trained exactly once while workers come and go.

`stream` makes a dataset of a source: `parquet`, `files`, `kafka`, or an object with the two methods of `Source`. See
docs/guide/data.md.
"""

from lightning_dlrover.data.dataset import Stream, stream
from lightning_dlrover.data.file_source import files
from lightning_dlrover.data.kafka_source import kafka
from lightning_dlrover.data.parquet_source import parquet
from lightning_dlrover.data.rows import Row, Rows
from lightning_dlrover.data.source import DataError, Shard, Skipped, Source

__all__ = ["DataError", "Row", "Rows", "Shard", "Skipped", "Source", "Stream", "files", "kafka", "parquet", "stream"]
