"""Changes and faults of a job at random moments: what the schedules of dense models and of tables have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.e2e.harness import Job, Worker

S = TypeVar("S")


@dataclass(frozen=True)
class Action:
    """A change or a fault of the job."""

    kind: str  # grow, shrink, replace, kill, kill_joiner, and kills of one test alone
    steps: int  # the step, or the steps after the previous action, after which it begins
    delay_s: float  # seconds after that step
    moment: str = ""  # kills: moment in the victim's own program; empty: at once
    victim: int = 0

    def victim_of(self, workers: Sequence[Worker]) -> Worker:
        return workers[self.victim % len(workers)]

    def start_joiner(self, job: Job, max_workers: int, delay_s: float) -> None:
        """Start one more worker, and kill it after a while if that is the action."""
        if sum(not w.doomed for w in job.workers) >= max_workers:
            return
        joiner = job.start()
        if self.kind == "kill_joiner":
            # Depending on the delay, it is starting, waiting, receiving the state or training.
            joiner.doomed = joiner.killed = True
            time.sleep(delay_s)
            joiner.kill()

    def strike(self, victim: Worker) -> None:
        """Let the victim leave, or kill it."""
        if self.kind in ("shrink", "replace"):
            victim.terminate()
        elif self.kind == "kill" and self.moment:
            victim.arm(self.moment)
        elif self.kind == "kill":
            victim.kill()


@dataclass(frozen=True)
class Schedule(Generic[S]):
    """A training run and its changes and faults, all from one seed."""

    seed: int
    settings: S
    start_workers: int
    actions: tuple[Action, ...]


def standing(job: Job) -> list[Worker]:
    """Return the workers that hold the state and are to stay."""
    return [w for w in job.workers if not w.doomed and w.exit_code is None and w.records("done")]


def has_ended(job: Job) -> bool:
    """Whether a worker has ended by itself."""
    return any(w.exit_code == 0 for w in job.workers if not w.doomed)


def bad_ends(job: Job, exit_codes: Sequence[int]) -> list[str]:
    """Name the workers that ended as they should not have."""
    bad = []
    for worker, code in zip(job.workers, exit_codes, strict=True):
        # An armed worker need not reach its moment any more. A drained worker may not have started yet.
        allowed = {0, -9} if worker.killed else {0}
        if worker.doomed and worker.records("after_fit"):
            allowed.add(-15)  # drained too late: the script handles the signal again
        if code not in allowed:
            bad.append(f"{worker.name} ended with {code}:\n{worker.output[-3000:]}")
    return bad
