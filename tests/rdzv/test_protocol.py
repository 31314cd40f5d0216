"""The membership protocol in any order of events: workers that follow its rules never stand still and never start over."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from lightning_dlrover.rdzv.records import JobRecord, PlanRecord, RoundRecord, WorkerRecord, WorkerState
from lightning_dlrover.rdzv.rounds import View, next_round

FOREVER_S = 1e6
JOBS = 400  # per test


@dataclass
class _Process:
    """A worker as `world.py` lets it behave, reduced to what it writes."""

    state: WorkerState
    number: int = 0  # as in its record
    entering: int = 0  # round that it is forming
    formed: int = 0  # round that it is in
    holds_state: bool = False


class Protocol:
    """Workers start, train, die and leave in any order while a convener answers whenever it likes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        min_workers = rng.choice([1, 1, 2])
        self.job = JobRecord("training", True, min_workers, min_workers + rng.randint(0, 3), "1")
        self.round: RoundRecord | None = None
        self.rounds: dict[int, RoundRecord] = {}
        self.arrived: dict[int, set[str]] = {}
        self.can_meet: dict[int, bool] = {}
        self.processes: dict[str, _Process] = {}
        self.drains: set[str] = set()
        self.plan: PlanRecord | None = None
        self.num_started = 0

    @property
    def view(self) -> View:
        workers = {
            w: WorkerRecord(w, f"agent-{w}", "host", 1, 0, "address", 1, p.state, p.number) for w, p in self.processes.items()
        }
        return View(self.job, self.round, self.plan, workers, {}, frozenset(self.drains))

    def run(self) -> None:
        """Let something happen now and then, and workers and convener act in between."""
        for _ in range(self.rng.randint(1, 12)):
            self._happen()
            for _ in range(self.rng.choice([0, 1, 2, 5, 10, 30])):
                self._act()

    def settle(self) -> None:
        """Let workers and convener act until nothing is left to do."""
        for _ in range(200):
            moved = [self._advance(w) for w in list(self.processes) if w in self.processes]
            if not any(moved) and not self._convene(FOREVER_S, between_steps=False):
                return
        raise AssertionError(f"never comes to rest: {self.view}")

    def _happen(self) -> None:
        event = self.rng.choice(["start", "start", "start", "die", "leave", "plan"])
        if event == "start":
            self.num_started += 1
            state: WorkerState = "standby" if self._someone_is_past_the_start() else "starting"
            self.processes[f"p{self.num_started}"] = _Process(state)
        elif event == "plan":
            self.plan = PlanRecord(self.rng.randint(1, 5), "planner", "because", binding=self.rng.random() < 0.7)
        elif self.processes:
            worker_id = self.rng.choice(list(self.processes))
            if event == "die":
                self._gone(worker_id)
            else:
                self.drains.add(worker_id)

    def _act(self) -> None:
        if not self.processes or self.rng.random() < 0.25:
            self._convene(FOREVER_S if self.rng.random() < 0.1 else 0.0, between_steps=self.rng.random() < 0.5)
        else:
            self._advance(self.rng.choice(list(self.processes)))

    # --- rules of the game

    def _someone_is_past_the_start(self) -> bool:
        return bool(self.view.survivors or self.view.in_state("standby", "ready"))

    def _gone(self, worker_id: str) -> None:
        self.processes.pop(worker_id, None)
        self.drains.discard(worker_id)

    def _convene(self, waited_s: float, between_steps: bool) -> bool:
        new = next_round(self.view, waited_s)
        if new is None:
            return False
        members = {w: self.processes[w].holds_state for w in new.members}
        if new.kind == "start":
            assert not any(members.values()), f"{new} starts over although some hold the state: {members}"
        mixed = len(set(members.values())) > 1
        self.can_meet[new.number] = new.planned or between_steps or not mixed
        self.round = self.rounds[new.number] = new
        return True

    def _advance(self, worker_id: str) -> bool:
        """Let one worker take its next step; returns whether it did anything."""
        me, newest = self.processes[worker_id], self.round
        if me.entering:
            return self._form(worker_id)
        if newest is not None and newest.number > max(me.formed, me.number) and self._follow(worker_id, newest):
            return True
        if me.state == "starting" and self._someone_is_past_the_start():
            me.state = "standby"
        elif me.state == "standby":
            me.state = "ready"
        elif me.state == "active" and any(w not in self.processes for w in self.rounds[me.formed].members):
            me.state, me.number = "reforming", me.formed  # a collective failed
        else:
            return False
        return True

    def _follow(self, worker_id: str, newest: RoundRecord) -> bool:
        me = self.processes[worker_id]
        if worker_id in newest.members:
            assert me.state != "standby", f"{worker_id} is in {newest} but still builds its model"
            me.entering = newest.number
            self.arrived.setdefault(newest.number, set()).add(worker_id)
        elif me.formed or me.holds_state:
            self._gone(worker_id)  # planned: it leaves; else it was evicted and starts again as another worker
        else:
            return False
        return True

    def _form(self, worker_id: str) -> bool:
        me = self.processes[worker_id]
        target = self.rounds[me.entering]
        assert self.round is not None
        complete = self.arrived[target.number] >= set(target.members)
        if complete and self.can_meet[target.number]:
            me.entering, me.formed, me.holds_state = 0, target.number, True
            me.state, me.number = "active", target.number
        elif complete or self.round.number > target.number or any(w not in self.processes for w in target.members):
            me.entering = 0
            me.state, me.number = ("reforming" if me.holds_state else "ready"), target.number
        else:
            return False
        return True


@pytest.mark.parametrize("first", range(0, 4000, JOBS))
def test_when_nothing_happens_any_more_everybody_who_can_train_does(first: int) -> None:
    for seed in range(first, first + JOBS):
        job = Protocol(random.Random(seed))
        job.run()
        job.settle()
        view = job.view
        staying = [w for w in job.processes if w not in job.drains]
        if len(staying) < job.job.min_workers or (job.round is not None and job.round.kind == "stop"):
            continue
        active = {w for w, process in job.processes.items() if process.state == "active"}
        assert len(active) == min(len(staying), view.cap), f"seed {seed}: not all that could train do: {view}"
        assert not job.drains & active, f"seed {seed}: {job.drains & active} were asked to leave: {view}"
        assert job.round is not None
        assert active == set(job.round.members), f"seed {seed}: {view}"
