"""Linux control groups that this process belongs to, version 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from lightning_dlrover import variables

__all__ = ["CGROUPS", "CONTROLLER", "GROUP_NAME", "PROC", "cgroup_folders", "is_of_one_node"]

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

GROUP_NAME = re.compile(r"dlrover-(\d+)-(.+)")
"""Names of our groups: the id of the process that created it, and the name of its owner."""


CONTROLLER = "controller"
"""Last part of the name of the controller's own group."""


def cgroup_folders(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield this process's control group and its ancestors, version 2 and 1; the limits of all of them hold."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        roots = [cgroups / controllers, cgroups / controller] if controllers else [cgroups, cgroups / "unified"]
        for root in roots:
            # In a container the path may be the host's, while only its root is visible here.
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def is_of_one_node(folder: Path, environ: Mapping[str, str]) -> bool:
    """Return whether a control group holds processes of only one of the job's nodes: ours, or that of a node's Slurm job."""
    # Only a job that our controller submitted is certain to be one node: several may share one, as on this machine.
    is_slurms = variables.NODE in environ and variables.STARTED_BY not in environ
    slurm_job = f"job_{variables.slurm_job(environ)}" if is_slurms else ""
    names = ((name, GROUP_NAME.fullmatch(name)) for name in folder.parts)
    return any(name == slurm_job or (ours is not None and ours[2] != CONTROLLER) for name, ours in names)
