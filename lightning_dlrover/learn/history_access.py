"""Read and write the history of jobs for a running one, which goes on without it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from lightning_dlrover.learn.history import HistoryError, JobEntry, JobHistory
from lightning_dlrover.learn.job_memory import JobMemory, Past
from lightning_dlrover.perf import Population, population_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.warm_start import PastJob, descriptor_of

__all__ = ["HistoryAccess"]

log = logging.getLogger(__name__)

HISTORY_EVERY_S = 30.0


class HistoryAccess:
    """Access to the job history for a running job. A failure is logged once, and training goes on.

    Args:
        url: the history's database; None: nothing is read or written.
    """

    def __init__(self, url: str | None, node_cores: float) -> None:
        self._history = JobHistory(url) if url else None
        self._node_cores = node_cores
        self._has_failed = False
        self._written_at = time.monotonic()
        self._found: dict[str, Sequence[PastJob]] = {}
        self._populations: dict[str, Population | None] = {}

    @property
    def is_due(self) -> bool:
        return self._history is not None and time.monotonic() - self._written_at >= HISTORY_EVERY_S

    def record(self, key: str, began_at: float, end: Literal["running", "finished", "failed"], memory: JobMemory) -> None:
        if self._history is None or not memory.windows:
            return
        self._written_at = time.monotonic()
        descriptor = descriptor_of(memory.windows[-1], self._node_cores)
        entry = JobEntry(key, key.rpartition("@")[0], began_at, time.time(), end, descriptor)
        with self._surviving("nothing of this job is remembered"):
            self._history.record(entry, memory.windows, memory.decisions, memory.outcomes)

    def past(self, key: str) -> Past:
        if self._history is not None:
            with self._surviving("the job's earlier results are read from its events only"):
                return Past(self._history.windows(key), self._history.decisions(key), self._history.outcomes(key))
        return Past()

    def similar(self, profile: StepProfile, key: str) -> Sequence[PastJob]:
        """Return similar past jobs. The query runs once a job because its model does not change."""
        if self._history is None:
            return ()
        if key not in self._found:
            self._found[key] = ()
            with self._surviving("this job starts without the results of earlier jobs"):
                self._found[key] = self._history.similar(descriptor_of(profile, self._node_cores), but=key)
        return self._found[key]

    def population(self, profile: StepProfile, key: str) -> Population | None:
        """Return the common properties of other jobs on this hardware. The query and the fits run once a job."""
        if self._history is None:
            return None
        if key not in self._populations:
            self._populations[key] = None
            with self._surviving("this job starts without the results of earlier jobs"):
                others = self._history.on_hardware_of(descriptor_of(profile, self._node_cores), but=key)
                self._populations[key] = population_of(others, self._node_cores)
        return self._populations[key]

    @contextlib.contextmanager
    def _surviving(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except HistoryError as error:
            if not self._has_failed:
                log.warning("%s, training goes on: %s", consequence, error)
            self._has_failed = True
