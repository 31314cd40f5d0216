"""Jobs of plain loops with workers that are disturbed at one of their writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.e2e.harness import Job, Worker
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.stand_in_jobs import OverStandIn, run_over_stand_in
from tests.e2e.toy_job import Recorder
from tests.support.disturbed_writes import STOP_S, Failpoint, disturb_writes
from tests.support.nccl_stand_in import NAME, Quirks


@dataclass(frozen=True)
class FailpointSettings:
    plain: PlainSettings
    point: Failpoint | None = None


def run_with_failpoint(recorder: Recorder, settings: FailpointSettings) -> None:
    """Run the plain loop, record all its writes and disturb one of them."""
    disturb_writes(settings.point, recorder.write)
    if settings.plain.backend == NAME:
        run_over_stand_in(recorder, OverStandIn(run_plain_loop, settings.plain, Quirks(create_s=0.2, loss="either")))
    else:
        run_plain_loop(recorder, settings.plain)


class Scenario:
    """A job that starts, grows, shrinks, grows, loses a worker and ends. Each slot is a worker that an agent would keep alive.

    A worker that ends without being asked is replaced in its slot. A worker stopped by a failpoint is continued after a while.
    """

    def __init__(self, job: Job, point: Failpoint | None, backend: str = "gloo") -> None:
        self.job = job
        self.point = point
        self.slots: dict[str, Worker] = {}
        self.ended: list[Worker] = []  # workers that ended without being asked to
        self._stopped_at: dict[str, float] = {}
        self._plain = PlainSettings(num_steps=1_000_000, backend=backend)

    def play(self) -> None:
        self._start("first")
        self._until(lambda: any(name == "put convener" for _, name in self.writes), "a coordinator")
        self._start("second")
        self._world(2)
        self._start("third")
        self._world(3)
        self.slots["second"].terminate()
        self._world(2)
        self._start("fourth")
        self._world(3)
        self.slots["third"].kill()
        self._world(2)
        (self.job.folder / "end").touch()
        self._until(lambda: all(w.exit_code is not None for w in self.job.workers), "the end")

    @property
    def has_fired(self) -> bool:
        return bool(self.job.records("failpoint"))

    @property
    def writes(self) -> Iterator[tuple[str, str]]:
        """Slot and name of every write."""
        for slot, worker in self.slots.items():
            for record in worker.records("write"):
                yield slot, record["name"]

    def _start(self, slot: str) -> None:
        is_first = slot not in self.slots
        point = self.point if is_first and self.point is not None and self.point.slot == slot else None
        self.slots[slot] = self.job.start(settings=FailpointSettings(self._plain, point))

    def _world(self, size: int) -> None:
        # Count only steps of the current workers from now on: a change may be under way.
        after = self.job.step
        living = [w for w in self.slots.values() if not w.doomed]
        assert len(living) == size

        def look() -> bool:
            pids = {w.pid for w in self.slots.values() if not w.doomed}
            newest = [r for r in self.job.records("done") if r["world"] == size and r["step"] > after]
            return {r["pid"] for r in newest if r["step"] == newest[-1]["step"]} == pids if newest else False

        self._until(look, f"a step of {size} workers after step {after}")

    def _until(self, found: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self._tend()
            return found()

        self.job.wait_until(look, f"{what} ({self.point})", 90.0)

    def _tend(self) -> None:
        for slot, worker in list(self.slots.items()):
            if worker.records("failpoint") and self.point is not None and self.point.action == "stop":
                since = self._stopped_at.setdefault(worker.name, time.monotonic())
                if time.monotonic() - since > STOP_S and worker.exit_code is None:
                    worker.go_on()
            is_over = (self.job.folder / "end").exists() and worker.exit_code == 0
            if not worker.doomed and worker.exit_code is not None and not is_over:
                self.ended.append(worker)
                self._start(slot)
