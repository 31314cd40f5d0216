"""Lost nodes, and jobs that fail, in a simulation."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from lightning_dlrover.lab.simulate.simulator import Arrival, Finished, Fragility, NodeLoss, draw_losses, simulate
from lightning_dlrover.tuning.cluster import Allocation, Device, Job, Profile, State

DEVICES = (Device("d0", "core", "n0", 1), Device("d1", "core", "n1", 1))
JOB = Job("job", {"core": Profile(0, 1.0)}, steps_left=100)


def run(fragility: Fragility, *losses: NodeLoss) -> Finished:
    def first_device(state: State) -> Allocation:
        return {job.name: ("d0",) for job in (*state.waiting, *(r.job for r in state.running))}

    arrival = Arrival(JOB, 100, fragility)
    (ended,) = simulate([arrival], DEVICES, first_device, lambda *_: 1.0, losses=losses).finished
    return ended


def test_a_job_repeats_the_steps_since_its_checkpoint_and_restarts() -> None:
    ended = run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n0"))
    assert ended.ended_s == pytest.approx(100 + 20 + 5)
    assert ended.is_whole


def test_checkpoints_are_counted_from_the_restart() -> None:
    ended = run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n0"), NodeLoss(95, "n0"))
    # 30 steps at the first loss, then 40 s of steps of which 10 are lost.
    assert ended.ended_s == pytest.approx(95 + 5 + 100 - 60)


def test_a_live_job_loses_no_step() -> None:
    assert run(Fragility(restart_s=2), NodeLoss(50, "n0")).ended_s == pytest.approx(102)


def test_the_loss_of_another_node_does_not_touch_a_job() -> None:
    assert run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n1")).ended_s == pytest.approx(100)


def test_a_job_fails_at_one_loss_too_many() -> None:
    ended = run(Fragility(most_losses=1), NodeLoss(20, "n0"), NodeLoss(40, "n0"))
    assert not ended.is_whole
    assert [ended.ended_s, ended.steps] == pytest.approx([40, 40])


def test_a_job_fails_where_its_memory_ends() -> None:
    ended = run(Fragility(fails_at_steps=60))
    assert not ended.is_whole
    assert [ended.ended_s, ended.steps] == pytest.approx([60, 60])


def test_a_negative_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Fragility(restart_s=-1)


def test_losses_come_at_the_rate_of_all_nodes_together() -> None:
    losses = list(islice(draw_losses(["a", "b", "c", "d"], 0.5, random.Random(1)), 4000))
    assert losses[-1].at_s / 3600 == pytest.approx(4000 / (4 * 0.5), rel=0.05)
    assert {loss.node for loss in losses} == {"a", "b", "c", "d"}
    assert list(draw_losses(["a"], 0.0, random.Random(1))) == []
