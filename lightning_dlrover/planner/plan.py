"""What a planner decided, on what grounds, and how it turned out.

A `Decision` travels as `data` of an event of kind "decision". How it is reached is in `autoscale.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

__all__ = ["Candidate", "Decision", "Outcome", "outcome"]


LARGEST = 1e18  # of any quantity; beyond lies a broken record, infinity or a whole number that is no float


@dataclass(frozen=True)
class Candidate:
    """One world size that was considered."""

    num_workers: int
    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float  # of the whole job
    worth_s: float  # seconds by which the rest of the job ends sooner than without a change; negative if later
    measured: bool  # this size was tried with this batch
    feasible: bool
    note: str = ""  # for people: why not, or why


@dataclass(frozen=True)
class Decision:
    """A world size chosen over others. JSON-safe: `from_data(to_data(d)) == d`, through `json` too."""

    decision_id: int
    at: float  # seconds since the epoch
    current_workers: int
    chosen_workers: int
    reason: str  # a sentence for people
    candidates: tuple[Candidate, ...]  # ascending in workers
    observed_step_time_s: float  # before the change
    predicted_step_time_s: float  # of the chosen size
    explored: bool  # chosen to learn, not because it was known to be better

    @property
    def is_change(self) -> bool:
        return self.chosen_workers != self.current_workers

    @property
    def chosen(self) -> Candidate:
        return next(c for c in self.candidates if c.num_workers == self.chosen_workers)

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
        candidates = tuple(_read(Candidate, item) for item in raw)
        decision = _read(cls, {**data, "candidates": candidates})
        if decision.chosen_workers not in [c.num_workers for c in candidates]:
            raise ValueError(f"decision {decision.decision_id} chose {decision.chosen_workers} workers, no candidate")
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
    chosen = decision.chosen
    ratio = observed_step_time_s / decision.predicted_step_time_s
    expected = chosen.low_s <= observed_step_time_s <= chosen.high_s
    text = (
        f"decision {decision.decision_id}, {decision.chosen_workers} workers: "
        f"{observed_step_time_s * 1e3:.3g} ms a step, {ratio:.2f} times the "
        f"{decision.predicted_step_time_s * 1e3:.3g} ms predicted "
        f"({'inside' if expected else 'outside'} {chosen.low_s * 1e3:.3g}-{chosen.high_s * 1e3:.3g})"
    )
    if decision.is_change:
        before = decision.observed_step_time_s / observed_step_time_s
        text += f"; {before:.2f} times as fast as with {decision.current_workers}"
    return Outcome(decision.decision_id, observed_step_time_s, ratio, expected, text)


T = TypeVar("T")


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
        if hint is float and type(value) in (int, float) and -LARGEST <= value <= LARGEST:
            value = float(value)
        elif type(value) is not (get_origin(hint) or hint) or hint is float:
            raise ValueError(f"{name} of a {record_type.__name__} is {value!r:.80}, not {hint}")
        values[name] = value
    return record_type(**values)
