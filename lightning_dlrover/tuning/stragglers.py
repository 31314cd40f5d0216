"""Find the worker that makes the others wait, and decide whether replacing it pays. Pure.

In synchronous training all workers have the same step time. The comparison therefore uses each worker's own time: its
computing and its wait for data, without the time blocked in collectives. In each of the newest observations, each worker is
compared with the median of the others. It is named only if nearly all observations agree, so an occasional slow step does not
make it a straggler.

Time in which a worker was ready but had no core is left out among workers of one host, which all wait for the same cores. For
a worker alone on its host it counts: a neighbour that takes the cores makes a node slow like any other fault. The cost of a
straggler includes that time. A step takes as long as the slowest worker, so without the straggler it would take as long as the
second slowest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lightning_dlrover.tuning.plan import seconds_text
from lightning_dlrover.tuning.samples import Floats, OwnTimes

SPANS = (12, 24, 48)  # numbers of newest steps by which a worker is judged; longer spans are tried where times vary much
MIN_OBSERVATIONS = 6  # minimum number of observations before a worker can be called a straggler
MIN_RATIO = 1.3  # minimum median ratio to the median of the others; below it, a replacement would hardly be noticed
MIN_SHARE = 0.8  # fraction of the observations that have to show at least half of that excess
NUM_DEVIATIONS = 4.0  # minimum excess in standard errors of its median; high, as all workers are judged several times a second
MIN_LOST = 0.05  # minimum fraction of a step that the others wait for it: on shared cores a slow worker may cost nothing
ASSUMED_DEVIATION = 0.3  # minimum deviation of the log of a worker's ratio to the others, below `NUM_KNOWN` observations
NUM_KNOWN = 24  # observations after which the measured variation of that ratio is used alone
MARGIN = 2.0  # minimum ratio of a replacement's saving to its cost: the new worker may turn out slower than the others, too


@dataclass(frozen=True)
class Straggler:
    """A worker that makes the others wait."""

    global_rank: int
    part: Literal["compute", "data"]  # the part of its step that takes longer
    own_s: float  # median of its own time per step, as compared
    others_s: float  # the same of the others
    ratio: float
    lost_s: float  # time by which a step would be shorter without it
    step_time_s: float
    num_steps: int  # steps observed

    @property
    def text(self) -> str:
        what = "computing" if self.part == "compute" else "waiting for its data"
        return (
            f"{self.own_s * 1e3:.3g} ms a step of its own work where the others need {self.others_s * 1e3:.3g} ms, "
            f"{self.ratio:.1f} times as long in {self.num_steps} steps, mostly {what}; "
            f"the others wait {self.lost_s * 1e3:.3g} of {self.step_time_s * 1e3:.3g} ms for it"
        )


@dataclass(frozen=True)
class Replacement:
    """Whether to replace a straggler, and why."""

    pays: bool
    saved_s: float  # time by which the job would end earlier, without the cost
    cost_s: float
    reason: str


def find_straggler(
    observations: Sequence[OwnTimes], hosts: Sequence[object] = (), loads: Sequence[float] = ()
) -> Straggler | None:
    """Return the worker that makes the others wait most, or None.

    Args:
        observations: those of one round, oldest first.
        hosts: host of each worker, by rank; empty: each has its own.
        loads: relative computing time that each worker may take, by rank, such as samples over cores; empty: equal. A
            straggler must be one with and without this scaling, because not all work is faster on more cores.
    Raises:
        ValueError: the numbers of workers differ, or a load is not above 0.
    """
    if not observations:
        return None
    size = len(observations[0].compute_s)
    if any(len(part) != size for o in observations for part in (o.compute_s, o.data_s, o.queued_s)):
        raise ValueError("observations of different numbers of workers were given; those of one round belong together")
    for name, given in (("hosts", hosts), ("loads", loads)):
        if given and len(given) != size:
            raise ValueError(f"{len(given)} {name} were given for {size} workers")
    if any(not load > 0 for load in loads):
        raise ValueError(f"the load of every worker must be above 0, not {list(loads)}")
    if size < 2:
        return None
    speeds = observations[-1].speeds
    observations = [each.at_equal_shares() for each in observations]
    times = _Times.of(observations, hosts, loads)
    for span in SPANS:
        count = _num_newest(observations, span)
        if count and (found := _judge(times, count)):
            worst = max(found, key=lambda s: s.ratio)
            return replace(worst, lost_s=min(worst.lost_s, _lost_with(speeds, worst))) if speeds else worst
    return None


def _lost_with(speeds: Sequence[int], straggler: Straggler) -> float:
    """Seconds by which a step would be shorter if the straggler were as fast as the median of the others.

    Shares are proportional to speeds, so a step's time is inverse to the sum of them.
    """
    others = [speed for rank, speed in enumerate(speeds) if rank != straggler.global_rank]
    after = sum(others) + max(statistics.median(others), speeds[straggler.global_rank])
    return straggler.step_time_s * (1 - sum(speeds) / after)


def judge_replacement(
    straggler: Straggler,
    remaining_steps: float | None,
    resize_cost_s: float,
    num_earlier: int,
    lead_s: float = 0.0,
    horizon_s: float = 3600.0,
) -> Replacement:
    """Decide whether a straggler costs more over the rest of the job than its replacement by a new worker.

    The new worker starts while the others train, so the job pauses for only one change of the world. The straggler stays until
    the new worker has started, so only the steps after that are faster.

    Args:
        remaining_steps: steps left in the job; None if unknown.
        resize_cost_s: seconds that the whole job pauses for a change of the world.
        num_earlier: stragglers that this job has replaced already. Each further one has to save twice as much, because
            replacing does not help where new workers are slow, too.
        lead_s: seconds until the new worker can train.
        horizon_s: remaining time assumed when the number of steps is unknown.
    Raises:
        ValueError: a number of steps or a cost is negative or not finite.
    """
    for name, value in (("remaining_steps", remaining_steps), ("resize_cost_s", resize_cost_s), ("lead_s", lead_s)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, not a finite number of 0 or more")
    steps = horizon_s / straggler.step_time_s if remaining_steps is None else remaining_steps
    left_s = steps * straggler.step_time_s
    saved_s = max(0.0, left_s - lead_s) / straggler.step_time_s * straggler.lost_s
    needed_s = MARGIN * resize_cost_s * 2.0**num_earlier
    gain = f"would save {seconds_text(saved_s)} of {seconds_text(left_s)} left and cost {seconds_text(resize_cost_s)}"
    if lead_s:
        gain += f" (a new worker starts in about {seconds_text(lead_s)})"
    if saved_s < needed_s:
        again = f", after {num_earlier} that were replaced before" if num_earlier else ""
        return Replacement(False, saved_s, resize_cost_s, f"replacing it {gain}, less than {seconds_text(needed_s)}{again}")
    return Replacement(True, saved_s, resize_cost_s, f"replacing it {gain}")


@dataclass(frozen=True)
class _Times:
    """Observations prepared for comparison, oldest first; arrays have the shape ``(num_observations, num_workers)``."""

    num_steps: Floats  # shape ``(num_observations,)``
    step_time_s: Floats  # the same
    total_s: Floats  # time of a worker's own work
    data_s: Floats
    busy_s: Floats  # including the time without a core
    excess: Floats  # logarithm of the ratio of `total_s` to the median of the others
    deviation: Floats  # standard deviation of `excess`, shape ``(num_workers,)``

    @staticmethod
    def of(observations: Sequence[OwnTimes], hosts: Sequence[object], loads: Sequence[float]) -> _Times:
        compute_s, data_s, queued_s = (
            np.array([getattr(o, name) for o in observations], dtype=np.float64) for name in ("compute_s", "data_s", "queued_s")
        )
        own_s = compute_s + queued_s * _alone(hosts, compute_s.shape[1])
        excess = _log_ratio(own_s + data_s)
        if len(loads):
            excess = np.minimum(excess, _log_ratio(own_s * np.median(loads) / np.array(loads) + data_s))
        return _Times(
            num_steps=np.array([o.num_steps for o in observations], dtype=np.float64),
            step_time_s=np.array([o.step_time_s for o in observations]),
            total_s=own_s + data_s,
            data_s=data_s,
            busy_s=compute_s + data_s + queued_s,
            excess=excess,
            deviation=_deviation(excess),
        )


def _alone(hosts: Sequence[object], num_workers: int) -> Floats:
    """Return 1 for each worker that is alone on its host, and 0 for the others; without hosts, all are alone."""
    num_on = Counter(hosts)
    return np.array([float(num_on[host] == 1) for host in hosts]) if hosts else np.ones(num_workers)


def _num_newest(observations: Sequence[OwnTimes], span: int) -> int:
    """Return how many of the newest observations cover `span` steps; 0 if there are too few."""
    num_steps = 0
    for count in range(1, len(observations) + 1):
        num_steps += observations[-count].num_steps
        if num_steps >= span and count >= MIN_OBSERVATIONS:
            return count
    return 0


def _judge(times: _Times, count: int) -> list[Straggler]:
    """Return the workers that the newest `count` observations show to be slow."""
    recent = times.excess[-count:]
    excess = np.median(recent, axis=0)
    clear = (recent > math.log(MIN_RATIO) / 2).mean(axis=0) >= MIN_SHARE
    # The whole round counts, too: a few observations may agree by chance.
    deviation = np.maximum(_deviation(recent), times.deviation)
    if len(times.excess) < NUM_KNOWN:
        deviation = np.maximum(deviation, ASSUMED_DEVIATION)
    error = 1.2533 * deviation / math.sqrt(count)  # standard error of the median of normal values
    slow = clear & (excess >= math.log(MIN_RATIO)) & (excess >= NUM_DEVIATIONS * error)
    # Medians before the maximum: the maximum of several noisy times is larger than each of them usually is.
    busy_s = np.median(times.busy_s[-count:], axis=0)
    step_time_s = float(np.median(times.step_time_s[-count:]))
    found = []
    for rank in np.flatnonzero(slow):
        lost_s = min(float(busy_s[rank] - np.delete(busy_s, rank).max()), step_time_s)
        if lost_s < MIN_LOST * step_time_s:
            continue  # slow, but no other worker waits for it
        total_s, data_s = times.total_s[-count:], times.data_s[-count:]
        own_s = float(np.median(total_s[:, rank]))
        others_s = float(np.median(_median_of_others(total_s)[:, rank]))
        more_data_s = float(np.median(data_s[:, rank] - _median_of_others(data_s)[:, rank]))
        found.append(
            Straggler(
                global_rank=int(rank),
                part="data" if more_data_s > (own_s - others_s) / 2 else "compute",
                own_s=own_s,
                others_s=others_s,
                ratio=math.exp(excess[rank]),
                lost_s=lost_s,
                step_time_s=step_time_s,
                num_steps=int(times.num_steps[-count:].sum()),
            )
        )
    return found


def _deviation(values: Floats) -> Floats:
    """Return the standard deviation, per column, of a normal distribution with the column's median absolute deviation."""
    deviation: Floats = 1.4826 * np.median(np.abs(values - np.median(values, axis=0)), axis=0)
    return deviation


