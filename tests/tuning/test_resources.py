"""Limits of control groups of both versions, and the memory of a process with children."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_dlrover.tuning import resources
from lightning_dlrover.tuning.resources import (
    CORES_S,
    MachineLoad,
    MemoryWatch,
    OwnCores,
    _BusyTimes,
    available_cores,
    cpu_use,
    memory_limit_bytes,
    own_memory_limit_bytes,
)
from lightning_dlrover.tuning.samples import AGENT_BYTES
from lightning_dlrover.variables import THREADS_PER_CORE, WORKERS_PER_NODE
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

MIB = 1 << 20


def group(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A machine on which this process is in control group `own`."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/pod/worker\n", {"pod/worker/memory.max": "max\n", "pod/memory.max": f"{64 * MIB}\n"}),
        ("0::/on/the/host\n", {"memory.max": f"{64 * MIB}\n"}),  # the view from inside a container
        ("3:cpu,cpuacct:/\n4:memory:/job/step\n", {"memory/job/step/memory.limit_in_bytes": f"{64 * MIB}\n"}),
    ],
)
def test_the_least_limit_of_all_groups_above_counts(own: str, files: dict[str, str], tmp_path: Path) -> None:
    assert memory_limit_bytes({}, *group(tmp_path, own, files)) == 64 * MIB


@pytest.mark.parametrize("files", [{}, {"memory.max": "max\n"}, {"memory.max": "not a number"}])
def test_without_a_limit_it_is_all_memory_of_the_machine(files: dict[str, str], tmp_path: Path) -> None:
    assert memory_limit_bytes({}, *group(tmp_path, "0::/\n", files)) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    "environ, mib",
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 3936),
        ({"SLURM_MEM_PER_NODE": "4096", "LOCAL_WORLD_SIZE": "4"}, 984),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "8", "LOCAL_WORLD_SIZE": "2"}, 3920),
        ({"SLURM_MEM_PER_CPU": "1000"}, 0),
        ({"SLURM_MEM_PER_NODE": "all"}, 0),
        ({"SLURM_MEM_PER_NODE": "100"}, 0),  # less than an agent alone takes
        ({}, 0),
    ],
)
def test_slurms_memory_less_the_agents_is_shared_by_the_workers(environ: dict[str, str], mib: int, tmp_path: Path) -> None:
    assert own_memory_limit_bytes(environ, *group(tmp_path, "0::/\n", {})) == mib * MIB


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/jobs/dlrover-7-node3-0123abcd\n", {"jobs/dlrover-7-node3-0123abcd/memory.max": f"{512 * MIB}\n"}),
        (
            "4:memory:/dlrover-7-node3-0123abcd/by-the-script\n0::/\n",
            {
                "memory/dlrover-7-node3-0123abcd/by-the-script/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "memory/dlrover-7-node3-0123abcd/memory.limit_in_bytes": f"{512 * MIB}\n",
            },
        ),
        ("0::/scope/job_12/step_batch/task_0\n", {"scope/job_12/memory.max": f"{512 * MIB}\n"}),
    ],
)
@pytest.mark.parametrize("local_workers", [1, 2])
def test_limit_of_one_nodes_group_is_not_shared_with_others(
    own: str, files: dict[str, str], local_workers: int, tmp_path: Path
) -> None:
    shared = "memory/memory.limit_in_bytes" if "memory:" in own else "memory.max"
    place = group(tmp_path, own, {**files, shared: f"{1024 * MIB}\n"})
    environ = {"DLROVER_NODE": "node3", "SLURM_JOB_ID": "12", "LOCAL_WORLD_SIZE": str(local_workers)}
    assert own_memory_limit_bytes(environ, *place) == (512 * MIB - AGENT_BYTES) // local_workers
    assert memory_limit_bytes(environ, *place) == 1024 * MIB


@pytest.mark.parametrize("ours", [{}, {"DLROVER_NODE": "node3", "DLROVER_STARTED_BY": "a dlrover run in that job"}])
@pytest.mark.parametrize("folder", ["dlrover-7-controller", "job_13", "job_12"])
def test_a_group_that_may_hold_other_nodes_is_shared_with_them(folder: str, ours: dict[str, str], tmp_path: Path) -> None:
    place = group(tmp_path, f"0::/{folder}\n", {f"{folder}/memory.max": f"{64 * MIB}\n"})
    # The limits of a torchrun that the user started, of which the job may have several, or of `dlrover run` there.
    environ = {"SLURM_JOB_ID": "12", **ours}
    assert own_memory_limit_bytes(environ, *place) == 0
    assert memory_limit_bytes(environ, *place) == 64 * MIB


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/pod\n", {"pod/cpu.max": "50000 100000\n"}),
        ("2:cpu,cpuacct:/pod\n", {"cpu/pod/cpu.cfs_quota_us": "50000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_a_quota_of_cpu_time_means_fewer_cores(own: str, files: dict[str, str], tmp_path: Path) -> None:
    assert available_cores(*group(tmp_path, own, files)) == 0.5


@pytest.mark.parametrize(
    "files", [{}, {"cpu.max": "max 100000\n"}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"}]
)
def test_without_a_quota_all_cores_of_the_affinity_count(files: dict[str, str], tmp_path: Path) -> None:
    assert available_cores(*group(tmp_path, "0::/\n1:cpu:/\n", files)) == len(os.sched_getaffinity(0))


def _touched(num_bytes: int) -> mmap.mmap:
    # No tensor: torch's threads are missing in a forked child, which would wait for them.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(num_bytes // MIB):  # piece by piece, so that the copy is never larger than one MiB
        memory.write(b"1" * MIB)
    return memory


def _hold(num_bytes: int, ready: Event, end: Event) -> None:
    with _touched(num_bytes):
        ready.set()
        end.wait(60)


@pytest.mark.parametrize(
    "own, folder, limit, used",
    [
        ("0::/\n", "", "memory.max", "memory.current"),  # a container that sees itself as the root
        ("0::/job_1/step_0/task_0\n", "job_1/", "memory.max", "memory.current"),  # created by Slurm
        ("4:memory:/job_1\n", "memory/job_1/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limits_of_all_control_groups_count(own: str, folder: str, limit: str, used: str, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(own)
    unlimited = resources.available_bytes(proc, cgroups)
    (cgroups / folder).mkdir(parents=True)
    (cgroups / folder / limit).write_text("max\n")
    (cgroups / folder / used).write_text("1000\n")
    assert resources.available_bytes(proc, cgroups) > unlimited / 2
    (cgroups / folder / limit).write_text("5000\n")
    assert resources.available_bytes(proc, cgroups) == 4000


def test_memory_that_a_child_shares_with_this_process_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []  # without those of other tests, which come and go
    monkeypatch.setattr(resources, "_children", lambda parents: children)
    context = multiprocessing.get_context("fork")
    shared = _touched(600 * MIB)
    ready, end = context.Event(), context.Event()
    with MemoryWatch(sample_s=0.02) as watch:
        alone = watch.take()
        child = context.Process(target=_hold, args=(300 * MIB, ready, end))
        gc.freeze()  # a collection writes to all objects and so ends their sharing
        child.start()
        assert child.pid is not None
        children.append(child.pid)
        try:
            assert ready.wait(60)
            wanted = alone.resident_bytes + 290 * MIB
            eventually(lambda: watch.take().resident_bytes >= wanted, "the child's memory", 30, 0.02)
            together = watch.take()
        finally:
            gc.unfreeze()
            end.set()
            child.join(60)
    assert 290 * MIB < together.resident_bytes - alone.resident_bytes < 550 * MIB
    assert together.peak_bytes >= together.resident_bytes
    assert len(shared) < alone.resident_bytes


BUSY = """
import time
while time.process_time() < 0.3:
    pass
