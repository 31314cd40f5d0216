"""What Lightning offers goes on working while workers join, leave and die."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from feature_jobs import (
    BATCH_SIZE,
    NUM_ROWS,
    Feature,
    Means,
    Validated,
    run_feature,
    run_folds,
    run_other_model,
    run_two_trainers,
)
from harness import Job, Record, Worker

STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE

MakeJob = Callable[..., Job]


def by_step(job: Job) -> dict[tuple[int, int], list[Record]]:
    steps: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in job.records("done"):
        steps[record["epoch"], record["batch"]].append(record)
    return steps


def assert_all_agree(job: Job, num_batches: int) -> None:
    """Every batch was done, and by all workers of its round with the same result."""
    steps = by_step(job)
    assert len(steps) == num_batches
    for place, records in steps.items():
        assert len({record["parameters"] for record in records}) == 1, place
        assert len({record["step"] for record in records}) == 1, place
        assert len({str(record["lr"]) for record in records}) == 1, place


def rank_0_of(job: Job) -> Worker:
    """The worker that was rank 0 in its newest step."""

    def look() -> Worker | None:
        living = [worker for worker in job.workers if worker.exit_code is None and worker.records("done")]
        return next((worker for worker in living if worker.records("done")[-1]["rank"] == 0), None)

    return job.wait_until(look, "a step of rank 0")


def grown_and_killed(make_job: MakeJob, feature: Feature, moment: str = "forward") -> Job:
    """A job of 1 -> 2 -> 3 workers that loses one in the middle of a step and lets another one, rank 0, go."""
    job = make_job(feature, script=run_feature)
    first = job.start()
    job.wait_for_step(3)
    second = job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    second.arm(moment)
    job.wait_for_world(2)
    first.terminate()
    job.wait_for_world(1)
    codes = job.finish()
    assert codes == [0, -9, 0], job.report()
    return job


@pytest.mark.parametrize("name", ["by_name", "bf16", "batch_norm", "drop_last"])
def test_workers_agree_at_every_step_across_growth_loss_and_move_of_rank_0_with(name: str, make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature(name))
    assert_all_agree(job, 3 * STEPS_PER_EPOCH)


def test_gradient_accumulation_and_clipping_count_the_same_updates_as_an_unresized_run(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("clipping", epochs=4))
    assert_all_agree(job, 4 * STEPS_PER_EPOCH)
    assert job.step == 4 * STEPS_PER_EPOCH // 2


def test_a_scheduler_sets_the_rate_of_an_unresized_run_at_every_step(make_job: MakeJob) -> None:
    still = make_job(Feature("scheduler", step_s=0.0), script=run_feature)
    still.start()
    assert still.finish() == [0]
    job = grown_and_killed(make_job, Feature("scheduler"))
    expected = {place: records[0]["lr"] for place, records in by_step(still).items()}
    assert {place: records[0]["lr"] for place, records in by_step(job).items()} == expected


@pytest.mark.parametrize("moment", ["forward", "second_forward"])
def test_a_step_of_manual_optimization_is_taken_back_and_done_again_when_a_worker_dies_at(
    moment: str, make_job: MakeJob
) -> None:
    job = grown_and_killed(make_job, Feature("manual", epochs=4), moment)
    assert_all_agree(job, 4 * STEPS_PER_EPOCH)
    assert job.step == 2 * 4 * STEPS_PER_EPOCH


@pytest.mark.parametrize("name", ["means", "single_rows"])
def test_logged_means_are_those_of_an_unresized_run_on_all_workers(name: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name), script=run_feature)
    job.start()
    job.wait_for_step(3)
    job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0], job.report()
    found = job.records("metrics")
    assert {record["world"] for record in found} >= {3}
    val_mean = (Means.NUM_VAL_ROWS - 1) / 2
    expected = {"rare": 1000.0, "common": 1.0, "val_mean": val_mean, "val_count": Means.NUM_VAL_ROWS}
    for record in found:
        assert record["metrics"] == pytest.approx(expected), record


@pytest.mark.parametrize(
    "name, moments",
    [
        ("validated", ["validation_3", "validation_end", "validation_ended"]),
        ("gathering", ["validation_2", "gathered_1", "validation_9"]),
    ],
)
def test_validation_goes_on_after_losses(name: str, moments: list[str], make_job: MakeJob) -> None:
    epochs = 12
    job = make_job(Feature(name, epochs=epochs, step_s=0.02), script=run_feature)
    for _ in range(4):
        job.start()
    job.wait_for_world(4)
    for number, moment in enumerate(moments):
        victim = job.workers[(2, 0, 3)[number]]
        victim.arm(moment)
        assert victim.wait() == -9
    assert sorted(job.finish()) == [-9, -9, -9, 0], job.report()
    last = Validated.NUM_VAL_ROWS - 1
    expected = {
        "val_mean": last / 2,
        "val_count": Validated.NUM_VAL_ROWS,
        "val_max": last,
        "val_metric": last / 2,
        "val_sum": last * Validated.NUM_VAL_ROWS / 2,
        "val_unique": Validated.NUM_VAL_ROWS,
    }
    for worker in job.workers:
        validated = worker.records("validated")
        assert [record["waited"] for record in validated] == [record["epoch"] for record in validated]
        for record in validated:
            assert {name: record["metrics"][name] for name in expected} == pytest.approx(expected), record
        before = {record["step"]: record["parameters"] for record in worker.records("done")}
        for record in worker.records("next"):
            assert all(record["training"]), record
            if record["step"] in before:
                assert record["parameters"] == before[record["step"]], record
    assert {record["epoch"] for record in job.records("validated")} == set(range(epochs))
    saved = {file.stem for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert saved == {f"epoch={epoch}" for epoch in range(epochs)}
    assert_all_agree(job, epochs * STEPS_PER_EPOCH)


def test_a_second_trainer_trains_with_the_workers_there_are(make_job: MakeJob) -> None:
    job = make_job(Feature("two"), script=run_two_trainers)
    job.start()
    job.wait_for_step(1)
    job.start()
    job.wait_for_world(2)
    assert job.finish() == [0, 0], job.report()
    trained = [(record["number"], record["step"], record["world"]) for record in job.records("trained")]
    assert sorted(trained) == [(number, STEPS_PER_EPOCH, 2) for number in (0, 0, 1, 1)]


@pytest.mark.parametrize("name, batch", [("counted", 0), ("counted_windows", 2)])
def test_redone_steps_count_once(name: str, batch: int, make_job: MakeJob) -> None:
    job = make_job(Feature(name, epochs=4), script=run_feature)
    for _ in range(3):
        job.start()
    job.wait_for_world(3)
    epoch = max(record["epoch"] for record in job.records("done")) + 1
    # In the first accumulation window: of earlier ones the lost worker's share would not be in the means.
    job.workers[1].arm(f"counted_{epoch}_{batch}")
    assert job.finish() == [0, -9, 0], job.report()
    assert job.records("restart")
    expected = {"count": NUM_ROWS, "metric": NUM_ROWS, "held": NUM_ROWS, "mean_id": (NUM_ROWS - 1) / 2, "ended": 1.0}
    found = [record["metrics"] for record in job.records("metrics") if record["epoch"] == epoch]
    assert len(found) == 2
    for metrics in found:
        assert {key: metrics[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("moment", ["toggled_0", "toggled_1"])
def test_frozen_halves_and_manual_windows_survive_losses(moment: str, make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("toggling"), moment)
    assert_all_agree(job, 3 * STEPS_PER_EPOCH)
    assert all(all(record["flags"]) for record in job.records("trainable"))


@pytest.mark.parametrize("name", ["walked", "newton"])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_optimizers_that_evaluate_several_times_are_redone(name: str, moment: str, make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature(name), moment)
    assert_all_agree(job, 3 * STEPS_PER_EPOCH)


def test_later_fits_survive_losses_and_end_right(make_job: MakeJob) -> None:
    job = make_job(Feature("folds", step_s=0.03), script=run_folds)
    for _ in range(4):
        job.start()
    job.wait_for_world(4)

    def await_end_of(number: int) -> None:
        job.wait_until(lambda: any(r["number"] == number for r in job.records("trained")), f"the end of fit {number}")

    for number, victim in ((0, job.workers[1]), (1, job.workers[0])):
        await_end_of(number)
        victim.arm(("backward", "reduced")[number])
        assert victim.wait() == -9
    await_end_of(2)
    job.wait_for_world(2)
    job.workers[2].terminate()
    assert job.finish() == [-9, -9, 0, 0], job.report()
    trained = {record["number"]: record["step"] for record in job.workers[3].records("trained")}
    assert trained == {0: STEPS_PER_EPOCH, 1: STEPS_PER_EPOCH, 2: STEPS_PER_EPOCH, 3: 2 * STEPS_PER_EPOCH}
    assert len(job.workers[2].records("trained")) == 3


def test_a_sampler_of_the_users_own_decides_the_order_across_resizes(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("sampler"))
    for (epoch, batch), records in by_step(job).items():
        number = records[0]["round"]
        shares = {
            r["rank"]: r["ids"] for r in job.records("share") if (r["epoch"], r["batch"], r["round"]) == (epoch, batch, number)
        }
        first = NUM_ROWS - 1 - batch * BATCH_SIZE
        assert [i for rank in sorted(shares) for i in shares[rank]] == list(range(first, first - BATCH_SIZE, -1))


def test_max_steps_ends_the_job_at_that_step_on_all_workers(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("max_steps", epochs=-1, max_steps=100))
    assert job.step == 100


def test_no_checkpoint_is_missing_when_rank_0_has_left(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("checkpoint"))
    steps = {int(file.stem.removeprefix("step=")) for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert steps == set(range(10, 3 * STEPS_PER_EPOCH + 1, 10))


def test_checkpoint_of_a_lost_rank_0_is_written_by_the_next(make_job: MakeJob) -> None:
    job = make_job(Feature("saving"), script=run_feature)
    for _ in range(4):
        job.start()
    job.wait_for_world(4)
    for moment in ("saving", "saved"):
        victim = rank_0_of(job)
        victim.arm(moment)
        assert victim.wait() == -9
    job.wait_for_world(2)
    rank_0_of(job).terminate()
    assert sorted(job.finish()) == [-9, -9, 0, 0], job.report()
    steps = {int(file.stem.removeprefix("step=")) for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert steps == set(range(10, 3 * STEPS_PER_EPOCH + 1, 10))
    assert [Path(record["best"]).exists() for record in job.records("after_fit")] == [True]
    assert job.records("alarm") == [], "a planned leave was taken for a failure"
    assert not list((job.folder / "exceptions").glob("*"))


def test_no_row_of_the_csv_log_is_lost_when_rank_0_has_left(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("csv_logger"))
    with next(job.folder.rglob("metrics.csv")).open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(3 * STEPS_PER_EPOCH))


def test_early_stopping_ends_all_workers_in_the_same_epoch(make_job: MakeJob) -> None:
    job = make_job(Feature("early_stopping", epochs=50), script=run_feature)
    job.start()
    job.wait_for_step(3)
    job.start()
    assert job.finish() == [0, 0], job.report()
    assert {record["step"] for record in job.records("after_fit")} == {2 * STEPS_PER_EPOCH}


def test_a_leaver_runs_nothing_of_the_script_after_fit(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("by_name"))
    first, _, third = job.workers
    assert first.records("after_fit") == []
    assert len(third.records("after_fit")) == 1


def test_an_iterable_dataset_is_refused_with_what_to_do_instead(make_job: MakeJob) -> None:
    job = make_job(Feature("iterable"), script=run_feature)
    worker = job.start()
    assert worker.wait() == 1
    assert "Stream is an IterableDataset" in worker.output
    assert "map-style dataset" in worker.output


def test_the_only_worker_asked_to_leave_ends_with_143_instead_of_hanging(make_job: MakeJob) -> None:
    job = make_job(Feature("by_name", epochs=100), script=run_feature)
    worker = job.start()
    job.wait_for_step(3)
    worker.terminate()
    assert worker.wait() == 143


def test_a_mistake_of_the_users_ends_its_workers_with_the_traceback(make_job: MakeJob) -> None:
    job = make_job(Feature("failing"), script=run_feature)
    workers = [job.start(), job.start()]
    for worker in workers:
        assert worker.wait() == 1
    assert any("a mistake of the user's" in worker.output for worker in workers)


def test_a_worker_with_another_model_is_refused_and_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(Feature("by_name", epochs=8), script=run_feature)
    job.start()
    job.wait_for_step(3)
    stranger = job.start(script=run_other_model)
    assert stranger.wait() == 1
    assert "other parameter names or shapes" in stranger.output
    assert job.finish() == [0, 1]
    assert_all_agree(job, 8 * STEPS_PER_EPOCH)


def test_a_job_all_of_whose_workers_died_goes_on_from_its_newest_checkpoint(make_job: MakeJob) -> None:
    job = make_job(Feature("resume", epochs=4), script=run_feature)
    worker = job.start()
    job.wait_for_step(45)
    worker.kill()
    worker.wait()
    again = job.start()
    assert again.wait() == 0, job.report()
    steps = [record["step"] for record in again.records("done")]
    assert steps[0] > 40
    assert steps[-1] == 4 * STEPS_PER_EPOCH
