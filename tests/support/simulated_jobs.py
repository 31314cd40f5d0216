"""Jobs with a known truth, for the planner to drive: step times in any settings, and noisy windows of them.

The truth differs from the model: it has a maximum where the model has sums, spinning threads, loader workers that take cores
from training only while they are busy, and a memory bus that all workers of a node share.
"""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_dlrover.rdzv.job.records import PlanRecord
from lightning_dlrover.tuning.candidates import PlanRequest
from lightning_dlrover.tuning.plan import Decision, Limits, Settings, tunable_axes
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile
from tests.support.windows import WINDOW

Planner = Callable[[PlanRequest, Limits, int], Decision]

WINDOW_S = 2.0


@dataclass(frozen=True)
class Parts:
    data_s: float
    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s


@dataclass(frozen=True)
class Truth:
    """One kind of job on one node."""

    name: str
    node_cores: int
    global_batch: int
    sample_s: float  # core seconds of forward and backward for one sample
    parallel_share: float  # fraction of `sample_s` that threads speed up
    overhead_s: float  # seconds of overhead per step
    load_s: float  # core seconds to prepare one sample
    fetch_s: float = 0.0  # seconds of waiting per sample before it is prepared, without a core
    bus_s: float = 0.0  # seconds for a sample's table rows, on the memory bus that all workers of the node share
    dense_bytes: int = 4_000_000
    link_bytes_per_s: float = 1.5e9
    latency_s: float = 3e-4
    embedding_bytes: int = 0
    lookups_per_sample: float = 0.0

    def parts(self, settings: Settings) -> Parts:
        workers, loaders, threads = settings.num_workers, settings.loader_workers, max(1, settings.intra_op_threads)
        local = math.ceil(self.global_batch / workers)
        work_s, load_s = local * self.sample_s, local * self.load_s
        # Threads spin at a barrier, and are switched when they outnumber the cores.
        spin = 1 + 0.02 * (threads - 1) + 0.25 * max(0.0, workers * threads / self.node_cores - 1)
        alone_s = (work_s * ((1 - self.parallel_share) + self.parallel_share / threads) + self.overhead_s) * spin
        # All workers of the node read rows over one memory bus, which three threads saturate.
        bus_s = workers * local * self.bus_s / min(3.0, workers * threads) ** 0.8
        in_loaders_s = 1.1 * load_s if loaders else 0.0
        node_s = workers * ((work_s + self.overhead_s) * spin + in_loaders_s) / self.node_cores
        compute_s = (alone_s**6 + node_s**6) ** (1 / 6) + bus_s
        communication_s = 0.0
        if workers > 1:
            communication_s = 2 * (workers - 1) / workers * self.dense_bytes / self.link_bytes_per_s + workers * self.latency_s
        if loaders == 0:
            return Parts(local * self.fetch_s + load_s * max(1.0, workers / self.node_cores), compute_s, communication_s)
        # With few batches ready, training sometimes waits for a slow one.
        feed_s = 1.1 * load_s * (1 + 0.08 / max(1, settings.prefetch_factor)) / loaders
        feed_s *= max(1.0, workers * loaders / self.node_cores)
        feed_s = max(feed_s, (1.1 * load_s + local * self.fetch_s) / loaders)
        step_s = compute_s + communication_s
        return Parts((step_s**6 + feed_s**6) ** (1 / 6) - step_s + 2e-4, compute_s, communication_s)


def dense_heavy(node_cores: int) -> Truth:
    return Truth("dense", node_cores, 512, 4e-4, 0.92, 2e-3, 2e-5, dense_bytes=20_000_000)


def embedding_heavy(node_cores: int) -> Truth:
    return Truth(
        "embedding",
        node_cores,
        2048,
        3e-5,
        0.6,
        3e-3,
        8e-6,
        bus_s=2.5e-5,
        dense_bytes=3_000_000,
        embedding_bytes=2_000_000_000,
        lookups_per_sample=26.0,
    )


def input_bound(node_cores: int) -> Truth:
    return Truth("input", node_cores, 256, 1.5e-4, 0.85, 2e-3, 6e-4)


def storage_bound(node_cores: int) -> Truth:
    """Job that spends most of a sample's loading time waiting."""
    return Truth("storage", node_cores, 48, 1.5e-4, 0.85, 2e-3, 4e-4, fetch_s=6e-4)


KINDS = (dense_heavy, embedding_heavy, input_bound)