print("done", flush=True)
time.sleep(600)
"""


def test_cpu_time_of_children_counts_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        with MemoryWatch(sample_s=0.01) as watch:
            eventually(lambda: child.pid in watch.children, "the child to be seen")
        monkeypatch.setattr(psutil, "Process", None)  # the training thread must not walk the machine's processes
        own, family = cpu_use(), cpu_use([child.pid, 2**22 + 1])
        child.kill()
    assert 0.25 <= family.cpu_s - own.cpu_s < 10.0
    assert own.cpu_s == pytest.approx(time.process_time(), abs=0.5)


def test_search_for_children_reads_each_process_of_the_machine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(pid: int, parent: int) -> Path:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        return tmp_path / str(pid)

    monkeypatch.setattr(resources, "PROC", tmp_path)  # a kernel that lists no children
    parents: dict[int, int] = {}
    own = show(100, os.getpid())
    show(200, 1)
    assert resources._children(parents) == [100]
    show(200, os.getpid())  # not read again
    assert resources._children(parents) == [100]
    shutil.rmtree(own)
    show(300, os.getpid())
    assert resources._children(parents) == [300]


def test_load_of_others_excludes_this_job() -> None:
    clock, busy = iter([0.0, 2.0, 4.0, 6.0]), iter([100.0, 103.0, 107.0, 107.5])
    load = MachineLoad(lambda: (next(busy), 0.0), lambda: next(clock), num_cores=4, cores=4.0, is_bound=False)
    assert [load.foreign_cores(0.5, num_workers) for num_workers in (2, 1, 2)] == [0.5, 1.5, 0.0]


@pytest.mark.parametrize(
    ("case", "on_cores", "in_group", "cores", "is_bound", "expected"),
    [
        ("others on the worker's cores", 3.0, 0.0, 4.0, True, 2.0),
        ("a quota, and cores enough for all", 50.0, 1.0, 4.0, False, 0.0),
        ("a quota on a full machine", 63.0, 1.0, 4.0, False, 1.0),
        ("others that use up the same quota", 5.0, 3.0, 4.0, False, 1.0),
    ],
)
def test_load_elsewhere_takes_no_core_from_the_job(
    case: str, on_cores: float, in_group: float, cores: float, is_bound: bool, expected: float
) -> None:
    """Two workers on the machine, each of which keeps one core busy."""
    clock, busy = iter([0.0, 1.0]), iter([(0.0, 0.0), (on_cores, in_group)])
    num_cores = 4 if is_bound else 64
    load = MachineLoad(lambda: next(busy), lambda: next(clock), num_cores, cores, is_bound, num_local_workers=1)
    assert load.foreign_cores(1.0, num_workers=2) == expected, case


def test_only_cores_of_this_process_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [SimpleNamespace(user=1000.0 * core, system=1.0) for core in range(4)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    assert _BusyTimes({1, 2})() == (3002.0, 0.0)
    assert _BusyTimes({1, 9})()[0] == 6004.0


def test_machine_is_busy_while_a_child_computes() -> None:
    load = MachineLoad()
    subprocess.run([sys.executable, "-c", BUSY.partition("print")[0]], check=True, timeout=60)
    assert load.foreign_cores(0.0) > 0.05


def test_cores_of_a_resized_node_are_seen_at_the_next_look() -> None:
    clock, available = ManualClock(), [2.0]
    cores = OwnCores({THREADS_PER_CORE: "1", WORKERS_PER_NODE: "2"}, lambda: available[0], clock)
    assert (cores.number, cores.threads_per_core, cores.is_due) == (2.0, 0.5, False)
    available[0] = 4.0
    clock.advance_s(CORES_S)
    assert (cores.is_due, cores.look(), cores.is_due) == (True, 4.0, False)
    assert cores.look() is None
    assert cores.look(planned=1) == 1.0  # before the node shrinks
    assert cores.look(planned=8) == 4.0
    assert OwnCores({}, lambda: 1.0).threads_per_core == 0.0


def test_load_of_other_cores_is_measured_from_the_start() -> None:
    before = os.sched_getaffinity(0)
    load = MachineLoad()
    found = [load.is_outdated]
    os.sched_setaffinity(0, {min(before)})
    try:
        found.append(load.is_outdated)
    finally:
        os.sched_setaffinity(0, before)
    assert found == [False, len(before) > 1]
