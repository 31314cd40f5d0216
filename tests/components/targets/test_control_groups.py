"""Memory limits of nodes: with the kernel's own control groups where they may be written, and the files of version 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.components.targets.machine import MemoryGroups, NoMemoryGroupsError
from lightning_dlrover.host import CGROUPS, cgroup_folders

MIB = 1 << 20


@pytest.fixture
def groups() -> Iterator[MemoryGroups]:
    try:
        made = MemoryGroups()
    except NoMemoryGroupsError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    yield made
    made.close()


def python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def allocate(group: Path, mib: int) -> subprocess.CompletedProcess[str]:
    """Run a process in `group` that allocates `mib` MiB."""
    source = f"""
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
held = bytearray({mib} << 20)
print("has it", flush=True)
"""
    return python(source, str(group))


def test_kernel_ends_a_process_above_the_limit_and_reports_it(groups: MemoryGroups) -> None:
    small, large = groups.create("node1", 64 * MIB), groups.create("node2", 512 * MIB)
    assert allocate(large, 200).stdout == "has it\n"
    assert groups.num_killed("node2") == 0
    assert allocate(small, 200).returncode == -9
    assert groups.num_killed("node1") == 1
    assert groups.num_killed("node2") == 0
    assert groups.num_killed("never heard of") == 0


def test_a_group_stays_until_its_last_process_has_ended(groups: MemoryGroups) -> None:
    folder = groups.create("node1", 64 * MIB)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (folder / "cgroup.procs").write_text(str(process.pid))
        assert not groups.remove("node1")
        assert folder.exists()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)
    groups.close()
    assert not folder.exists()
    assert groups.remove("node1")


def test_only_groups_of_killed_processes_are_removed(groups: MemoryGroups) -> None:
    kept = groups.create("node1", 64 * MIB)
    source = """
import os
from lightning_dlrover.components.targets.machine import MemoryGroups
print(MemoryGroups().create("node1", 64 << 20), flush=True)
os.kill(os.getpid(), 9)
"""
    left = python(source).stdout
    folder = Path(left.strip())
    assert folder.exists()
    MemoryGroups().close()
    assert not folder.exists()
    assert kept.exists()


def machine(tmp_path: Path, own: str, *groups: str, controllers: str = "cpu memory") -> tuple[Path, Path]:
    """Files as the kernel shows them with version 2, for a process in `own`."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::{own}\n")
    for name in (own, *groups):
        folder = tmp_path / "cgroup" / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(f"{controllers}\n")
        (folder / "cgroup.subtree_control").write_text("memory\n")
    return tmp_path / "proc", tmp_path / "cgroup"


def test_with_version_2_a_node_has_a_limit_and_may_not_swap(tmp_path: Path) -> None:
    place = machine(tmp_path, "/user/scope")
    folder = MemoryGroups(*place).create("node1", 64 * MIB)
    assert folder.parent == place[1] / "user/scope"
    assert (folder / "memory.max").read_text() == str(64 * MIB)
    assert (folder / "memory.swap.max").read_text() == "0"


def test_with_version_2_the_kernels_count_of_ended_processes_is_read(tmp_path: Path) -> None:
    groups = MemoryGroups(*machine(tmp_path, "/scope"))
    folder = groups.create("node1", 64 * MIB)
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 21\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert groups.num_killed("node1") == 2


def test_process_that_left_its_group_creates_siblings_not_children(tmp_path: Path) -> None:
    place = machine(tmp_path, f"/scope/dlrover-{os.getpid()}-controller", "/scope")
    assert MemoryGroups(*place).create("node1", 64 * MIB).parent == place[1] / "scope"


@pytest.mark.parametrize(
    ("controllers", "message"),
    [("cpu", "scope has no memory controller; it takes root, or `systemd-run --user --scope"), (None, "is mounted at")],
)
def test_reason_is_given_where_memory_cannot_be_limited(controllers: str | None, message: str, tmp_path: Path) -> None:
    place = machine(tmp_path, "/scope", controllers=controllers or "")
    if controllers is None:
        (place[0] / "self/cgroup").unlink()
    with pytest.raises(NoMemoryGroupsError, match=message):
        MemoryGroups(*place)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_missing_right_to_write_a_group_is_explained_with_a_remedy(groups: MemoryGroups) -> None:
    source = """
from lightning_dlrover.components.targets.machine import MemoryGroups
import os
os.setresuid(65534, 65534, 65534)
try:
    MemoryGroups()
except RuntimeError as error:
    print(error)
"""
    done = python(source)
    assert "cannot be divided: [Errno 13] Permission denied" in done.stdout, done.stderr
    assert "systemd-run --user --scope --property=Delegate=yes dlrover run" in done.stdout


