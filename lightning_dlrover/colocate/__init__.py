"""Several jobs on one machine, side by side (docs/colocate/colocation.md)."""

from lightning_dlrover.colocate.jobs_file import JobSpec, read_jobs
from lightning_dlrover.colocate.queue import run_queue

__all__ = ["JobSpec", "read_jobs", "run_queue"]
