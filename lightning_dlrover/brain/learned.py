"""The speed of a job at other sizes, as its history shows it. Reads only events since the last look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, Rate
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.memory_growth import least_workers
from lightning_dlrover.planner.plan import Candidate, Decision
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.events import DecisionMade, MemoryShort, TrainingStalled, content_of
from lightning_dlrover.rdzv.job.journal import read_events
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, RecordError

__all__ = ["DEFAULT_CHANGE_S", "Learned", "rates_of"]

DEFAULT_CHANGE_S = 0.5
"""Assumed seconds of a change of workers until the job has measured one."""


@dataclass
class Learned:
    """A job's newest decision, its fewest workers for want of memory, and its own changes so far."""

    decision: Decision | None = None
    least_workers: int = 0
    stalls_s: list[float] = field(default_factory=list)
    revision: int = 0  # events up to this revision have been read

    @staticmethod
    def update_all(client: EtcdClient, learned: Mapping[Keys, Learned]) -> None:
        """Read the new events of jobs, in few requests.

        Raises:
            EtcdError: etcd does not answer; nothing has changed.
        """
        found = client.read_prefixes({keys.events: each.revision for keys, each in learned.items()})
        for keys, each in learned.items():
            revision, entries = found[keys.events]
            each.add(read_events(entries))
            each.revision = revision

    def add(self, records: Iterable[EventRecord]) -> None:
        for record in records:
            try:
                event = content_of(record)
                if isinstance(event, DecisionMade):
                    self.decision = Decision.from_data(event.document)
            except (RecordError, ValueError):
                continue  # an event of another release, or foreign
            if isinstance(event, MemoryShort):
                self.least_workers = max(self.least_workers, least_workers([(event.act, event.num_workers)]))
            elif isinstance(event, TrainingStalled) and event.seconds >= 0:
                self.stalls_s.append(event.seconds)

    @property
    def change_s(self) -> float:
        return median(self.stalls_s) if self.stalls_s else DEFAULT_CHANGE_S

    def samples_left(self, num_workers: int, now: float) -> float | None:
        """Return the samples that are left by now, if the job has run with `num_workers` since its decision; None: unknown."""
        decision = self.decision
        if decision is None or decision.left_s is None:
            return None
        by_size = {rate.num_workers: rate.samples_per_s for rate in rates_of(decision)}
        then = by_size.get(decision.current.num_workers)
        if then is None:
            return None
        done = max(0.0, now - decision.at) * by_size.get(num_workers, then)
        return max(0.0, decision.left_s * then - done)

    def as_job(self, name: str, now: float) -> PoolJob:
        """Return a job outside of any pool as one of a pool, with the size of its newest decision."""
        size = self.decision.current_workers if self.decision is not None else 1
        return PoolJob(
            name,
            Resources(1.0),
            1,
            max(size, 1),
            granted=size,
            alive=size,
            rates=rates_of(self.decision),
            samples_left=self.samples_left(size, now),
            change_s=self.change_s,
        )


def rates_of(decision: Decision | None) -> tuple[Rate, ...]:
    """Return the best throughput that a decision knows for each number of workers, ascending."""
    best: dict[int, Candidate] = {}
    for candidate in decision.candidates if decision is not None else ():
        known = best.get(candidate.num_workers)
        if candidate.feasible and (known is None or candidate.samples_per_s > known.samples_per_s):
            best[candidate.num_workers] = candidate
    return tuple(_rate(best[size]) for size in sorted(best) if best[size].samples_per_s > 0)


def _rate(candidate: Candidate) -> Rate:
    samples = candidate.samples_per_s * candidate.step_time_s
    return Rate(
        candidate.num_workers,
        candidate.samples_per_s,
        samples / candidate.high_s if candidate.high_s > 0 else candidate.samples_per_s,
        samples / candidate.low_s if candidate.low_s > 0 else candidate.samples_per_s,
        candidate.measured,
    )
