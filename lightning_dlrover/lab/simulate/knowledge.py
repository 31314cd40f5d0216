"""A policy's knowledge of simulated jobs, learned while they run. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.lab.simulate.simulator import (
    GUESS_STEPS_PER_S,
    Cluster,
    ElasticWorkload,
    Family,
    SimulationOutcome,
    placement_of,
    simulate,
)
from lightning_dlrover.lab.simulate.traces import Placement, even_placement
from lightning_dlrover.tuning.cluster import Device, Floats, Job, Policy, Scaling, Speeds
from lightning_dlrover.tuning.samples import NORMAL_WIDTH, Columns, StepProfile, configuration_of
from lightning_dlrover.tuning.step_time import StepTimeModel

NOISE = 0.03
"""Standard deviation of the logarithm of a window's step time."""

GUESS_SPREAD = 1.0
"""Spread of the speeds that are assumed before the first window."""

KEPT_WINDOWS = 8
"""Newest windows of a placement that count. For a fit they are merged, as a job's are while nothing changes."""

FEW_PLACEMENTS = 4
"""Up to this number of placements, each new one triggers a fit. Beyond it, half as many more are needed."""


@dataclass(frozen=True, eq=False)
class ScalingTable:
    """Speeds by number of devices and of nodes; arrays of shape ``(max_devices + 1, num_nodes + 1)``. A `Scaling`."""

    steps_per_s: Floats
    spread: Floats

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        most_devices, most_nodes = self.steps_per_s.shape
        inside = (num_devices < most_devices) & (num_nodes < most_nodes)
        devices, nodes = np.where(inside, num_devices, 0), np.where(inside, num_nodes, 0)
        return Speeds(self.steps_per_s[devices, nodes], self.spread[devices, nodes])


@dataclass(frozen=True)
class _Grid:
    """Sizes that a family can have on a cluster, spread evenly; arrays of shape ``(num_sizes,)``."""

    shape: tuple[int, int]
    devices: NDArray[np.int_]
    nodes: NDArray[np.int_]

    @classmethod
    def of(cls, family: Family, cluster: Cluster) -> _Grid:
        most_nodes = min(family.max_devices, cluster.num_nodes)
        sizes = [
            (devices, nodes)
            for devices in range(1, family.max_devices + 1)
            for nodes in range(math.ceil(devices / cluster.per_node), min(devices, most_nodes) + 1)
        ]
        devices, nodes = np.array(sizes).T
        return cls((family.max_devices + 1, most_nodes + 1), devices, nodes)

    def placements(self) -> list[Placement]:
        return [even_placement(d, n) for d, n in zip(self.devices.tolist(), self.nodes.tolist(), strict=True)]

    def table(self, steps_per_s: Floats, spread: Floats) -> ScalingTable:
        table = ScalingTable(np.zeros(self.shape), np.zeros(self.shape))
        table.steps_per_s[self.devices, self.nodes] = steps_per_s
        table.spread[self.devices, self.nodes] = spread
        return table


class PerfectKnowledge:
    """Knows the real speed of every size: an oracle."""

    def __init__(self, families: Mapping[str, Family], cluster: Cluster) -> None:
        self._tables: dict[str, ScalingTable] = {}
        for name, family in families.items():
            grid = _Grid.of(family, cluster)
            speeds = np.array([family.steps_per_s(placement) for placement in grid.placements()])
            self._tables[name] = grid.table(speeds, np.zeros(len(speeds)))

    def ran(self, job: Job, devices: Sequence[Device]) -> None:
        """Do nothing: nothing remains to be learned."""

    def scaling(self, job: Job) -> Scaling:
        return self._tables[job.family]


