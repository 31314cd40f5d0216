"""Remember the windows, decisions and outcomes of one job, on its rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlrover.codec import from_fields
from lightning_dlrover.learn.profile_log import LOG_EVERY_S
from lightning_dlrover.perf import configuration_of
from lightning_dlrover.perf.samples import StepProfile, impossible_figure
from lightning_dlrover.planner.objective import Objective, resources_of
from lightning_dlrover.planner.plan import Decision, Outcome, Settings
from lightning_dlrover.planner.space import settings_of
from lightning_dlrover.rdzv.job.events import DecisionMade, OutcomeJudged, PlannerEvent, WindowMeasured, events_of
from lightning_dlrover.rdzv.job.records import EventRecord

__all__ = ["JobMemory", "Past"]

log = logging.getLogger(__name__)

MAX_WINDOWS_PER_SETTINGS = 30
MAX_STAYS = 50  # decisions without a change to keep in memory; each is soon recorded elsewhere

# Maximum seconds between the last logged window of one rank 0 and the first of the next, unless the job was ended meanwhile.
LONGEST_HANDOVER_S = LOG_EVERY_S + 60.0


@dataclass(frozen=True)
class Past:
    """The history's records of this job."""

    windows: Sequence[StepProfile] = ()
    decisions: Sequence[Decision] = ()
    outcomes: Sequence[Outcome] = ()


class JobMemory:
    """Rank 0's records of the job."""

    def __init__(self) -> None:
        self.windows: list[StepProfile] = []  # oldest first, the newest few of each settings
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self._spans: list[tuple[StepProfile, float]] = []  # one window for each stretch of equal settings, seconds

    @classmethod
    def of(cls, events: Sequence[EventRecord], past: Past) -> JobMemory:
        memory = cls()
        windows = {window.at: window for window in past.windows}
        decisions = {decision.decision_id: decision for decision in past.decisions}
        outcomes = {found.decision_id: found for found in past.outcomes}
        for _, event in events_of(events, PlannerEvent):
            try:
                if isinstance(event, WindowMeasured):
                    window = from_fields(StepProfile, event.document, "a profile")
                    if problem := impossible_figure(window):
                        raise ValueError(f"{problem[0]} of a profile {problem[1]}")
                    windows[window.at] = window
                elif isinstance(event, DecisionMade):
                    decision = Decision.from_data(event.document)
                    decisions[decision.decision_id] = decision
                elif isinstance(event, OutcomeJudged):
                    found = from_fields(Outcome, event.document, "an outcome")
                    outcomes[found.decision_id] = found
            except (TypeError, ValueError, KeyError) as error:
                log.warning("an event of the job's past cannot be read: %s", error)
        for window in sorted(windows.values(), key=lambda w: w.at):
            memory.add(window)
        for decision in sorted(decisions.values(), key=lambda d: d.decision_id):
            memory.decide(decision)
        memory.outcomes += outcomes.values()
        return memory

    @property
    def next_id(self) -> int:
        return max((d.decision_id for d in self.decisions), default=0) + 1

    @property
    def trial(self) -> Decision | None:
        """The newest decision, if it is a trial without an outcome yet."""
        last = self.decisions[-1] if self.decisions else None
        if last is None or not last.explored or not last.is_change:
            return None
        return last if all(o.decision_id != last.decision_id for o in self.outcomes) else None

    def add(self, window: StepProfile) -> None:
        def place(of: StepProfile) -> tuple[Settings, int]:
            return settings_of(of), of.global_batch

        last = self.windows[-1] if self.windows else None
        own_s = window.num_steps * window.step_time_s
        passed_s = max(own_s, window.at - last.at) if last is not None and window.at else own_s
        if last is not None and last.worker_id != window.worker_id:
            # A job that was ended and resumed days later has cost nothing in between.
            passed_s = min(passed_s, own_s + LONGEST_HANDOVER_S)
        if self._spans and place(self._spans[-1][0]) == place(window):
            self._spans[-1] = window, self._spans[-1][1] + passed_s
        else:
            self._spans.append((window, passed_s))
        self.windows = [*self.windows, window]
        alike = [i for i, each in enumerate(self.windows) if place(each) == place(window)]
        if len(alike) > MAX_WINDOWS_PER_SETTINGS:
            del self.windows[alike[0]]

    def decide(self, decision: Decision) -> None:
        """Keep a decision: all changes, and the newest decisions without a change, of which there is no end."""
        self.decisions.append(decision)
        stays = [i for i, each in enumerate(self.decisions) if not each.is_change]
        if len(stays) > MAX_STAYS:
            del self.decisions[stays[0]]

    def spent(self, objective: Objective, node_cores: float) -> float | None:
        """Return the money spent so far; None: unknown."""
        total = 0.0
        for window, seconds in self._spans:
            used = resources_of(configuration_of(window, node_cores), max(window.peak_memory_bytes, window.memory_bytes))
            price = objective.prices.per_hour(used)
            if price is None:
                return None
            total += price * seconds / 3600
        return total
