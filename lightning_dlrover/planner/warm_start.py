"""Initial settings for a job, from the final settings of similar jobs.

DLRover-RM's warm start (Wang et al., PVLDB 17(12), 2024) takes the k most similar jobs and smooths their final settings
exponentially, the newest last. Pure: the jobs come from `learn/history.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_dlrover.perf import configuration_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.objective import Objective, resources_of
from lightning_dlrover.planner.plan import Settings
from lightning_dlrover.planner.space import Limits, settings_of

__all__ = ["Descriptor", "PastJob", "Suggestion", "descriptor_of", "distance", "nearest", "suggest"]

NUM_NEIGHBOURS = 5
MAX_DISTANCE = 1.0  # mean of log factors; e: a job of nearly three times the size gives no evidence
SMOOTHING = 0.5  # weight of the newest of the nearest jobs; the older ones share the rest
FASTEST = Objective()
HALF_LIFE_S = 30 * 86400.0  # decay of a job's weight, which halves with each month: code and machines change


@dataclass(frozen=True)
class Descriptor:
    """A job's properties, independent of the machines it runs on; unknown figures are 0."""

    dense_flops: float  # per sample
    dense_bytes: float
    embedding_bytes: float
    lookups_per_sample: float
    global_batch: float
    device: str
    node_cores: float


@dataclass(frozen=True)
class PastJob:
    """A job of the history, with its windows; those of the best settings are among them."""

    job: str
    at: float  # seconds since the epoch at its end
    descriptor: Descriptor
    windows: tuple[StepProfile, ...]

    def best_within(self, limits: Limits, objective: Objective = FASTEST) -> Settings | None:
        """Return the settings that `objective` would have chosen among those measured with the job's last global batch."""
        losses = {settings: loss for settings, loss in self.losses(objective).items() if limits.allows(settings)}
        return min(losses, key=lambda settings: (losses[settings], settings), default=None)

    def losses(self, objective: Objective) -> dict[Settings, float]:
        """Return the loss that `objective` minimises, in its own unit: median step times, scaled up for dearer settings."""
        rates = {settings_of(window): self._rate(window, objective) for window in self.windows}
        return {s: time_s * rates[s] ** objective.elasticity for s, time_s in self.step_times_s().items()}

    def _rate(self, window: StepProfile, objective: Objective) -> float:
        used = resources_of(configuration_of(window, self.descriptor.node_cores), window.peak_memory_bytes)
        price = objective.prices.per_hour(used)
        return max(1e-9, used.scalar if price is None else price)

    def step_times_s(self) -> dict[Settings, float]:
        """Return the median step time of each settings."""
        batch = self.windows[-1].global_batch
        found: dict[Settings, list[float]] = {}
        for window in self.windows:
            if window.global_batch == batch:
                found.setdefault(settings_of(window), []).append(window.step_time_s)
        return {settings: sorted(times)[len(times) // 2] for settings, times in found.items()}


@dataclass(frozen=True)
class Suggestion:
    """Initial settings for a job."""

    settings: Settings
    speedup: float  # speed relative to the present settings in those jobs; 1 where they give no comparison
    gain: float  # the same ratio of the objective's loss
    jobs: tuple[str, ...]
    reason: str


def descriptor_of(profile: StepProfile, node_cores: float) -> Descriptor:
    return Descriptor(
        dense_flops=float(profile.dense_flops),
        dense_bytes=float(profile.dense_bytes),
        embedding_bytes=float(profile.embedding_bytes),
        lookups_per_sample=profile.lookups_per_sample,
        global_batch=float(profile.global_batch),
        device=profile.device,
        node_cores=node_cores,
    )


def distance(one: Descriptor, other: Descriptor) -> float:
    """Mean of the absolute log ratios of the figures known for both; infinite between kinds of devices.

    A figure that only one of them has, such as tables, counts as a factor of a hundred.
    """
    if one.device != other.device:
        return math.inf
    total, count = 0.0, 0
    for name in (f.name for f in fields(Descriptor) if f.name != "device"):
        a, b = getattr(one, name), getattr(other, name)
        if a > 0 and b > 0:
            total += abs(math.log(a / b))
        elif a > 0 or b > 0:
            total += math.log(100.0)
        else:
            continue
        count += 1
    return total / count if count else math.inf


def nearest(descriptor: Descriptor, jobs: Sequence[PastJob]) -> list[PastJob]:
    """Return at most five jobs that are similar enough to learn from, the most similar first."""
    near = [(d, -job.at, job) for job in jobs if (d := distance(descriptor, job.descriptor)) <= MAX_DISTANCE]
    return [job for *_, job in sorted(near, key=lambda item: item[:2])][:NUM_NEIGHBOURS]


def suggest(
    current: StepProfile,
    neighbours: Sequence[PastJob],
    limits: Limits,
    *,
    node_cores: float,
    at: float,
    objective: Objective = FASTEST,
) -> Suggestion | None:
    """Return the settings that similar jobs found best, smoothed by age and similarity; None without such jobs.

    The smoothed figures belong to no job, so the nearest settings among the neighbours' best ones are taken.
    Args:
        limits: a neighbour's settings with more or fewer workers do not count.
        at: now, seconds since the epoch.
    """
    able = [(job, best) for job in neighbours if (best := job.best_within(limits, objective)) is not None]
    if not able:
        return None
    here = descriptor_of(current, node_cores)
    smoothed: list[float] = []
    for job, best in sorted(able, key=lambda pair: pair[0].at):
        share = SMOOTHING * 0.5 ** (max(0.0, at - job.at) / HALF_LIFE_S) * math.exp(-distance(here, job.descriptor))
        figures = [math.log1p(figure) for figure in _figures(best)]
        smoothed = figures if not smoothed else [(1 - share) * s + share * f for s, f in zip(smoothed, figures, strict=True)]
    settings = min(
        (best for _, best in able),
        key=lambda s: sum((math.log1p(f) - m) ** 2 for f, m in zip(_figures(s), smoothed, strict=True)),
    )
    followed = [job for job, best in able if best == settings]
    compared = [(job, near) for job in followed if (near := _nearest(settings_of(current), job.step_times_s())) != settings]
    speedup, gain = (
        math.exp(sum(math.log(of(job)[near] / of(job)[settings]) for job, near in compared) / max(1, len(compared)))
        for of in (PastJob.step_times_s, lambda job: job.losses(objective))
    )
    names = ", ".join(job.job for job in followed[:3])
    reason = f"{len(followed)} of the {len(able)} most similar past jobs ({names}) ran best with these settings"
    if compared:
        reason += f", {speedup:.2f} times as fast as with what runs now"
    return Suggestion(settings, speedup, gain, tuple(job.job for job, _ in able), reason)


def _figures(settings: Settings) -> tuple[int, ...]:
    return settings.num_workers, settings.loader_workers, settings.intra_op_threads, settings.prefetch_factor


def _nearest(now: Settings, measured: Iterable[Settings]) -> Settings:
    return min(
        measured,
        key=lambda s: sum(abs(math.log((1 + a) / (1 + b))) for a, b in zip(_figures(s), _figures(now), strict=True)),
    )