@pytest.fixture
def scope() -> Iterator[tuple[Path, str]]:
    """An empty group of version 2, as systemd creates one, and the name of one of its controllers."""
    own = next((f for f in cgroup_folders("none") if (f / "cgroup.controllers").exists()), None)
    # Only the topmost group may have processes beside groups with controllers.
    above = own.parent if own is not None and (own.parent / "cgroup.controllers").exists() else own
    controllers = (above / "cgroup.controllers").read_text().split() if above is not None else []
    if above is None or not controllers or not os.access(above, os.W_OK):
        pytest.skip(f"no control group of version 2 with a controller may be written below {CGROUPS}")
    control = above / "cgroup.subtree_control"
    handed_on = control.read_text().split()
    controller = (handed_on or controllers)[0]
    control.write_text(f"+{controller}")
    folder = above / f"dlrover-test-{os.getpid()}"
    folder.mkdir()
    yield folder, controller
    for each in (*folder.glob("*/"), folder):
        each.rmdir()
    if not handed_on:
        control.write_text(f"-{controller}")


@pytest.mark.parametrize("with_a_stranger", [False, True])
def test_divider_of_a_v2_group_moves_out_if_it_is_alone_in_it(scope: tuple[Path, str], with_a_stranger: bool) -> None:
    folder, controller = scope
    source = f"""
import pathlib, subprocess, sys
from lightning_dlrover.components.targets.machine import (enable,)
from lightning_dlrover.host import (cgroup_folders,)
scope = pathlib.Path({str(folder)!r})
scope.joinpath("cgroup.procs").write_text("0")
with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
    try:
        enable(scope, {controller!r})
        enable(scope, {controller!r})
    except OSError as error:
        print(error)
    print(scope.joinpath("cgroup.subtree_control").read_text().split())
    print(pathlib.Path("/proc/self/cgroup").read_text() == pathlib.Path(f"/proc/{{child.pid}}/cgroup").read_text())
"""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        if with_a_stranger:
            (folder / "cgroup.procs").write_text(str(stranger.pid))
        done = python(source)
        expected = "[Errno 16] Device or resource busy\n[]\nTrue\n" if with_a_stranger else f"{[controller]}\nTrue\n"
        assert done.stdout == expected, done.stderr
        assert [each.name.endswith("-controller") for each in folder.glob("*/")] == [True] * (not with_a_stranger)
        assert stranger.stdin is not None
        stranger.stdin.close()


def test_process_in_a_group_may_take_more_after_its_limit_was_raised(groups: MemoryGroups) -> None:
    folder = groups.create("node1", 64 * MIB)
    source = f"""
import pathlib, sys
pathlib.Path({str(folder)!r}, "cgroup.procs").write_text("0")
input()
held = bytearray(200 << 20)
print("has it", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert groups.resize("node1", 512 * MIB) == ""
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has it\n"
        why = groups.resize("node1", 100 * MIB)  # the kernel would have to end it
        assert "MiB are in use" in why
        assert groups.num_killed("node1") == 0
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
    assert groups.resize("node1", 100 * MIB) == ""


def version_2(folder: Path, **values: str) -> tuple[MemoryGroups, Path]:
    """Groups of version 2 with node1, as files of a test: a kernel would give them these values."""
    groups = MemoryGroups.__new__(MemoryGroups)
    groups._own, groups._version, groups._folders = folder, 2, {}
    node = groups.create("node1", 1024 * MIB)
    for name, text in values.items():
        (node / name.replace("_", ".", 1)).write_text(text)
    return groups, node


def test_lower_limit_of_version_2_does_not_kill_what_is_in_use(tmp_path: Path) -> None:
    stat = f"anon {800 * MIB}\nactive_file {60 * MIB}\ninactive_file {40 * MIB}\n"
    groups, node = version_2(tmp_path, memory_current=str(900 * MIB), memory_stat=stat)
    assert groups.resize("node1", 850 * MIB) == "800 MiB are in use"
    assert (node / "memory.max").read_text() == str(1024 * MIB)
    assert groups.resize("node1", 900 * MIB) == ""  # the kernel drops pages of files
    assert (node / "memory.max").read_text() == str(900 * MIB)
    assert groups.resize("node1", 4096 * MIB) == ""


def test_node_without_a_group_cannot_be_resized(groups: MemoryGroups) -> None:
    with pytest.raises(FileNotFoundError, match="node1 has no control group of its own"):
        groups.resize("node1", 64 * MIB)
