"""Records of a job as its processes write them, without any process: for screens, which only read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    ProgressRecord,
    RoundRecord,
    WorkerRecord,
    encode,
)
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.windows import WINDOW

START = 1_790_000_000.0
"""Seconds since the epoch at which recorded jobs start."""

STEP_S = 0.1
GLOBAL_BATCH = 512


def profile(worker_id: str, rank: int, num_workers: int, **given: Any) -> StepProfile:
    """Return a window of a worker; without `given` all workers are equally fast."""
    made = replace(
        WINDOW,
        worker_id=worker_id,
        global_rank=rank,
        num_workers=num_workers,
        round_number=2,
        global_batch=GLOBAL_BATCH,
        local_batch=GLOBAL_BATCH // num_workers,
        samples_per_s=GLOBAL_BATCH / STEP_S,
        prefetch_factor=2,
        memory_bytes=3 << 30,
        peak_memory_bytes=(3 << 30) + (200 << 20),
        memory_limit_bytes=4 << 30,
        at=START + 100.0,
    )
    return replace(made, **given)


def window_event(at: float, first_step: int, num_steps: int = 20, **given: Any) -> EventRecord:
    """Return the event of a window of rank 0 that ends at a time."""
    made = profile("w0", 0, 2, at=at, first_step=first_step, num_steps=num_steps, **given)
    return kinds.record_of(kinds.WindowMeasured(vars(made)), "", at)


def decision(at: float, current: int = 2, chosen: int = 2, sizes: Iterable[int] = (1, 2, 3, 4)) -> Decision:
    """Return a decision about the number of workers, with a prediction for each size."""
    candidates = []
    for size in sizes:
        step_s = STEP_S * 2 / size
        settings = Settings(size, 1, 1, 2)
        low_s, high_s = 0.9 * step_s, 1.1 * step_s
        rate = GLOBAL_BATCH / step_s
        candidates.append(Candidate(settings, step_s, low_s, high_s, rate, 10.0, size == current, True, cores=float(size)))
    now, then = Settings(current, 1, 1, 2), Settings(chosen, 1, 1, 2)
    reason = "the present size is the fastest that pays" if chosen == current else "more workers end the job earlier"
    predicted = next(c for c in candidates if c.settings == then).step_time_s
    return Decision(7, at, now, then, reason, tuple(candidates), STEP_S, predicted, False, left_s=600.0, change_cost_s=0.4)


def decision_event(made: Decision) -> EventRecord:
    return kinds.record_of(kinds.DecisionMade(made.to_data()), made.reason, made.at)


def recorded_job(num_workers: int = 2, at: float = START) -> dict[str, bytes]:
    """Return the records of a job that trains in its second round since 90 s, by path below its root."""
    workers = [f"host{rank // 8}-{rank}" for rank in range(num_workers)]
    records: dict[str, Any] = {
        "live/shared/job": JobRecord(
            *("training", True, 1, 2 * num_workers, "0.1"), global_batch_size=GLOBAL_BATCH, created_at=at
        ),
        "live/shared/round": RoundRecord(2, workers, "a worker joined", "grow", True, created_at=at + 10.0),
        "live/shared/plan": PlanRecord(num_workers + 1, "planner", "more workers end the job earlier", True, 7, at + 60.0),
        "live/shared/controller": ControllerRecord("host0", 77, "local", {"node9": ""}),
        "live/shared/nodes": NodesRecord("local", "", 3),
        "progress": ProgressRecord(900, 0, 900, num_workers, 5120.0, 2, 1000, 120.0, "0.41", at + 100.0),
        "nodes/node9": NodeRecord("asked", asked_at=at + 95.0),
    }
    for rank, worker in enumerate(workers):
        records[f"live/agents/a{rank}"] = AgentRecord(
            f"a{rank}", f"host{rank // 8}", 100 + rank, 1, "running", {"node": f"node{rank}"}
        )
        records[f"live/workers/{worker}"] = WorkerRecord(
            *(worker, f"a{rank}", f"host{rank // 8}", 1000 + rank, 0, "127.0.0.1", 1, "active", 2), since=at + 10.0
        )
        records[f"profiles/{worker}"] = profile(worker, rank, num_workers, at=at + 100.0)
    events = [
        kinds.record_of(kinds.RoundFormed(1, workers[:1], "start", reason="the first workers are there"), "round 1 formed", at),
        kinds.record_of(kinds.RoundFormed(2, workers, "grow", reason="a worker joined"), "round 2 formed", at + 10.0),
        kinds.record_of(kinds.TrainingStalled(2, 0.4, "grow", 1, num_workers), "paused for 0.4 s", at + 10.4),
        *(window_event(at + 12.4 + 2.0 * n, 20 * n) for n in range(40)),
        decision_event(decision(at + 50.0)),
    ]
    for number, event in enumerate(events):
        records[f"events/{number:020d}-w"] = event
    return {path: encode(record) for path, record in records.items()}


def write(client: EtcdClient, run_id: str, records: dict[str, bytes]) -> None:
    """Write the records of a job to etcd."""
    root = Keys(run_id).root
    for path, value in records.items():
        client.put(root + path, value)


def entries_of(records: dict[str, bytes], run_id: str = "job") -> list[KeyValue]:
    """Return the records as one read of etcd gives them."""
    root = Keys(run_id).root
    return [KeyValue(root + path, value, 1, 1, 1, 0) for path, value in records.items()]
