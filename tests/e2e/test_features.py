"""What Lightning offers goes on working while workers join, leave and die."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable

import pytest
from feature_jobs import BATCH_SIZE, NUM_ROWS, Feature, Means, run_feature, run_other_model, run_two_trainers
from harness import Job, Record

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


@pytest.mark.parametrize("name", ["gan", "unused", "rarely_unused"])
def test_growth_keeps_models_that_leave_parameters_out(name: str, make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature(name))
    assert_all_agree(job, 3 * STEPS_PER_EPOCH)


@pytest.mark.parametrize("name", ["gan", "unused", "rarely_unused"])
def test_models_that_leave_parameters_out_start_with_two(name: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name, epochs=2, step_s=0.0), script=run_feature, min_workers=2)
    job.start()
    job.start()
    assert job.finish() == [0, 0], job.report()
    assert_all_agree(job, STEPS_PER_EPOCH)  # of twice the batch size, in two epochs
    searches = [worker.output.count("searches for unused") for worker in job.workers]
    assert sum(searches) == (0 if name == "gan" else 1), job.report()


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


def one_device_alone(make_job: MakeJob, epochs: int) -> Job:
    alone = make_job(Feature("one_device", step_s=0.0, epochs=epochs), script=run_feature)
    alone.start()
    assert alone.finish() == [0]
    assert len(alone.records("metrics")) == epochs - 1
    return alone


def assert_same_metrics(job: Job, alone: Job) -> None:
    """Every worker has the values, the callbacks' states and the learning rates of the job of one worker."""
    expected = {record["epoch"]: record for record in alone.records("metrics")}
    for record in job.records("metrics"):
        assert record["metrics"] == pytest.approx(expected[record["epoch"]]["metrics"], rel=1e-5), record
        for name, state in expected[record["epoch"]]["states"].items():
            assert record["states"][name] == pytest.approx(state, rel=1e-5), record
    rates = {place: records[0]["lr"] for place, records in by_step(alone).items()}
    for place, records in by_step(job).items():
        assert records[0]["lr"] == pytest.approx(rates[place]), place
    validated = alone.records("validated")[0]["metrics"]
    assert job.records("validated")
    for record in job.records("validated"):
        assert record["metrics"] == pytest.approx(validated, rel=1e-5), record


def test_script_for_one_device_means_the_same_with_three(make_job: MakeJob) -> None:
    alone = one_device_alone(make_job, epochs=6)
    job = make_job(Feature("one_device", epochs=6), script=run_feature)
    job.start()
    job.wait_for_step(3)
    job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    job.wait_for_step(2 * STEPS_PER_EPOCH + 10)
    job.workers[1].terminate()
    job.wait_for_world(2)
    assert job.finish() == [0, 0, 0], job.report()
    assert {record["world"] for record in job.records("metrics")} >= {2, 3}
    assert_same_metrics(job, alone)
    followed = {(r["epoch"], r["batch"]): r["value"] for r in alone.records("followed")}
    for record in job.records("followed"):
        assert record["value"] == pytest.approx(followed[record["epoch"], record["batch"]], rel=1e-5), record
    assert_all_agree(job, 6 * (STEPS_PER_EPOCH + 1))


def test_loss_at_an_epochs_end_keeps_its_metrics(make_job: MakeJob) -> None:
    alone = one_device_alone(make_job, epochs=3)
    job = make_job(Feature("one_device"), script=run_feature)
    job.start()
    job.wait_for_step(3)
    job.start()
    job.wait_for_world(2)
    job.workers[1].arm("epoch_end")
    assert job.finish() == [0, -9], job.report()
    assert_same_metrics(job, alone)


def test_a_validation_that_is_started_over_counts_every_sample_once(make_job: MakeJob) -> None:
    job = make_job(Feature("means"), script=run_feature)
    for _ in range(3):
        job.start()
    job.wait_for_world(3)
    job.workers[1].arm("validation")
    assert job.finish() == [0, -9, 0], job.report()
    for record in job.records("metrics"):
        assert record["metrics"]["val_count"] == Means.NUM_VAL_ROWS, record


def test_a_second_trainer_trains_with_the_workers_there_are(make_job: MakeJob) -> None:
    job = make_job(Feature("two"), script=run_two_trainers)
    job.start()
    job.wait_for_step(1)
    job.start()
    job.wait_for_world(2)
    assert job.finish() == [0, 0], job.report()
    trained = [(record["number"], record["step"], record["world"]) for record in job.records("trained")]
    assert sorted(trained) == [(number, STEPS_PER_EPOCH, 2) for number in (0, 0, 1, 1)]


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


@pytest.mark.parametrize(
    "name, num_workers, message",
    [
        ("raw_backward", 1, "call self.manual_backward(loss) instead"),
        ("zero", 2, "ZeroRedundancyOptimizer spreads its state over the ranks"),
        ("single_sample", 2, "BatchNorm cannot train on one sample"),
    ],
)
def test_script_that_cannot_be_right_is_refused(name: str, num_workers: int, message: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name), script=run_feature, min_workers=num_workers)
    workers = [job.start() for _ in range(num_workers)]
    assert [worker.wait() for worker in workers] == [1] * num_workers
    assert any(message in worker.output for worker in workers), job.report()


def test_joiner_with_another_learning_rate_is_refused(make_job: MakeJob) -> None:
    job = make_job(Feature("rate_of_world", epochs=6), script=run_feature, min_workers=2)
    job.start()
    job.start()
    job.wait_for_step(3)
    joiner = job.start()
    assert joiner.wait() == 1
    assert "rank 0's is [0.002" in joiner.output, job.report()
    assert job.finish() == [0, 0, 1], job.report()


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
