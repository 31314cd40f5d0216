"""A model with sharded tables ends as if undisturbed, whichever workers join, leave and die, in any order.

Some seeds by default; DLROVER_ALL_FAULTS=1 in the environment tests all of them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.e2e.harness import Job
from tests.e2e.scheduled import Action, Schedule, bad_ends, has_ended, standing

pytest.importorskip("torchrec", reason="sharded tables need torchrec")
from tests.e2e.table_job import KINDS, TableSettings, train_tables
from tests.e2e.table_verdict import judge, lose_shared_memory_of, shared_memory_of, undisturbed

SCHEDULES = 100 if os.environ.get("DLROVER_ALL_FAULTS") else 4
BATCH = 4  # schedules per test
AT_ONCE = 2

MOMENTS = (
    "",
    "forward",
    "backward",
    "reduced",
    "zero_grad",
    "batch_end",
    "copying",
    "commit",
    "swap2",
    "take_done",
    "validation",
)
CHANGE_MOMENTS = ("", "reshard", "exchange", "reshard_done", "enter")

MODELS = (
    TableSettings(num_rows=160),
    TableSettings(num_rows=158, batch_size=7, kinds=("row_wise", "table_row_wise", "column_wise")),
    TableSettings(num_rows=160, kinds=("table_wise", "table_column_wise", "data_parallel"), manual=True),
    TableSettings(num_rows=150, num_val_rows=21, val_every=6),
    TableSettings(num_rows=160, kinds=KINDS[:3], is_bag=False, num_val_rows=13),
)
"""Few models, each compared with one undisturbed run. Their last batches have a sample for each of four workers."""


def random_schedule(seed: int) -> Schedule[TableSettings]:
    rng = random.Random(seed)
    settings = rng.choice(MODELS)
    actions = []
    for _ in range(rng.randint(2, 4)):
        kind = rng.choice(["grow", "grow", "shrink", "replace", "kill", "kill", "kill_joiner", "kill_changing"])
        moments = {"kill": MOMENTS if settings.num_val_rows else MOMENTS[:-1], "kill_changing": CHANGE_MOMENTS}.get(kind, ("",))
        delay_s = rng.choice([0.0, rng.uniform(0.0, 0.03), rng.uniform(0.0, 0.3)])
        actions.append(Action(kind, rng.randint(0, 6), delay_s, rng.choice(moments), rng.randrange(100)))
    start_workers = rng.choice([1, 2, 2, 3])
    return Schedule(seed, replace(settings, apart=rng.random() < 0.7), start_workers, tuple(actions))


def carry_out(schedule: Schedule[TableSettings], job: Job, reference: Job) -> list[str]:
    """Run a schedule to its end; return the violations."""
    for _ in range(schedule.start_workers):
        job.start()
    job.wait_for_step(1)
    for action in schedule.actions:
        if has_ended(job):
            break
        settled = job.step
        job.wait_until(
            lambda settled=settled, action=action: (  # type: ignore[misc]
                (job.step >= min(settled + action.steps + 8, schedule.settings.num_steps - 4) and _can_lose_a_worker(job))
                or has_ended(job)
            ),
            "the steps before an action, and a snapshot",
        )
        time.sleep(action.delay_s)
        _act(action, job)
    exit_codes = job.finish(hurry=False)  # the last action may still be under way
    bad = [*judge(job, schedule.settings, reference), *bad_ends(job, exit_codes)]
    if shared_memory_of(job):
        bad.append("files are left in shared memory")
    return bad


def _can_lose_a_worker(job: Job) -> bool:
    """Whether the newest round has a snapshot that counts, and all who were to leave have left. Else a loss may end the job."""
    newest = max((record["round"] for record in job.records("done")), default=0)
    leaving = any(w.doomed and not w.killed and w.exit_code is None for w in job.workers)
    return not leaving and any(record["round"] == newest for record in job.records("counted"))


def _act(action: Action, job: Job) -> None:
    # A worker that holds the state must stay: the job ends with the last one.
    workers = standing(job)
    victim = action.victim_of(workers) if len(workers) > 1 else None
    if action.kind == "kill_changing" and victim is not None:
        victim.arm(action.moment or "forward")
    if action.kind in ("grow", "replace", "kill_joiner", "kill_changing"):
        action.start_joiner(job, 4, 2 * action.delay_s)
    if victim is not None:
        action.strike(victim)


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_tables_end_as_in_an_undisturbed_run(first: int, make_job: Callable[..., Job]) -> None:
    schedules = [random_schedule(seed) for seed in range(first, min(first + BATCH, SCHEDULES))]
    references = [undisturbed(make_job, schedule.settings) for schedule in schedules]
    jobs = [make_job(schedule.settings, script=train_tables) for schedule in schedules]
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(carry_out, schedules, jobs, references))
    finally:
        for job in jobs:
            job.__exit__()
            lose_shared_memory_of(job)
    assert not {schedule.seed: bad for schedule, bad in zip(schedules, results, strict=True) if bad}
