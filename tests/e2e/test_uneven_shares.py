"""A slow worker gets fewer samples of the same global batches, and the model learns what it would have learned anyway."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.toy_job import ToySettings

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
    slow, fast = (next(n for w, n in event.data["samples"].items() if str(worker.pid) in w) for worker in reversed(workers))
    assert (slow + fast, event.data["global_batch_size"]) == (24, 24)
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
