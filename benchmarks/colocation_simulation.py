"""Jobs of a trace on simulated devices: the same policies, with the speeds of measured pairs as the truth.

`complementary` learns on the way: it starts without an observation, and is fitted anew each time the number of observations has
doubled. Measurements err by a few per cent, which depends on the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gavel_traces import MeasuredPairs

from lightning_dlrover.planner.cluster import Policy, PolicySettings
from lightning_dlrover.planner.cluster.outcome import SimulationOutcome
from lightning_dlrover.planner.cluster.policies import POLICIES, make_policy
from lightning_dlrover.planner.cluster.simulator import Arrival, Costs, simulate
from lightning_dlrover.planner.cluster.slowdown import Observation, SlowdownModel

__all__ = ["LOADS", "Run", "runs"]

MEASUREMENT_ERROR = 0.02
FIRST_FIT = 8
MOST_FITTED = 256
START_S = 10.0
MAX_WAIT_S = 48 * 3600.0

LOADS = {4: 200, 32: 400}
"""Jobs by number of devices."""

LOAD = 1.2
"""Work that arrives in an hour, over what the devices do in an hour with one job each."""

LONGEST_S, SHORTEST_S = 12 * 3600.0, 900.0
"""Durations alone; those of the trace, which reach months, are drawn anew between these."""


@dataclass(frozen=True)
class Run:
    """One simulation."""

    policy: str
    num_devices: int
    seed: int
    outcome: SimulationOutcome


@dataclass
class _LearnsOnline:
    """Fits the slowdowns anew each time the number of observations has doubled, up to `MOST_FITTED`."""

    settings: PolicySettings
    rng: random.Random
    seen: list[Observation] = field(default_factory=list)
    next_fit: int = FIRST_FIT

    def observed(self, observation: Observation, lasted_s: float) -> Policy | None:
        noisy = tuple(speed * self.rng.lognormvariate(0, MEASUREMENT_ERROR) for speed in observation.relative_speeds)
        self.seen.append(replace(observation, relative_speeds=noisy))
        if len(self.seen) < self.next_fit or self.next_fit > MOST_FITTED:
            return None
        self.next_fit *= 2
        return make_policy("complementary", replace(self.settings, speeds=SlowdownModel.fit(self.seen)))


def runs(
    pairs: MeasuredPairs,
    arrivals: Sequence[Arrival],
    num_devices: int,
    num_seeds: int,
    policies: Sequence[str] = tuple(POLICIES),
) -> Iterator[Run]:
    """Simulate every policy with the same jobs, for each seed; the seed draws their durations and arrivals.

    Jobs arrive faster than the devices could run them one at a time, by `LOAD`.
    """
    devices = tuple(replace(pairs.device, name=f"device-{i:02d}") for i in range(num_devices))
    for seed in range(num_seeds):
        jobs = _drawn(arrivals, pairs.device.kind, num_devices, random.Random(seed))
        for name in policies:
            settings = PolicySettings(SlowdownModel(), MAX_WAIT_S, seed, most_together=2)
            learner = _LearnsOnline(settings, random.Random(seed)) if name == "complementary" else None
            policy = make_policy(name, settings)
            yield Run(name, num_devices, seed, simulate(jobs, devices, policy, pairs, costs=Costs(START_S), learner=learner))


def _drawn(arrivals: Sequence[Arrival], kind: str, num_devices: int, rng: random.Random) -> list[Arrival]:
    """The jobs with log-uniform durations, and arrivals of a Poisson process at the rate of `LOAD`."""
    durations = [SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.random() for _ in arrivals]
    gap_s = sum(durations) / len(arrivals) / num_devices / LOAD
    at_s, drawn = 0.0, []
    for arrival, duration_s in zip(arrivals, durations, strict=True):
        job = replace(arrival.job, submitted_s=at_s)
        drawn.append(Arrival(job, duration_s * job.profiles[kind].steps_per_s))
        at_s += rng.expovariate(1 / gap_s)
    return drawn
