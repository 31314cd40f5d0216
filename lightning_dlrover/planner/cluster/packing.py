"""An allocation while a policy builds it: workers on each device, and the room left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_dlrover.planner.cluster.jobs import HOST_RESOURCES, RESOURCES, Allocation, Device, Job, Profile, State
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Packing", "why_never"]


class Packing:
    """Starts with the running jobs, which stay where they are, and grows by `start`.

    Memory and places are hard: `start` refuses to exceed them. The limits of other resources are only asked for.
    """

    def __init__(self, state: State) -> None:
        self.devices = {device.name: device for device in state.devices}
        if len(self.devices) != len(state.devices):
            raise ValueError(f"two of the devices {sorted(d.name for d in state.devices)} have one name")
        self._workers: dict[str, list[Job]] = {name: [] for name in self.devices}
        self._used = dict.fromkeys(self.devices, 0)
        self._host_used: Counter[str] = Counter()  # host memory of workers on GPUs, by node
        self._use: defaultdict[tuple[str, str], float] = defaultdict(float)  # amounts by node or device, and resource
        self._hosts = {device.node: device for device in state.devices if device.is_host}
        self._host_limits: dict[tuple[str, str], float] = {}
        for device in state.devices:
            for resource in HOST_RESOURCES:
                if resource in device.limits:
                    self._host_limits[device.node, resource] = device.limits[resource]
        self._allocation: dict[str, tuple[str, ...]] = {}
        self._closed: set[str] = set()
        for running in state.running:
            self._enter(running.job, running.devices)

    @property
    def allocation(self) -> Allocation:
        return dict(self._allocation)

    def members(self, device: Device) -> tuple[Job, ...]:
        """The workers on a device; a job with two workers there appears twice."""
        return tuple(self._workers[device.name])

    def free_bytes(self, device: Device) -> int:
        """Memory of a device that no worker has."""
        return self._room(device) - self._used[device.name]

    def open_devices(self) -> list[Device]:
        """Devices with a free place that are not kept free for another job, in the order of the state."""
        return [d for d in self.devices.values() if d.name not in self._closed and len(self._workers[d.name]) < d.places]

    def close(self, devices: Iterable[Device]) -> None:
        """Let no more jobs start on these devices."""
        self._closed.update(device.name for device in devices)

    def fits(self, job: Job, device: Device, beside: Sequence[Job] = ()) -> bool:
        """Whether one worker fits there by memory and places, beside the workers present and those of `beside`."""
        workers = self._workers[device.name]
        if device.name in self._closed or len(workers) + len(beside) >= device.places:
            return False
        profile = job.profiles.get(device.kind)
        if profile is None or any(
            other.name != job.name and (job.exclusive or other.exclusive) for other in (*workers, *beside)
        ):
            return False
        profiles = (profile, *(other.profiles[device.kind] for other in beside))
        if sum(p.memory_bytes for p in profiles) > self.free_bytes(device):
            return False
        host = self._hosts.get(device.node)
        host_bytes = sum(p.host_memory_bytes for p in profiles)
        return host is None or host is device or not host_bytes or host_bytes <= self.free_bytes(host)

    def use_of_limits(self, jobs: Sequence[Job], device: Device, with_present: bool) -> Floats:
        """Return the fraction of each limit that jobs would use, in the order of `RESOURCES`; 0 where nothing is limited.

        Args:
            with_present: count the use of the workers on the device and its node.
        """
        used = np.zeros(len(RESOURCES))
        for index, resource in enumerate(RESOURCES):
            is_host = resource in HOST_RESOURCES
            limit = self._host_limits.get((device.node, resource)) if is_host else device.limits.get(resource)
            if limit:
                present = self._use[device.node if is_host else device.name, resource] if with_present else 0.0
                used[index] = (present + sum(job.profiles[device.kind].use.get(resource, 0.0) for job in jobs)) / limit
        return used

    def start(self, job: Job, devices: Sequence[Device]) -> None:
        """Give a waiting job its devices.

        Raises:
            ValueError: the job runs already, or one of the devices has no room for it.
        """
        if job.name in self._allocation:
            raise ValueError(f"job {job.name!r} runs on {self._allocation[job.name]} already")
        for device, workers in Counter(d.name for d in devices).items():
            if not self.fits(job, self.devices[device], (job,) * (workers - 1)):
                raise ValueError(f"{workers} workers of job {job.name!r} do not fit on device {device!r}")
        self._enter(job, tuple(device.name for device in devices))

    def _enter(self, job: Job, names: Sequence[str]) -> None:
        self._allocation[job.name] = tuple(names)
        for name in names:
            device = self.devices.get(name)
            if device is None:
                raise ValueError(f"job {job.name!r} runs on device {name!r}, which is not among {sorted(self.devices)}")
            profile = _profile(job, device)
            self._workers[name].append(job)
            self._used[name] += profile.memory_bytes
            self._host_used[device.node] += profile.host_memory_bytes
            for resource, amount in profile.use.items():
                self._use[_scope(device, resource), resource] += amount

    def _room(self, device: Device) -> int:
        """Bytes that the workers on a device may have together."""
        return device.memory_bytes - (self._host_used[device.node] if device.is_host else 0)


def why_never(job: Job, devices: Sequence[Device]) -> str | None:
    """Return why a job could not start even if all devices were free; None if it could."""
    kinds = sorted({device.kind for device in devices})
    suitable = [device for device in devices if device.kind in job.profiles]
    if not suitable:
        return (
            f"job {job.name!r} runs on {', '.join(sorted(job.profiles))}, and there are only {', '.join(kinds) or 'no devices'}"
        )
    large = [d for d in suitable if job.profiles[d.kind].memory_bytes <= d.memory_bytes]
    if not large:
        need, most = min(p.memory_bytes for p in job.profiles.values()), max(d.memory_bytes for d in suitable)
        return f"a worker of job {job.name!r} needs {need / 1e9:.2f} GB, and the largest device has {most / 1e9:.2f} GB"
    most_of_kind = max(Counter(device.kind for device in large).values())
    if most_of_kind < job.fewest_devices:
        return f"job {job.name!r} needs {job.fewest_devices} devices of one kind, and {most_of_kind} are large enough"
    return None


def _profile(job: Job, device: Device) -> Profile:
    try:
        return job.profiles[device.kind]
    except KeyError:
        raise ValueError(f"job {job.name!r} has no profile for {device.kind!r}, the kind of device {device.name!r}") from None


def _scope(device: Device, resource: str) -> str:
    """The owner of a resource's limit: the node or the device."""
    return device.node if resource in HOST_RESOURCES else device.name
