"""One Linux control group with a memory limit for each node that this process starts; version 1 and 2.

A group of a node's own lies below that of the process that starts nodes, so the limits above it hold as before. In it are all
of the node's processes; it stays until they have ended.
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
"""From the end of a group's last process, as others see it, until the kernel lets go of the group."""


class NoMemoryGroupsError(RuntimeError):
    """Memory of nodes cannot be limited here; says why, and what would help."""


class MemoryGroups:
    """Makes and removes control groups that limit the memory of nodes.

    Args:
        proc: where the kernel shows processes.
        cgroups: where it shows control groups.

    Raises:
        NoMemoryGroupsError: none can be made.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._own, self._version = _own_group(proc, cgroups)
        self._folders: dict[str, Path] = {}  # by node
        try:
            if self._version == 2:
                enable(self._own, "memory")
            self._remove_leftovers()
            self.create("attempt", 1 << 40)
            self.remove("attempt")
        except OSError as error:
            raise NoMemoryGroupsError(f"control group {self._own} cannot be divided: {error}; {_WAY_OUT}") from error

    def create(self, node: str, limit_bytes: int) -> Path:
        """A group for a node's processes; its first one has to write its id to the file `cgroup.procs` there.

        Raises:
            OSError: the kernel does not let us.
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
        # A worker that swaps holds up all others for longer than one that is replaced.
        with suppress(OSError):  # a kernel without swap has no such file
            (folder / with_swap).write_text(str(limit_bytes if self._version == 1 else 0))
        return folder

    def num_killed(self, node: str) -> int:
        """Processes of a node that the kernel has ended because the node has reached its limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        with suppress(OSError, ValueError, KeyError):
            for line in (self._folders[node] / file).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def remove(self, node: str) -> bool:
        """Remove a node's group, if there is one; False while a process is in it."""
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
        """Remove what is left, once all nodes have ended."""
        deadline = time.monotonic() + _EMPTY_S
        while left := [node for node in list(self._folders) if not self.remove(node)]:
            if time.monotonic() > deadline:
                log.warning("control groups of %s have processes in them, and stay for now", ", ".join(left))
                return
            time.sleep(0.02)

    def _remove_leftovers(self) -> None:
        """Those of processes that were killed before they could."""
        for folder in self._own.iterdir():
            match = GROUP_NAME.fullmatch(folder.name)
            if match is not None and not psutil.pid_exists(int(match[1])):
                with suppress(OSError):
                    folder.rmdir()


def _own_group(proc: Path, cgroups: Path) -> tuple[Path, int]:
    """The group of this process that limits memory, and its version.

    Raises:
        NoMemoryGroupsError: there is none.
    """
    reason = f"no control group with a memory controller is mounted at {cgroups}"
    for folder in cgroup_folders("memory", proc, cgroups):
        if (folder / "memory.limit_in_bytes").exists():
            return folder, 1
        with suppress(OSError):
            if "memory" in (folder / "cgroup.controllers").read_text().split():
                # One that we have moved into is no place for others.
                moved = (match := GROUP_NAME.fullmatch(folder.name)) is not None and match[2] == CONTROLLER
                return folder.parent if moved else folder, 2
            reason = f"control group {folder} has no memory controller"
            break  # those above it are not ours
    raise NoMemoryGroupsError(f"{reason}; {_WAY_OUT}")


def enable(group: Path, controller: str) -> None:
    """Let groups below one of version 2 have limits of their own.

    The kernel wants no processes in a group that has such groups below it. If all in it are ours, they move into a group of
    their own, where they stay: `group` may not take them back.

    Raises:
        OSError: the kernel does not let us.
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
