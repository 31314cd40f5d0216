"""A user's objective for a job, and the cost of running the job in some settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_dlrover import variables
from lightning_dlrover.perf import Configuration

__all__ = ["Aim", "Objective", "Prices", "Resources", "objective_from", "parse_prices", "resources_of"]

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

    fastest: ends soonest; with `budget`, among the settings that the budget allows. Twice the resources have to bring at
    least 2 ** 0.05 = 1.035 times the throughput, or they are left to others.
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
            raise ValueError(f"the objective {self.aim!r} is none of {', '.join(get_args(Aim))}")
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
        said = {"fastest": "fastest", "cheapest": "cheapest", "efficient": "best throughput per cost"}[self.aim]
        if self.budget is not None:
            said += f" within a budget of {self.budget:g}"
        if self.deadline_s is not None:
            said += f" that ends within {self.deadline_s:g} s of the start"
        return said


def objective_from(environ: Mapping[str, str]) -> Objective:
    """Read the objective from the environment; the fastest by default.

    Raises:
        ValueError: a variable holds something else.
    """
    given = {name: environ.get(variable, "").strip() for name, variable in variables.OBJECTIVE.items()}
    found = {name: text for name, text in given.items() if text}
    figures = {name: _figure(variables.OBJECTIVE[name], found[name]) for name in ("deadline_s", "budget") if name in found}
    aim: Any = found.get("aim", "fastest")
    return Objective(aim=aim, prices=parse_prices(found.get("prices", "")), **figures)


def _figure(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{variable} is {text!r}, which is no number") from error


def parse_prices(text: str) -> Prices:
    """Prices from `core_hour=0.04,gpu_hour=2.5`.

    Raises:
        ValueError: a name is unknown, or a figure is none.
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
