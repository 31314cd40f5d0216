"""Limits of a pod's processes: its control groups for CPU time and memory, as a kubelet sets them. Versions 1 and 2."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from lightning_dlrover.components.targets.machine import enable
from lightning_dlrover.host import cgroup_folders

PERIOD_US = 100_000


def why_not() -> str:
    """Return why pods cannot be limited here; empty if they can."""
    try:
        PodLimits("attempt").remove()
    except OSError as error:
        return f"control groups cannot be written here: {error}"
    return ""


class PodLimits:
    """The control groups of one pod.

    Raises:
        OSError: they cannot be created.
    """

    def __init__(self, pod: str) -> None:
        self.folders: dict[str, Path] = {}
        for controller in ("cpu", "memory"):
            parent = next((each for each in cgroup_folders(controller) if (each / "cgroup.procs").exists()), None)
            if parent is None:
                raise FileNotFoundError(f"no control group has a controller for {controller}")
            if (parent / "cgroup.subtree_control").exists():
                enable(parent, controller)
            folder = parent / f"kubepod-{os.getpid()}-{pod}"
            folder.mkdir(exist_ok=True)
            self.folders[controller] = folder

    def enter(self) -> None:
        """Move this process into the groups; call it in a child before it becomes the pod's first process."""
        for folder in self.folders.values():
            (folder / "cgroup.procs").write_text("0")

    def used_bytes(self) -> int:
        return int(self._memory("memory.current", "memory.usage_in_bytes").read_text())

    def num_killed(self) -> int:
        """Return how many processes the kernel has killed because the pod reached its limit."""
        lines = self._memory("memory.events", "memory.oom_control").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def set_cpus(self, cpus: float) -> None:
        folder, quota_us = self.folders["cpu"], round(cpus * PERIOD_US)
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def set_memory(self, limit_bytes: int) -> None:
        self._memory("memory.max", "memory.limit_in_bytes").write_text(str(limit_bytes))

    def remove(self) -> None:
        """Remove the groups once their processes have ended, which takes the kernel a moment."""
        deadline = time.monotonic() + 2.0
        for folder in self.folders.values():
            while folder.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.02)

    def _memory(self, *names: str) -> Path:
        return next(file for name in names if (file := self.folders["memory"] / name).exists())
