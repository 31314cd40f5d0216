"""Shares of this machine for each node: cores, memory and GPUs, enforced by the system.

`MachineShares` assigns the shares, and `MemoryGroups` enforces memory limits with control groups.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from lightning_dlrover import variables
from lightning_dlrover.components.targets.target import NodeSize, NotTakenError, thread_variables
from lightning_dlrover.host import CGROUPS, CONTROLLER, GROUP_NAME, PROC, cgroup_folders

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

_LIST_S = 30.0
_DEVICE = re.compile(r"\s*(GPU|MIG)\b.*\(UUID: ([^)\s]+)\)")


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """Return GPU names in the format of `CUDA_VISIBLE_DEVICES`: those in the variable, else all that the driver lists.

    CUDA is not initialized.
    """
    if DEVICES_VARIABLE not in environ:
        try:
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return []  # no driver, or an unresponsive one: CUDA would find no device either
        return devices_in(done.stdout)
    found: list[str] = []
    for name in (each.strip() for each in environ[DEVICES_VARIABLE].split(",")):
        # CUDA ignores everything after the first malformed name.
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        found.append(name)
    return list(dict.fromkeys(found))


def devices_in(listing: str) -> list[str]:
    """Return the UUIDs in the output of `nvidia-smi -L`. A GPU divided into MIG instances is replaced by its instances."""
    found: list[tuple[str, str]] = []  # kind and UUID
    for match in filter(None, map(_DEVICE.match, listing.splitlines())):
        if match[1] == "MIG" and found and found[-1][0] == "GPU":
            found.pop()  # the first instance follows its GPU
        found.append((match[1], match[2]))
    return [uuid for _, uuid in found]


class NothingFreeError(RuntimeError):
    """Too few devices are free for a node."""


@dataclass(frozen=True)
class Share:
    """Cores and devices of one node."""

    cores: tuple[int, ...] = ()  # ascending; empty: bound to no core
    devices: tuple[str, ...] = ()  # owned exclusively


class Allocation:
    """Cores and devices by owning node. Pure: the same calls in the same order give the same shares.

    Cores are exclusive while enough are free. After that, nodes share those with the fewest users. Devices are never shared.

    Args:
        cores: numbers of the usable cores.
        devices: names of the usable devices, in the order of assignment.
    """

    def __init__(self, cores: Sequence[int], devices: Sequence[str] = ()) -> None:
        self._cores = sorted(cores)
        self._devices = list(dict.fromkeys(devices))
        self._shares: dict[str, Share] = {}

    def take(self, node: str, num_cores: int = 0, num_devices: int = 0, usable: Collection[str] | None = None) -> Share:
        """Give a node cores and devices; all cores if it requests more than exist.

        Args:
            usable: names of the only devices that it may have; None: any.

        Raises:
            NothingFreeError: too few devices are free; nothing was assigned.
            ValueError: the node has a share already.
        """
        if node in self._shares:
            raise ValueError(f"{node} has {self._shares[node]} already")
        free = [each for each in self.free_devices if usable is None or each in usable]
        if num_devices > len(free):
            owners = [owner for owner, share in self._shares.items() if share.devices]
            others = f"; {', '.join(owners)} {'have' if len(owners) > 1 else 'has'} the others" if owners else ""
            raise NothingFreeError(f"{node} needs {num_devices} GPUs, and {len(free)} of {len(self._devices)} are free{others}")
        self._shares[node] = Share(self._least_used(num_cores, self._use()), tuple(free[:num_devices]))
        return self._shares[node]

    def resize(self, node: str, num_cores: int) -> Share:
        """Change a node's number of cores, and return its new share. It keeps the cores that it has, as far as possible."""
        former = self._shares[node]
        use = self._use()
        use.subtract(former.cores)
        # Fewer cores are among those it has: others are not disturbed.
        able = former.cores if 0 < num_cores < len(former.cores) else self._cores
        ordered = sorted(able, key=lambda core: (use[core], core not in former.cores, core))
        self._shares[node] = Share(tuple(sorted(ordered[:num_cores])), former.devices)
        return self._shares[node]

    @property
    def free_devices(self) -> list[str]:
        """Devices that no node has."""
        taken = {device for share in self._shares.values() for device in share.devices}
        return [device for device in self._devices if device not in taken]

    def share(self, node: str) -> Share:
        """Return a node's share, empty if it has none."""
        return self._shares.get(node, Share())

    def give_back(self, node: str) -> Share:
        """Take back a node's share. Return it, empty if it has none."""
        return self._shares.pop(node, Share())

    def spread(self) -> dict[str, Share]:
        """Move nodes that share cores to less used ones where possible. Return the changed shares."""
        changed = {}
        for node, share in reversed(self._shares.items()):  # newest first, so that the oldest node keeps its cores
            use = self._use()
            use.subtract(share.cores)
            cores = self._least_used(len(share.cores), use, share.cores)
            if sum(use[core] for core in cores) < sum(use[core] for core in share.cores):
                changed[node] = Share(cores, share.devices)
                self._shares[node] = changed[node]
        return changed

    def shared_cores(self, node: str) -> tuple[int, ...]:
        """Return the cores of a node that other nodes use, too."""
        use = self._use()
        return tuple(core for core in self._shares.get(node, Share()).cores if use[core] > 1)

    def _least_used(self, num_cores: int, use: Counter[int], rather: Collection[int] = ()) -> tuple[int, ...]:
        ordered = sorted(self._cores, key=lambda core: (use[core], core not in rather, core))
        return tuple(sorted(ordered[:num_cores]))

    def _use(self) -> Counter[int]:
        return Counter(core for share in self._shares.values() for core in share.cores)


