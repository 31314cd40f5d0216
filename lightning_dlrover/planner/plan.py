"""What a planner decided, on what grounds, and how it turned out.

A `Decision` travels as `data` of an event of kind "decision". How it is reached is in `autoscale.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

__all__ = ["Candidate", "Decision", "Outcome", "Settings", "has_failed", "outcome", "step_text"]

FAR_OUT = 1.5
"""A trial whose first window is slower by this factor than the slowest step that was predicted has failed."""


LARGEST = 1e18  # of any quantity; beyond lies a broken record, infinity or a whole number that is no float


@dataclass(frozen=True, order=True)
class Settings:
    """What a plan may change while a job runs. The local batch follows: the global batch is kept."""

    num_workers: int
    loader_workers: int  # of each worker; 0: the worker prepares its batches itself
    intra_op_threads: int  # of each worker; 0: as many as it has cores
    prefetch_factor: int  # batches that each loader worker keeps ready; 0 without loader workers

    def __post_init__(self) -> None:
        least = {"num_workers": 1, "loader_workers": 0, "intra_op_threads": 0, "prefetch_factor": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"no job runs with {name}={getattr(self, name)!r}, which must be {low} or more")

    @property
    def short(self) -> str:
        """`2x4+1/4`: two workers with four threads and one loader worker each, which keeps four batches ready; not two."""
        ahead = f"/{self.prefetch_factor}" if self.prefetch_factor != 2 else ""
        return f"{self.num_workers}x{self.intra_op_threads}" + (f"+{self.loader_workers}{ahead}" if self.loader_workers else "")


@dataclass(frozen=True)
class Candidate:
    """Settings that were considered."""

    settings: Settings
    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float  # of the whole job
    worth_s: float  # seconds by which the rest of the job ends sooner than without a change; negative if later
    measured: bool  # these settings were tried with this batch
    feasible: bool
    note: str = ""  # for people: why not, or why
    on_front: bool = False  # nothing else is both faster and cheaper
    cores: float = 0.0  # to ask a scheduler for, all workers together; 0: unknown
    gpus: int = 0
    cost_per_hour: float | None = None  # in the currency of the user's prices; None: unknown
    cost_to_end: float | None = None  # of the rest of the job; None: unknown

    @property
    def num_workers(self) -> int:
        return self.settings.num_workers


@dataclass(frozen=True)
class Decision:
    """Settings chosen over others. JSON-safe: `from_data(to_data(d)) == d`, through `json` too."""

    decision_id: int
    at: float  # seconds since the epoch
    current: Settings
    chosen: Settings
    reason: str  # a sentence for people
    candidates: tuple[Candidate, ...]  # ascending in settings
    observed_step_time_s: float  # before the change
    predicted_step_time_s: float  # of the chosen settings
    explored: bool  # chosen to learn, not because it was known to be better
    objective: str = ""  # what was aimed at, in words
    num_considered: int = 0  # settings, of which `candidates` holds those that matter
    num_windows: int = 0  # of this job's steps that the prediction rests on
    left_s: float | None = None  # work that was left, at the step time observed; None: nobody knew
    change_cost_s: float = 0.0  # the job stands still for so long, as measured by earlier changes
    spent: float | None = None  # money until now; None: unknown
    node_cores: float = 0.0  # that each worker's node needs for the chosen settings; 0: what it has is enough
    node_memory_bytes: int = 0  # likewise; 0: what it has is enough

    @property
    def is_change(self) -> bool:
        return self.chosen != self.current

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
        raw = data.get("candidates")
        if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
            raise ValueError(f"a decision's candidates must be a list of objects, not {raw!r:.80}")
        candidates = tuple(_read(Candidate, _with_settings(item, "settings")) for item in raw)
        decision = _read(cls, {**_with_settings(data, "current", "chosen"), "candidates": candidates})
        if decision.chosen not in [c.settings for c in candidates]:
            raise ValueError(f"decision {decision.decision_id} chose {decision.chosen}, which is no candidate")
        return decision


@dataclass(frozen=True)
class Outcome:
    """What a decision was worth, once the chosen size was measured."""

    decision_id: int
    observed_step_time_s: float
    ratio: float  # observed over predicted
    expected: bool  # inside the predicted interval
    text: str


def outcome(decision: Decision, observed_step_time_s: float) -> Outcome:
    """Compare what `decision` predicted with the step time measured after it.

    Raises:
        ValueError: the measured time is not a finite time above 0.
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


def has_failed(decision: Decision, step_time_s: float) -> bool:
    """Whether a trial makes steps so slow that a single window of them is enough to leave it."""
    if not decision.explored or not decision.is_change:
        return False
    return step_time_s > FAR_OUT * max(decision.choice.high_s, decision.observed_step_time_s)


def step_text(seconds: float) -> str:
    """A step time for people: `41.7 ms`, `1.04 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


T = TypeVar("T")


def _with_settings(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`data` with the objects under `names` read as settings."""
    found = {name: data[name] for name in names if name in data}
    for name, raw in found.items():
        if not isinstance(raw, dict):
            raise ValueError(f"{name} must be an object of settings, not {raw!r:.80}")
    return {**data, **{name: _read(Settings, raw) for name, raw in found.items()}}


def _read(record_type: type[T], data: Mapping[str, Any]) -> T:
    """`record_type` from its fields, each of exactly its type."""
    hints = get_type_hints(record_type)
    fields = {f.name: f for f in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(data)):
        raise ValueError(f"a {record_type.__name__} needs {missing}")
    if unknown := sorted(set(data) - set(fields)):
        raise ValueError(f"a {record_type.__name__} has no {unknown}")
    values = {}
    for name, value in data.items():
        hint = hints[name]
        is_number = type(value) in (int, float) and -LARGEST <= value <= LARGEST
        if hint in (float, float | None) and is_number:
            value = float(value)
        elif hint == float | None and value is None:
            pass
        elif type(value) is not (get_origin(hint) or hint) or hint is float:
            raise ValueError(f"{name} of a {record_type.__name__} is {value!r:.80}, not {hint}")
        values[name] = value
    return record_type(**values)
