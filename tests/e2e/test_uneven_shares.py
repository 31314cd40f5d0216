"""A slow worker gets fewer samples of the same global batches, and the model learns what it would have learned anyway."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.rdzv.job.records import EventRecord
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Worker, violations
from tests.e2e.toy_job import Recorder, Rows, ToyModel, ToySettings, make_trainer, train_toy

SLOW = ToySettings(num_rows=1920, batch_size=24, step_s=0.02, slow="w1", max_epochs=4)
KINDS = {
    "rows": SLOW,
    "prepared rows": replace(SLOW, loader_workers=1),
    "windows": replace(SLOW, accumulate=2),
    "a stream": replace(SLOW, streams=True),
    "an iterable": replace(SLOW, iterable="stateful"),
}


def losses(job: Job) -> list[float]:
    """Mean loss over the samples of each batch, in training order."""
    found: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for record in job.records("done"):
        found[record["epoch"], record["batch"]].append((record["loss"], record["weight"]))
    return [sum(loss * n for loss, n in found[at]) / sum(n for _, n in found[at]) for at in sorted(found)]


def first_uneven_shares(job: Job, num_workers: int = 2) -> EventRecord:
    """Start workers, and wait until the slow one gets fewer samples. Return the event of that change."""
    for _ in range(num_workers):
        job.start()
    job.wait_for_world(num_workers)
    return job.wait_until(lambda: next(iter(job.events("shares")), None), "shares by speed")


@pytest.mark.parametrize("kind", KINDS)
def test_slow_worker_gets_fewer_samples_and_the_losses_stay(kind: str, make_job: MakeJob) -> None:
    settings = KINDS[kind]
    job, alone = make_job(settings), make_job(replace(settings, slow="", step_s=0.0))
    for each in (job, alone) if settings.streams else ():
        settings.write_streams(each.folder)
    slow, fast = sorted(first_uneven_shares(job).data["samples"])
    assert slow + fast == 24
    assert 5 <= slow <= 8
    changed = job.step
    job.wait_for_step(changed + 20)
    taken = job.workers[1].records("share")[-10:]
    assert all(5 <= len(r["ids"]) <= slow for r in taken)  # a second change may have corrected the first one
    assert job.finish() == [0, 0]
    assert violations(job, settings) == []
    alone.start()
    assert alone.finish() == [0]
    assert losses(job) == pytest.approx(losses(alone), rel=1e-3)


def test_shares_are_equal_in_a_new_round_and_follow_the_speeds_again(make_job: MakeJob) -> None:
    settings = replace(SLOW, max_epochs=8)
    job = make_job(settings)
    first = first_uneven_shares(job, 3)
    job.workers[2].kill()
    job.wait_for_world(2)
    number = job.round_number
    later = job.wait_until(
        lambda: next((e for e in job.events("shares") if e.data["round"] == number), None), "shares of the next round"
    )
    shares = [r for r in job.records("share") if r["round"] == number and r["world"] == 2]
    assert shares[0]["speeds"] == []
    assert min(later.data["samples"]) < 12
    assert len(first.data["samples"]) == 3
    assert [code for code in job.finish() if code != -9] == [0, 0]
    assert violations(job, settings) == []


class Gathers(ToyModel):
    """Gathers all samples of a batch, which needs equal shares."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gathered = self.all_gather(batch[0])
        assert isinstance(gathered, Tensor)
        assert gathered.shape[-2] == 12
        return super().training_step(batch, batch_idx)


def test_script_with_collectives_in_its_step_keeps_equal_shares(make_job: MakeJob) -> None:
    job = make_job(SLOW, script=partial(train_toy, model=Gathers))
    job.start_all(2)
    job.wait_for_world(2)
    job.wait_for_step(60)
    assert job.events("shares") == []
    assert job.finish() == [0, 0]
    assert violations(job, SLOW) == []


