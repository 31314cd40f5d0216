"""Limits given to nodes. `test_targets.py` shows that nodes respect them."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import pytest

from lightning_dlrover.components.targets import machine as shares
from lightning_dlrover.components.targets.machine import MachineShares, MemoryGroups, NoMemoryGroupsError
from lightning_dlrover.components.targets.target import ANY_SIZE, NodeSize, NotTakenError
from lightning_dlrover.variables import MEMORY_GROUP, THREADS_PER_CORE

CORES = sorted(os.sched_getaffinity(0))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_node_without_a_size_has_no_limits_and_one_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = MachineShares(gpus=0)
    assert machine.take("node1", ANY_SIZE) == ((), {"OMP_NUM_THREADS": "1"})
    assert machine.take("node2", ANY_SIZE) == ((), {"OMP_NUM_THREADS": "1"})
    assert warnings_in(caplog) == []


def test_number_of_threads_is_that_of_cores_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    size = NodeSize(len(CORES))
    exported = {"OMP_NUM_THREADS": str(len(CORES)), THREADS_PER_CORE: "1"}
    assert MachineShares(gpus=0).take("node1", size) == (tuple(CORES), exported)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert MachineShares(gpus=0).take("node1", size) == (tuple(CORES), {"OMP_NUM_THREADS": "7"})


def test_a_node_has_a_memory_limit_of_its_own_size_until_it_has_ended() -> None:
    machine = MachineShares(gpus=0)
    try:
        MemoryGroups().close()
    except NoMemoryGroupsError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    folders = [Path(machine.take(f"node{mib}", NodeSize(0, mib))[1][MEMORY_GROUP]) for mib in (64, 128)]
    files = [next(f for f in (each / "memory.max", each / "memory.limit_in_bytes") if f.exists()) for each in folders]
    assert [int(file.read_text()) >> 20 for file in files] == [64, 128]
    assert not machine.awaits
    machine.end("node64")
    assert machine.settle({"node64"}) == {}
    assert machine.awaits
    assert folders[0].exists()  # type: ignore[unreachable]
    machine.settle(())
    assert not machine.awaits
    assert [folder.exists() for folder in folders] == [False, True]
    machine.close()
    assert not folders[1].exists()


def test_a_node_that_is_refused_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    machine = MachineShares(gpus=1)
    assert machine.take("node1", NodeSize(1))[1]["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    with pytest.raises(NotTakenError, match="0 of 1 are free; node1 has the others"):
        machine.take("node2", NodeSize(1))
    machine.end("node1")
    machine.settle(())
    assert machine.take("node2", NodeSize(1))[1]["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_missing_resource_of_this_machine_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shares, "MemoryGroups", functools.partial(MemoryGroups, tmp_path / "proc", tmp_path / "cgroup"))
    machine, size = MachineShares(gpus=0), NodeSize(len(CORES) + 1, 64)
    for number in (1, 2, 3):
        cores, variables = machine.take(f"node{number}", size)
        assert cores == tuple(CORES)
        assert MEMORY_GROUP not in variables
        assert machine.why_killed(f"node{number}") == ""
    assert warnings_in(caplog) == [
        f"nodes run without a memory limit: no control group with a memory controller is mounted at {tmp_path / 'cgroup'}; "
        "it takes root, or `systemd-run --user --scope --property=Delegate=yes dlrover run ...`",
        f"nodes ask for {len(CORES) + 1} cores, and get the {len(CORES)} that there are",
        f"too few cores are free for node2: it shares core{'s' * (len(CORES) > 1)} {', '.join(map(str, CORES))} with other "
        + "nodes until some are",
    ]


def test_resized_node_keeps_its_cores_as_far_as_possible() -> None:
    allocation = shares.Allocation(range(4))
    assert allocation.take("node1", 1).cores == (0,)
    assert allocation.take("node2", 1).cores == (1,)
    assert allocation.resize("node1", 3).cores == (0, 2, 3)
    assert allocation.shared_cores("node1") == ()
    assert allocation.resize("node1", 4).cores == (0, 1, 2, 3)
    assert allocation.shared_cores("node1") == (1,)
    assert allocation.resize("node1", 2).cores == (0, 2)  # not the one that it shared
    assert allocation.resize("node2", 9).cores == (0, 1, 2, 3)


def test_resized_node_has_other_cores_and_another_memory_limit() -> None:
    machine = MachineShares(gpus=0)
    try:
        MemoryGroups().close()
    except NoMemoryGroupsError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    _, exported = machine.take("node1", NodeSize(1, 64))
    folder = Path(exported[MEMORY_GROUP])
    file = next(f for f in (folder / "memory.max", folder / "memory.limit_in_bytes") if f.exists())
    assert machine.resize("node1", NodeSize(1, 256)) == ((CORES[0],), "")
    assert int(file.read_text()) >> 20 == 256
    assert machine.resize("node1", NodeSize(len(CORES), 256)) == (tuple(CORES), "")
    assert machine.resize("node1", NodeSize(1, 128)) == ((CORES[0],), "")
    assert int(file.read_text()) >> 20 == 128
    machine.end("node1")
    machine.settle(())
    machine.close()


def test_memory_of_a_node_without_a_limit_is_not_changed_in_place() -> None:
    machine = MachineShares(gpus=0)
    machine.take("node1", NodeSize(1))
    assert machine.resize("node1", NodeSize(1, 64)) == ((CORES[0],), "its memory is not limited")
