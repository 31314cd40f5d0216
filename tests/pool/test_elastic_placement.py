"""Sizes become devices on few nodes; jobs of unchanged size stay unless moving them gains more than it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.pool.placement import place
from lightning_dlrover.tuning.cluster import Job
from tests.support.elastic_jobs import Amdahl, cluster, job

NODES = {device.name: device.node for device in cluster(8)}


def num_nodes(devices: tuple[str, ...]) -> int:
    return len({NODES[name] for name in devices})


def put(
    sizes: Mapping[str, int], running: Mapping[str, tuple[str, ...]], nodes: int = 2, **fields: Any
) -> dict[str, tuple[str, ...]]:
    jobs = {name: job(name, **fields) for name in sizes}
    return place(cluster(nodes), 4, jobs, sizes, running)


def test_whole_nodes_come_first_and_small_jobs_fill_the_rest() -> None:
    placed = put({"wide": 8, "small": 1, "pair": 2, "half": 3}, {}, nodes=4)
    assert {name: num_nodes(devices) for name, devices in placed.items()} == {"wide": 2, "small": 1, "pair": 1, "half": 1}
    assert NODES[placed["small"][0]] == NODES[placed["half"][0]]


def test_unchanged_job_stays_and_a_growing_one_keeps_its_devices() -> None:
    running = {"a": ("gpu0-1",), "b": ("gpu1-2",)}
    placed = put({"a": 1, "b": 3}, running)
    assert placed["a"] == ("gpu0-1",)
    assert "gpu1-2" in placed["b"]
    assert num_nodes(placed["b"]) == 1


def test_small_job_makes_room_for_one_that_would_be_split() -> None:
    running = {"a": ("gpu0-0", "gpu0-1"), "b": ("gpu1-0",)}
    sizes = {"a": 2, "b": 1, "wide": 4}
    costly_nodes: dict[str, Any] = {"scaling": Amdahl(node_s=1.0), "change_s": 1.0}
    placed = put(sizes, running, **costly_nodes)
    assert num_nodes(placed["wide"]) == 1
    assert placed["a"] == running["a"]
    assert NODES[placed["b"][0]] == "node0"


def test_no_job_moves_where_that_costs_more_than_it_gains() -> None:
    running = {"a": ("gpu0-0", "gpu0-1"), "b": ("gpu1-0",)}
    sizes = {"a": 2, "b": 1, "wide": 4}
    cases: list[dict[str, Any]] = [
        {"scaling": Amdahl(node_s=0.0), "change_s": 1.0},
        {"scaling": Amdahl(node_s=1.0), "change_s": 1e6},
    ]
    for fields in cases:
        placed = put(sizes, running, **fields)
        assert {name: placed[name] for name in running} == running
        assert num_nodes(placed["wide"]) == 2


def test_split_job_comes_together_when_a_node_gets_free() -> None:
    running = {"split": ("gpu0-0", "gpu1-0")}
    placed = put({"split": 2}, running, scaling=Amdahl(node_s=1.0), change_s=1.0)
    assert num_nodes(placed["split"]) == 1


@given(st.lists(st.integers(1, 9), max_size=12), st.lists(st.integers(1, 9), max_size=12), st.data())
def test_every_job_gets_its_number_of_different_devices(first: list[int], second: list[int], data: st.DataObject) -> None:
    jobs: dict[str, Job] = {f"j{i}": job(f"j{i}", scaling=Amdahl(node_s=1.0), change_s=1.0, max_devices=9) for i in range(12)}
    placed: dict[str, tuple[str, ...]] = {}
    for sizes in (first, second):
        left, numbers = 32, {}
        for i, size in enumerate(sizes):
            if size <= left:
                numbers[f"j{i}"] = size
                left -= size
        kept = {name: devices for name, devices in placed.items() if data.draw(st.booleans())}
        placed = place(cluster(8), 4, jobs, numbers, kept)
        assert {name: len(devices) for name, devices in placed.items()} == numbers
        assert max(Counter(name for devices in placed.values() for name in devices).values(), default=1) == 1