log = logging.getLogger(__name__)

_WAY_OUT = "it takes root, or `systemd-run --user --scope --property=Delegate=yes dlrover run ...`"

_MAX_USED = 0.9
"""Share of a lower memory limit that may be in use when it is set."""

_EMPTY_S = 2.0
"""Seconds to wait for the kernel to release a group after its last process has visibly ended."""


class NoMemoryGroupsError(RuntimeError):
    """Nodes' memory cannot be limited here; the message gives the reason and a remedy."""


class MemoryGroups:
    """Linux control groups that limit the memory of nodes, versions 1 and 2.

    Each group is a child of the group of the process that starts nodes, so all limits above it still apply. It contains all
    processes of its node, and exists until they have ended.

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
        is_v2 = self._version == 2
        folder = self._own / f"dlrover-{os.getpid()}-{node}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        self._folders[node] = folder
        try:
            (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        except OSError:
            self.remove(node)
            raise
        # A swapping worker holds up all others for longer than a replacement would.
        with suppress(OSError):  # a kernel without swap has no such file
            file, swap_bytes = ("memory.swap.max", 0) if is_v2 else ("memory.memsw.limit_in_bytes", limit_bytes)
            (folder / file).write_text(str(swap_bytes))
        return folder

    def resize(self, node: str, limit_bytes: int) -> str:
        """Change the limit of a node's group. Return why it could not be lowered; empty if it was changed.

        Raises:
            OSError: the kernel refuses, or the node has no group.
        """
        if (folder := self._folders.get(node)) is None:
            raise FileNotFoundError(f"{node} has no control group of its own")
        if self._version == 2:
            is_lower = limit_bytes < int((folder / "memory.max").read_text())
            # The kernel would kill processes above a lower limit, and what they use may grow in the meantime.
            if is_lower and (used := _unreclaimable_bytes(folder)) > _MAX_USED * limit_bytes:
                return f"{used >> 20} MiB are in use"
            (folder / "memory.max").write_text(str(limit_bytes))
            return ""
        files = [folder / "memory.limit_in_bytes", folder / "memory.memsw.limit_in_bytes"]
        former_bytes = int(files[0].read_text())
        is_lower = limit_bytes < former_bytes
        # The limit with swap must never be below the other one. A kernel without swap has no such file.
        for file in filter(Path.exists, files if is_lower else reversed(files)):
            try:
                file.write_text(str(limit_bytes))
            except OSError as error:
                if not is_lower or error.errno != errno.EBUSY:
                    raise
                with suppress(OSError):  # where only the limit with swap could not be lowered, the node would swap from now on
                    files[0].write_text(str(former_bytes))
                return f"{int((folder / 'memory.usage_in_bytes').read_text()) >> 20} MiB are in use"
        return ""

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
        if node in self._folders:
            try:
                with suppress(FileNotFoundError):
                    self._folders[node].rmdir()
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


def _unreclaimable_bytes(folder: Path) -> int:
    """Return the memory of a version 2 group without the pages of files, which the kernel can drop."""
    words = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(value) for name, value in words if name in ("active_file", "inactive_file"))
    return max(0, int((folder / "memory.current").read_text()) - cached)


def _own_group(proc: Path, cgroups: Path) -> tuple[Path, int]:
    """Return this process's group with a memory controller, and its cgroup version; raise NoMemoryGroupsError without one."""
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


class Claims(Protocol):
    """The GPUs that this job may use of those that it shares with other jobs."""

    def take(self, gpus: Sequence[str], number: int, /) -> list[str]:
        """Claim the first ones that no other job has, `number` at most; return them."""

    def give_back(self, gpus: Collection[str], /) -> None:
        """Release them to other jobs."""

    def holders(self, gpus: Sequence[str], /) -> str:
        """Name the jobs that have these GPUs."""


