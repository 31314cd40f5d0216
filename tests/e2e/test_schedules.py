"""Every sample is trained on exactly once and all workers agree, whichever workers join, leave and die, in any order.

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

from tests.e2e.harness import Job, violations
from tests.e2e.scheduled import Action, Schedule, bad_ends, has_ended, standing
from tests.e2e.toy_job import ToySettings

SCHEDULES = 208 if os.environ.get("DLROVER_ALL_FAULTS") else 24
BATCH = 8  # schedules per test
AT_ONCE = 3  # jobs at once, which mostly sleep

MOMENTS = ("forward", "backward", "reduced", "zero_grad", "batch_end", "validation", "validation_end")


def random_schedule(seed: int) -> Schedule[ToySettings]:
    rng = random.Random(seed)
    accumulate = rng.choice([1, 1, 1, 1, 2, 3])
    epochs = rng.choice([1, 2, 2, 3])
    batch_size = rng.randint(4, 9)
    batches = rng.randint(36, 60) // epochs
    with_validation = rng.random() < 0.35
    settings = ToySettings(
        num_rows=(batches - 1) * batch_size + rng.randint(1, batch_size),
        batch_size=batch_size,
        shuffle=rng.random() < 0.8,
        max_epochs=epochs,
        step_s=rng.choice([0.004, 0.008, 0.015]),
        loader_workers=rng.choice([0, 0, 0, 1, 2]),
        accumulate=accumulate,
        num_val_rows=rng.randint(8, 40) if with_validation else 0,
        val_every=rng.choice([None, 4, 7]) if with_validation else None,
        streams=seed % 3 == 1,
        threads=2 if seed % 6 == 1 else 0,
        iterable={2: "opaque", 5: "stateful"}.get(seed % 9, ""),
    )
    moments = MOMENTS if with_validation else MOMENTS[:-2]
    actions = []
    step = 0
    for _ in range(rng.randint(2, 6)):
        step += rng.randint(0, 8)
        kind = rng.choice(["grow", "grow", "grow", "shrink", "replace", "kill", "kill", "kill_joiner", "kill_forming"])
        moment = rng.choice(["", *moments]) if kind == "kill" else ""
        delay_s = rng.choice([0.0, rng.uniform(0.0, 0.03), rng.uniform(0.0, 0.3)])
        actions.append(Action(kind, min(step, settings.num_steps - 4), delay_s, moment, rng.randrange(100)))
    return Schedule(seed, settings, rng.choice([1, 1, 2, 3]), tuple(actions))


def carry_out(schedule: Schedule[ToySettings], job: Job) -> list[str]:
    """Run a schedule to its end; return the violations."""
    if schedule.settings.streams:
        schedule.settings.write_streams(job.folder)
    for _ in range(schedule.start_workers):
        job.start()
    job.wait_for_step(1)
    for action in schedule.actions:
        if has_ended(job):
            break
        job.wait_for_step(action.steps)
        time.sleep(action.delay_s)
        _act(action, job)
    exit_codes = job.finish(hurry=False)  # the last action may still be under way
    return [*violations(job, schedule.settings), *bad_ends(job, exit_codes)]


def _act(action: Action, job: Job) -> None:
    if action.kind in ("grow", "replace", "kill_joiner"):
        action.start_joiner(job, 5, action.delay_s)
    if action.kind == "kill_forming":
        _kill_while_forming(action, job)
    # A worker that holds the state must stay: the job ends with the last one.
    elif len(workers := standing(job)) > 1:
        action.strike(action.victim_of(workers))


def _kill_while_forming(action: Action, job: Job) -> None:
    """Let a worker join, and kill a member while it forms the new round."""
    if sum(not w.doomed for w in job.workers) >= 5:
        return
    number = job.round_number
    joiner = job.start()
    is_full = len(job.members) == job.max_workers  # the joiner becomes a spare, unless another worker leaves
    deadline = time.monotonic() + (0.5 if is_full else 5.0)
    while job.round_number == number and time.monotonic() < deadline and not has_ended(job):
        time.sleep(0.0005)
    time.sleep(action.delay_s / 20)
    workers = standing(job)
    action.victim_of([joiner, *workers] if len(workers) > 1 else [joiner]).kill()


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_every_sample_is_trained_on_exactly_once(first: int, make_job: Callable[..., Job]) -> None:
    schedules = [random_schedule(seed) for seed in range(first, first + BATCH)]
    jobs = [make_job(schedule.settings) for schedule in schedules]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(carry_out, schedules, jobs))
    assert not {schedule.seed: bad for schedule, bad in zip(schedules, results, strict=True) if bad}


def test_the_only_worker_stays_until_its_replacement_has_started(make_job: Callable[..., Job]) -> None:
    settings = ToySettings(max_epochs=4, step_s=0.02)
    job = make_job(settings)
    only = job.start()
    job.wait_for_step(2)
    replacement = job.start(settings=replace(settings, slow_start_s=1.0))
    job.wait_until(lambda: replacement.records("fit_start"), "the replacement to start")
    only.terminate()
    assert only.wait() == 0
    assert job.finish() == [0, 0]
    assert replacement.records("done")
    assert violations(job, settings) == []