def window(truth: Truth, settings: Settings, rng: random.Random, noise: float, at: float = 0.0) -> StepProfile:
    """Window of steps that the profiler would publish."""
    parts = truth.parts(settings)
    factor = rng.lognormvariate(0, noise)
    data_s, compute_s, communication_s = (part * factor for part in (parts.data_s, parts.compute_s, parts.communication_s))
    step_s = data_s + compute_s + communication_s
    return replace(
        WINDOW,
        **vars(settings),
        worker_id="w0",
        num_nodes=1,
        num_steps=max(1, round(WINDOW_S / step_s)),
        global_batch=truth.global_batch,
        local_batch=math.ceil(truth.global_batch / settings.num_workers),
        cores=float(truth.node_cores),
        step_time_s=step_s,
        data_wait_s=data_s,
        forward_s=compute_s / 3,
        backward_s=compute_s / 2,
        communication_s=communication_s,
        optimizer_s=compute_s / 12,
        other_s=compute_s / 12,
        samples_per_s=truth.global_batch / step_s,
        memory_bytes=1 << 29,
        cpu_percent=100.0,
        dense_bytes=truth.dense_bytes,
        at=at,
        peak_memory_bytes=1 << 29,
        dense_flops=round(truth.sample_s * 2e9),
        embedding_bytes=truth.embedding_bytes,
        lookups_per_sample=truth.lookups_per_sample,
    )


def settings_under(plan: PlanRecord, now: Settings) -> Settings:
    """Return the settings with which a job runs once a plan is carried out."""
    workers = plan.num_workers if plan.binding else now.num_workers
    loaders = plan.loader_workers if plan.loader_workers is not None else now.loader_workers
    return Settings(
        workers, loaders, plan.intra_op_threads or now.intra_op_threads, (plan.prefetch_factor or 2) if loaders else 0
    )


def slowed(sample: StepProfile, factor: float) -> StepProfile:
    """Window of a machine that is slower by `factor`."""
    times = {name: factor * getattr(sample, name) for name in ("step_time_s", *(f"{part}_s" for part in STEP_PARTS))}
    return replace(sample, samples_per_s=sample.samples_per_s / factor, **times)


@dataclass
class SimulatedJob:
    """A job that carries out the planner's decisions, after a few windows each."""

    truth: Truth
    planner: Planner
    limits: Limits
    settings: Settings
    noise: float = 0.05
    drift: float = 0.0  # standard deviation of the log of the machine's speed from one decision to the next
    seed: int = 0
    remaining_s: float = 4 * 3600.0  # estimate at the initial settings
    windows_per_decision: int = 3
    samples: list[StepProfile] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, num_decisions: int = 12) -> Settings:
        """Run `num_decisions` decisions; return the final settings."""
        rng = random.Random(self.seed)
        remaining = self.remaining_s / self.truth.parts(self.settings).step_s * self.truth.global_batch
        weather = random.Random(self.seed + 1)
        slow = 1.0
        for number in range(num_decisions):
            slow *= weather.lognormvariate(0, self.drift)
            for _ in range(self.windows_per_decision):
                sample = slowed(window(self.truth, self.settings, rng, self.noise, at=float(len(self.samples))), slow)
                self.samples.append(sample)
                remaining -= sample.num_steps * sample.global_batch
            request = PlanRequest(
                self.samples,
                node_cores=float(self.truth.node_cores),
                remaining_samples=max(0.0, remaining),
                resize_cost_s=0.5,
                retune_cost_s=0.2,
                past=self.decisions,
            )
            self.decisions.append(self.planner(request, self.limits, number))
            self.settings = self.decisions[-1].chosen
        return self.settings

    @property
    def visited(self) -> list[Settings]:
        """Settings in order of their first run."""
        ran = [Settings(s.num_workers, s.loader_workers, s.intra_op_threads, s.prefetch_factor) for s in self.samples]
        return list(dict.fromkeys([*ran, self.settings]))

    @property
    def num_changes(self) -> int:
        return sum(d.is_change for d in self.decisions)


def limits_of(truth: Truth, max_workers: int) -> Limits:
    axes: dict[str, Any] = tunable_axes(float(truth.node_cores), float(truth.node_cores))
    return Limits(1, max_workers, **axes)


def throughput_share(truth: Truth, settings: Settings, space: Sequence[Settings]) -> float:
    """Throughput of `settings` as a share of the best in `space`."""
    return min(truth.parts(s).step_s for s in space) / truth.parts(settings).step_s


def traced_steps(file: Path) -> dict[tuple[int, int, int], float]:
    """Mean step time by (nodes, workers, local batch) of a `MODEL-placements.csv` or `MODEL-scalability.csv`."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            if "placement" in row:
                digits = [int(d) for d in row["placement"]]
                place = len(digits), sum(digits)
            else:
                place = int(row["num_nodes"]), int(row["num_replicas"])
            key = (*place, int(row["local_bsz"]))
            found[key].append(float(row["step_time"]))
    return {key: sum(times) / len(times) for key, times in found.items()}
