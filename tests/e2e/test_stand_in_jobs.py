"""Jobs over NCCL, and over its stand-in, survive the same faults as over gloo, and a product with a planted fault does not.

Some seeds of random schedules by default; DLROVER_ALL_FAULTS=1 in the environment tests all of them.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.stand_in_jobs import (
    OnDevice,
    OverStandIn,
    run_on_device,
    run_over_stand_in,
    train_awaiting,
    train_counted,
    train_synced,
)
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.e2e.test_schedules import AT_ONCE, MOMENTS, carry_out, random_schedule
from tests.e2e.toy_job import Script, ToySettings, train_toy
from tests.support.nccl_stand_in import NAME, Quirks

SCHEDULES = 100 if os.environ.get("DLROVER_ALL_FAULTS") else AT_ONCE

LATE = {"process_group_backend": NAME, "gradient_as_bucket_view": True}
"""Arguments of a strategy with which the stand-in's late mode works, see `Result.get_future`."""

COUNTED = PlainSettings(num_steps=1_000_000, backend=NAME)  # runs until the test ends it


def toy(**settings: Any) -> ToySettings:
    return ToySettings(**{"max_epochs": 12, "step_s": 0.03, "ddp": LATE, **settings})


@dataclass(frozen=True)
class Case:
    """A job and what happens to it."""

    disturb: Callable[[Job], None]
    settings: Any
    quirks: Quirks = field(default_factory=Quirks)
    script: Script = train_toy

    def problems(self, make_job: MakeJob, fault: str = "") -> list[str]:
        """Run the job to its end; return what went wrong."""
        return self._problems(make_job(OverStandIn(self.script, self.settings, self.quirks, fault), script=run_over_stand_in))

    def problems_on(self, device: str, make_job: MakeJob) -> list[str]:
        """Run the job without the stand-in: over NCCL on a GPU that its workers share, or over gloo."""
        return self._problems(make_job(OnDevice(self.script, self.settings, device), script=run_on_device))

    def _problems(self, job: Job) -> list[str]:
        try:
            self.disturb(job)
            (job.folder / "end").touch()
            codes = job.finish()
        except AssertionError as error:
            return [str(error)]
        expected = [-9 if worker.killed else 0 for worker in job.workers]
        found = [] if codes == expected else [f"exit codes {codes}\n{job.report()}"]
        if isinstance(self.settings, ToySettings):
            found += violations(job, self.settings)
            found += [f"{record}" for record in job.records("val_done") if not math.isfinite(record["metric"])]
            found += [f"{record}" for record in job.records("reduced") if record["num_workers"] != record["world"]]
        else:
            assert_everyone_counted_the_same(job, job.step)
        return found


# --- what happens -------------------------------------------------------------------------------------------------------------


def lose_one_in_each_phase(job: Job) -> None:
    for number, moment in enumerate(MOMENTS):
        while len(job.workers) - number < 3:
            job.start()
        job.wait_for_world(3)
        job.workers[1 + number].arm(moment)
        job.wait_for_world(2)


def lose_one_of_two(job: Job) -> None:
    job.start()
    job.wait_for_step(3)
    second = job.start()
    job.wait_for_world(2)
    second.arm("forward")
    job.wait_until(lambda: second.exit_code is not None, "the second worker to die")
    step = job.step
    job.wait_until(lambda: job.step > step + 1, "the first worker to go on", timeout_s=10)


def lose_one_in_a_validation(job: Job) -> None:
    job.start()
    job.wait_for_step(1)
    second = job.start()
    job.wait_for_world(2)
    second.arm("reduction")
    job.wait_for_world(1)


def move_rank_0_and_drain(job: Job) -> None:
    first = job.start()
    job.wait_for_step(3)
    job.start_all(2)
    job.wait_for_world(3)
    first.terminate()
    job.wait_for_world(2)
    job.workers[2].terminate()
    job.wait_for_world(1)


def lose_rank_0_of_three_twice(job: Job) -> None:
    for number in range(2):
        while len(job.workers) - number < 3:
            job.start()
        job.wait_for_world(3)
        job.workers[number].arm("backward")
        job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)


def grow_to_three(job: Job) -> None:
    job.start()
    job.wait_for_step(3)
    job.start_all(2)
    job.wait_for_world(3)


def lose_one_before_its_first_collective(job: Job) -> None:
    job.start_all(2)
    job.wait_for_world(2)
    joiner = job.start()
    joiner.arm("forward")
    job.wait_until(lambda: joiner.exit_code is not None, "the joiner to enter a round and die")
    step = job.step
    job.wait_until(lambda: job.step > step + 5, "the others to go on", timeout_s=10)


