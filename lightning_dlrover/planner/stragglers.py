"""Find the worker that makes the others wait, and say whether replacing it pays. Pure.

In synchronous training all workers have the same step time, so what is compared is what each needs by itself: its own computing
and its own wait for data, without the time that it is blocked in collectives. Each is compared with the median of the others,
in each of the newest observations, and named only if nearly all of them say so: a worker that is hit by something now and
then is no straggler. Time in which a worker was ready but had no core is left out among workers of one host, which all wait for
the same cores; on a host of its own it counts, for a neighbour that takes the cores makes a node slow like any other fault.

What a straggler costs is counted with that time: the step is as long as the slowest worker's, so without the straggler it
would be as long as the second slowest's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

__all__ = ["OwnTimes", "Replacement", "Straggler", "find_straggler", "judge_replacement"]

MIN_STEPS = 12
"""A worker is judged by its newest observations of so many steps together, and ..."""

MIN_OBSERVATIONS = 6
"""... by at least so many observations."""

MIN_RATIO = 1.3
"""To the median of the others; in the median of the observations. Below, replacing would hardly be noticed."""

MIN_SHARE = 0.8
"""Of the observations have to show at least half of that excess."""

NUM_DEVIATIONS = 3.0
"""The excess exceeds so many standard errors of its median."""

MIN_LOST = 0.05
"""Of a step the others wait for it. Where workers share cores, a slow one may cost nothing: the others have the cores."""

MARGIN = 2.0
"""A replacement must save so many times what it costs: the new worker may turn out slower than the others, too."""


@dataclass(frozen=True)
class OwnTimes:
    """What each worker needed by itself in a few consecutive steps of one round: means per step, by global rank."""

    num_steps: int
    step_time_s: float
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    queued_s: tuple[float, ...]  # beside these two: ready to go on, but without a core


@dataclass(frozen=True)
class Straggler:
    """A worker that makes the others wait."""

    global_rank: int
    part: Literal["compute", "data"]  # what takes it so long
    own_s: float  # of a step, as compared: median
    others_s: float  # the same of the median of the others
    ratio: float
    lost_s: float  # by which a step would be shorter without it
    step_time_s: float
    num_steps: int  # that were looked at

    @property
    def text(self) -> str:
        what = "computing" if self.part == "compute" else "waiting for its data"
        return (
            f"{self.own_s * 1e3:.3g} ms a step by itself where the others need {self.others_s * 1e3:.3g} ms, "
            f"{self.ratio:.1f} times as long in {self.num_steps} steps, mostly {what}; "
            f"the others wait {self.lost_s * 1e3:.3g} of {self.step_time_s * 1e3:.3g} ms for it"
        )


@dataclass(frozen=True)
class Replacement:
    """Whether to replace a straggler, and why."""

    pays: bool
    saved_s: float  # by which the job would end sooner, the cost not counted
    cost_s: float
    reason: str


def find_straggler(
    observations: Sequence[OwnTimes], hosts: Sequence[str] = (), loads: Sequence[float] = ()
) -> Straggler | None:
    """The worker that makes the others wait most, or None.

    Args:
        observations: of one round, oldest first.
        hosts: of each worker, by rank; none: each has its own.
        loads: relative time that each worker may take to compute, by rank, such as samples over cores; none: all alike. A
            worker is a straggler only if it is one with and without that: not all is faster on more cores.
    Raises:
        ValueError: the numbers of workers differ, or a load is not above 0.
    """
    recent = _recent(observations)
    if not recent:
        return None
    size = len(recent[0].compute_s)
    if any(len(part) != size for o in recent for part in (o.compute_s, o.data_s, o.queued_s)):
        raise ValueError("observations of different numbers of workers were given; those of one round belong together")
    for name, given in (("hosts", hosts), ("loads", loads)):
        if given and len(given) != size:
            raise ValueError(f"{len(given)} {name} were given for {size} workers")
    if any(not load > 0 for load in loads):
        raise ValueError(f"the load of every worker must be above 0, not {list(loads)}")
    if size < 2:
        return None
    shares_host = [bool(hosts) and list(hosts).count(host) > 1 for host in (hosts or range(size))]
    usual = median(loads) if loads else 1.0
    scales = [usual / load for load in loads] if loads else [1.0] * size
    own = [_own(o, shares_host, scales) for o in recent]
    found = [s for rank in range(size) if (s := _judge(rank, own, recent)) is not None]
    return max(found, key=lambda s: s.ratio, default=None)


def judge_replacement(
    straggler: Straggler, remaining_steps: float | None, resize_cost_s: float, num_earlier: int, horizon_s: float = 3600.0
) -> Replacement:
    """Whether the time that a straggler costs over the rest of the job exceeds that of exchanging it for a new worker.

    The new worker starts while the others train; what they lose is the one change of the world.

    Args:
        remaining_steps: of the job; None if nobody knows.
        resize_cost_s: how long the whole job stands still for a change of the world.
        num_earlier: stragglers that this job has replaced already; each one more has to save twice as much, for where new
            workers are slow, too, replacing does not help.
        horizon_s: time left that is assumed when nobody knows how many steps are.
    Raises:
        ValueError: a number of steps or a cost is negative or not finite.
    """
    for name, value in (("remaining_steps", remaining_steps), ("resize_cost_s", resize_cost_s)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, not a finite number of 0 or more")
    steps = horizon_s / straggler.step_time_s if remaining_steps is None else remaining_steps
    saved_s, left_s = steps * straggler.lost_s, steps * straggler.step_time_s
    needed_s = MARGIN * resize_cost_s * 2.0**num_earlier
    gain = f"would save {saved_s:.3g} s of {left_s:.3g} s left and cost {resize_cost_s:.2g} s"
    if saved_s < needed_s:
        again = f", after {num_earlier} that were replaced before" if num_earlier else ""
        return Replacement(False, saved_s, resize_cost_s, f"replacing it {gain}, less than {needed_s:.2g} s{again}")
    return Replacement(True, saved_s, resize_cost_s, f"replacing it {gain}")


@dataclass(frozen=True)
class _Own:
    """One observation as it is compared."""

    total_s: list[float]
    scaled_s: list[float]  # as if all had the same load
    data_s: list[float]
    busy_s: list[float]  # with the time that a worker had no core


def _recent(observations: Sequence[OwnTimes]) -> Sequence[OwnTimes]:
    """The newest ones that are enough to judge by; empty if there are too few."""
    num_steps = 0
    for count in range(1, len(observations) + 1):
        num_steps += observations[-count].num_steps
        if num_steps >= MIN_STEPS and count >= MIN_OBSERVATIONS:
            return observations[-count:]
    return []


def _own(seen: OwnTimes, shares_host: Sequence[bool], scales: Sequence[float]) -> _Own:
    queued_s = [0.0 if shared else queued for queued, shared in zip(seen.queued_s, shares_host, strict=True)]
    compute_s = [compute + queued for compute, queued in zip(seen.compute_s, queued_s, strict=True)]
    return _Own(
        total_s=[compute + data for compute, data in zip(compute_s, seen.data_s, strict=True)],
        scaled_s=[compute * scale + data for compute, data, scale in zip(compute_s, seen.data_s, scales, strict=True)],
        data_s=list(seen.data_s),
        busy_s=[sum(parts) for parts in zip(seen.compute_s, seen.data_s, seen.queued_s, strict=True)],
    )


def _judge(rank: int, own: Sequence[_Own], recent: Sequence[OwnTimes]) -> Straggler | None:
    ratios = [min(_ratio(rank, o.total_s), _ratio(rank, o.scaled_s)) for o in own]
    ratio = median(ratios)
    deviation = 1.4826 * median(abs(r - ratio) for r in ratios)  # of a normal distribution with that median deviation
    error = 1.2533 * deviation / math.sqrt(len(ratios))  # the median's standard error, as of a normal distribution
    clear = sum(r > 1 + (MIN_RATIO - 1) / 2 for r in ratios) >= MIN_SHARE * len(ratios)
    if ratio < MIN_RATIO or not clear or ratio - 1 < NUM_DEVIATIONS * error:
        return None
    own_s = median(o.total_s[rank] for o in own)
    others_s = median(median(_without(rank, o.total_s)) for o in own)
    data_s = median(o.data_s[rank] - median(_without(rank, o.data_s)) for o in own)
    # Medians before the maximum: that of several noisy times is larger than each of them usually is.
    busy_s = [median(o.busy_s[other] for o in own) for other in range(len(own[0].busy_s))]
    step_time_s = median(o.step_time_s for o in recent)
    lost_s = min(busy_s[rank] - max(_without(rank, busy_s)), step_time_s)
    if lost_s < MIN_LOST * step_time_s:
        return None  # slow, but nobody waits for it
    return Straggler(
        global_rank=rank,
        part="data" if data_s > (own_s - others_s) / 2 else "compute",
        own_s=own_s,
        others_s=others_s,
        ratio=ratio,
        lost_s=lost_s,
        step_time_s=step_time_s,
        num_steps=sum(o.num_steps for o in recent),
    )


def _ratio(rank: int, values: Sequence[float]) -> float:
    return values[rank] / max(1e-9, median(_without(rank, values)))


def _without(rank: int, values: Sequence[float]) -> list[float]:
    return [value for other, value in enumerate(values) if other != rank]
