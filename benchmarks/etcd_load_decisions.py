"""Seconds that a coordinator takes to decide in jobs of 100 and 1,000 workers: one part of `etcd_load.py`.

A decision is the next round and the notice for the others, from a view that was just decoded. The coordinator makes it after
each change of a record, in a process that trains. Situations:

    quiet   all train
    loss    one worker is gone
    retry   a collective failed, and all have reported it
    star    half of the workers report that they cannot reach rank 0
    split   two halves do not reach each other; each worker reports 64 of the others
    random  each worker reports 64 others, drawn at random
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from lightning_dlrover.rdzv.job.records import MAX_UNREACHABLE, JobRecord, RoundRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import JobView, next_round, notice_of

SIZES = (100, 1000)


def _nobody(rank: int, size: int) -> list[int]:
    return []


def _other_half(rank: int, size: int) -> list[int]:
    first = 0 if rank >= size // 2 else size // 2
    return list(range(first, first + min(MAX_UNREACHABLE, size // 2)))


def _any(rank: int, size: int) -> list[int]:
    return random.Random(rank).sample(range(size), min(MAX_UNREACHABLE, size // 2))


SITUATIONS: dict[str, tuple[bool, int, Callable[[int, int], list[int]]]] = {  # broken, lost, who is not reached by a rank
    "quiet": (False, 0, _nobody),
    "loss": (False, 1, _nobody),
    "retry": (True, 0, _nobody),
    "star": (True, 0, lambda rank, size: [0] if rank % 2 else []),
    "split": (True, 0, _other_half),
    "random": (True, 0, _any),
}


def view_of(size: int, situation: str) -> JobView:
    """Return a job of `size` workers, eight on each host, in one of `SITUATIONS`."""
    is_broken, num_lost, unreached = SITUATIONS[situation]
    members = [f"host{rank // 8}-{rank}-a1b2c3" for rank in range(size)]
    state = "reforming" if is_broken else "active"
    workers = {}
    for rank, worker in enumerate(members[num_lost:], num_lost):
        others = [members[other] for other in unreached(rank, size) if other != rank]
        host = f"host{rank // 8}"
        workers[worker] = WorkerRecord(worker, f"agent{rank}", host, 1, 0, "10.0.0.1", 1, state, 7, unreachable=others)  # type: ignore[arg-type]
    round_ = RoundRecord(7, members, "", "start", planned=True, apart_attempts=2)
    return JobView(JobRecord("training", True, 1, size, "1"), round_, None, workers)


def seconds_of(size: int, situation: str) -> float:
    view = view_of(size, situation)
    began = time.perf_counter()
    next_round(view, float("inf"))
    notice_of(view, 1)
    return time.perf_counter() - began


def measure(quick: bool) -> dict[str, float]:
    worst: dict[int, float] = {}
    for size in SIZES:
        for situation in SITUATIONS:
            took_ms = 1000 * statistics.median(seconds_of(size, situation) for _ in range(3 if quick else 9))
            worst[size] = max(worst.get(size, 0.0), took_ms)
            print(f"{size:5} workers, {situation:6}: {took_ms:8.2f} ms", flush=True)
    return {f"decision_{size}_ms": worst[size] for size in SIZES}