@dataclass
class _Learned:
    """Windows of one family and the last fit; keys are (nodes, devices, fullest, emptiest)."""

    family: Family
    cluster: Cluster
    grid: _Grid
    columns: Columns
    windows: dict[tuple[int, int, int, int], list[StepProfile]] = field(default_factory=dict)
    merged: dict[tuple[int, int, int, int], StepProfile] = field(default_factory=dict)
    fitted_placements: int = 0
    fitted_windows: int = 0
    fitted: ScalingTable | None = None
    table: ScalingTable | None = None  # the last fit, with later measurements; None: out of date

    @classmethod
    def of(cls, family: Family, cluster: Cluster) -> _Learned:
        grid = _Grid.of(family, cluster)
        windows = [_window(placement, family.global_batch, 1.0, 0.0) for placement in grid.placements()]
        columns = Columns.of([configuration_of(window) for window in windows])
        return cls(family, cluster, grid, columns)

    def add(self, placement: Placement, rng: random.Random) -> None:
        time = self.family.application.step_time(placement, self.family.global_batch)
        factor = rng.lognormvariate(0, NOISE)
        window = _window(placement, self.family.global_batch, time.step_s * factor, time.sync_s * factor)
        key = len(placement), sum(placement), max(placement), min(placement)
        self.windows[key] = [*self.windows.get(key, ()), window][-KEPT_WINDOWS:]
        self.merged[key] = _merged(self.windows[key])
        self.table = None

    def scaling(self) -> ScalingTable:
        if self.table is None:
            if self.windows and (self.fitted is None or self._is_news()):
                self._fit()
            self.table = self._guess() if self.fitted is None else self._with_measured(self.fitted)
        return self.table

    def _is_news(self) -> bool:
        placements, windows = len(self.windows), sum(map(len, self.windows.values()))
        few = self.fitted_placements < FEW_PLACEMENTS
        enough = self.fitted_placements + (1 if few else self.fitted_placements // 2)
        return placements >= enough or windows >= 2 * self.fitted_windows

    def _fit(self) -> None:
        samples = list(self.merged.values())
        self.fitted_placements, self.fitted_windows = len(samples), sum(map(len, self.windows.values()))
        predicted = StepTimeModel.fit(samples).predict_columns(self.columns)
        spread = np.log(predicted.high_s / predicted.step_time_s) / NORMAL_WIDTH
        self.fitted = self.grid.table(1 / predicted.step_time_s, spread)

    def _with_measured(self, fitted: ScalingTable) -> ScalingTable:
        """Put the measurements at even placements in the place of predictions."""
        table = ScalingTable(fitted.steps_per_s.copy(), fitted.spread.copy())
        for (nodes, devices, fullest, emptiest), windows in self.windows.items():
            if fullest - emptiest > 1:
                continue
            table.steps_per_s[devices, nodes] = 1 / self.merged[nodes, devices, fullest, emptiest].step_time_s
            table.spread[devices, nodes] = NOISE / math.sqrt(len(windows))
        return table

    def _guess(self) -> ScalingTable:
        speeds = GUESS_STEPS_PER_S * np.minimum(self.grid.devices, self.cluster.per_node)
        return self.grid.table(speeds, np.full(len(speeds), GUESS_SPREAD))


# Jobs of one family share their knowledge, as jobs of one model share their history. Step times are fitted by the model
# that plans real jobs (`tuning`), which sees windows only at the placements that jobs have run on. Before the first window
# of a family, all that is assumed is a speed that grows linearly up to one node and no further, with a wide spread.
class LearnedKnowledge:
    """Learns the speed of each family from noisy windows of its jobs. Equal seeds and windows give equal knowledge."""

    def __init__(self, families: Mapping[str, Family], cluster: Cluster, seed: int = 0) -> None:
        self._families = {name: _Learned.of(family, cluster) for name, family in families.items()}
        self._rng = random.Random(seed)

    def ran(self, job: Job, devices: Sequence[Device]) -> None:
        """Observe one window of a job on its devices."""
        self._families[job.family].add(placement_of(devices), self._rng)

    def scaling(self, job: Job) -> Scaling:
        return self._families[job.family].scaling()


def _merged(windows: Sequence[StepProfile]) -> StepProfile:
    """Return one window with the geometric mean of the step times, divided into parts as the newest."""
    newest = windows[-1]
    step_s = math.exp(sum(math.log(window.step_time_s) for window in windows) / len(windows))
    factor = step_s / newest.step_time_s
    return replace(
        newest,
        step_time_s=step_s,
        forward_s=newest.forward_s * factor,
        communication_s=newest.communication_s * factor,
        samples_per_s=newest.samples_per_s / factor,
    )


def _window(placement: Placement, global_batch: int, step_s: float, sync_s: float) -> StepProfile:
    """Return the profiler's figures: the time of a step, and the part of it that synchronises."""
    devices = sum(placement)
    return StepProfile(
        worker_id="simulated",
        round_number=0,
        global_rank=0,
        num_workers=devices,
        num_nodes=len(placement),
        first_step=0,
        num_steps=1,
        global_batch=global_batch,
        local_batch=math.ceil(global_batch / devices),
        loader_workers=0,
        intra_op_threads=1,
        cores=1.0,
        device="gpu",
        step_time_s=step_s,
        data_wait_s=0.0,
        forward_s=step_s - sync_s,
        backward_s=0.0,
        communication_s=sync_s,
        optimizer_s=0.0,
        other_s=0.0,
        samples_per_s=global_batch / step_s,
        memory_bytes=0,
        cpu_percent=0.0,
        fullest_node=max(placement),
        emptiest_node=min(placement),
    )


def run_elastic(
    workload: ElasticWorkload, policy: Policy, *, every_s: float = 60.0, seed: int = 0, oracle: bool = False
) -> SimulationOutcome:
    """Simulate all jobs of a workload to their ends.

    Args:
        every_s: seconds between decisions, in addition to those when a job arrives or ends.
        seed: of the noise in windows.
        oracle: let the policy know the real speed of every job at every size.
    Raises:
        SimulationError: the policy exceeds a limit, or leaves jobs waiting forever.
    """
    families, cluster = workload.families, workload.cluster
    knowledge: PerfectKnowledge | LearnedKnowledge
    knowledge = PerfectKnowledge(families, cluster) if oracle else LearnedKnowledge(families, cluster, seed)

    def truth(job: Job, devices: Sequence[Device], others: object) -> float:
        return families[job.family].steps_per_s(placement_of(devices))

    return simulate(workload.arrivals, cluster.devices(), policy, truth, every_s=every_s, knowledge=knowledge)


def fairness_ratios(outcome: SimulationOutcome, workload: ElasticWorkload) -> Floats:
    """Return the finish-time fairness of each job, in the order of `outcome.finished` (Themis, Mahajan et al., NSDI 2020).

    It is the job's JCT over its JCT alone with a fair share. That share is the devices of the cluster over the mean number of
    jobs that were in the system during the job's life. Alone, the job has its best size within that share from its submission
    on. Above 1, sharing has made it slower than a partition of the cluster would have.

    Returns:
        Array of shape ``(num_jobs,)``.
    """
    finished = outcome.finished
    came = np.array([job.job.submitted_s for job in finished])
    ended = np.array([job.ended_s for job in finished])
    contention = _mean_in_system(came, ended)
    ratios = []
    for job, others in zip(finished, contention.tolist(), strict=True):
        family = workload.families[job.job.family]
        share = min(family.max_devices, max(1, int(outcome.num_devices / others)))
        fastest = max(family.steps_per_s(workload.cluster.packed(devices)) for devices in range(1, share + 1))
        ratios.append(job.completion_s / (job.job.start_s + job.steps / fastest))
    return np.array(ratios)


def _mean_in_system(came: Floats, ended: Floats) -> Floats:
    """Return the mean number of jobs in the system during the life of each."""
    times = np.concatenate([came, ended])
    changes = np.concatenate([np.ones(len(came)), -np.ones(len(ended))])
    order = np.argsort(times, kind="stable")
    times, present = times[order], np.cumsum(changes[order])
    job_seconds = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])
    total = np.interp(ended, times, job_seconds) - np.interp(came, times, job_seconds)
    mean: Floats = total / np.maximum(ended - came, 1e-9)
    return np.maximum(mean, 1.0)
