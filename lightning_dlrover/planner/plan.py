"""A planner's decision, its grounds, and its outcome.

A `Decision` travels as `data` of an event of kind "decision". `autoscale.py` reaches it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dlrover.codec import from_fields

__all__ = ["Candidate", "Decision", "Outcome", "Settings", "outcome", "seconds_text", "step_text"]


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
    """Settings chosen over others. JSON-safe: `from_data(to_data(d)) == d`, through `json` too.

    Example:
        >>> from lightning_dlrover.perf import StepTimeModel
        >>> from lightning_dlrover.planner import Limits, Objective, PlanRequest, plan
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
    reason: str  # a sentence for people
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
        data = dataclasses.asdict(self)
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
            raise ValueError(f"decision {decision.decision_id} chose {decision.chosen}, which is no candidate")
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
        >>> from lightning_dlrover.perf import StepTimeModel
        >>> from lightning_dlrover.planner import Limits, Objective, PlanRequest, plan
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
    """A step time for people: `41.7 ms`, `1.04 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def seconds_text(seconds: float) -> str:
    """A time of a job for people, with two digits or more: `7.3 s`, `580 s`, `19 min`, `2.5 h`."""
    if abs(seconds) >= 7200:
        return f"{seconds / 3600:.1f} h"
    if abs(seconds) >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"
