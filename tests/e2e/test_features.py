"""Lightning's features keep working while workers join, leave and die."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import Keys, PlanRecord
from tests.e2e.feature_jobs import (
    BATCH_SIZE,
    NUM_ROWS,
    Drifting,
    Feature,
    Means,
    SeveralLoaders,
    SeveralSets,
    Validated,
    run_feature,
    run_folds,
    run_in_pool,
    run_other_model,
    run_prepared,
    run_seeded_by_worker,
    run_several_sets,
    run_split,
    run_two_fits,
    run_two_trainers,
    run_with_surroundings,
)
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Record, Worker

STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


def by_step(job: Job) -> dict[tuple[int, int], list[Record]]:
    steps: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in job.records("done"):
        steps[record["epoch"], record["batch"]].append(record)
    return steps


def assert_all_agree(job: Job, num_batches: int) -> None:
    """Assert that every batch ran, on all workers of its round, with the same result."""
    steps = by_step(job)
    assert len(steps) == num_batches
    for place, records in steps.items():
        assert len({record["parameters"] for record in records}) == 1, place
        assert len({record["step"] for record in records}) == 1, place
        assert len({str(record["lr"]) for record in records}) == 1, place


def rank_0_of(job: Job) -> Worker:
    """Return the worker that was rank 0 in its newest step."""

    def look() -> Worker | None:
        living = [worker for worker in job.workers if worker.exit_code is None and worker.records("done")]
        return next((worker for worker in living if worker.records("done")[-1]["rank"] == 0), None)

    return job.wait_until(look, "a step of rank 0")


def grown_and_killed(make_job: MakeJob, feature: Feature, *moments: str) -> Job:
    """A job that grows to three workers, loses one at each moment of a step, growing again between, and drains rank 0."""
    job = make_job(feature, script=run_feature)
    job.grow_to(2)
    first = job.workers[0]
    for number, moment in enumerate(moments or ("forward",), start=1):
        job.start()
        job.wait_for_world(3)
        job.workers[number].arm(moment)
        job.wait_for_world(2)
    first.terminate()
    job.wait_for_world(1)
    codes = job.finish()
    assert codes == [0, *[-9] * number, 0], job.report()
    assert [len(worker.records("after_fit")) for worker in job.workers] == [0, *[0] * number, 1]
    return job


GROWN: dict[str, tuple[int, list[str], int]] = {
    # Two jobs for five features: a batch sampler, the strategy by its name; bf16, batch norm, an incomplete batch to drop.
    "batch_sampler": (3, ["forward"], 3 * STEPS_PER_EPOCH),
    "bf16": (3, ["forward"], 3 * STEPS_PER_EPOCH),
    "clipping": (4, ["forward"], 4 * STEPS_PER_EPOCH // 2),
    "manual": (4, ["forward", "second_forward"], 2 * 4 * STEPS_PER_EPOCH),
    "gan": (3, ["forward"], 2 * 3 * STEPS_PER_EPOCH),
    "unused": (3, ["forward"], 3 * STEPS_PER_EPOCH),
    "rarely_unused": (3, ["forward"], 3 * STEPS_PER_EPOCH),
    "toggling": (8, ["toggled_0", "toggled_1"], 2 * 8 * STEPS_PER_EPOCH // 3),
    "walked": (3, ["forward", "backward"], 3 * STEPS_PER_EPOCH),
    "newton": (3, ["forward", "backward"], 3 * STEPS_PER_EPOCH),
}
"""Epochs of a feature's job, moments at which a worker is lost, and optimizer steps."""


@pytest.mark.parametrize("name", GROWN)
def test_workers_agree_across_growth_loss_and_move_of_rank_0_with(name: str, make_job: MakeJob) -> None:
    epochs, moments, num_steps = GROWN[name]
    job = grown_and_killed(make_job, Feature(name, epochs), *moments)
    assert_all_agree(job, epochs * STEPS_PER_EPOCH)
    assert job.step == num_steps
    assert all(all(record["flags"]) for record in job.records("trainable"))  # of the one that freezes halves


