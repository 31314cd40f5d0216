"""A plan: its candidates, the limits of the search, and the objective that ranks them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal, get_args

import numpy as np

from lightning_dlrover import variables
from lightning_dlrover.codec import from_fields
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.tuning.samples import Configuration, Floats, StepProfile, configuration_of


@dataclass(frozen=True, order=True)
class Settings:
    """The settings that a plan may change while a job runs. The local batch follows, because the global batch is constant.

    Example:
        >>> settings = Settings(num_workers=2, loader_workers=1, intra_op_threads=4, prefetch_factor=2)
        >>> settings.short
        '2x4+1'
    """

    num_workers: int
    loader_workers: int  # per worker; 0: the worker prepares its batches itself
    intra_op_threads: int  # per worker; 0: one for each of its cores
    prefetch_factor: int  # batches that each loader worker keeps ready; 0 without loader workers

    def __post_init__(self) -> None:
        least = {"num_workers": 1, "loader_workers": 0, "intra_op_threads": 0, "prefetch_factor": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"no job runs with {name}={getattr(self, name)!r}, which must be {low} or more")

    @property
    def short(self) -> str:
        """`2x4+1/4`: two workers, each with four threads and one loader worker, which keeps four batches ready.

        The last figure is omitted where it is two.
        """
        ahead = f"/{self.prefetch_factor}" if self.prefetch_factor != 2 else ""
        return f"{self.num_workers}x{self.intra_op_threads}" + (f"+{self.loader_workers}{ahead}" if self.loader_workers else "")


@dataclass(frozen=True)
class Candidate:
    """Settings that the planner considered.

    Example:
        >>> settings = Settings(num_workers=2, loader_workers=0, intra_op_threads=1, prefetch_factor=0)
        >>> candidate = Candidate(settings, step_time_s=0.06, low_s=0.05, high_s=0.08, samples_per_s=8533.0, worth_s=30.0,
        ...                       measured=False, feasible=True, note="predicted to be faster")
        >>> candidate.num_workers
        2
    """

    settings: Settings
    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float  # throughput of the whole job
    worth_s: float  # seconds by which the rest of the job ends earlier than without a change; negative if later
    measured: bool  # measured with these settings and this batch
    feasible: bool
    note: str = ""  # the reason in words, for or against
    on_front: bool = False  # no other candidate is both faster and cheaper
    cores: float = 0.0  # cores to request from a scheduler, all workers together; 0: unknown
    gpus: int = 0
    cost_per_hour: float | None = None  # currency of the user's prices; None: unknown
    cost_to_end: float | None = None  # cost of the rest of the job; None: unknown

    @property
    def num_workers(self) -> int:
        return self.settings.num_workers


@dataclass(frozen=True)
class Decision:
    """Settings chosen over others, as `autoscale.py` decides. JSON-safe: `from_data(to_data(d)) == d`, through `json` too.

    Example:
        >>> from lightning_dlrover.tuning import StepTimeModel
        >>> from lightning_dlrover.tuning import Limits, Objective, PlanRequest, plan
        >>> request = PlanRequest(windows, remaining_samples=1e6)  # `windows`: step profiles of one job
        >>> decision = plan(request, StepTimeModel.fit(windows), Limits(2, 2), Objective(), decision_id=1, at=0.0)
        >>> decision.is_change, decision.chosen.short
        (False, '2x1')
        >>> Decision.from_data(decision.to_data()) == decision
        True
    """

    decision_id: int
    at: float  # seconds since the epoch
    current: Settings
    chosen: Settings
    reason: str  # one sentence
    candidates: tuple[Candidate, ...]  # ascending in settings
    observed_step_time_s: float  # before the change
    predicted_step_time_s: float  # step time with the chosen settings
    explored: bool  # chosen to learn about these settings, not because they were known to be better
    objective: str = ""  # the objective in words
    num_considered: int = 0  # settings considered; `candidates` holds only the relevant ones
    num_windows: int = 0  # windows of this job that the prediction is based on
    left_s: float | None = None  # remaining work at the observed step time; None: unknown
    change_cost_s: float = 0.0  # pause of the job for the change, as earlier changes measured it
    spent: float | None = None  # money spent so far; None: unknown
    node_cores: float = 0.0  # cores per node that the chosen settings require; 0: the present ones are enough
    node_memory_bytes: int = 0  # memory per node that the chosen settings require; 0: the present one is enough
    break_even_s: float | None = None  # step time up to which a trial is no worse than the settings before it
    fallback: Settings | None = None  # best measured settings, for the return from a failed trial; None: `current`

    @property
    def is_change(self) -> bool:
        return self.chosen != self.current

    @property
    def home(self) -> Settings:
        """Settings to return to if the chosen ones fail, as soon as possible: no workers join or leave."""
        fallback = self.fallback
        return fallback if fallback is not None and fallback.num_workers == self.chosen_workers else self.current

    @property
    def current_workers(self) -> int:
        return self.current.num_workers

    @property
    def chosen_workers(self) -> int:
        return self.chosen.num_workers

    @property
    def choice(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.settings == self.chosen)

    def to_data(self) -> dict[str, Any]:
        """Plain lists and dicts, for `EventRecord.data`."""
        data = asdict(self)
        data["candidates"] = list(data["candidates"])
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Decision:
        """The decision that `to_data` wrote.

        Raises:
            ValueError: a field is missing, unknown or has another type, or no candidate was chosen.
        """
        decision = from_fields(cls, dict(data), "a decision")
        if decision.chosen not in [c.settings for c in decision.candidates]:
            raise ValueError(f"decision {decision.decision_id} chose {decision.chosen}, which is not a candidate")
        return decision


@dataclass(frozen=True)
class Outcome:
    """The result of a decision, once the chosen settings were measured.

    Example:
        >>> Outcome(decision_id=1, observed_step_time_s=0.12, ratio=1.5, expected=False, text="slower than predicted").ratio
        1.5
    """

    decision_id: int
    observed_step_time_s: float
    ratio: float  # observed over predicted
    expected: bool  # inside the predicted interval
    text: str


def outcome(decision: Decision, observed_step_time_s: float) -> Outcome:
    """Compare the prediction of `decision` with the step time measured after it.

    Raises:
        ValueError: the measured time is not a finite time above 0.

    Example:
        >>> from lightning_dlrover.tuning import StepTimeModel
        >>> from lightning_dlrover.tuning import Limits, Objective, PlanRequest, plan
        >>> request = PlanRequest(windows, remaining_samples=1e6)  # `windows`: step profiles of one job
        >>> decision = plan(request, StepTimeModel.fit(windows), Limits(2, 2), Objective(), decision_id=1, at=0.0)
        >>> outcome(decision, observed_step_time_s=decision.predicted_step_time_s).expected
        True
    """
    if not 0 < observed_step_time_s < math.inf:
        raise ValueError(f"decision {decision.decision_id} cannot be judged by a step time of {observed_step_time_s!r} s")
    chosen = decision.choice
    ratio = observed_step_time_s / decision.predicted_step_time_s
    expected = chosen.low_s <= observed_step_time_s <= chosen.high_s
    text = (
        f"decision {decision.decision_id}, {decision.chosen.short}: "
        f"{step_text(observed_step_time_s)} a step, {ratio:.2f} times the {step_text(chosen.step_time_s)} predicted "
        f"({'inside' if expected else 'outside'} {step_text(chosen.low_s)} to {step_text(chosen.high_s)})"
    )
    if decision.is_change:
        before = decision.observed_step_time_s / observed_step_time_s
        text += f"; {before:.2f} times as fast as with {decision.current.short}"
    return Outcome(decision.decision_id, observed_step_time_s, ratio, expected, text)


def step_text(seconds: float) -> str:
    """Format a step time: `41.7 ms`, `1.04 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def seconds_text(seconds: float) -> str:
    """Format a duration of a job, with two digits or more: `7.3 s`, `580 s`, `19 min`, `2.5 h`."""
    if abs(seconds) >= 7200:
        return f"{seconds / 3600:.1f} h"
    if abs(seconds) >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"


# The settings that a plan may choose from, and the subset worth considering.
#
# All combinations are considered, so the Pareto front is exact. Large numbers of workers are a few percent apart.

SPARE_THREADS = 0.5  # tolerance for foreign load, which any machine has a bit of
ALL_SIZES_UP_TO = 128  # numbers of workers up to which each one is considered


@dataclass(frozen=True)
class Limits:
    """The range that a plan may choose from. An empty tuple leaves that setting as it is.

    Example:
        >>> limits = Limits(min_workers=1, max_workers=8, intra_op_threads=(1, 2, 4), failed_sizes=frozenset({3}))
        >>> limits.sizes
        (1, 2, 4, 5, 6, 7, 8)
    """

    min_workers: int
    max_workers: int
    loader_workers: tuple[int, ...] = ()  # per worker
    intra_op_threads: tuple[int, ...] = ()  # per worker
    prefetch_factors: tuple[int, ...] = ()  # used where there are loader workers
    workers_per_node: int = 0  # workers that a new node starts, all of them or none; 0: workers stay on the present nodes
    # Maximum for a worker's node, where each worker has one of its own; 0: the node stays as it is.
    max_cores: float = 0.0
    max_memory_bytes: int = 0
    # Numbers of workers with which a step has failed, or that would leave a node with fewer workers than others.
    failed_sizes: frozenset[int] = frozenset()
    listed_sizes: tuple[int, ...] = ()  # numbers of workers that may be requested, ascending; empty: any
    # Cores of the job on a node that other processes keep busy. No more threads than now are considered for these.
    foreign_cores: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"cannot plan between {self.min_workers} and {self.max_workers} workers: "
                "min_workers must be at least 1 and at most max_workers"
            )
        least = {"loader_workers": 0, "intra_op_threads": 1, "prefetch_factors": 1}
        for name, low in least.items():
            if wrong := [value for value in getattr(self, name) if value < low]:
                raise ValueError(f"cannot plan with {name} of {wrong[0]}: each must be {low} or more")
        if self.workers_per_node < 0:
            raise ValueError(f"cannot plan with {self.workers_per_node} workers per node; 0 leaves them where they are")
        if self.listed_sizes and not any(self.min_workers <= n <= self.max_workers for n in self.listed_sizes):
            raise ValueError(
                f"cannot plan between {self.min_workers} and {self.max_workers} workers with sizes of "
                f"{WorldSizes(self.listed_sizes).text} only: one of them must be within these limits"
            )
        if not 0 <= self.foreign_cores < math.inf:
            raise ValueError(f"cannot plan with {self.foreign_cores} cores that others keep busy; 0 leaves all to the job")
        if not 0 <= self.max_cores < math.inf or self.max_memory_bytes < 0:
            raise ValueError(
                f"cannot plan with nodes of up to {self.max_cores} cores and {self.max_memory_bytes} bytes; "
                "0 leaves them as they are"
            )

    def allows(self, settings: Settings) -> bool:
        """Return whether the workers are within their limits. The other settings may keep the user's values."""
        num = settings.num_workers
        return self.min_workers <= num <= self.max_workers and num not in self.failed_sizes and self.lists(num)

    def lists(self, num_workers: int) -> bool:
        """Return whether this number of workers may be requested."""
        return not self.listed_sizes or num_workers in self.listed_sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers to predict. Those that may not be requested show what the list of sizes costs."""
        sizes = sizes_to_consider(self.max_workers, max(1, self.workers_per_node), (self.min_workers, *self.listed_sizes))
        return tuple(n for n in sizes if n >= self.min_workers and n not in self.failed_sizes)


def sizes_to_consider(most: int, per_node: int, also: Sequence[int] = ()) -> list[int]:
    """Return numbers of workers or devices to choose from, ascending from 0 to `most`.

    Above `ALL_SIZES_UP_TO` they are whole nodes, about 4 % apart: a job's speed hardly differs between two of them.
    Args:
        per_node: workers or devices of one node.
        also: further numbers, such as the present one; those above `most` are left out.
    """
    sizes = set(range(min(most, ALL_SIZES_UP_TO) + 1))
    size = ALL_SIZES_UP_TO
    while size < most:
        size = max(size + per_node, (size * 26 // 25) // per_node * per_node)
        sizes.add(min(size, most))
    return sorted(sizes.union(size for size in also if size <= most))


def tunable_axes(node_cores: float, cores: float) -> dict[str, tuple[int, ...]]:
    """Return, for `Limits`, the values of the tunable settings worth considering on nodes with `node_cores` cores.

    The values are powers of two: within a factor of two of the best number the remaining gain is small.
    Args:
        cores: cores that one worker may use.
    """
    powers = tuple(2**k for k in range(11))
    most_loaders = max(1.0, min(16.0, node_cores or cores, cores))
    return {
        "loader_workers": (0, *(n for n in powers if n <= most_loaders)),
        "intra_op_threads": tuple(sorted({*(n for n in powers if n <= cores), max(1, int(cores))})),
        "prefetch_factors": (2, 4),
    }


def settings_of(profile: StepProfile) -> Settings:
    """Return the settings of a measured profile."""
    prefetch_factor = profile.prefetch_factor if profile.loader_workers else 0
    return Settings(profile.num_workers, profile.loader_workers, profile.intra_op_threads, prefetch_factor)


def all_settings(limits: Limits, now: Settings) -> list[Settings]:
    """Return all settings that `limits` allow, and the present ones, ascending."""
    prefetch = limits.prefetch_factors or (now.prefetch_factor or 2,)
    found = {now}
    for workers, loaders, threads in product(
        limits.sizes, limits.loader_workers or (now.loader_workers,), limits.intra_op_threads or (now.intra_op_threads,)
    ):
        found.update(Settings(workers, loaders, threads, factor) for factor in (prefetch if loaders else (0,)))
    return sorted(found)


def configuration(settings: Settings, current: StepProfile, limits: Limits, node_cores: float) -> Configuration:
    """Return the current configuration with other settings and the same global batch."""
    num_nodes = min(current.num_nodes, settings.num_workers)
    if limits.workers_per_node:
        num_nodes = math.ceil(settings.num_workers / limits.workers_per_node)
    is_same = settings.num_workers == current.num_workers
    cores = current.cores
    if settings != settings_of(current):
        # Threads and loader workers may request a larger node. A present node never loses cores.
        cores = max(cores, min(limits.max_cores, max(1, settings.intra_op_threads) + settings.loader_workers))
    return replace(
        configuration_of(current, node_cores),
        **vars(settings),
        cores=cores,
        num_nodes=num_nodes,
        local_batch=math.ceil(current.global_batch / settings.num_workers),
        fullest_node=current.fullest_node if is_same else 0,
        emptiest_node=current.emptiest_node if is_same else 0,
    )


def why_not(settings: Settings, now: Configuration, asked: Configuration, global_batch: int, limits: Limits) -> str:
    """Return why `settings` cannot or should not be run, before any prediction; empty if they can.

    Threads beyond a node's cores only get in each other's way, so they are not considered, unless they run already.
    """
    if settings.num_workers > global_batch:
        return f"a global batch of {global_batch} leaves workers without a sample"
    if limits.workers_per_node and settings.num_workers % limits.workers_per_node:
        return f"nodes start {counted(limits.workers_per_node, 'worker')} each"
    if not limits.lists(settings.num_workers):
        return not_listed(limits)
    if asked == now or not asked.node_cores:
        return ""
    threads = asked.workers_on_node * asked.threads
    if asked.threads > 1 and threads > asked.node_cores:
        return f"{threads:g} threads on {asked.node_cores:g} cores of a node"
    # Threads meet at a barrier many times in each step, so one that shares its core makes all others wait.
    # Workers bound to cores of their own do not get the cores of a node that none of them has.
    cores = min(asked.node_cores, asked.workers_on_node * asked.cores)
    free_cores = cores - limits.foreign_cores
    if asked.threads > max(1, now.threads) and threads > free_cores + SPARE_THREADS:
        return f"{threads:g} threads on {cores:g} cores of a node, of which others keep {limits.foreign_cores:.1f} busy"
    loaders = asked.workers_on_node * asked.loader_workers
    if asked.loader_workers > 1 and loaders > 2 * cores:
        return f"{counted(loaders, 'loader worker')} on {cores:g} cores of a node"
    return ""


def not_listed(limits: Limits) -> str:
    """Return why a number of workers that is not listed is not chosen."""
    return f"the job's sizes are {WorldSizes(limits.listed_sizes).text}"


def pareto_front(gain: Floats, cost: Floats) -> list[int]:
    """Return the indices of candidates that no other beats in both `gain` and `cost`, ascending in cost; of equals, the first.

    Args:
        gain: shape ``(num_candidates,)``, as `cost`.
    """
    front: list[int] = []
    best = -math.inf
    for index in np.lexsort((-gain, cost)):
        if gain[index] > best:
            best = float(gain[index])
            front.append(int(index))
    return front


# The user's objective for a job, and the cost of running the job with some settings.

Aim = Literal["fastest", "cheapest", "efficient"]

FASTEST_ELASTICITY = 0.05


@dataclass(frozen=True)
class Prices:
    """Price of each resource for an hour, in the user's own currency. None: unknown, and never guessed.

    Example:
        >>> Prices(core_hour=0.04).are_known
        True
    """

    core_hour: float | None = None
    gpu_hour: float | None = None
    gib_hour: float | None = None

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            price = getattr(self, name)
            if price is not None and not 0 <= price < math.inf:
                raise ValueError(f"the price {name} is {price!r}; give a finite figure of 0 or more, or leave it out")

    @property
    def are_known(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    def per_hour(self, used: Resources) -> float | None:
        """Return the money for an hour of `used`. A resource without a price is free if another one has a price.

        The result is None if a GPU's price is needed and missing, or if nothing has a price.
        """
        if not self.are_known or (used.gpus and self.gpu_hour is None):
            return None
        amounts = ((used.cores, self.core_hour), (used.gpus, self.gpu_hour), (used.memory_gib, self.gib_hour))
        return sum(amount * (price or 0.0) for amount, price in amounts)


@dataclass(frozen=True)
class Resources:
    """Resources to request from a scheduler, all workers together."""

    cores: float
    gpus: int
    memory_gib: float  # 0: unknown

    @property
    def scalar(self) -> float:
        """The dearest kind alone, for comparisons without prices."""
        return float(self.gpus or self.cores)


def resources_of(configuration: Configuration, peak_memory_bytes: float = 0.0) -> Resources:
    """Return a core for each thread and loader worker, but never more than the workers may use and the nodes have."""
    each = max(1.0, configuration.threads) + configuration.loader_workers
    cores = configuration.num_workers * min(each, max(1.0, configuration.cores))
    if configuration.node_cores:
        cores = min(cores, configuration.num_nodes * configuration.node_cores)
    gpus = 0 if configuration.device == "cpu" else configuration.num_workers
    return Resources(cores, gpus, configuration.num_workers * peak_memory_bytes / 2**30)


@dataclass(frozen=True)
class Objective:
    """The criterion for the choice of a plan.

    fastest: ends soonest; with `budget`, among the settings that the budget allows. Twice the resources must give at least
    2 ** 0.05 = 1.035 times the throughput, or they are left to others.
    cheapest: costs least; with `deadline_s`, among the settings that end in time. Without prices the cost is in core hours,
    or in GPU hours on GPUs.
    efficient: the best throughput per cost.

    Args:
        deadline_s: seconds since the job's start by which it should end.
        budget: money for the whole job; needs prices.

    Example:
        >>> Objective("cheapest", deadline_s=7200).describe()
        'cheapest that ends within 7200 s of the start'
        >>> Objective(budget=20)
        Traceback (most recent call last):
        ValueError: a budget of 20 needs prices to be kept; give at least one of core_hour, gpu_hour and gib_hour
    """

    aim: Aim = "fastest"
    deadline_s: float | None = None
    budget: float | None = None
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        if self.aim not in get_args(Aim):
            raise ValueError(f"the objective {self.aim!r} is not one of {', '.join(get_args(Aim))}")
        for name, value in (("deadline_s", self.deadline_s), ("budget", self.budget)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; give a finite figure above 0, or leave it out")
        if self.budget is not None and not self.prices.are_known:
            raise ValueError(
                f"a budget of {self.budget:g} needs prices to be kept; give at least one of core_hour, gpu_hour and gib_hour"
            )

    @property
    def elasticity(self) -> float:
        """Minimum relative gain of throughput for a relative gain of cost (Cobb and Douglas' exponent)."""
        return FASTEST_ELASTICITY if self.aim == "fastest" else 1.0

    def describe(self) -> str:
        text: str = "best throughput per cost" if self.aim == "efficient" else self.aim
        if self.budget is not None:
            text += f" within a budget of {self.budget:g}"
        if self.deadline_s is not None:
            text += f" that ends within {self.deadline_s:g} s of the start"
        return text


def objective_from(environ: Mapping[str, str]) -> Objective:
    """Read the objective from the environment; the fastest by default.

    Raises:
        ValueError: a variable holds something else.
    """
    given = {name: environ.get(variable, "").strip() for name, variable in variables.OBJECTIVE.items()}
    figures: dict[str, float] = {}
    for name in ("deadline_s", "budget"):
        if text := given[name]:
            try:
                figures[name] = float(text)
            except ValueError as error:
                raise ValueError(f"{variables.OBJECTIVE[name]} is {text!r}, which is not a number") from error
    aim: Any = given["aim"] or "fastest"
    return Objective(aim=aim, prices=parse_prices(given["prices"]), **figures)


def parse_prices(text: str) -> Prices:
    """Return the prices in a text such as `core_hour=0.04,gpu_hour=2.5`.

    Raises:
        ValueError: a name is unknown, or a figure is not a number.
    """
    names = [f.name for f in fields(Prices)]
    found: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, figure = item.partition("=")
        try:
            found[name.strip()] = float(figure)
        except ValueError as error:
            raise ValueError(f"price {item!r} is not NAME=FIGURE, such as core_hour=0.04") from error
        if name.strip() not in names:
            raise ValueError(f"price {item!r}: there is no {name.strip()!r}; known are {', '.join(names)}")
    return Prices(**found)
