"""Play one seed and return its outcome."""

from __future__ import annotations

import hashlib
import traceback
from dataclasses import dataclass

from .faults import heal, plague
from .invariants import SETTLE_S, Violation
from .job import Job
from .kernel import LivelockError


@dataclass(frozen=True)
class Outcome:
    seed: int
    invariant: str  # violated invariant; empty if none
    text: str
    trace: list[str]
    num_rounds: int
    num_steps: int
    num_events: int

    @property
    def trace_hash(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.text}\nreplay: python -m tests.rdzv.simulate --seed {self.seed} --trace"


def play(seed: int) -> Outcome:
    """Play one seed. The outcome is the same whatever ran before, and on every machine."""
    job = Job(seed)
    invariant = text = ""
    try:
        _play(job)
    except Violation as violation:
        invariant, text = violation.invariant, str(violation)
    except LivelockError as error:
        invariant, text = "progress", f"progress: {error}"
    except Exception:
        invariant, text = "sound", "sound: " + traceback.format_exc()
    for worker in job.workers.values():
        worker.process.close()
    trace = [f"{at:8.3f} {who:>4} {' '.join(map(str, what))}" for at, who, *what in job.kernel.lines]
    return Outcome(seed, invariant, text, trace, len(job.checks.rounds), job.checks.num_steps, job.kernel.num_events)


def _play(job: Job) -> None:
    job.kernel.run_until(plague(job))
    heal(job)
    end, well_s = job.kernel.now + SETTLE_S, 0
    # Give late effects time to appear, such as those of a worker that does not know of its removal.
    while well_s < 4:
        missing = job.checks.missing()
        well_s = 0 if missing else well_s + 1
        if missing and job.kernel.now >= end:
            raise Violation("progress", f"{SETTLE_S:.0f} s after the last fault: {missing}")
        job.kernel.run_until(job.kernel.now + 1.0)
        for _ in range(job.min_workers - job.num_staying):
            job.start_node(0.0)