def _log_ratio(values: Floats) -> Floats:
    """Return the log ratio of each worker to the median of the others."""
    ratio: Floats = np.log(np.maximum(values, 1e-9) / np.maximum(_median_of_others(values), 1e-9))
    return ratio


def _median_of_others(values: Floats) -> Floats:
    """Return, for each value, the median of the rest of its row; at least two columns."""
    others = values.shape[1] - 1
    order = np.argsort(values, axis=1)
    place = np.argsort(order, axis=1)
    ascending = np.take_along_axis(values, order, axis=1)

    def at(index: int) -> Floats:  # value at `index` in the sorted row without the value itself
        found: Floats = np.where(place > index, ascending[:, [index]], ascending[:, [index + 1]])
        return found

    median: Floats = (at((others - 1) // 2) + at(others // 2)) / 2
    return median


# Shares by speed: a slow worker gets fewer samples of the same global batch, as in DLRover-RM (VLDB 2024, section 4.3).

MIN_GAIN = 1.1  # minimum predicted ratio of the slowest worker's time before a change of shares to that after it
MIN_PAID = 1.03  # minimum ratio that such a change must have had, or it is taken back
SHARE_STEPS = 12  # minimum number of steps with the same shares before they change
REST = 64  # observations after a change that was taken back in which the shares stay; twice as many after each further one
LEAST_SHARE, LARGEST_SHARE = 0.25, 2.0  # bounds of a worker's share, in equal shares; an even slower worker is replaced
LEAST_SAMPLES = 2  # that a worker keeps if it has them in equal shares: BatchNorm, for example, cannot train on a single one
NEARLY_EQUAL = 0.03  # shares are equal if none differs by more than this fraction from an equal one
SPEED_UNIT = 1000  # speed of a worker with an equal share
ROUNDING = 1.002  # factor by which the smallest share is larger, lest the rounding of speeds takes a sample from it


@dataclass
class ShareBalancer:
    """Decides on the shares of a job's rounds, one after the other.

    Not all time of a step depends on the share, as that of a slow disk or network. A change that has not paid is taken back.
    """

    _round: int = 0
    _before: tuple[tuple[int, ...], float] | None = None  # speeds before the newest change, and the slowest worker's time then
    _rest_until: int = 0  # number of the observation at which a rest ends
    _num_failed: int = 0  # changes that did not pay

    def decide(
        self,
        round_number: int,
        num_observations: int,
        observations: Sequence[OwnTimes],
        global_batch_size: int,
        hosts: Sequence[object] = (),
        largest_shares: Sequence[float] = (),
    ) -> tuple[int, ...] | None:
        """Return the speeds from now on, as `better_speeds` does; None if the present shares should stay.

        Args:
            num_observations: number of observations ever made, of which `observations` are the newest of the round.
            observations: oldest first.
            hosts: host of each worker, by rank; empty: each has its own.
        """
        if round_number != self._round:
            self._round, self._before, self._rest_until, self._num_failed = round_number, None, 0, 0
        if any(largest <= 0 for largest in largest_shares):
            return () if observations and observations[-1].speeds else None
        own_s = own_times_of_present_shares(observations, hosts)
        if own_s is None:
            return None
        slowest_s = float(np.median(own_s.max(axis=1)))
        before, self._before = self._before, None
        if before is not None and before[0] != observations[-1].speeds and slowest_s * MIN_PAID > before[1]:
            self._rest_until = num_observations + REST * 2**self._num_failed
            self._num_failed += 1
            return before[0]
        if num_observations < self._rest_until:
            return None
        found = better_speeds(own_s, observations[-1].speeds, global_batch_size, largest_shares)
        if found is not None:
            self._before = observations[-1].speeds, slowest_s
        return found


def better_speeds(
    own_s: Floats, speeds: Sequence[int], global_batch_size: int, largest_shares: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """Return speeds to which the shares should be proportional from now on; None if the present shares should stay.

    A worker's time is taken as proportional to its share. It has a constant part, too, so that one change corrects too little
    rather than too much, and the next one corrects the rest.

    Args:
        own_s: see `own_times_of_present_shares`.
        speeds: by which the present shares are split; empty: they are equal.
        largest_shares: largest share that each worker may take, in equal shares; empty: no limit.

    Returns:
        One speed per rank, of which `SPEED_UNIT` is the mean; empty for equal shares.
    """
    size = own_s.shape[1]
    present = np.array(speeds or (SPEED_UNIT,) * size) / SPEED_UNIT
    speed = present / np.maximum(np.median(own_s, axis=0), 1e-9)
    least_samples = max(1, min(LEAST_SAMPLES, global_batch_size // size))
    least_share = max(LEAST_SHARE, least_samples * size / global_batch_size * ROUNDING)
    wanted = _bounded(speed / speed.mean(), least_share, largest_shares)
    if np.abs(wanted - 1).max() <= NEARLY_EQUAL:
        wanted = np.ones(size)
    rounded = tuple(max(1, round(SPEED_UNIT * each)) for each in wanted)
    new: tuple[int, ...] = rounded if len(set(rounded)) > 1 else ()
    factor = np.array(new or (SPEED_UNIT,) * size) / SPEED_UNIT / present
    gains = np.log(np.maximum(own_s.max(axis=1), 1e-9) / np.maximum((own_s * factor).max(axis=1), 1e-9))
    gain = float(np.median(gains))
    error = 1.2533 * float(_deviation(gains[:, None])[0]) / math.sqrt(len(gains))
    is_clear = (gains > math.log(MIN_GAIN) / 2).mean() >= MIN_SHARE and gain >= NUM_DEVIATIONS * error
    return new if is_clear and gain >= math.log(MIN_GAIN) else None


def own_times_of_present_shares(observations: Sequence[OwnTimes], hosts: Sequence[object] = ()) -> Floats | None:
    """Return each worker's own seconds per step, shape ``(num_observations, num_workers)``; None if there are too few.

    Args:
        observations: those of one round, oldest first. Only the newest ones with the same shares count.
        hosts: host of each worker, by rank; empty: each has its own. Workers of one host wait for the same cores, so that time
            in which they were ready but had no core counts only where a worker is alone.
    """
    if not observations or (size := len(observations[-1].compute_s)) < 2:
        return None
    now = observations[-1].speeds
    newest = observations[: -NUM_KNOWN - 1 : -1]  # an older one would delay the answer to a worker that has become slow
    same = list(itertools.takewhile(lambda each: each.speeds == now, newest))
    if len(same) < MIN_OBSERVATIONS or sum(each.num_steps for each in same) < SHARE_STEPS:
        return None
    alone = _alone(hosts, size)
    return np.array([np.add(each.compute_s, each.data_s) + np.multiply(each.queued_s, alone) for each in same])


def _bounded(shares: Floats, least_share: float, largest_shares: Sequence[float]) -> Floats:
    """Return shares with a mean of 1 within their bounds, in proportion to `shares` where no bound applies."""
    upper = np.minimum(np.array(largest_shares or (math.inf,) * len(shares)), LARGEST_SHARE)
    if upper.mean() <= 1 or least_share >= 1 or upper.min() < least_share:  # not all samples would be taken
        return np.ones(len(shares))
    low, high = 0.0, float(len(shares) / shares.min())
    for _ in range(60):  # bisection: the sum of the clipped shares grows with the factor
        factor = (low + high) / 2
        if np.clip(factor * shares, least_share, upper).mean() < 1:
            low = factor
        else:
            high = factor
    clipped: Floats = np.clip(high * shares, least_share, upper)
    return clipped
