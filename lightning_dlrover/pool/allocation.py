"""Jobs that compete for the devices of one kind: all that a policy of sizes decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.policy import Floats, PolicySettings

__all__ = ["ChooseSizes", "Share", "SizePolicy"]

UNKNOWN_WORK_DEVICE_S = 600.0
"""Least expected work of a job with an unknown end, seconds times devices."""

SERVICE_STEP = 8.0
"""Factor between two levels of attained service."""


@dataclass(frozen=True)
class Share:
    """Jobs, in the order of their turns, and the number of devices to divide among them.

    Args:
        num_devices: that these jobs may have together.
        num_in_cluster: of this kind, all of them.
        per_node: devices of a node.
        present: devices that each job has now, shape ``(num_jobs,)``; 0: it waits.
        since_s: when it got these, shape ``(num_jobs,)``.
        floors: fewest devices to give to each job, shape ``(num_jobs,)``; 0 where it may wait.
        sizes: numbers of devices to choose from, ascending, beginning with 0, shape ``(num_sizes,)``.
        speeds: predicted steps/s, shape ``(num_jobs, num_sizes)``; 0 where a job cannot run.
        spreads: deviations of the logarithms of these speeds, of that shape.
    """

    now_s: float
    jobs: tuple[Job, ...]
    num_devices: int
    num_in_cluster: int
    per_node: int
    present: Ints
    since_s: Floats
    floors: Ints
    sizes: Ints
    speeds: Floats
    spreads: Floats
    settings: PolicySettings

    @cached_property
    def fewest(self) -> Ints:
        """Fewest devices with which each job runs."""
        return np.array([job.fewest_devices for job in self.jobs], dtype=np.int64)

    @cached_property
    def least(self) -> Ints:
        """Fewest devices to give to each job if it gets any, shape ``(num_jobs,)``."""
        return np.maximum(self.fewest, self.floors)

    @cached_property
    def most(self) -> Ints:
        """Most devices with which each job runs, within the cluster."""
        return np.array([min(job.most_devices, self.num_in_cluster) for job in self.jobs], dtype=np.int64)

    @cached_property
    def asked(self) -> Ints:
        """Devices that each user asked for, or the fewest of the job where the cluster has less."""
        wanted = np.array([job.num_devices for job in self.jobs], dtype=np.int64)
        return np.where(wanted <= self.num_in_cluster, wanted, self.fewest)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Where a job may have a size, waiting included, shape ``(num_jobs, num_sizes)``."""
        sizes = self.sizes[None, :]
        runs = (sizes >= self.least[:, None]) & (sizes <= self.most[:, None]) & (self.speeds > 0)
        return np.asarray(runs | ((sizes == 0) & (self.floors[:, None] == 0)))

    @cached_property
    def filling(self) -> NDArray[np.bool_]:
        """Allowed sizes that fill nodes: any within a node, whole nodes above, and the fewest devices of the job."""
        fills = (self.sizes <= self.per_node) | (self.sizes % self.per_node == 0)
        return np.asarray(self.allowed & (fills | (self.sizes == self.least[:, None])))

    @cached_property
    def fastest(self) -> Ints:
        """The smallest of the sizes in `filling` with which each job is fastest, shape ``(num_jobs,)``."""
        return np.asarray(self.sizes[np.where(self.filling, self.speeds, -1.0).argmax(axis=1)])

    @cached_property
    def steps_left(self) -> Floats:
        """Steps that each job has left, infinite where its end is unknown; shape ``(num_jobs,)``."""
        return np.array([np.inf if job.steps_left is None else max(job.steps_left, 1e-9) for job in self.jobs])

    @cached_property
    def most_efficient(self) -> Floats:
        """Best steps/s per device of each job over its sizes, shape ``(num_jobs,)``; 0 where it cannot run."""
        runs = (self.sizes >= self.fewest[:, None]) & (self.sizes <= self.most[:, None]) & (self.sizes > 0)
        return np.asarray(np.where(runs, self.speeds / np.maximum(self.sizes, 1), 0.0).max(axis=1))

    @cached_property
    def work_left(self) -> Floats:
        """Device seconds that each job has left at its most efficient size, shape ``(num_jobs,)``.

        A job of unknown length is expected to need as much again as it has had, as of lengths without a scale. What it has had
        counts in powers of `SERVICE_STEP`: jobs with about as much service would take turns without end otherwise.
        """
        served = np.array([max(job.served_device_s, UNKNOWN_WORK_DEVICE_S) for job in self.jobs])
        step = np.log(SERVICE_STEP)
        served = UNKNOWN_WORK_DEVICE_S * np.exp(step * np.floor(np.log(served / UNKNOWN_WORK_DEVICE_S) / step + 1e-9))
        known = self.steps_left / np.where(self.most_efficient > 0, self.most_efficient, 1e-300)
        return np.where(np.isfinite(self.steps_left), known, served)

    @cached_property
    def seconds_left(self) -> Floats:
        """Expected seconds to the end with each size, shape ``(num_jobs, num_sizes)``; infinite where a job cannot run."""
        runs = self.speeds > 0
        steps = self.work_left * self.most_efficient
        return np.where(runs, steps[:, None] / np.where(runs, self.speeds, 1.0), np.inf)

    @cached_property
    def weights(self) -> Floats:
        """Importance of each job, with that of its owner."""
        return np.array([job.weight for job in self.jobs])

    @cached_property
    def ages_s(self) -> Floats:
        """Seconds since each job was submitted."""
        return np.array([max(self.now_s - job.submitted_s, 0.0) for job in self.jobs])

    def columns_of(self, numbers: Ints) -> Ints:
        """Return the columns of numbers of devices; the next smaller size where one is not considered."""
        return np.asarray(np.searchsorted(self.sizes, numbers, side="right") - 1, dtype=np.int64)

    def speeds_at(self, numbers: Ints) -> Floats:
        """Return the predicted steps/s of each job with so many devices, shape ``(num_jobs,)``."""
        return np.asarray(self.speeds[np.arange(len(self.jobs)), self.columns_of(numbers)])

    def rows(self, indices: Sequence[int], num_devices: int) -> Share:
        """Return the share of some of the jobs, with other devices to divide."""
        some = list(indices)
        return Share(
            self.now_s,
            tuple(self.jobs[i] for i in some),
            num_devices,
            self.num_in_cluster,
            self.per_node,
            self.present[some],
            self.since_s[some],
            self.floors[some],
            self.sizes,
            self.speeds[some],
            self.spreads[some],
            self.settings,
        )


class ChooseSizes(Protocol):
    """A pure function: which job gets how many devices."""

    def __call__(self, share: Share, /) -> Ints:
        """Return the number of devices of each job, shape ``(num_jobs,)``; 0: it waits, or is paused.

        Their sum is at most `share.num_devices`, and each is allowed by `share.allowed`.
        """
        ...


@dataclass(frozen=True)
class SizePolicy:
    """A way to choose sizes, and the facts that its caller needs.

    Args:
        every_s: seconds between decisions in its paper. A running job with a change within them is left alone, so
            that a policy that is asked more often changes no job more often. None: it decides whenever it is asked.
        preempts: takes devices from running jobs for waiting ones. Otherwise it sees the jobs of all priorities at once, in
            the order of their turns, and starts none before those that come first could.
        rigid: gives a job the devices that were asked for, or none.
    """

    choose: ChooseSizes
    every_s: float | None = None
    preempts: bool = True
    rigid: bool = False
