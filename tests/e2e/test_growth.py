"""A growth with which the script cannot continue is undone: the job goes on with the workers that it had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.outgrown_jobs import MODELS, train_for_good, train_outgrown, train_plain_outgrown
from tests.e2e.plain_loop import PlainSettings
from tests.e2e.stand_in_jobs import OverStandIn, run_over_stand_in
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.e2e.toy_job import ToySettings
from tests.support.nccl_stand_in import NAME, Quirks

AT_ONCE = 5
STEPS = 8  # after the failure


def settings_for(name: str) -> ToySettings:
    batch_size = 4 if name == "SingleSample" else 8
    return ToySettings(num_rows=160, batch_size=batch_size, max_epochs=15, step_s=0.1)


def grow_and_go_back(job: Job) -> list[str]:
    """Grow from two workers to three; return what went wrong with the others."""
    job.start_all(2)
    job.wait_for_world(2)
    joiner = job.start()
    job.wait_until(lambda: joiner.exit_code is not None, "the joiner to leave")
    after = job.step
    job.wait_until(lambda: job.step > after + STEPS, "the others to go on")
    found = [f"worker {worker.name} has ended" for worker in job.workers[:2] if worker.exit_code is not None]
    undone = job.events("undo")
    if [event.data["num_workers"] for event in undone] != [3]:
        found.append(f"events of undone growths: {undone}")
    # Another worker of the same size would bring the same failure.
    spare = job.start()
    job.wait_until(lambda: any(r["kind"] == "fit_start" for r in spare.records()) or spare.exit_code is not None, "a spare")
    after = job.step
    job.wait_until(lambda: job.step > after + STEPS, "the others to go on beside the spare")
    worlds = {record["world"] for record in job.records("done") if record["step"] > after}
    return [*found, *([f"worlds {worlds} after the failure"] if worlds != {2} else [])]


def problems_of(name: str, job: Job) -> list[str]:
    settings = settings_for(name)
    try:
        found = grow_and_go_back(job)
        codes = job.finish()
    except AssertionError as error:
        return [f"{name}: {error}"]
    expected = [0, 0, 1 if name == "InHookOfJoiner" else 0, 0]
    found += [] if codes == expected else [f"exit codes {codes}"]
    found += violations(job, settings)
    return [f"{name}: {each}\n{job.report()}" for each in found]


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, len(MODELS), AT_ONCE))
def test_job_goes_on_with_the_workers_that_it_had(first: int, make_job: MakeJob) -> None:
    names = list(MODELS)[first : first + AT_ONCE]
    jobs = [make_job((name, settings_for(name)), script=train_outgrown) for name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [each for problems in pool.map(problems_of, names, jobs) for each in problems]
    assert not found, "\n".join(found)


def test_job_whose_collectives_hang_goes_on_with_the_workers_that_it_had(make_job: MakeJob) -> None:
    settings = replace(settings_for("OnRankZero"), ddp={"process_group_backend": NAME})
    over = OverStandIn(train_outgrown, ("OnRankZero", settings), Quirks(loss="hang"))
    job = make_job(over, script=run_over_stand_in)
    assert not problems_of("OnRankZero", job)


@pytest.mark.parametrize("victim", [0, 1])
def test_worker_may_die_while_a_growth_is_undone(victim: int, make_job: MakeJob) -> None:
    settings = settings_for("OnRankZero")
    job = make_job(("OnRankZero", settings), script=train_outgrown)
    job.start_all(2)
    job.wait_for_world(2)
    joiner = job.start()
    job.wait_until(lambda: joiner.records("share"), "the joiner's first step")
    job.workers[victim].kill()
    after = job.step
    job.wait_until(lambda: job.step > after + STEPS, "the others to go on")
    codes = job.finish()
    assert codes[victim] == -9
    assert {codes[i] for i in range(3) if i != victim} == {0}, job.report()
    assert violations(job, settings) == [], job.report()


def test_plain_loop_goes_on_with_the_workers_that_it_had(make_job: MakeJob) -> None:
    job = make_job(PlainSettings(num_steps=1_000_000), script=train_plain_outgrown)
    job.start_all(2)
    job.wait_for_world(2)
    joiner = job.start()
    job.wait_until(lambda: joiner.exit_code is not None, "the joiner to leave")
    after = job.step
    job.wait_for_step(after + STEPS)
    assert job.end() == [0, 0, 0], job.report()
    assert_everyone_counted_the_same(job, job.step)


def test_error_that_comes_again_with_fewer_workers_is_the_scripts(make_job: MakeJob) -> None:
    job = make_job(settings_for("ForGood"), script=train_for_good)
    job.start()
    job.wait_for_world(1)
    job.start()
    codes = job.finish(hurry=False)
    assert codes[0] == 1, job.report()
    assert "the script's own" in job.workers[0].output