class Tight(ToyModel):
    """Has no memory for more samples than an equal share, so that larger shares are computed in parts."""

    _ids: Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[2]) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory (by hand)")
        return super().training_step(batch, batch_idx)

    def record_share(self, batch: Any, batch_idx: int) -> None:
        assert self.live is not None
        self._ids = batch[2] if self.live.steps.parts.is_first else torch.cat((self._ids, batch[2]))
        super().record_share((None, None, self._ids), batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_worker_without_memory_for_its_larger_share_takes_the_same_samples_again(accumulate: int, make_job: MakeJob) -> None:
    settings = replace(SLOW, accumulate=accumulate)
    job = make_job(settings, script=partial(train_toy, model=Tight))
    first_uneven_shares(job)
    job.wait_for_step(job.step + 10)
    assert job.finish() == [0, 0]
    assert "computes its shares in parts" in job.workers[0].output
    assert violations(job, settings) == []


class Stateful(ToyModel):
    """Keeps a state per sample, as a recurrent network that is trained on consecutive parts of sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.world_size == 2 and len(batch[0]) != 12:
            self.recorder.write("refused", samples=len(batch[0]))
            raise RuntimeError("the state has 12 rows")
        return super().training_step(batch, batch_idx)


class GathersAtTimes(ToyModel):
    """Gathers all samples of every fiftieth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 50:
            self.recorder.write("gathers", speeds=self.live.position.speeds if self.live else ())
            self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [Stateful, GathersAtTimes])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_that_fails_with_other_shares_is_repeated_with_equal_ones(
    model: type[ToyModel], accumulate: int, make_job: MakeJob
) -> None:
    settings = replace(SLOW, accumulate=accumulate)
    job = make_job(settings, script=partial(train_toy, model=model))
    first_uneven_shares(job)
    job.wait_until(lambda: job.round_number > 1, "the workers to meet again")
    assert job.finish() == [0, 0]
    assert violations(job, settings) == []
    assert len(job.events("shares")) == 1
    assert {tuple(r["speeds"]) for r in job.records("share") if r["round"] > 1} == {()}


class GathersAfterSteps(ToyModel):
    """Gathers all samples of a batch in a hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.all_gather(batch[0])


def test_script_with_collectives_in_its_hooks_keeps_equal_shares(make_job: MakeJob) -> None:
    settings = replace(SLOW, max_epochs=1)
    job = make_job(settings, script=partial(train_toy, model=GathersAfterSteps))
    job.start_all(2)
    job.wait_for_world(2)
    job.wait_for_step(60)
    assert job.finish() == [0, 0]
    assert job.events("shares") == []


def train_twice(recorder: Recorder, settings: ToySettings) -> None:
    strategy = DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03)
    trainer = make_trainer(recorder.place.folder, strategy=strategy, max_epochs=2, limit_val_batches=0)
    loader = DataLoader(Rows(settings.num_rows), settings.batch_size)
    model = ToyModel(recorder, settings.step_s * (3 if recorder.place.agent_id == settings.slow else 1))
    trainer.fit(model, loader)
    assert model.live is not None
    recorder.write("first_fit_ended", speeds=model.live.position.speeds)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader)


def test_second_fit_begins_with_equal_shares(make_job: MakeJob) -> None:
    job = make_job(SLOW, script=train_twice)
    workers = [job.start() for _ in range(2)]
    job.wait_for_world(2)
    job.wait_until(lambda: all(w.records("first_fit_ended") for w in workers), "the end of the first fit")
    assert all(w.records("first_fit_ended")[0]["speeds"] for w in workers)
    job.wait_until(lambda: any(speeds_of_second_fit(workers[0])), "shares by speed in the second fit")
    assert job.finish() == [0, 0]
    first, second = map(speeds_of_second_fit, workers)
    assert first == second
    assert first[:12] == [[]] * 12


def speeds_of_second_fit(worker: Worker) -> list[list[int]]:
    records = worker.records()
    ended = next(i for i, r in enumerate(records) if r["kind"] == "first_fit_ended")
    return [r["speeds"] for r in records[ended:] if r["kind"] == "share"]
