"""Models of a worker's memory: allocators, safety margin, peak and growth over time. Pure."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from lightning_dlrover.rdzv.job.sizes import ANY_NUMBER, WorldSizes
from lightning_dlrover.tuning.samples import (
    AGENT_BYTES,
    NORMAL_WIDTH,
    Columns,
    Configuration,
    Floats,
    StepProfile,
    configuration_of,
    windows_by_configuration,
)

# Memory that an allocator holds while a program allocates and frees. Live bytes alone underestimate it: an allocator rounds
# sizes up, and freed memory stays with the process, in holes that may be too small for the next request.

MIB = 1 << 20
Event = tuple[int, int]  # handle of an allocation and its bytes; 0 bytes free it


class Allocator(Protocol):
    """An allocator in its current state."""

    @property
    def held_bytes(self) -> int:
        """Memory that other programs cannot use."""
        ...

    def allocate(self, handle: int, num_bytes: int) -> None: ...

    def free(self, handle: int) -> None: ...


class Footprint:
    """An allocator's peaks while it serves events, one after the other."""

    def __init__(self, allocator: Allocator) -> None:
        self.live_bytes = 0  # allocated and not yet freed
        self.peak_live_bytes = 0
        self.peak_held_bytes = 0
        self.peak_at = 0  # number of events until the peak of the live bytes, inclusive
        self._allocator = allocator
        self._sizes: dict[int, int] = {}
        self._num_events = 0

    def add(self, event: Event) -> None:
        """Serve one event.

        Raises:
            ValueError: it frees a handle that is not allocated, allocates one that is, or has a negative size.
        """
        handle, num_bytes = event
        if num_bytes < 0 or (num_bytes == 0) != (handle in self._sizes):
            raise ValueError(
                f"event {self._num_events} gives handle {handle} {num_bytes} bytes, and it is "
                f"{'' if handle in self._sizes else 'not '}allocated: allocate each handle once, with more than 0 bytes, "
                "before its free"
            )
        self._num_events += 1
        if num_bytes:
            self._sizes[handle] = num_bytes
            self.live_bytes += num_bytes
            self._allocator.allocate(handle, num_bytes)
        else:
            self.live_bytes -= self._sizes.pop(handle)
            self._allocator.free(handle)
        self.peak_held_bytes = max(self.peak_held_bytes, self._allocator.held_bytes)
        if self.live_bytes > self.peak_live_bytes:
            self.peak_live_bytes, self.peak_at = self.live_bytes, self._num_events


@dataclass
class _Space:
    """One range of addresses, used from its start, with free chunks in between."""

    used: dict[int, int] = field(default_factory=dict)  # address: bytes
    by_size: list[tuple[int, int]] = field(default_factory=list)  # free chunks: bytes, address
    starts: dict[int, int] = field(default_factory=dict)  # free chunks by address: bytes
    ends: dict[int, int] = field(default_factory=dict)  # free chunks by the address behind them: address

    def best_fit(self, num_bytes: int) -> tuple[int, int] | None:
        """Return address and bytes of the smallest free chunk of at least `num_bytes`."""
        place = bisect_left(self.by_size, (num_bytes, -1))
        return None if place == len(self.by_size) else (self.by_size[place][1], self.by_size[place][0])

    def take(self, address: int, num_bytes: int, split_above: int) -> None:
        """Use a free chunk; a rest of more than `split_above` bytes stays free."""
        size = self.remove(address)
        if size - num_bytes > split_above:
            self.add(address + num_bytes, size - num_bytes)
            size = num_bytes
        self.used[address] = size

    def give(self, address: int) -> int:
        """Free a used chunk, merge it with free neighbours, and return the address of the result."""
        size = self.used.pop(address)
        if address in self.ends:
            before = self.ends[address]
            size += self.remove(before)
            address = before
        if address + size in self.starts:
            size += self.remove(address + size)
        self.add(address, size)
        return address

    def add(self, address: int, num_bytes: int) -> None:
        insort(self.by_size, (num_bytes, address))
        self.starts[address] = num_bytes
        self.ends[address + num_bytes] = address

    def remove(self, address: int) -> int:
        size = self.starts.pop(address)
        del self.ends[address + size]
        self.by_size.pop(bisect_left(self.by_size, (size, address)))
        return size


