"""One Linux control group with a memory limit for each node that this process starts; cgroup versions 1 and 2.

Each group is a child of the group of the process that starts nodes, so all limits above it still apply. It contains all
processes of its node, and exists until they have ended.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_dlrover.observe.cgroups import CGROUPS, CONTROLLER, GROUP_NAME, PROC, cgroup_folders

__all__ = ["MemoryGroups", "NoMemoryGroupsError", "enable"]

log = logging.getLogger(__name__)


_WAY_OUT = "it takes root, or `systemd-run --user --scope --property=Delegate=yes dlrover run ...`"

_EMPTY_S = 2.0
"""Seconds to wait for the kernel to release a group after its last process has visibly ended."""


class NoMemoryGroupsError(RuntimeError):
    """Nodes' memory cannot be limited here; the message gives the reason and a remedy."""


class MemoryGroups:
    """Create and remove control groups that limit the memory of nodes.

    Args:
        proc: mount point of the kernel's process information.
        cgroups: mount point of the control groups.

    Raises:
        NoMemoryGroupsError: no group can be created.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._own, self._version = _own_group(proc, cgroups)
        self._folders: dict[str, Path] = {}  # key: node
        try:
            if self._version == 2:
                enable(self._own, "memory")
            self._remove_leftovers()
            self.create("attempt", 1 << 40)
            self.remove("attempt")
        except OSError as error:
            raise NoMemoryGroupsError(f"control group {self._own} cannot be divided: {error}; {_WAY_OUT}") from error

    def create(self, node: str, limit_bytes: int) -> Path:
        """Create a group for a node's processes. The first of them must write its process id to the file `cgroup.procs` there.

        Raises:
            OSError: the kernel refuses.
        """
        folder = self._own / f"dlrover-{os.getpid()}-{node}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        self._folders[node] = folder
        limit, with_swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        if self._version == 2:
            limit, with_swap = ("memory.max", "memory.swap.max")
        try:
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            self.remove(node)
            raise
        # A swapping worker holds up all others for longer than a replacement would.
        with suppress(OSError):  # a kernel without swap has no such file
            (folder / with_swap).write_text(str(limit_bytes if self._version == 1 else 0))
        return folder

    def num_killed(self, node: str) -> int:
        """Return how many of a node's processes the kernel has killed because the node reached its limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        with suppress(OSError, ValueError, KeyError):
            for line in (self._folders[node] / file).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def remove(self, node: str) -> bool:
        """Remove a node's group, if it has one; False while a process is in it."""
        folder = self._folders.get(node)
        if folder is not None:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
            del self._folders[node]
        return True

    def close(self) -> None:
        """Remove the remaining groups after all nodes have ended."""
        deadline = time.monotonic() + _EMPTY_S
        while left := [node for node in list(self._folders) if not self.remove(node)]:
            if time.monotonic() > deadline:
                log.warning("control groups of %s have processes in them, and stay for now", ", ".join(left))
                return
            time.sleep(0.02)

    def _remove_leftovers(self) -> None:
        """Remove groups of processes that were killed before their own cleanup."""
        for folder in self._own.iterdir():
            match = GROUP_NAME.fullmatch(folder.name)
            if match is not None and not psutil.pid_exists(int(match[1])):
                with suppress(OSError):
                    folder.rmdir()


def _own_group(proc: Path, cgroups: Path) -> tuple[Path, int]:
    """Return this process's group with a memory controller, and its cgroup version.

    Raises:
        NoMemoryGroupsError: there is none.
    """
    reason = f"no control group with a memory controller is mounted at {cgroups}"
    for folder in cgroup_folders("memory", proc, cgroups):
        if (folder / "memory.limit_in_bytes").exists():
            return folder, 1
        with suppress(OSError):
            if "memory" in (folder / "cgroup.controllers").read_text().split():
                # A group that this process has moved into cannot have child groups with limits.
                moved = (match := GROUP_NAME.fullmatch(folder.name)) is not None and match[2] == CONTROLLER
                return folder.parent if moved else folder, 2
            reason = f"control group {folder} has no memory controller"
            break  # groups further up are not ours
    raise NoMemoryGroupsError(f"{reason}; {_WAY_OUT}")


def enable(group: Path, controller: str) -> None:
    """Allow child groups of a version 2 group to have limits of their own.

    The kernel allows no processes in a group with such children. If all processes in it are ours, they move into a child
    group of their own. They stay there because `group` may not accept them again.

    Raises:
        OSError: the kernel refuses.
    """
    control = group / "cgroup.subtree_control"
    if controller in control.read_text().split():
        return
    try:
        control.write_text(f"+{controller}")
        return
    except OSError as error:
        family = {process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))}
        inside = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        if error.errno != errno.EBUSY or not inside <= family:
            raise
    own = group / f"dlrover-{os.getpid()}-{CONTROLLER}"
    own.mkdir()
    for pid in inside:
        with suppress(ProcessLookupError):
            (own / "cgroup.procs").write_text(str(pid))
    control.write_text(f"+{controller}")
