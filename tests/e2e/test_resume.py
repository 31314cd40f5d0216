"""Jobs that resume from a checkpoint after all workers are gone, and jobs with a state that cannot be handed over."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, streamed_order
from tests.e2e.resume_jobs import BATCH_SIZE, NUM_ROWS, STEPS_PER_EPOCH, Resumable, run_resumable
from tests.e2e.toy_job import ToySettings, streamed, write_files
from tests.support.waiting import eventually


def killed_at(make_job: MakeJob, settings: Resumable, step: int) -> Job:
    job = make_job(settings, script=run_resumable, lease_ttl_s=3)  # the next worker waits for the lease to expire
    worker = job.start()
    job.wait_for_step(step)
    worker.kill()
    worker.wait()
    return job


@pytest.mark.parametrize("settings", [Resumable(as_url=True), Resumable("objects")], ids=["url", "objects"])
def test_checkpoint_is_found_again_at_a_url_and_with_objects(settings: Resumable, make_job: MakeJob) -> None:
    job = killed_at(make_job, settings, STEPS_PER_EPOCH + 7)
    again = job.start()
    assert job.finish() == [-9, 0], job.report()
    steps = [record["step"] for record in again.records("done")]
    assert steps[0] > STEPS_PER_EPOCH + 5, "training began anew"
    assert steps[-1] == settings.epochs * STEPS_PER_EPOCH


def test_noise_goes_on_after_the_loss_of_all_workers_and_the_validation_that_was_due_is_made_whole(make_job: MakeJob) -> None:
    settings = Resumable("drawing", epochs=2)
    undisturbed = make_job(replace(settings, step_s=0.0), script=run_resumable)
    undisturbed.start()
    assert undisturbed.finish() == [0], undisturbed.report()
    job = make_job(settings, script=run_resumable, lease_ttl_s=3)
    for step in (STEPS_PER_EPOCH, STEPS_PER_EPOCH + 10):  # at an epoch's end and inside of one, after a checkpoint was saved
        worker = job.start()
        worker.arm(f"validation after {step}")
        assert worker.wait() == -9
    job.start_all(2)
    assert job.finish() == [-9, -9, 0, 0], job.report()
    noise = [record["drawn"] for record in job.records("noise")]
    num_alone = STEPS_PER_EPOCH + 10
    assert noise[:num_alone] == [record["drawn"] for record in undisturbed.records("noise")][:num_alone]
    assert len({drawn for drawn, *_ in noise}) == len(noise)  # no noise of torch's comes again
    num_validated: dict[int, int] = defaultdict(int)
    for record in job.records("whole"):
        num_validated[record["step"]] += record["rows"]
    assert num_validated == dict.fromkeys(range(5, 2 * STEPS_PER_EPOCH + 1, 5), NUM_ROWS // 4)


def test_other_job_goes_on_with_the_next_row_of_a_stream(make_job: MakeJob, tmp_path: Path) -> None:
    """With another number of workers now, another number that the job may have, and another seed in the script."""
    files = tmp_path / "rows"
    write_files(files, NUM_ROWS)
    settings = Resumable(files=str(files), epochs=2)
    first = make_job(settings, script=run_resumable, max_workers=4)
    first.start()
    first.wait_for_step(3)
    first.start()
    first.wait_for_world(2)
    first.wait_for_step(STEPS_PER_EPOCH + 7)
    for worker in first.workers:
        worker.kill()
    checkpoint = first.folder / "checkpoints" / f"step={STEPS_PER_EPOCH + 5}.ckpt"
    assert checkpoint.exists()

    changed = replace(settings, resumes=str(checkpoint), order_seed=5)
    second = make_job(changed, script=run_resumable, min_workers=3, max_workers=9)
    for _ in range(3):
        second.start()
    assert second.finish() == [0, 0, 0], second.report()
    shares = sorted(second.records("share"), key=lambda share: (share["batch"], share["rank"]))
    assert {(share["world"], share["epoch"]) for share in shares} == {(3, 1)}
    trained = list(itertools.chain.from_iterable(share["ids"] for share in shares))
    expected = streamed_order(streamed(files, shuffle=True), 1, BATCH_SIZE, max_workers=4)
    assert trained == expected[5 * BATCH_SIZE :]


def test_checkpoint_of_an_epochs_end_resumes_with_the_next_epoch(make_job: MakeJob) -> None:
    settings = Resumable(at_epoch_end=True)
    job = killed_at(make_job, settings, STEPS_PER_EPOCH + 4)
    workers = [job.start(), job.start()]
    job.wait_for_world(2, since=0)
    assert job.finish() == [-9, 0, 0], job.report()
    for worker in workers:
        done = [(record["epoch"], record["batch"]) for record in worker.records("done")]
        expected = [(epoch, batch) for epoch in range(1, settings.epochs) for batch in range(STEPS_PER_EPOCH)]
        assert done == expected[len(expected) - len(done) :]
        assert worker.records("after_fit")[0]["step"] == settings.epochs * STEPS_PER_EPOCH


@pytest.mark.parametrize("data", [{}, {"streams": True}, {"iterable": "opaque"}], ids=["map-style", "stream", "iterable"])
def test_checkpoint_of_an_epochs_end_resumes_with_the_next_epoch_with_max_steps(
    data: dict[str, Any], make_job: MakeJob
) -> None:
    settings = ToySettings(num_rows=37, saves_epochs=True, max_epochs=1, limits={"max_steps": 13}, **data)
    first = make_job(settings)
    if settings.streams:
        write_files(first.folder / "train", settings.num_rows)
    first.start()
    assert first.finish() == [0], first.report()
    second = make_job(replace(settings, max_epochs=-1, resumes=str(first.folder / "checkpoints" / "step=5.ckpt")))
    if settings.streams:
        shutil.copytree(first.folder / "train", second.folder / "train")
    second.start()
    assert second.finish() == [0], second.report()
    shares = second.records("share")
    assert [(share["epoch"], share["batch"]) for share in shares] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert sorted(itertools.chain.from_iterable(share["ids"] for share in shares[:5])) == list(range(37))
    saved = {file.name for file in (second.folder / "checkpoints").iterdir()}
    assert saved == {"step=10.ckpt", "step=13.ckpt"}, "an epoch without a batch has ended, too"


def test_job_resumes_with_collective_in_save_hook(make_job: MakeJob) -> None:
    settings = Resumable("saves_together")
    job = killed_at(make_job, settings, STEPS_PER_EPOCH + 7)
    workers = [job.start(), job.start()]
    job.wait_for_world(2, since=0)
    assert job.finish(40) == [-9, 0, 0], job.report()
    assert all(worker.records("after_fit")[0]["step"] == settings.epochs * STEPS_PER_EPOCH for worker in workers)


@pytest.mark.parametrize("moment", ["round_of_three", "hook"])
def test_collective_in_save_hook_hangs_no_worker_when_a_joiner_is_admitted_after_a_loss(moment: str, make_job: MakeJob) -> None:
    settings = Resumable("joined_after_a_loss", step_s=0.05)
    job = make_job(settings, script=run_resumable)
    first = job.start()
    job.wait_for_step(1)  # fixes the batch size for one worker
    lost = job.start()
    job.wait_for_world(2)
    lost.arm(moment)
    joiner = job.start()
    assert lost.wait() == -signal.SIGKILL, job.report()
    if moment == "hook" and joiner.wait() != 0:  # refused, as the state can only be captured by one worker
        assert "on_save_checkpoint: only this worker captures the state for a joiner" in joiner.output
        joiner = job.start()
    job.wait_until(lambda: joiner.records("done"), "a step of the joiner")
    job.finish()
    assert [first.exit_code, joiner.exit_code] == [0, 0], job.report()
    ended_at = [worker.records("after_fit")[0]["step"] for worker in (first, joiner)]
    assert ended_at == [settings.epochs * STEPS_PER_EPOCH] * 2, job.report()


def test_last_checkpoint_of_a_stop_is_written_by_the_next_worker_when_its_writer_dies(make_job: MakeJob) -> None:
    settings = Resumable(step_s=0.05)
    job = make_job(settings, script=run_resumable)
    workers = [job.start() for _ in range(3)]
    job.wait_for_world(3)
    job.wait_until(lambda: all(worker.records("done") for worker in workers) or None, "a step of each worker")
    writer = next(worker for worker in workers if worker.records("done")[-1]["rank"] == 0)
    writer.arm("last_checkpoint")
    job.drain()
    for worker in workers:
        worker.wait()
    assert writer.records("killed")
    steps = {record["step"] for worker in workers for record in worker.records("done")[-1:]}
    saved = [record["step"] for record in job.records("last_checkpoint")]
    assert saved == [*steps], job.report()
    again = job.start()
    assert job.finish()[-1] == 0, job.report()
    assert again.records("done")[0]["step"] == saved[0] + 1


def test_newly_chosen_older_checkpoint_wins_over_the_newest_and_is_not_chosen_twice(make_job: MakeJob) -> None:
    job = killed_at(make_job, Resumable(), STEPS_PER_EPOCH + 7)
    chosen = replace(Resumable(epochs=1), resumes=str(job.folder / "checkpoints" / "step=5.ckpt"))
    second = job.start(settings=chosen)
    eventually(lambda: len(second.records("done")) > 6, "7 steps of the second worker", 60.0)
    second.kill()
    second.wait()
    third = job.start(settings=chosen)
    assert third.wait() == 0, job.report()
    assert second.records("done")[0]["step"] == 6
    assert third.records("done")[0]["step"] in (11, 16)


def test_job_does_not_begin_anew_when_its_checkpoint_is_gone(make_job: MakeJob) -> None:
    job = killed_at(make_job, Resumable(), STEPS_PER_EPOCH)
    shutil.rmtree(job.folder / "checkpoints")
    again = job.start()
    assert again.wait() == 1
    assert "does not exist on this host" in again.output
    assert "start a new job under another name" in again.output
    assert again.records("done") == []


@pytest.mark.parametrize("name, is_known_early", [("unsendable", True), ("unsendable_later", False)])
def test_state_that_cannot_be_sent_refuses_joiners_alone(name: str, is_known_early: bool, make_job: MakeJob) -> None:
    job = make_job(Resumable(name, step_s=0.05, epochs=4), script=run_resumable)
    first = job.start()
    job.wait_for_step(6)
    assert bool(job.events("unjoinable")) == is_known_early
    for _ in range(2):
        worker = job.start()
        assert worker.wait() == 1, job.report()
        assert "lambda" in worker.output
        assert "without this worker" in worker.output
    assert job.finish() == [0, 1, 1], job.report()
    assert first.step == 4 * STEPS_PER_EPOCH
    assert job.round_number == (1 if is_known_early else 3)  # the second worker was refused before it joined a round