class CudaCache:
    """torch's caching allocator with its default settings (c10/cuda/CUDACachingAllocator.cpp, torch 2.13).

    Sizes are multiples of 512 bytes. Requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB;
    larger ones get a segment of their own, a multiple of 2 MiB. Freed segments stay reserved.
    """

    ROUND_BYTES = 512
    SMALL_BYTES = 1 * MIB
    SMALL_SEGMENT_BYTES = 2 * MIB
    LARGE_SEGMENT_BYTES = 20 * MIB
    MIN_LARGE_BYTES = 10 * MIB
    LARGE_ROUND_BYTES = 2 * MIB

    def __init__(self) -> None:
        self._reserved = 0
        self._small, self._large = _Space(), _Space()
        self._places: dict[int, tuple[_Space, int]] = {}

    @property
    def held_bytes(self) -> int:
        return self._reserved

    def allocate(self, handle: int, num_bytes: int) -> None:
        size = -(-num_bytes // self.ROUND_BYTES) * self.ROUND_BYTES
        is_small = size <= self.SMALL_BYTES
        space = self._small if is_small else self._large
        if (found := space.best_fit(size)) is None:
            segment = self._segment_bytes(size)
            # One unused address between segments keeps their chunks apart.
            space.add(2 * self._reserved + 1, segment)
            found = (2 * self._reserved + 1, segment)
            self._reserved += segment
        space.take(found[0], size, self.ROUND_BYTES - 1 if is_small else self.SMALL_BYTES)
        self._places[handle] = (space, found[0])

    def free(self, handle: int) -> None:
        space, address = self._places.pop(handle)
        space.give(address)

    def _segment_bytes(self, size: int) -> int:
        if size <= self.SMALL_BYTES:
            return self.SMALL_SEGMENT_BYTES
        if size < self.MIN_LARGE_BYTES:
            return self.LARGE_SEGMENT_BYTES
        return -(-size // self.LARGE_ROUND_BYTES) * self.LARGE_ROUND_BYTES


# Safety margin of memory estimates, learned from the errors of earlier ones.

# Margin without records, as a share of the estimate. Where blocks lie in the heap is chance: the peak of one MLP, of the models
# that the estimator was tuned on, was 1.33 times its estimate in one run of three, and 0.94 times in another.
DEFAULT_SHARE = 0.35
MIN_SHARE = 0.02  # the peaks of two equal runs differ by about this much
RISK = 0.05  # probability that a job needs more than its estimate and margin
MAX_RECORDS = 500  # the newest count: an estimator changes, and so do jobs


@dataclass(frozen=True)
class MemoryMargin:
    """One-sided bound on the relative error of the next estimate; create it with `of`.

        margin = MemoryMargin.of([(estimate_bytes, measured_bytes), ...])
        margin.bytes_for(900 << 20)

    Split conformal prediction (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Papadopoulos et al.,
    ECML 2002): the ceil((n + 1)(1 - risk))-th smallest of n past errors bounds the next error with probability 1 - risk, if
    past and next jobs come in any order with equal probability.
    """

    share: float  # relative to the estimate
    num_records: int

    @classmethod
    def of(cls, records: Iterable[tuple[int, int]] = (), risk: float = RISK) -> MemoryMargin:
        """Return the margin that earlier jobs teach.

        With too few records for a bound (fewer than 19 at a risk of 0.05), it is the default, or the largest error if that is
        more.
        Args:
            records: estimate without its margin and measured peak, bytes, oldest first.
        Raises:
            ValueError: a figure is not positive, or the risk is outside (0, 1).
        """
        if not 0 < risk < 1:
            raise ValueError(f"risk={risk!r} of too small a margin is outside (0, 1): 0.05 is usual")
        pairs = [*records][-MAX_RECORDS:]
        for index, (estimate, measured) in enumerate(pairs):
            if estimate <= 0 or measured <= 0:
                raise ValueError(
                    f"memory record {index} of {len(pairs)} has estimate {estimate!r} and measured peak {measured!r} bytes: "
                    "leave out jobs without both figures"
                )
        errors = sorted(measured / estimate - 1 for estimate, measured in pairs)
        needed = math.ceil(1 / risk) - 1
        if len(errors) >= needed:
            found = errors[math.ceil((len(errors) + 1) * (1 - risk)) - 1]
        else:
            found = max([DEFAULT_SHARE, *errors])
        return cls(max(MIN_SHARE, found), len(errors))

    def bytes_for(self, estimate_bytes: int) -> int:
        """Return the margin of an estimate."""
        return math.ceil(self.share * estimate_bytes)


# Peak memory of a worker and its loader workers, or of its GPU, with its uncertainty.
#
# The prediction is a sum of named terms with non-negative coefficients, fitted by least squares in relative error, as in
# `prior.py` for time. The planner decides on remedies.

MIN_SIGMA = 0.03  # allocators keep freed memory, so the peaks of two equal runs differ by about this much
UNTESTED_SIGMA = 0.15  # uncertainty of terms fitted to too few configurations to hold any out
MIN_TESTED_CONFIGURATIONS = 4
MAX_FOLDS = 10
PULL = 0.03  # weight of a default, as a share of the peak: defaults decide only where samples do not


@dataclass(frozen=True)
class MemoryPrediction:
    """The highest resident set of a worker with its loader workers, or memory of its GPU, and its 90 % interval.

    Example:
        >>> prediction = MemoryPrediction(peak_bytes=900 * 2**20, low_bytes=800 * 2**20, high_bytes=1100 * 2**20)
        >>> prediction.high_bytes <= 2**30  # may not fit into 1 GiB
        False
    """

    peak_bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class MemoryTerm:
    """One cause of memory: bytes = coefficient x `amount`; the coefficient is fitted and never negative."""

    name: str
    source: str
    amount: Callable[[Columns], Floats]
    default: float  # coefficient in the absence of samples


MEMORY_TERMS: tuple[MemoryTerm, ...] = (
    MemoryTerm("process", "interpreter, libraries, and the data set held in memory", lambda c: np.ones(len(c)), 400.0 * MIB),
    MemoryTerm(
        "dense_state",
        "parameters, gradients, optimizer state and reduction buckets: 3 to 6 times the bytes of the dense parameters "
        "(ZeRO, Rajbhandari et al., SC 2020, section 3.1)",
        lambda c: c.dense_bytes,
        4.0,
    ),
    MemoryTerm(
        "activations",
        "what forward keeps for backward, once for each sample of the local batch (ZeRO, section 3.2)",
        lambda c: c.local_batch,
        0.0,
    ),
    MemoryTerm(
        "loader_processes", "pages that a loader worker does not share with its worker", lambda c: c.loader_workers, 50.0 * MIB
    ),
    MemoryTerm(
        "prefetched_batches",
        "each loader worker prepares prefetch_factor batches ahead (torch.utils.data.DataLoader: 2 by default)",
        lambda c: c.loader_workers * np.where(c.prefetch_factor > 0, c.prefetch_factor, 2.0) * c.local_batch,
        0.0,
    ),
    MemoryTerm(
        "tables",
        "table shards with their optimizer state, spread over the workers",
        lambda c: c.embedding_bytes / c.num_workers,
        1.5,
    ),
)


GPU_TERMS = tuple(term for term in MEMORY_TERMS if term.name in ("dense_state", "activations", "tables"))
"""Causes of memory on a worker's GPU; activations are those of one pass."""


def on_gpu(samples: Sequence[StepProfile]) -> list[StepProfile]:
    """Return the windows with a figure of the GPU's memory, as windows of that memory and of the samples of one pass."""
    found = []
    for sample in samples:
        if sample.gpu_memory_bytes > 0:
            share = configuration_of(sample).local_batch
            at_once = min(share, sample.pass_limit or share)
            window = replace(sample, local_batch=at_once, global_batch=at_once * sample.num_workers)
            found.append(replace(window, peak_memory_bytes=sample.gpu_memory_bytes, memory_bytes=0))
    return found


@dataclass(frozen=True)
class MemoryModel:
    """Model of one worker's peak memory; create it with `fit`.

    Example:
        >>> from lightning_dlrover.tuning import configuration_of
        >>> model = MemoryModel.fit(windows)  # step profiles of one job
        >>> prediction = model.predict(configuration_of(windows[0]))
        >>> prediction.low_bytes < prediction.peak_bytes < prediction.high_bytes
        True
    """

    terms: Sequence[MemoryTerm]
    coefficients: Floats  # coefficients of the terms, in their order
    sigma: float  # deviation of the log error in a configuration that was not measured
    reach: Floats  # largest measured amount of each term

    @classmethod
    def fit(cls, samples: Sequence[StepProfile], terms: Sequence[MemoryTerm] = MEMORY_TERMS) -> MemoryModel:
        """Fit a model to the windows of one job; a window without a peak counts with its resident set at the end.

        Args:
            terms: `GPU_TERMS` for windows by `on_gpu`.

        Raises:
            ValueError: no sample holds a figure above 0, or one holds a negative one.
        """
        for index, sample in enumerate(samples):
            for name in ("peak_memory_bytes", "memory_bytes"):
                if getattr(sample, name) < 0:
                    raise ValueError(
                        f"cannot fit a memory model: sample {index} (worker {sample.worker_id!r}, round {sample.round_number}, "
                        f"first step {sample.first_step}) has {name}={getattr(sample, name)!r}; leave this window out"
                    )
        used = [sample for sample in samples if _peak_bytes(sample) > 0]
        if not used:
            raise ValueError(
                f"cannot fit a memory model: none of {len(samples)} samples has peak_memory_bytes or memory_bytes above 0; "
                "wait for the first profile window of the job"
            )
        groups = windows_by_configuration(used, 0.0)
        amounts = _amounts(Columns.of([*groups]), terms)
        peaks = np.array([max(_peak_bytes(sample) for sample in group) for group in groups.values()], dtype=np.float64)
        sigma = UNTESTED_SIGMA
        if len(groups) >= MIN_TESTED_CONFIGURATIONS:
            order = np.random.default_rng(0).permutation(len(groups))
            num_folds = min(MAX_FOLDS, len(groups))
            errors = []
            for fold in range(num_folds):
                test, train = order[fold::num_folds], np.delete(order, np.s_[fold::num_folds])
                errors.append(np.log(peaks[test] / (amounts[test] @ _fit(amounts[train], peaks[train], terms))))
            sigma = math.sqrt(np.square(np.concatenate(errors)).mean() * (1 + 2 / len(groups)))
        return cls(terms, _fit(amounts, peaks, terms), max(sigma, MIN_SIGMA), amounts.max(axis=0))

    def predict(self, configuration: Configuration) -> MemoryPrediction:
        """Predict the peak in `configuration`; amounts beyond the measured ones widen the interval."""
        amounts = _amounts(Columns.of([configuration]), self.terms)[0]
        peak = max(1.0, float(amounts @ self.coefficients))
        beyond = float(np.maximum(0.0, amounts - self.reach) @ self.coefficients) / peak
        width = math.exp(NORMAL_WIDTH * math.hypot(self.sigma, UNTESTED_SIGMA * beyond))
        return MemoryPrediction(round(peak), round(peak / width), round(peak * width))


def _peak_bytes(sample: StepProfile) -> int:
    return max(sample.peak_memory_bytes, sample.memory_bytes)


def _amounts(columns: Columns, terms: Sequence[MemoryTerm]) -> Floats:
    return np.stack([term.amount(columns) for term in terms], axis=1)


def _fit(amounts: Floats, peaks: Floats, terms: Sequence[MemoryTerm]) -> Floats:
    """Return the coefficients, of shape ``(num_terms,)``."""
    from scipy.optimize import nnls  # import takes 0.3 s, which a reader of profiles need not pay

    rows = amounts / peaks[:, None]
    scale = np.sqrt((rows**2).mean(axis=0))
    seen = scale > 0
    coefficients = np.array([term.default for term in terms])
    pull = PULL * np.eye(int(seen.sum()))
    target = np.concatenate([np.ones(len(peaks)), PULL * coefficients[seen] * scale[seen]])
    coefficients[seen] = nnls(np.vstack([rows[:, seen] / scale[seen], pull]), target)[0] / scale[seen]
    return coefficients


# Predict when a worker's memory reaches its limit, and choose a remedy before that.
#
# Memory grows with the steps made: table rows touched for the first time, or a list that keeps growing. The forecast
# therefore extrapolates over steps, by the median slope of all pairs of windows and its interval. A few odd windows do not
# move that median (Theil, 1950; Sen, JASA 63(324), 1968).
#
# The right remedy depends on the part that grows, and only a trial shows which it is. A leak ends with its process, so a
# replacement starts small. State that is handed over keeps its size and needs a larger node, if the job may request one. If
# that state is split over the workers, more of them need less each. Where none of these helps, or nothing starts workers, a
# checkpoint saves the progress. Where nodes get more memory in place, that comes before all of them.

NUM_SETTLING = 2  # first windows of a round to leave out, because buffers are allocated then
MIN_WINDOWS = 5
MIN_SPAN_S = 8.0  # minimum training time that the windows cover: loading and caching at the start end within seconds
MAX_WINDOWS = 60
CONFIDENCE = 0.9
MIN_GROWTH = 0.02  # minimum growth over the windows, as a fraction of the limit; less is noise
RESERVE = 0.05  # fraction of the limit that stays free: peaks within a window may be higher than those observed
LEADS = 3.0  # a remedy begins when the limit may be reached within this multiple of the time that the remedy takes
MARGIN = 1.2  # memory of a larger node relative to the forecast, which extrapolates only the slope so far
NODE_MEMORY_STEP = 256 * 2**20  # node sizes are multiples of it: a smaller difference is not worth a replacement
UNKNOWN_END_FACTOR = 2.0  # memory of a larger node relative to the present one, if the remaining steps are unknown

Act = Literal["none", "wait", "raise", "replace", "enlarge", "add_workers", "checkpoint"]


@dataclass(frozen=True)
class MemoryForecast:
    """Time until a worker reaches its memory limit, if nothing changes."""

    level_bytes: int  # highest recent use
    grown_bytes: int  # over the windows considered
    limit_bytes: int
    bytes_per_step: float
    steps_left: float  # steps until the limit, less a reserve
    earliest_steps_left: float  # the same at the upper bound of the slope
    step_time_s: float

    @property
    def seconds_left(self) -> float:
        return self.steps_left * self.step_time_s

    @property
    def earliest_seconds_left(self) -> float:
        return self.earliest_steps_left * self.step_time_s

    @property
    def text(self) -> str:
        return (
            f"{self.level_bytes / 2**20:.0f} MiB of {self.limit_bytes / 2**20:.0f} used, growing by "
            f"{self.bytes_per_step / 2**20:.3g} MiB a step: the limit is reached in {self.seconds_left:.0f} s "
            f"({self.earliest_seconds_left:.0f} s at the earliest)"
        )


@dataclass(frozen=True)
class GrowthSituation:
    """Facts that determine which remedies are possible."""

    remaining_steps: float | None  # remaining steps of the job; None if unknown
    lead_s: float  # time between the request for a worker and its first step
    num_workers: int
    max_workers: int
    can_add: bool  # workers can be started, and the size was not set by hand
    can_replace: bool  # workers can be started
    has_sharded_tables: bool
    max_memory_bytes: int = 0  # largest node that can be requested; 0: no larger one
    tried: Sequence[Act] = ()  # remedies that this job tried without success
    sizes: WorldSizes = ANY_NUMBER  # numbers of workers that may be requested
    spare_bytes: int = 0  # memory of the process that a node's workers are forked from
    can_raise: bool = False  # the node may get more memory in place, without a new worker


@dataclass(frozen=True)
class Remedy:
    """A remedy and its reason."""

    act: Act
    reason: str
    num_workers: int = 0  # only for `add_workers`
    node_memory_bytes: int = 0  # only for `raise` and `enlarge`


def forecast_memory(windows: Sequence[StepProfile]) -> MemoryForecast | None:
    """Forecast when the worker reaches its memory limit, from its windows so far, oldest first; None if it does not grow.

    Only the newest windows of one round and of equal settings count, because another split of the work or other loader workers
    take other memory. Memory taken at once, such as by a first validation run, does not count as growth.

    Raises:
        ValueError: the windows belong to several workers.
    """
    if len({w.worker_id for w in windows}) > 1:
        raise ValueError(f"windows of several workers were given: {sorted({w.worker_id for w in windows})}")
    same = list(itertools.takewhile(lambda w: _memory_settings(w) == _memory_settings(windows[-1]), reversed(windows)))[::-1]
    recent = same[NUM_SETTLING:][-MAX_WINDOWS:]
    if len(recent) < MIN_WINDOWS or recent[-1].memory_limit_bytes <= 0:
        return None
    if sum(w.num_steps * w.step_time_s for w in recent) < MIN_SPAN_S:
        return None
    limit = recent[-1].memory_limit_bytes
    steps = np.array([w.first_step + w.num_steps for w in recent], dtype=np.float64)
    used = np.array([w.memory_bytes for w in recent], dtype=np.float64)
    if len(set(steps)) < MIN_WINDOWS:
        return None
    from scipy.stats import theilslopes  # import takes 0.7 s, which no worker needs to pay before it trains

    slope, intercept, low, high = (float(value) for value in theilslopes(used, steps, CONFIDENCE))
    grown = slope * (steps[-1] - steps[0])
    if low <= 0 or grown < MIN_GROWTH * limit or _is_one_jump(steps, used):
        return None
    # The line's end, or the highest value observed: a peak within a step counts, too.
    level = max(intercept + slope * steps[-1], *(max(w.peak_memory_bytes, w.memory_bytes) for w in recent[-3:]))
    room = max(0.0, limit * (1 - RESERVE) - level)
    return MemoryForecast(
        level_bytes=int(level),
        grown_bytes=int(grown),
        limit_bytes=limit,
        bytes_per_step=slope,
        steps_left=room / slope,
        earliest_steps_left=room / high,
        step_time_s=recent[-1].step_time_s,
    )


def _memory_settings(window: StepProfile) -> tuple[int, ...]:
    """Return the settings of a window that determine its memory."""
    return window.round_number, window.loader_workers, window.prefetch_factor, window.intra_op_threads


def _is_one_jump(steps: Floats, used: Floats) -> bool:
    """Return whether two levels, one up to some window and one after it, describe the windows much better than a line."""

    def squares(values: Floats) -> float:
        return float(((values - values.mean()) ** 2).sum())

    line = used - np.polyval(np.polyfit(steps - steps[0], used, 1), steps - steps[0])
    return min(squares(used[:i]) + squares(used[i:]) for i in range(1, len(used))) < float((line**2).sum()) / 2


def inherited_forecast(window: StepProfile, earlier: MemoryForecast) -> MemoryForecast | None:
    """Return the replaced worker's forecast from the new worker's present level, as there may be no time for a new one.

    None if that level is lower: the replacement has helped.
    """
    level = max(window.memory_bytes, window.peak_memory_bytes)
    if level <= earlier.level_bytes - earlier.grown_bytes / 2 or window.memory_limit_bytes <= 0:
        return None
    room = max(0.0, window.memory_limit_bytes * (1 - RESERVE) - level)
    return replace(
        earlier,
        level_bytes=level,
        limit_bytes=window.memory_limit_bytes,
        steps_left=room / earlier.bytes_per_step,
        earliest_steps_left=room / earlier.bytes_per_step * earlier.earliest_steps_left / max(1e-9, earlier.steps_left),
        step_time_s=window.step_time_s,
    )


def choose_remedy(forecast: MemoryForecast, situation: GrowthSituation) -> Remedy:
    """Choose a remedy for growing memory.

    Raises:
        ValueError: the time that a remedy takes is not a finite time of 0 s or more.
    """
    if not 0 <= situation.lead_s < math.inf:
        raise ValueError(f"lead_s is {situation.lead_s!r}, not a finite time of 0 s or more")
    remaining = situation.remaining_steps
    if remaining is not None and forecast.earliest_steps_left > remaining:
        return Remedy("none", f"{forecast.text}; the job ends before, in {remaining:.0f} steps")
    if forecast.earliest_seconds_left > LEADS * situation.lead_s:
        return Remedy("wait", f"{forecast.text}; there is time, as a new worker takes {situation.lead_s:.0f} s")
    # A larger node costs no more than a new one, unlike more workers.
    order: tuple[Act, ...] = ("enlarge", "add_workers", "replace")
    if not situation.has_sharded_tables:
        order = ("replace", "enlarge", "add_workers")
    # More memory in place costs nothing, not even where a leak would end with its process.
    order = ("raise", *order)
    larger = _enough_memory(forecast, situation)
    is_larger = larger > forecast.limit_bytes + AGENT_BYTES + situation.spare_bytes
    possible = {
        "raise": situation.can_raise and is_larger,
        "replace": situation.can_replace,
        "enlarge": situation.can_replace and is_larger,
        "add_workers": situation.can_add and situation.num_workers < situation.max_workers,
    }
    failed = f"; {' and '.join(_NAMES[act] for act in situation.tried)} did not help" if situation.tried else ""
    for act in order:
        if act in situation.tried or not possible[act]:
            continue
        if act == "raise":
            size = f"{larger / 2**20:.0f} instead of {forecast.limit_bytes / 2**20:.0f} MiB"
            return Remedy(act, f"{forecast.text}{failed}; its node gets {size} in place", node_memory_bytes=larger)
        if act == "replace":
            return Remedy(act, f"{forecast.text}{failed}; a new worker takes its place, without the leaked memory")
        if act == "enlarge":
            size = f"a node of {larger / 2**20:.0f} instead of {forecast.limit_bytes / 2**20:.0f} MiB"
            return Remedy(act, f"{forecast.text}{failed}; a new worker takes its place, on {size}", node_memory_bytes=larger)
        number = _enough_workers(forecast, situation)
        text = f"{forecast.text}{failed}; {number} instead of {situation.num_workers} workers hold less each"
        return Remedy(act, text, number)
    why = "nothing starts workers" if not situation.can_replace else "all other remedies have failed"
    return Remedy("checkpoint", f"{forecast.text}{failed}; a checkpoint is written, as {why}: give each worker more memory")


_NAMES: dict[Act, str] = {"replace": "a new worker in its place", "enlarge": "a larger node", "add_workers": "more workers"}


def least_workers(remedies: Iterable[tuple[str, int]]) -> int:
    """Return the number of workers with which each has enough memory, by earlier remedies; 0 if any number will do.

    Args:
        remedies: act and number of workers of each.
    """
    return max((num_workers for act, num_workers in remedies if act == "add_workers"), default=0)


def node_memory_bytes(worker_bytes: float, max_bytes: int, spare_bytes: int) -> int:
    """Return the bytes that a node needs for one worker of that size and its agent, with a reserve; at most `max_bytes`.

    Args:
        spare_bytes: memory of the process that the node's workers are forked from.
    """
    needed = worker_bytes / (1 - RESERVE) + AGENT_BYTES + spare_bytes
    return min(max_bytes, NODE_MEMORY_STEP * math.ceil(needed / NODE_MEMORY_STEP))


def _enough_memory(forecast: MemoryForecast, situation: GrowthSituation) -> int:
    """Return the bytes that one worker's node needs until the job's end, within the limit for nodes."""
    needed = UNKNOWN_END_FACTOR * (1 - RESERVE) * forecast.limit_bytes
    if situation.remaining_steps is not None:
        needed = MARGIN * (forecast.level_bytes + forecast.bytes_per_step * situation.remaining_steps)
    return node_memory_bytes(needed, situation.max_memory_bytes, situation.spare_bytes)


def _enough_workers(forecast: MemoryForecast, situation: GrowthSituation) -> int:
    """Return the number of workers that can hold the growth until the end; the maximum if the remaining steps are unknown."""
    if situation.remaining_steps is None:
        return situation.max_workers
    growth = forecast.bytes_per_step * situation.remaining_steps * situation.num_workers  # growth of all workers together
    # The growth so far is redistributed as well.
    spread = forecast.grown_bytes * situation.num_workers + growth
    fixed = forecast.level_bytes - forecast.grown_bytes
    room = forecast.limit_bytes * (1 - RESERVE) - fixed
    needed = math.ceil(spread / room) if room > 0 else situation.max_workers
    return min(situation.max_workers, situation.sizes.at_least(max(situation.num_workers + 1, needed)))