def test_a_scheduler_sets_the_rate_of_an_unresized_run_at_every_step(make_job: MakeJob) -> None:
    still = make_job(Feature("scheduler", step_s=0.0), script=run_feature)
    still.start()
    assert still.finish() == [0]
    job = grown_and_killed(make_job, Feature("scheduler"))
    expected = {place: records[0]["lr"] for place, records in by_step(still).items()}
    assert {place: records[0]["lr"] for place, records in by_step(job).items()} == expected


@pytest.mark.parametrize("name", ["gan", "unused", "rarely_unused"])
def test_models_that_leave_parameters_out_start_with_two(name: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name, epochs=2, step_s=0.0), script=run_feature, min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    assert_all_agree(job, STEPS_PER_EPOCH)  # twice the batch size, two epochs
    searches = [worker.output.count("searches for unused") for worker in job.workers]
    assert sum(searches) == (0 if name == "gan" else 1), job.report()


@pytest.mark.parametrize("name", ["means", "single_rows"])
def test_logged_means_are_those_of_an_unresized_run_on_all_workers(name: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name), script=run_feature)
    job.grow_to(3)
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
    """Assert that every worker has the values, callback states and learning rates of the job of one worker."""
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


@pytest.mark.long
def test_script_for_one_device_means_the_same_with_three(make_job: MakeJob) -> None:
    alone = one_device_alone(make_job, epochs=5)
    job = make_job(Feature("one_device", epochs=5), script=run_feature)
    job.grow_to(3)
    with job.at_full_speed():
        job.wait_until(lambda: any(r["world"] == 3 for r in job.records("metrics")), "an epoch's metrics of three workers")
    job.workers[1].terminate()
    job.wait_for_world(2)
    assert job.finish() == [0, 0, 0], job.report()
    assert {record["world"] for record in job.records("metrics")} >= {2, 3}
    assert_same_metrics(job, alone)
    followed = {(r["epoch"], r["batch"]): r["value"] for r in alone.records("followed")}
    for record in job.records("followed"):
        assert record["value"] == pytest.approx(followed[record["epoch"], record["batch"]], rel=1e-5), record
    assert_all_agree(job, 5 * (STEPS_PER_EPOCH + 1))


def one_device_that_loses_its_joiner(make_job: MakeJob, moment: str) -> Job:
    job = make_job(Feature("one_device"), script=run_feature)
    job.grow_to(2)
    job.workers[1].arm(moment)
    assert job.finish() == [0, -9], job.report()
    return job


def test_loss_at_an_epochs_end_keeps_its_metrics(make_job: MakeJob) -> None:
    alone = one_device_alone(make_job, epochs=3)
    job = one_device_that_loses_its_joiner(make_job, "epoch_end")
    assert_same_metrics(job, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, moments",
    [
        ("validated", ["validation_3", "validation_end", "validation_ended"]),
        ("gathering", ["validation_2", "gathered_1", "validation_9"]),
    ],
)
def test_validation_goes_on_after_losses(name: str, moments: list[str], make_job: MakeJob) -> None:
    epochs = 8
    job = make_job(Feature(name, epochs=epochs, step_s=0.03), script=run_feature)
    job.start()
    job.wait_for_step(1)  # fixes the batch size for one worker
    job.start_all(3)
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


