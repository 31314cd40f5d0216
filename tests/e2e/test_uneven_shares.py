"""A slow worker gets fewer samples of the same global batches, and the model learns what it would have learned anyway."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.toy_job import ToyModel, ToySettings, train_toy

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


@pytest.mark.parametrize("kind", KINDS)
def test_slow_worker_gets_fewer_samples_and_the_losses_stay(kind: str, make_job: MakeJob) -> None:
    settings = KINDS[kind]
    job, alone = make_job(settings), make_job(replace(settings, slow="", step_s=0.0))
    for each in (job, alone) if settings.streams else ():
        settings.write_streams(each.folder)
    workers = [job.start() for _ in range(2)]
    job.wait_for_world(2)
    event = job.wait_until(lambda: next(iter(job.events("shares")), None), "shares by speed")
    slow, fast = sorted(event.data["samples"])
    assert slow + fast == 24
    assert 5 <= slow <= 8
    changed = job.step
    job.wait_for_step(changed + 20)
    taken = workers[1].records("share")[-10:]
    assert all(5 <= len(r["ids"]) <= slow for r in taken)  # a second change may have corrected the first one
    assert job.finish() == [0, 0]
    assert violations(job, settings) == []
    alone.start()
    assert alone.finish() == [0]
    assert losses(job) == pytest.approx(losses(alone), rel=1e-3)


def test_shares_are_equal_in_a_new_round_and_follow_the_speeds_again(make_job: MakeJob) -> None:
    settings = replace(SLOW, max_epochs=8)
    job = make_job(settings)
    workers = [job.start() for _ in range(3)]
    job.wait_for_world(3)
    first = job.wait_until(lambda: next(iter(job.events("shares")), None), "shares by speed")
    workers[2].kill()
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