def lose_one_while_aborts_take_seconds(job: Job) -> None:
    job.start_all(3)
    job.wait_for_world(3)
    number, began = job.round_number, time.monotonic()
    for num_lost, worker in enumerate(job.workers[1:], start=1):
        worker.kill()
        job.wait_until(lambda: job.round_number >= number + num_lost, f"the round after {num_lost} losses")  # noqa: B023
    assert time.monotonic() - began < SLOW_ABORT_S, "the last round was written after the aborts"
    job.wait_for_world(1)


SLOW_ABORT_S = 6.0

CASES = {
    "each_phase": Case(
        lose_one_in_each_phase,
        toy(accumulate=2, num_val_rows=20, val_every=6),
        Quirks(is_late=True, loss="either"),
        train_synced,
    ),
    "one_of_two": Case(lose_one_of_two, toy(), Quirks(notice_s=0.0)),
    "counted": Case(lose_one_of_two, COUNTED, Quirks(notice_s=0.0), run_plain_loop),
    "one_at_a_time": Case(grow_to_three, toy(), Quirks(is_one_at_a_time=True, create_s=0.3)),
    "late": Case(grow_to_three, toy(), Quirks(is_late=True)),
    "validation": Case(lose_one_in_a_validation, toy(num_val_rows=20, val_every=6), Quirks(loss="hang"), train_counted),
    "rank_0_of_three": Case(lose_rank_0_of_three_twice, toy(), Quirks(loss="hang", create_s=0.3)),
    "rank_0": Case(move_rank_0_and_drain, toy(), Quirks(create_s=0.5)),
    "early": Case(lose_one_before_its_first_collective, COUNTED, Quirks(), run_plain_loop),
    "slow_abort": Case(lose_one_while_aborts_take_seconds, COUNTED, Quirks(loss="hang", abort_s=SLOW_ABORT_S), run_plain_loop),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.on_demand] if name == "slow_abort" else []) for name in CASES]
)
def test_workers_survive(name: str, make_job: MakeJob) -> None:
    assert CASES[name].problems(make_job) == []


OVER_NCCL = ("one_of_two", "rank_0_of_three", "rank_0", "each_phase", "late")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.on_demand), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", OVER_NCCL)
def test_workers_of_one_device_survive(name: str, device: str, make_job: MakeJob) -> None:
    assert CASES[name].problems_on(device, make_job) == []


@pytest.mark.parametrize(
    "fault, name",
    [
        ("shut_down_instead_of_abort", "one_of_two"),
        pytest.param("use_gradients_without_a_wait", "late", marks=pytest.mark.on_demand),
        ("leave_the_watchdog_on", "counted"),
        pytest.param("abort_in_the_callers_thread", "slow_abort", marks=pytest.mark.on_demand),
        ("use_aborted_results_outside_of_steps", "validation"),
        pytest.param("connect_in_the_first_collective", "early", marks=pytest.mark.on_demand),
    ],
)
def test_planted_fault_is_found(fault: str, name: str, make_job: MakeJob) -> None:
    assert CASES[name].problems(make_job, fault)


def test_host_waits_for_the_device_once_per_step(make_job: MakeJob) -> None:
    job = make_job(OverStandIn(train_awaiting, toy(max_epochs=2)), script=run_over_stand_in)
    job.start_all(2)
    job.wait_for_world(2)
    assert job.finish() == [0, 0]
    numbers = [record["number"] for record in job.records("awaited") if record["world"] == 2]
    assert len(numbers) > 20
    assert set(numbers[1:]) == {1}, numbers


# --- anything in any order ----------------------------------------------------------------------------------------------------


def random_quirks(seed: int) -> Quirks:
    rng = random.Random(seed)
    return Quirks(
        create_s=rng.choice([0.0, 0.0, 0.2, 1.0]),
        loss=rng.choice(["error", "hang", "either"]),
        notice_s=rng.choice([0.0, 0.02, 0.2]),
        abort_s=rng.choice([0.0, 0.0, 0.3]),
        is_late=rng.random() < 0.5,
        seed=seed,
    )


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SCHEDULES, AT_ONCE))
def test_every_sample_is_trained_on_exactly_once(first: int, make_job: MakeJob) -> None:
    schedules = [random_schedule(seed) for seed in range(first, min(first + AT_ONCE, SCHEDULES))]
    schedules = [replace(each, settings=replace(each.settings, ddp=LATE)) for each in schedules]
    jobs = [
        make_job(OverStandIn(train_toy, each.settings, random_quirks(each.seed)), script=run_over_stand_in)
        for each in schedules
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(carry_out, schedules, jobs))
    assert not {each.seed: bad for each, bad in zip(schedules, results, strict=True) if bad}
