"""Sizes are chosen kind by kind, from those worth considering, with speeds that are asked for once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.lab.simulate.baselines import make_elastic
from lightning_dlrover.pool.allocation import SpeedTables
from lightning_dlrover.tuning.cluster import Profile, Speeds, State
from lightning_dlrover.tuning.plan import ALL_SIZES_UP_TO, sizes_to_consider
from tests.support.elastic_jobs import GB, Amdahl, cluster, job, numbers, running

TWO_KINDS = {"gpu": Profile(GB, 2.0), "old": Profile(GB, 1.0)}


def test_waiting_jobs_spread_over_kinds_by_speed_and_load() -> None:
    devices = (*cluster(1), *cluster(1, kind="old"))
    jobs = [job(f"j{i}", profiles=TWO_KINDS, num_devices=4, submitted_s=float(i)) for i in range(3)]
    placed = make_elastic("as-requested")(State(10.0, devices, tuple(jobs)))
    # The second waits for the fast devices: half of them are as fast as all of the slow ones.
    kinds = {name: found[0][:3] for name, found in placed.items()}
    assert kinds == {"j0": "gpu", "j2": "old"}


def test_running_job_stays_with_its_kind_and_a_fixed_one_with_its_devices() -> None:
    devices = (*cluster(1), *cluster(1, kind="old"))
    elastic = running(job("elastic", profiles=TWO_KINDS), ["old0-0"])
    fixed = running(job("fixed", profiles=TWO_KINDS, num_devices=1, max_devices=1), ["gpu0-2"])
    placed = make_elastic("jct")(State(10.0, devices, (), (elastic, fixed)))
    assert placed["fixed"] == ("gpu0-2",)
    assert {name[:3] for name in placed["elastic"]} == {"old"}


def test_job_gets_devices_with_enough_memory_only() -> None:
    devices = tuple(replace(d, memory_bytes=2 * GB) if d.node == "node0" else d for d in cluster(2))
    large = job("large", profiles={"gpu": Profile(8 * GB, 1.0)}, num_devices=8)
    placed = make_elastic("jct")(State(10.0, devices, (large,)))
    assert numbers(placed) == {"large": 4}
    assert all(name.startswith("gpu1") for name in placed["large"])


def test_all_sizes_of_a_usual_cluster_are_considered_and_whole_nodes_of_a_large_one() -> None:
    assert sizes_to_consider(64, 4) == list(range(65))
    large = np.array(sizes_to_consider(10_000, 8, also=(131, 20_000)))
    assert large[: ALL_SIZES_UP_TO + 1].tolist() == list(range(ALL_SIZES_UP_TO + 1))
    assert 131 in large
    assert large[-1] == 10_000
    rest = large[large > 136]
    assert (rest % 8 == 0).all()
    assert (np.diff(rest) / rest[:-1] < 0.06).all()


def test_speeds_are_asked_for_once_while_nothing_new_is_known() -> None:
    class Counting(Amdahl):
        asked = 0

        def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
            Counting.asked += 1
            return super().speeds(num_devices, num_nodes)

    known, tables, sizes = Counting(), SpeedTables(), np.array(sizes_to_consider(8, 4))
    jobs = [job("a", scaling=known, max_devices=4), job("b", scaling=known, max_devices=4)]
    for _ in range(3):
        speeds, _ = tables.of(jobs, "gpu", sizes, 4)
    assert Counting.asked == 1
    assert speeds[0].tolist() == [0.0, *(Amdahl().at(n, 1) for n in range(1, 5)), 0.0, 0.0, 0.0, 0.0]
    tables.of([replace(jobs[0], scaling=Counting())], "gpu", sizes, 4)
    assert Counting.asked == 2