class MachineShares:
    """Give nodes cores, memory and GPUs, and take them back.

    Where the system does not allow memory limits, a warning is logged once and nodes run without a limit.

    Args:
        gpus: GPUs that each node owns exclusively; 0: all nodes share every GPU visible to this process.
        workers_per_node: workers that share a node's cores.
        claims: None: no other job uses the GPUs that this process sees.
    """

    def __init__(self, gpus: int, workers_per_node: int = 1, claims: Claims | None = None) -> None:
        self._gpus = gpus
        self._claims = claims
        self._workers_per_node = workers_per_node
        self._allocation = Allocation(sorted(os.sched_getaffinity(0)), visible_devices(os.environ) if gpus else ())
        self._groups: MemoryGroups | None = None
        self._limits_mb: dict[str, int] = {}  # MiB, of nodes with a control group
        self._ended: set[str] = set()  # nodes that still hold a part of their share
        self._warned: set[str] = set()  # topics of the warnings already logged

    @property
    def awaits(self) -> bool:
        """Whether nodes that have ended still hold a part of their share."""
        return bool(self._ended)

    def take(self, node: str, size: NodeSize) -> tuple[tuple[int, ...], Mapping[str, str]]:
        """Return cores and environment variables for a node limited to a share of `size`. No cores: it may use any.

        Raises:
            NotTakenError: too few GPUs are free; nothing was assigned.
        """
        try:
            share = self._allocation.take(node, size.cpus, self._gpus, self._claimed(node))
        except NothingFreeError as error:
            raise NotTakenError(str(error)) from error
        try:
            group = self._memory_group(node, size.memory_mb)
        except OSError as error:
            self._give_back(node)
            raise NotTakenError(f"{node} cannot be given a control group with {size.memory_mb} MiB: {error}") from error
        self._warn_of_fewer(share.cores, size)
        if shared := self._allocation.shared_cores(node):
            cores = f"core{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared))}"
            self._warn_once("cores", f"too few cores are free for {node}: it shares {cores} with other nodes until some are")
        # More threads than cores would slow each other down. Nodes without cores of their own compete, so each is limited to
        # one thread.
        exported = thread_variables(len(share.cores), self._workers_per_node)
        if share.devices:
            exported[DEVICES_VARIABLE] = ",".join(share.devices)
        if group is not None:
            exported[variables.MEMORY_GROUP] = str(group)
        return share.cores, exported

    def resize(self, node: str, size: NodeSize) -> tuple[tuple[int, ...], str]:
        """Change a node's share. Return its cores, and why it could not be changed; empty if it was.

        Memory comes first: nothing else has changed if it is refused.
        """
        limit_mb = self._limits_mb.get(node, 0)
        if size.memory_mb and size.memory_mb != limit_mb and "memory" not in self._warned:
            try:
                why = self._groups.resize(node, size.memory_mb << 20) if self._groups else "its memory is not limited"
            except OSError as error:
                why = f"the kernel refuses: {error}"
            if why:
                return self._allocation.share(node).cores, why
            self._limits_mb[node] = size.memory_mb
        if not size.cpus:
            return self._allocation.share(node).cores, ""
        cores = self._allocation.resize(node, size.cpus).cores
        self._warn_of_fewer(cores, size)
        if shared := self._allocation.shared_cores(node):
            names = f"core{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared))}"
            log.warning("too few cores are free for a larger %s: it shares %s with other nodes until some are", node, names)
        return cores, ""

    def end(self, node: str) -> None:
        """Record that a node has ended; some of its processes may still run."""
        self._ended.add(node)

    def settle(self, left: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Take back the shares of ended nodes, except those in `left`, which still have running processes.

        Returns:
            New cores of each node that shared some and now moves to others, by node.
        """
        for node in self._ended - {*left}:
            if self._groups is None or self._groups.remove(node):
                self._give_back(node)
                self._limits_mb.pop(node, None)
                self._ended.discard(node)
        return {node: share.cores for node, share in self._allocation.spread().items()}

    def why_killed(self, node: str) -> str:
        """Return the reason why the kernel killed a process of a node; empty if it did not."""
        if self._groups is None or not self._groups.num_killed(node):
            return ""
        return f"out of memory (limit {self._limits_mb[node]} MiB)"

    def close(self) -> None:
        """Remove the control groups after all nodes have ended."""
        if self._groups is not None:
            self._groups.close()

    def _claimed(self, node: str) -> list[str] | None:
        """Return GPUs for a node that no other job has; None: any. Raise NothingFreeError if there are too few."""
        if self._claims is None or not self._gpus:
            return None
        free = self._allocation.free_devices
        claimed = self._claims.take(free, self._gpus)
        if len(claimed) < self._gpus <= len(free):
            others = self._claims.holders([gpu for gpu in free if gpu not in claimed])
            self._claims.give_back(claimed)
            raise NothingFreeError(f"{node} needs {self._gpus} GPUs, and {len(claimed)} are free on this machine: {others}")
        return claimed

    def _give_back(self, node: str) -> None:
        share = self._allocation.give_back(node)
        if self._claims is not None:
            self._claims.give_back(share.devices)

    def _memory_group(self, node: str, limit_mb: int) -> Path | None:
        """Create the node's control group; return None if its memory is not limited."""
        if not limit_mb or "memory" in self._warned:
            return None
        try:
            self._groups = self._groups or MemoryGroups()
        except NoMemoryGroupsError as error:
            self._warn_once("memory", f"nodes run without a memory limit: {error}")
            return None
        self._limits_mb[node] = limit_mb
        return self._groups.create(node, limit_mb << 20)

    def _warn_of_fewer(self, cores: Collection[int], size: NodeSize) -> None:
        if 0 < len(cores) < size.cpus:
            self._warn_once("size", f"nodes ask for {size.cpus} cores, and get the {len(cores)} that there are")

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("%s", text)
