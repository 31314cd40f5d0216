"""Resizing does not change the result: the loss of every step equals that of an undisturbed run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from tests.e2e.harness import Job
from tests.e2e.toy_job import ToySettings

SETTINGS = ToySettings(num_rows=2400, batch_size=24, max_epochs=2, step_s=0.02)


def losses(job: Job) -> dict[int, float]:
    """Mean loss over the samples of each step, over all workers."""
    parts: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for record in job.records("done"):
        parts[record["step"]].append((record["loss"], record["weight"]))
    return {step: sum(loss * n for loss, n in each) / sum(n for _, n in each) for step, each in parts.items()}


def test_run_resized_1_2_3_2_1_has_the_losses_of_an_unresized_run(make_job: Callable[..., Job]) -> None:
    still = make_job(replace(SETTINGS, step_s=0.0))
    still.start()
    resized = make_job(SETTINGS)
    resized.start()
    resized.wait_for_step(5)
    second = resized.start()
    resized.wait_for_world(2)
    third = resized.start()
    resized.wait_for_world(3)
    third.terminate()
    resized.wait_for_world(2)
    second.terminate()
    resized.wait_for_world(1)

    assert resized.finish() == [0, 0, 0]
    assert still.finish() == [0]
    assert {record["world"] for record in resized.records("done")} == {1, 2, 3}
    expected, got = losses(still), losses(resized)
    assert len(expected) == 200
    assert got.keys() == expected.keys()
    worst = max(abs(got[step] - expected[step]) / expected[step] for step in expected)
    assert worst <= 1e-4