@pytest.mark.parametrize("name, batch_size", [("DividedRows", 2 * BATCH_SIZE), ("RowsDividedByGroup", 6 * BATCH_SIZE)])
def test_data_is_prepared_once_and_a_batch_that_the_script_divides_stays_whole(
    name: str, batch_size: int, make_job: MakeJob
) -> None:
    epochs = 8
    job = make_job(Feature(name, epochs=epochs, step_s=0.1), script=run_prepared, min_workers=2)
    job.start_all(2)
    job.wait_for_step(2)
    job.start()
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0], job.report()
    assert sorted(record["part"] for record in job.records("prepares")) == ["datamodule", "module"]
    rows: dict[tuple[int, int], set[int]] = defaultdict(set)
    for record in job.records("share"):
        rows[record["epoch"], record["batch"]].update(record["ids"])
    assert len(rows) == epochs * NUM_ROWS // batch_size
    assert {len(ids) for ids in rows.values()} == {batch_size}
    assert_all_agree(job, epochs * NUM_ROWS // batch_size)


def test_scripts_process_group_is_replaced_and_its_handler_of_sigterm_is_called_beside_ours(make_job: MakeJob) -> None:
    job = make_job(Feature("neither", epochs=4), script=run_with_surroundings)
    leavers = [job.start(settings=Feature(name, epochs=4)) for name in ("before", "while")]
    job.wait_for_step(1)
    job.start()
    job.wait_for_world(3)
    for remaining, leaver in zip((2, 1), leavers, strict=True):
        leaver.terminate()
        job.wait_for_world(remaining)
    assert job.finish() == [0, 0, 0], job.report()
    assert [len(worker.records("signalled")) for worker in job.workers] == [1, 1, 0]
    assert all("leave out torch.distributed.init_process_group" in worker.output for worker in job.workers)
    assert_all_agree(job, 4 * STEPS_PER_EPOCH)


def test_global_batch_does_not_depend_on_the_workers_that_a_pool_has_room_for(etcd: EmbeddedEtcd, make_job: MakeJob) -> None:
    job = make_job(Feature("plain", epochs=1, step_s=0.0), script=run_in_pool)
    with EtcdClient(EtcdConfig(etcd.endpoint)) as client:
        plan = PlanRecord(2, "brain", "there is room", binding=True)
        Journal(client, Keys(job.run_id)).fenced_write({Keys(job.run_id).plan: plan}, [])
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    assert {record["world"] for record in job.records("done")} == {2}
    assert_all_agree(job, STEPS_PER_EPOCH)


def test_a_second_trainer_trains_with_the_workers_there_are(make_job: MakeJob) -> None:
    job = make_job(Feature("two"), script=run_two_trainers)
    job.grow_to(2, after_step=1)
    assert job.finish() == [0, 0], job.report()
    trained = [(record["number"], record["step"], record["world"]) for record in job.records("trained")]
    assert sorted(trained) == [(number, STEPS_PER_EPOCH, 2) for number in (0, 0, 1, 1)]


@pytest.mark.parametrize("name, batch", [("counted", 7), ("counted_windows", 5)])
def test_redone_steps_count_once(name: str, batch: int, make_job: MakeJob) -> None:
    job = make_job(Feature(name, epochs=4), script=run_feature)
    job.start_all(3)
    job.wait_for_world(3)
    epoch = max(record["epoch"] for record in job.records("done")) + 1
    job.workers[1].arm(f"counted_{epoch}_{batch}")
    assert job.finish() == [0, -9, 0], job.report()
    assert job.records("restart")
    expected = {"count": NUM_ROWS, "metric": NUM_ROWS, "held": NUM_ROWS, "mean_id": (NUM_ROWS - 1) / 2, "ended": 1.0}
    found = [record["metrics"] for record in job.records("metrics") if record["epoch"] == epoch]
    assert len(found) == 2
    for metrics in found:
        assert {key: metrics[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["counted", "counted_windows", "counted_manual"])
def test_values_of_lost_workers_count_once(name: str, make_job: MakeJob) -> None:
    """In whichever phase of a step they are lost, in epochs that others join and leave."""
    after = [] if name == "counted_manual" else ["reduced", "zero_grad"]
    job = grown_and_killed(make_job, Feature(name, epochs=10), "forward", "backward", *after, "batch_end")
    expected = {"count": NUM_ROWS, "metric": NUM_ROWS, "held": NUM_ROWS, "mean_id": (NUM_ROWS - 1) / 2}
    found = job.records("metrics")
    assert {record["epoch"] for record in found} >= {0, 1, 2, 3}
    for record in found:
        if record["metrics"]:  # else no epoch has ended yet
            assert {key: record["metrics"][key] for key in expected} == pytest.approx(expected), record


def test_a_list_that_a_lost_worker_has_grown_is_named_and_all_other_values_are_kept(make_job: MakeJob) -> None:
    alone = one_device_alone(make_job, epochs=3)
    job = one_device_that_loses_its_joiner(make_job, "backward")
    [marked] = job.events("values")
    assert marked.data["names"] == ["all_ids"]
    expected = {record["epoch"]: record["metrics"] for record in alone.records("metrics")}
    for record in job.records("metrics"):
        wanted = {**expected[record["epoch"]], "num_ids": record["metrics"]["num_ids"]}
        assert record["metrics"] == pytest.approx(wanted, rel=1e-5), record


def test_tensors_that_drift_are_found_within_100_steps_and_repaired(make_job: MakeJob) -> None:
    job = make_job(Feature("drifting", epochs=29, step_s=0.0), script=run_feature, min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    found = [event.data for event in job.events("drift")]
    assert all(event["repaired"] and event["rank"] == 1 for event in found)
    expected = {"parameter net.0.weight": 1, "buffer constant": 2, "exp_avg_sq of optimizer 0 for parameter net.0.weight": 3}
    for name, number in expected.items():
        steps = [event["batch"] - number * Drifting.APART for event in found if event["name"] == name]
        assert any(0 < step <= 100 for step in steps), found
    assert "buffer own" not in {event["name"] for event in found}


def test_an_embedding_with_max_norm_is_named_at_the_start_and_ends_its_job(make_job: MakeJob) -> None:
    job = make_job(Feature("max_norm", epochs=20, step_s=0.0), script=run_feature, min_workers=2)
    job.start_all(2)
    assert job.finish() == [1, 1], job.report()
    for worker in job.workers:
        assert "the embeddings words have max_norm" in worker.output
        assert "the workers' models drift apart: parameter words.weight on rank 1 differs from rank 0's" in worker.output
    assert job.step <= 100


@pytest.mark.parametrize("name", ["buffered", "buffered_windows", "buffered_manual"])
def test_buffers_see_each_batch_once(name: str, make_job: MakeJob) -> None:
    job, _ = grown_to(make_job, Feature(name, epochs=4), 3)
    for size, moment in ((3, "backward_0"), (2, "backward_1")):  # a window's first batch and its second one
        job.wait_for_world(size)
        job.workers[size - 1].arm(moment)
    assert job.finish() == [0, -9, -9], job.report()
    assert {record["world"] for record in job.records("buffers")} == {1, 2, 3}
    for record in job.records("buffers"):
        number = record["epoch"] * STEPS_PER_EPOCH + record["batch"] + 1
        assert (record["tracked"], record["passes"]) == (number, number), record
        assert record["mean"] == pytest.approx([10 * (1 - 0.9**number)] * 8), record


def test_sets_without_a_sample_for_each_worker_end_alike(make_job: MakeJob) -> None:
    job = make_job(Feature("several_sets", epochs=2, step_s=0.0), script=run_several_sets, min_workers=3)
    job.start_all(3)
    assert job.finish() == [0, 0, 0], job.report()
    expected = [{f"id/dataloader_idx_{i}": (number - 1) / 2} for i, number in enumerate(SeveralSets.NUM_ROWS)]
    evaluated, validated = job.records("evaluated"), job.records("validated")
    assert [record["results"] for record in evaluated] == [expected] * 6
    assert len(validated) == 9  # runs in two epochs and after them
    for record in validated:
        assert record["metrics"] == {name: value for each in expected for name, value in each.items()}


@pytest.mark.parametrize("name", ["hourly", "each_moment"])
def test_monitored_value_is_exchanged_only_when_read(name: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name, epochs=1, step_s=0.0), script=run_feature, min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    saves_each_step = name == "each_moment"
    # Lightning broadcasts rank 0's clock after each step.
    assert {record["number"] > 1 for record in job.records("collectives")} == {saves_each_step}, job.report()
    shares = global_batches(job, "share")
    expected = {f"step={step + 1}-last={sum(ids) / len(ids):.3f}" for step, ids in shares.items()}
    saved = {file.stem for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert saved == (expected if saves_each_step else set())
    last = shares[max(shares)]
    assert [record["value"] for record in job.records("closed")] == pytest.approx([sum(last) / len(last)] * 2)


def test_checkpoints_of_rank_0_alone_are_refused(make_job: MakeJob) -> None:
    job = make_job(Feature("on_rank_zero", epochs=6), script=run_feature, min_workers=2)
    job.start_all(2)
    assert job.finish() == [1, 1], job.report()
    for worker in job.workers:
        assert re.search(r"ModelCheckpoint\(monitor='loss'\) on rank [01] only", worker.output), job.report()
    assert job.records("share") == []


def test_joiner_without_the_others_callbacks_is_refused(make_job: MakeJob) -> None:
    job = make_job(Feature("on_rank_zero", epochs=6), script=run_feature)
    job.start()
    job.wait_for_step(3)
    stranger = job.start()
    assert stranger.wait() == 1
    assert "ModelCheckpoint(monitor='loss') on the others only" in stranger.output
    assert job.finish() == [0, 1]
    assert_all_agree(job, 6 * STEPS_PER_EPOCH)


def weights_alone(make_job: MakeJob, name: str, epochs: int) -> list[float]:
    """Weights at the end of an undisturbed run."""
    alone = make_job(Feature(name, epochs=epochs, step_s=0.0), script=run_feature)
    alone.start()
    assert alone.finish() == [0], alone.report()
    weights: list[float] = alone.records("weights")[0]["values"]
    return weights


def grown_to(
    make_job: MakeJob, feature: Feature, num_workers: int, script: Callable[..., None] = run_feature
) -> tuple[Job, int]:
    """Return a job of `num_workers` workers, and an epoch that none of them has begun yet."""
    job = make_job(feature, script=script)
    job.start()
    job.wait_for_step(1)
    for _ in range(num_workers - 1):
        job.start()
    job.wait_for_world(num_workers, patience_s=0.0)  # no worker can join a later fit of the script
    return job, max(record["epoch"] for record in job.records("done")) + 1


def test_late_worker_takes_over_an_open_manual_window(make_job: MakeJob) -> None:
    job, epoch = grown_to(make_job, Feature("manual_windows", epochs=6, step_s=0.03), 3)
    job.workers[1].arm(f"aborted_added_{epoch}_4")
    job.workers[2].arm(f"added_{epoch}_4")
    assert job.finish() == [0, 0, -9], job.report()
    assert_all_agree(job, 6 * STEPS_PER_EPOCH)
    expected = weights_alone(make_job, "manual_windows", epochs=6)
    for record in job.records("weights"):
        assert record["values"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_loss_while_a_window_is_computed_again_is_survived(make_job: MakeJob) -> None:
    job, epoch = grown_to(make_job, Feature("gathering_windows", epochs=6, step_s=0.03), 4)
    job.workers[1].arm(f"late_{epoch}_12")
    job.workers[3].arm("again")
    job.workers[2].arm(f"gathered_{epoch}_12")
    assert job.finish() == [0, 0, -9, -9], job.report()
    assert {record["in_step"] for record in job.workers[0].records("again")} == {True}
    assert False in {record["in_step"] for record in job.workers[1].records("again")}
    assert_all_agree(job, 6 * STEPS_PER_EPOCH)
    expected = weights_alone(make_job, "gathering_windows", epochs=6)
    for record in job.records("weights"):
        assert record["values"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_later_fits_survive_losses_and_end_right(make_job: MakeJob) -> None:
    job, _ = grown_to(make_job, Feature("folds", step_s=0.03), 4, run_folds)

    def await_end_of(number: int) -> None:
        job.wait_until(lambda: any(r["number"] == number for r in job.records("trained")), f"the end of fit {number}")

    for number, victim in ((0, job.workers[1]), (1, job.workers[0])):
        await_end_of(number)
        victim.arm(("backward", "reduced")[number])
        assert victim.wait() == -9
    await_end_of(2)
    job.wait_for_world(2)
    late = job.start()
    assert late.wait() == 0, job.report()
    assert "no worker can join: fit number 4 of the script runs. Workers join the first one only" in late.output
    job.workers[2].terminate()
    job.wait_for_world(1)
    assert job.finish() == [-9, -9, 0, 0, 0], job.report()
    trained = {record["number"]: record["step"] for record in job.workers[3].records("trained")}
    assert trained == {0: STEPS_PER_EPOCH, 1: STEPS_PER_EPOCH, 2: STEPS_PER_EPOCH, 3: 2 * STEPS_PER_EPOCH}
    assert len(job.workers[2].records("trained")) == 3


def test_loss_at_the_end_of_a_fit_keeps_the_next(make_job: MakeJob) -> None:
    job, _ = grown_to(make_job, Feature("folds", step_s=0.03), 3, run_folds)
    job.workers[1].arm("cut_off")  # cut off after the others have met at the fit's end
    job.workers[2].arm("met")
    assert job.finish() == [0, 0, -9], job.report()
    assert job.records("cut_off")
    for worker in job.workers[:2]:
        trained = {record["number"]: (record["step"], record["world"]) for record in worker.records("trained")}
        assert [step for step, _ in trained.values()] == [STEPS_PER_EPOCH] * 3 + [2 * STEPS_PER_EPOCH]
        assert [trained[number][1] for number in (1, 2, 3)] == [2, 2, 2]


def test_loss_between_two_fits_keeps_the_next(make_job: MakeJob) -> None:
    job, _ = grown_to(make_job, Feature("folds", step_s=0.03), 4, run_folds)
    job.workers[0].arm("after_fit_0")
    job.workers[2].arm("after_fit_2")  # the last Trainer fits once more
    assert job.finish() == [-9, 0, -9, 0], job.report()
    for worker in (job.workers[1], job.workers[3]):
        trained = [(record["step"], record["world"]) for record in worker.records("trained")]
        expected = [(STEPS_PER_EPOCH, 4), (STEPS_PER_EPOCH, 3), (STEPS_PER_EPOCH, 3), (2 * STEPS_PER_EPOCH, 2)]
        assert trained == expected, job.report()


def test_worker_that_the_first_fit_was_to_admit_does_not_join_the_second(make_job: MakeJob) -> None:
    job = make_job(Feature("folds"), script=run_two_fits)
    first = job.start()
    job.wait_until(lambda: first.records("ends"), "the end of the first fit")
    joiner = job.start()
    job.wait_until(lambda: job.round_number == 2, "the round that admits the joiner")
    assert joiner.wait() == 0, job.report()
    assert not joiner.records("done")
    assert job.finish() == [0, 0], job.report()
    assert [(r["number"], r["step"], r["world"]) for r in first.records("trained")] == [
        (0, STEPS_PER_EPOCH, 1),
        (1, STEPS_PER_EPOCH, 1),
    ]


def test_a_sampler_of_the_users_own_decides_the_order_across_resizes(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("sampler"))
    for (epoch, batch), records in by_step(job).items():
        number = records[0]["round"]
        shares = {
            r["rank"]: r["ids"] for r in job.records("share") if (r["epoch"], r["batch"], r["round"]) == (epoch, batch, number)
        }
        first = NUM_ROWS - 1 - batch * BATCH_SIZE
        assert [i for rank in sorted(shares) for i in shares[rank]] == list(range(first, first - BATCH_SIZE, -1))


def test_neither_checkpoint_nor_row_of_the_log_is_lost_when_rank_0_has_left(make_job: MakeJob) -> None:
    job = grown_and_killed(make_job, Feature("saved", epochs=-1, max_steps=100))
    assert job.step == 100  # max_steps
    steps = {int(file.stem.removeprefix("step=")) for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert steps == set(range(10, 101, 10))
    with next(job.folder.rglob("metrics.csv")).open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert logged == list(range(100))


def test_checkpoint_of_a_lost_rank_0_is_written_by_the_next(make_job: MakeJob) -> None:
    job = make_job(Feature("saving"), script=run_feature)
    job.start()
    job.wait_for_world(1)  # the number of workers in the first round decides how many samples a step has
    job.start_all(3)
    job.wait_for_world(4)
    for moment in ("saving", "saved"):
        victim = rank_0_of(job)
        victim.arm(moment)
        assert victim.wait() == -9
    job.wait_for_world(2)
    rank_0_of(job).terminate()
    job.wait_for_world(1)
    assert sorted(job.finish()) == [-9, -9, 0, 0], job.report()
    steps = {int(file.stem.removeprefix("step=")) for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert steps == set(range(10, 3 * STEPS_PER_EPOCH + 1, 10))
    assert [Path(record["best"]).exists() for record in job.records("after_fit")] == [True]
    assert job.records("alarm") == [], "a planned leave was taken for a failure"
    assert not list((job.folder / "exceptions").glob("*"))


def test_drained_worker_leaves_before_the_first_round(make_job: MakeJob) -> None:
    job = make_job(Feature("saving"), script=run_feature, min_workers=2)
    worker = job.start()
    job.wait_until(lambda: job.num_registered == 1, "the worker's record")
    job.drain()
    assert worker.wait() == 0, job.report()
    assert "Traceback" not in worker.output, job.report()
    assert job.records("alarm") == [], "a planned leave was taken for a failure"


def test_early_stopping_ends_all_workers_in_the_same_epoch(make_job: MakeJob) -> None:
    job = make_job(Feature("early_stopping", epochs=50), script=run_feature)
    job.grow_to(2)
    assert job.finish() == [0, 0], job.report()
    assert [record["step"] for record in job.records("after_fit")] == [2 * STEPS_PER_EPOCH] * 2


@pytest.mark.parametrize(
    "name, num_workers, message",
    [
        ("raw_backward", 1, "call self.manual_backward(loss) instead"),
        ("zero", 2, "ZeroRedundancyOptimizer spreads its state over the ranks"),
        ("single_sample", 2, "BatchNorm cannot train on one sample"),
        ("hook_state", 1, "ddp_comm_state=PowerSGDState belongs to the workers of one round"),
    ],
)
def test_script_that_cannot_be_right_is_refused(name: str, num_workers: int, message: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name), script=run_feature, min_workers=num_workers)
    workers = [job.start() for _ in range(num_workers)]
    assert [worker.wait() for worker in workers] == [1] * num_workers
    assert any(message in worker.output for worker in workers), job.report()


def test_joiner_with_another_learning_rate_is_refused(make_job: MakeJob) -> None:
    job = make_job(Feature("rate_of_world", epochs=6), script=run_feature, min_workers=2)
    job.start_all(2)
    job.wait_for_step(3)
    joiner = job.start()
    assert joiner.wait() == 1
    assert "rank 0's is [0.002" in joiner.output, job.report()
    assert job.finish() == [0, 0, 1], job.report()


@pytest.mark.parametrize(
    "name, problem, advice",
    [
        ("own_batches", "takes whole batches from OwnBatches", "let the dataset yield single samples"),
        ("rank_aware", "sampler Repeating gives every worker samples of its own", "the order of the whole epoch"),
        ("split_by_user", "sampler Backwards decides which samples this worker gets", "leave use_distributed_sampler at True"),
        ("list", "train_dataloader holds a range", "map-style dataset"),
        ("late_validation", "sampler Repeating gives every worker samples of its own", "the order of the whole epoch"),
        ("dataloader_iter", "training_step(self, dataloader_iter) fetches", "training_step(self, batch, batch_idx)"),
    ],
)
def test_data_that_cannot_be_split_are_refused_at_the_start(name: str, problem: str, advice: str, make_job: MakeJob) -> None:
    job = make_job(Feature(name), script=run_feature)
    worker = job.start()
    assert worker.wait() == 1
    assert problem in worker.output
    assert advice in worker.output
    assert job.records("share") == []


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
def test_shorter_first_loader_does_not_end_changes_or_recovery(mode: str, make_job: MakeJob) -> None:
    job = make_job(Feature(mode, epochs=1), script=run_feature)
    job.start()
    job.wait_until(lambda: len(job.records("done")) > 4, "the end of the shorter loader's three batches")
    second = job.start()
    job.wait_for_world(2)
    second.arm("forward")  # window of four batches, within which the shorter loader begins again
    assert job.finish() == [0, -9], job.report()
    assert_all_agree(job, SeveralLoaders.NUM_LONG_ROWS // BATCH_SIZE)
    short, long = global_batches(job, "share"), global_batches(job, "long")
    assert [i for batch in sorted(long) for i in long[batch]] == list(range(SeveralLoaders.NUM_LONG_ROWS))
    num_rows = SeveralLoaders.NUM_SHORT_ROWS
    rows = [i for batch in sorted(short) for i in short[batch]]
    assert len(rows) == (SeveralLoaders.NUM_LONG_ROWS // BATCH_SIZE // 3 * num_rows if mode == "max_size_cycle" else num_rows)
    for first in range(0, len(rows), num_rows):
        assert sorted(rows[first : first + num_rows]) == list(range(num_rows)), first


def global_batches(job: Job, kind: str) -> dict[int, list[int]]:
    """Rows of each batch of an epoch over all workers, equal however often it was computed."""
    attempts: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)
    for record in job.records(kind):
        attempts[record["batch"], record["round"]][record["rank"]] = record
    found: dict[int, list[int]] = {}
    for (batch, number), shares in attempts.items():
        if len(shares) == next(iter(shares.values()))["world"]:  # else a worker was lost before it recorded its share
            rows = [i for rank in sorted(shares) for i in shares[rank]["ids"]]
            assert found.setdefault(batch, rows) == rows, (batch, number)
    return found


def test_joiner_with_other_data_is_refused_and_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(Feature("0", epochs=5), script=run_split)
    job.start()
    job.wait_for_step(3)
    stranger = job.start(settings=Feature("1"))
    assert stranger.wait() == 1
    assert "this worker's data differ from the job's: the training data" in stranger.output
    assert "The job continues without it" in stranger.output
    assert stranger.records("share") == []
    assert job.finish() == [0, 1]
    assert_all_agree(job, 5 * STEPS_PER_EPOCH)


def test_job_that_was_killed_names_the_way_to_other_data(make_job: MakeJob) -> None:
    job = make_job(Feature("0", epochs=5), script=run_split)
    first = job.start()
    job.wait_for_step(3)
    first.kill()
    first.wait()
    stranger = job.start(settings=Feature("1"))
    assert stranger.wait() == 1
    assert "All workers of job" in stranger.output
    assert "start a new job under another --rdzv-id" in stranger.output
    assert "The job continues without it" not in stranger.output


def test_first_workers_with_other_data_are_refused(make_job: MakeJob) -> None:
    job = make_job(Feature("0"), script=run_split, min_workers=2)
    workers = [job.start(), job.start(settings=Feature("1"))]
    assert job.finish() == [1, 1]
    for worker in workers:
        assert f"the training data: {NUM_ROWS} samples, the first one being" in worker.output
    assert job.records("share") == []


def test_workers_with_seeds_of_their_own_share_one_order(make_job: MakeJob) -> None:
    job = make_job(Feature("seeded_by_worker"), script=run_seeded_by_worker, min_workers=2)
    job.start_all(2)
    job.wait_for_step(5)
    job.start()
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0], job.report()
    for epoch in range(3):
        num_rows = NUM_ROWS // (epoch + 1)  # each epoch builds new loaders
        numbers = {batch: records[0]["round"] for (e, batch), records in by_step(job).items() if e == epoch}
        shares = [r for r in job.records("share") if r["epoch"] == epoch and r["round"] == numbers[r["batch"]]]
        assert sorted(i for r in shares for i in r["ids"]) == list(range(num_rows))
    for worker in job.workers:
        numbers_of_batches = [r["of"] for r in worker.records("number")]
        assert numbers_of_batches == list(range(numbers_of_batches[0], numbers_of_batches[-1] + 1))
        assert {r["children"] for r in worker.records("number")} == {1}  # former loaders are closed


def test_the_only_worker_asked_to_leave_ends_with_143_instead_of_hanging(make_job: MakeJob) -> None:
    job = make_job(Feature("by_name", epochs=100), script=run_feature)
    worker = job.start()
    job.wait_for_step(3)
    worker.terminate()
    assert worker.wait() == 143


def test_a_mistake_of_the_users_ends_its_workers_with_the_traceback(make_job: MakeJob) -> None:
    # Both at once: a worker that comes once the other has failed ends with 0, as its job is over.
    job = make_job(Feature("failing"), script=run_feature, min_workers=2)
    workers = [job.start(), job.start()]
    for worker in workers:
        assert worker.wait() == 1
    assert any("a mistake of the user's" in worker.output for worker in workers)


def test_a_worker_with_another_model_is_refused_and_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(Feature("by_name", epochs=5), script=run_feature)
    job.start()
    job.wait_for_step(3)
    stranger = job.start(script=run_other_model)
    assert stranger.wait() == 1
    assert "other parameter names or shapes" in stranger.output
    assert job.finish() == [0, 1]
    assert_all_agree(job, 5 * STEPS_PER_EPOCH)


def test_job_that_lost_all_workers_resumes_from_its_newest_checkpoint(make_job: MakeJob) -> None:
    job = make_job(Feature("resume", step_s=0.02), script=run_feature, lease_ttl_s=3)  # the next worker waits for its expiry
    worker = job.start()
    job.wait_for_step(45)
    worker.kill()
    worker.wait()
    again = job.start()
    assert job.finish() == [-9, 0], job.report()
    steps = [record["step"] for record in again.records("done")]
    assert steps[0] > 40
    assert steps[-1] == 3 * STEPS_PER_EPOCH
