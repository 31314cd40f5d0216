"""How often a worker that stays slow becomes an event of the job's history."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover.rdzv.job.events import Event, StragglerFound, events_of, record_of
from lightning_dlrover.rdzv.job.records import EventRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.tuning.samples import OwnTimes
from lightning_dlrover.watchdog import REPORT_AGAIN_S, _Stragglers

MEMBERS = ("w0", "w1", "w2")


def record_of_worker(number: int) -> WorkerRecord:
    return WorkerRecord(f"w{number}", f"a{number}", f"host{number}", number, 0, "127.0.0.1", 1, "active", 1)


@dataclass
class Records:
    """The records as rank 0 of a job without a controller sees them."""

    view: WorkerView = field(default_factory=WorkerView)
    events: list[EventRecord] = field(default_factory=list)

    @property
    def workers(self) -> Records:
        return self

    def of(self, worker_ids: Sequence[str]) -> dict[str, WorkerRecord]:
        return {worker: record_of_worker(MEMBERS.index(worker)) for worker in worker_ids}

    @property
    def shared(self) -> Records:
        return self

    @property
    def journal(self) -> SimpleNamespace:
        return SimpleNamespace(events=lambda: self.events)

    def has_controller(self) -> bool:
        return False

    def event(self, event: Event, text: str) -> None:
        self.events.append(record_of(event, text, at=1.0))


class SlowJob:
    """Two fast workers and a slow one; the test passes the seconds."""

    def __init__(self, remaining_steps: float = 1e6) -> None:
        self.records = Records()
        self._began = time.monotonic() + 1e6  # ahead of the clock, by which the watch measures what a look costs
        self._heard: list[OwnTimes] = []
        self._pulse = SimpleNamespace(num_observations=0, observations=lambda _: self._heard)
        formation = SimpleNamespace(rank=0, round=SimpleNamespace(number=1, members=MEMBERS, hosts=[0, 1, 2]))
        fit: Any = SimpleNamespace(
            world=SimpleNamespace(membership=self.records),
            pulse=self._pulse,
            formation=formation,
            loads=(),
            remaining_steps=remaining_steps,
            now=SimpleNamespace(counts=(0,)),
        )
        self._watch = _Stragglers(fit)

    def train(self, slow: int, second: int) -> None:
        """Make steps with a slow worker, and let the watch look at them."""
        rng = random.Random(second)
        for _ in range(32):
            times = tuple((0.15 if rank == slow else 0.05) * rng.gauss(1, 0.02) for rank in range(len(MEMBERS)))
            self._heard.append(OwnTimes(2, max(times), times, (0.0,) * 3, (0.0,) * 3))
        self._heard = self._heard[-32:]
        self._pulse.num_observations += 32
        self._watch.check(self._began + second)

    @property
    def named(self) -> list[str]:
        return [found.worker_id for _, found in events_of(self.records.events, StragglerFound)]


def test_worker_that_stays_slow_is_reported_once_in_ten_minutes() -> None:
    job = SlowJob()
    for second in range(int(2 * REPORT_AGAIN_S)):
        job.train(slow=1, second=second)
    assert job.named == ["w1", "w1"]


def test_workers_that_are_slow_in_turn_are_each_reported_once_in_ten_minutes() -> None:
    job = SlowJob()
    for second in range(int(REPORT_AGAIN_S)):
        job.train(slow=1 + second % 2, second=second)
    assert sorted(job.named) == ["w1", "w2"]


@pytest.mark.parametrize("slow", [0, 2])
def test_newly_slow_worker_is_reported_at_once(slow: int) -> None:
    job = SlowJob()
    job.train(slow=1, second=0)
    job.train(slow=slow, second=1)
    assert job.named == ["w1", f"w{slow}"]


@pytest.mark.parametrize(("left_s", "act"), [(20.0, "none"), (100.0, "recommend")])
def test_a_replacement_is_recommended_only_if_it_can_start_before_the_end(left_s: float, act: str) -> None:
    job = SlowJob(remaining_steps=left_s / 0.15)
    job.train(slow=1, second=0)
    assert [found.act for _, found in events_of(job.records.events, StragglerFound)] == [act]
