"""Live jobs train each row of an `IterableDataset` exactly once, whatever happens to their workers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import violations
from tests.e2e.iterables import Opaque, Stateful, order_of
from tests.e2e.toy_job import SEED, L, Recorder, Rows, ToyModel, ToySettings, make_trainer

SETTINGS = ToySettings(num_rows=203, batch_size=8, max_epochs=2, step_s=0.03)  # 26 batches, the last one of 3 rows


@pytest.mark.parametrize(
    ("kind", "loader_workers"),
    [("opaque", 0), ("opaque", 2), ("stateful", 0), ("stateful", 1)],
    ids=["opaque", "opaque, 2 loader workers", "stateful", "stateful, 1 loader worker"],
)
def test_each_row_is_trained_once_while_workers_come_and_go(
    kind: str, loader_workers: int, make_job: MakeJob, etcd: EmbeddedEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SETTINGS, iterable=kind, loader_workers=loader_workers, num_val_rows=13, val_every=9)
    job = make_job(settings)
    first = job.start()
    second = job.start()
    job.wait_for_world(2, since=0)
    third = job.start()  # grows
    job.wait_for_world(3)
    second.arm("reduced")  # is lost in a step
    job.wait_for_world(2)
    job.wait_for_step(20)
    late = job.start()  # joins late in the epoch
    job.wait_for_world(3)
    third.terminate()  # shrinks
    job.wait_for_world(2)
    assert main(["status", "--endpoint", etcd.endpoint, job.run_id]) == 0
    shown = capsys.readouterr().out
    assert f"{'Opaque' if kind == 'opaque' else 'Stateful'}, an IterableDataset, each row exactly once; {kind}" in shown
    job.finish()
    assert violations(job, settings) == [], job.report()
    assert [first.exit_code, late.exit_code] == [0, 0], job.report()
    assert ("is used as 1" in first.output + second.output) == (loader_workers == 2)


@pytest.mark.parametrize("kind", ["opaque", "stateful"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_loss_at_an_epochs_end_repeats_its_last_batch(kind: str, accumulate: int, make_job: MakeJob) -> None:
    settings = replace(SETTINGS, num_rows=45, iterable=kind, accumulate=accumulate, max_epochs=3, step_s=0.05)
    job = make_job(settings)
    job.start()
    second = job.start()
    job.wait_for_world(2, since=0)
    job.wait_until(lambda: any(r["batch"] >= 4 for r in second.records("done")) or None, "the last batch but one")
    second.arm("backward")
    assert second.wait() == -9
    job.finish()
    assert violations(job, settings) == [], job.report()


@pytest.mark.parametrize("kind", ["opaque", "stateful"])
def test_checkpoint_goes_on_with_the_next_row_in_another_world(kind: str, make_job: MakeJob) -> None:
    settings = replace(SETTINGS, iterable=kind, save_every=5)
    first = make_job(settings)
    first.start()
    first.start()
    first.wait_for_world(2, since=0)
    first.wait_for_step(26 + 7)
    for worker in first.workers:
        worker.kill()
    checkpoint = first.folder / "checkpoints" / "step=30.ckpt"
    assert checkpoint.exists()
    second = make_job(replace(settings, resumes=str(checkpoint)), min_workers=3)
    for _ in range(3):
        second.start()
    assert second.finish() == [0, 0, 0], second.report()
    shares = sorted(second.records("share"), key=lambda share: (share["batch"], share["rank"]))
    assert {(share["world"], share["epoch"]) for share in shares} == {(3, 1)}
    trained = list(itertools.chain.from_iterable(share["ids"] for share in shares))
    assert trained == order_of(kind, 203, True, SEED, 1)[4 * 8 :]


@pytest.mark.parametrize(("num_rows", "killed_at"), [(203, 13), (40, 7)], ids=["inside of an epoch", "after its last batch"])
def test_job_of_which_all_workers_were_killed_goes_on(num_rows: int, killed_at: int, make_job: MakeJob) -> None:
    settings = replace(SETTINGS, iterable="opaque", num_rows=num_rows, save_every=5, step_s=0.05)
    job = make_job(settings, lease_ttl_s=3)
    job.start()
    job.wait_for_step(killed_at)
    job.workers[0].kill()
    job.workers[0].wait()
    again = job.start()
    job.finish()
    assert again.exit_code == 0, job.report()
    steps = [record["step"] for record in again.records("done")]
    assert steps == list(range(killed_at // 5 * 5 + 1, settings.num_steps + 1))
    order = [id for epoch in (0, 1) for id in order_of("opaque", num_rows, True, SEED, epoch)]
    trained = list(itertools.chain.from_iterable(r["ids"] for r in again.records("share")))
    assert trained == order[killed_at // 5 * 5 * 8 :]


def test_checkpoint_of_an_epochs_last_batch_goes_on_with_the_next_epoch(make_job: MakeJob) -> None:
    settings = replace(SETTINGS, num_rows=37, iterable="stateful", save_every=5)  # 5 batches in an epoch
    first = make_job(replace(settings, max_epochs=3))
    first.start()
    first.wait_for_step(8)
    first.workers[0].kill()
    second = make_job(replace(settings, resumes=str(first.folder / "checkpoints" / "step=5.ckpt")), min_workers=2)
    second.start()
    second.start()
    assert second.finish() == [0, 0], second.report()
    shares = sorted(second.records("share"), key=lambda share: (share["epoch"], share["batch"], share["rank"]))
    trained = list(itertools.chain.from_iterable(share["ids"] for share in shares if share["epoch"] == 1))
    assert trained == order_of("stateful", 37, True, SEED, 1), second.report()
    assert {share["epoch"] for share in shares} == {1}


@pytest.mark.parametrize("limits", [{"limit_train_batches": 4}, {"max_steps": 8, "max_epochs": -1}], ids=["batches", "steps"])
def test_limits_end_epochs_of_unknown_length(limits: dict[str, int], make_job: MakeJob) -> None:
    job = make_job(replace(SETTINGS, num_rows=37, iterable="opaque", limits=limits), min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    per_epoch = limits.get("limit_train_batches", 5)
    for worker in job.workers:
        places = [(r["epoch"], r["batch"]) for r in worker.records("done")]
        assert places == [(step // per_epoch, step % per_epoch) for step in range(8)]


def validate_after_fit(recorder: Recorder, settings: ToySettings) -> None:
    L.seed_everything(SEED, verbose=False)
    trainer = make_trainer(recorder.place.folder, max_epochs=1, limit_train_batches=3)
    model = ToyModel(recorder)
    data = DataLoader(Opaque(Rows(settings.num_rows), shuffle=True), 4)
    trainer.fit(model, data)
    trainer.validate(model, DataLoader(Stateful(Rows(13), shuffle=False), 2), verbose=False)


def test_validation_without_a_fit_counts_each_row_once(make_job: MakeJob) -> None:
    job = make_job(replace(SETTINGS, iterable="opaque"), script=validate_after_fit, min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    assert sorted(itertools.chain.from_iterable(r["ids"] for r in job.records("val"))) == list(range(13))
    assert len({r["metric"] for r in job.records("val_done")}) == 1


def test_dataset_that_splits_itself_by_rank_ends_the_job_before_its_first_step(make_job: MakeJob) -> None:
    job = make_job(replace(SETTINGS, iterable="by_rank"), min_workers=2)
    job.start_all(2)
    assert job.finish() == [1, 1], job.report()
    assert job.records("done") == []
    for worker in job.workers:
        assert "ByRank gives workers different rows: in batch 0 of epoch 0 the first row of rank 0 is" in worker.output
        assert "leave out split_dataset_by_node of Hugging Face" in worker.output


def test_joiner_that_reads_other_rows_is_refused_and_the_job_goes_on(make_job: MakeJob) -> None:
    settings = replace(SETTINGS, iterable="by_rank", num_rows=406, shuffle=False)
    job = make_job(settings)
    first = job.start()
    job.wait_for_step(3)
    joiner = job.start()
    assert joiner.wait() == 1, job.report()
    assert "gives workers different rows" in joiner.output
    assert "The job continues without this worker" in joiner.output
    job.finish()
    assert first.exit_code == 0, job.report()
    assert len(first.records("after_fit")) == 1


def test_rows_that_differ_later_end_the_job(make_job: MakeJob) -> None:
    job = make_job(replace(SETTINGS, iterable="by_clock"), min_workers=2)
    job.start_all(2)
    assert job.finish(hurry=False) == [1, 1], job.report()
    assert 5 < job.step < 52
    for worker in job.workers:
        assert "ByClock gives workers different rows: in batch" in worker.output


def test_joiner_that_would_keep_the_others_waiting_for_too_long_is_refused(make_job: MakeJob) -> None:
    settings = replace(SETTINGS, iterable="opaque", row_s=0.01, step_s=0.0, max_catch_up_s=0.3, max_epochs=1)
    job = make_job(settings)
    first = job.start()
    job.wait_for_step(10)
    joiner = job.start()
    assert joiner.wait() == 1, job.report()
    assert "longer than the limit of 0.3 s. Give Opaque the methods state_dict()" in joiner.output
    job.finish()
    assert first.exit_code == 0, job.report()
    assert violations(job, settings) == []
