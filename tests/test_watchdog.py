"""The watch over a worker: growing memory, time without the GIL, and how often a straggler is reported."""

from __future__ import annotations

import faulthandler
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover import watchdog
from lightning_dlrover.rdzv.job.events import Event, MemoryShort, RoundFormed, StragglerFound, events_of, record_of
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, NodesRecord, Notice, PlanRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.tuning.samples import OwnTimes
from lightning_dlrover.watchdog import DEFAULT_LEAD_S, RAISE_S, REPORT_AGAIN_S, _GilWatch, _Memory, _Stragglers
from tests.support.windows import MIB
from tests.support.windows import memory_window as window

JOB = JobRecord(phase="training", live=True, min_workers=1, max_workers=3, version="1")
WINDOW = replace(window(0, 0.0), num_workers=1, local_batch=64)


@dataclass
class FakeMembership:
    """The records as this worker sees them; a requested worker never comes, unless the test sets it."""

    worker_id: str = "w"
    view: WorkerView = field(default_factory=lambda: WorkerView(job=JOB))
    events: list[EventRecord] = field(default_factory=list)
    num_checkpoints: int = 0
    nodes: NodesRecord | None = None

    @property
    def shared(self) -> FakeMembership:
        return self

    @property
    def journal(self) -> SimpleNamespace:
        return SimpleNamespace(events=lambda: self.events)

    def has_controller(self) -> bool:
        return True

    def replace(self, worker_id: str, reason: str) -> bool:
        self.to_be_replaced(worker_id)
        return True

    def to_be_replaced(self, *workers: str) -> None:
        self.view = replace(self.view, notice=Notice(1, replacements=list(workers)))

    @property
    def workers(self) -> SimpleNamespace:
        return SimpleNamespace(present=lambda workers: {})

    def update_plan(self, change: Callable[[PlanRecord | None], PlanRecord | None]) -> None:
        self.view = replace(self.view, plan=change(self.view.plan) or self.view.plan)

    def ask_for_checkpoint(self, reason: str) -> None:
        self.num_checkpoints += 1

    def event(self, event: Event, text: str) -> None:
        self.events.append(record_of(event, text, self.events[-1].at + 1 if self.events else 1.0))

    @property
    def acts(self) -> list[str]:
        return [short.act for _, short in events_of(self.events, MemoryShort)]


class Growing:
    """A worker that needs a MiB more in every second, in windows of 2 s; time is what the test says."""

    def __init__(self, membership: FakeMembership, round_number: int = 1) -> None:
        live: Any = SimpleNamespace(
            world=SimpleNamespace(membership=membership), remaining_steps=100_000.0, now=SimpleNamespace(counts=(0,))
        )
        self.watch = _Memory(live)
        self._membership = membership
        self.window = replace(WINDOW, round_number=round_number)
        self.now = 1000.0
        self.mib = 400.0

    def train(self, seconds: float) -> None:
        for _ in range(round(seconds / 2)):
            self.now += 2.0
            self.mib += 2.0
            steps = round(10 * (self.now - 1002.0))
            self.watch.windows.append(replace(self.window, first_step=steps, memory_bytes=round(self.mib * MIB), at=self.now))
            self.watch.check(self.now)

    def train_until(self, act: str) -> None:
        """Train until this act, for at most 3000 s."""
        for _ in range(1500):
            self.train(2.0)
            if self._membership.acts[-1:] == [act]:
                return
        raise AssertionError(f"no {act} within 3000 s: {self._membership.acts}")


def test_checkpoint_saves_the_job_if_the_requested_worker_is_missing() -> None:
    membership = FakeMembership()
    worker = Growing(membership)
    worker.train(450.0)  # 100 s before the limit, less a reserve
    assert membership.acts[-1] == "wait"
    worker.train(20.0)
    assert membership.acts[-1] == "replace"
    assert membership.num_checkpoints == 0
    worker.train(60.0)
    assert membership.acts[-1] == "checkpoint"
    assert membership.num_checkpoints == 1
    assert worker.mib < 950


def test_missing_replacement_does_not_prevent_the_memory_measure() -> None:
    membership = FakeMembership()
    worker = Growing(membership)
    membership.to_be_replaced("a straggler")
    worker.train(540.0)
    assert membership.acts[-1] == "checkpoint"
    assert worker.mib < 950


def test_one_worker_at_a_time_is_replaced_while_there_is_time() -> None:
    membership = FakeMembership()
    worker = Growing(membership)
    worker.train(450.0)
    membership.to_be_replaced("another worker")
    worker.train(DEFAULT_LEAD_S - 4)
    assert membership.acts[-1] == "wait"
    membership.to_be_replaced()
    worker.train(2.0)
    assert membership.acts[-1] == "replace"
    assert membership.view.replacements == {"w"}


def test_larger_node_is_requested_after_a_new_worker_did_not_help() -> None:
    plan = PlanRecord(1, "planner", "", binding=True)
    nodes = NodesRecord("slurm", "mark", min_memory_mb=1000, max_memory_mb=3000)
    membership = FakeMembership(view=WorkerView(job=JOB, plan=plan), nodes=nodes)
    worker = Growing(membership)
    worker.train(470.0)
    assert membership.acts[-1] == "replace"
    membership.to_be_replaced()
    successor = Growing(membership, round_number=2)  # equally large
    successor.now, successor.mib = worker.now, worker.mib
    successor.train(20.0)
    assert membership.acts[-1] == "enlarge"
    assert membership.view.plan == replace(plan, node_memory_mb=3000)
    assert membership.view.replacements == {"w"}


IN_PLACE = NodesRecord("local", "mark", min_memory_mb=1000, max_memory_mb=4000, in_place=True)


def test_memory_is_raised_in_place_again_and_again_until_the_largest_size() -> None:
    plan = PlanRecord(1, "user", "", binding=True)
    membership = FakeMembership(view=WorkerView(job=JOB, plan=plan), nodes=IN_PLACE)
    worker = Growing(membership)
    worker.watch._fit.remaining_steps = None  # type: ignore[misc]
    given = []
    for _ in range(3):
        worker.train_until("raise")
        assert membership.view.plan is not None
        memory_mb = membership.view.plan.node_memory_mb
        assert memory_mb is not None
        given.append(memory_mb)
        if memory_mb == IN_PLACE.max_memory_mb:
            break
        worker.window = replace(worker.window, memory_limit_bytes=(memory_mb - 200) * MIB)
        worker.train_until("wait")
    assert given == sorted(given)
    assert len(given) > 1
    assert given[-1] == 4000
    assert membership.view.replacements == set()
    worker.window = replace(worker.window, memory_limit_bytes=3900 * MIB)
    worker.train_until("replace")  # a new worker starts without the leak
    assert worker.mib < 3900


def test_worker_is_replaced_if_its_node_does_not_get_more_memory_in_time() -> None:
    plan = PlanRecord(1, "planner", "", binding=True)
    membership = FakeMembership(view=WorkerView(job=JOB, plan=plan), nodes=IN_PLACE)
    worker = Growing(membership)
    worker.train_until("raise")
    worker.train(RAISE_S - 4.0)
    assert membership.view.replacements == set()
    worker.train(6.0)
    assert membership.view.replacements == {"w"}
    assert worker.mib < 950


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0])
@pytest.mark.parametrize("is_successor", [True, False])
def test_forecast_is_inherited_with_any_clocks(skew_s: float, is_successor: bool) -> None:
    """The first worker's clock differs; only a newcomer of the next round has taken its place."""
    first = FakeMembership()
    Growing(first).train(470.0)
    assert first.acts[-1] == "replace"
    events = [replace(event, at=event.at + skew_s) for event in first.events]
    rounds = [["w"], ["second"], ["second", "third"]]
    events += [record_of(RoundFormed(i, members, "grow"), "", 0.0) for i, members in enumerate(rounds, start=1)]
    successor = Growing(FakeMembership("second" if is_successor else "third", events=events), 2 if is_successor else 3)
    successor.mib = 900.0
    successor.train(2.0)
    assert (successor.watch._of_replaced(events) is not None) == is_successor


# --- times without the GIL -----------------------------------------------------------------------------------------------


def test_stopped_worker_is_reported_and_not_dumped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *given, **_: armed.append(given))
    watch = _GilWatch({})
    for now in (0.0, 0.25, 14.0, 34.0, 34.25, 54.0):
        watch.check(now)
    [record] = caplog.records
    assert "no Python thread of this worker ran for 20 s" in record.getMessage()
    assert f"{__file__}:" in record.getMessage()
    watch.check(700.0)
    assert "ran for 646 s" in caplog.records[-1].getMessage()
    watch.close()
    assert armed == []


@pytest.mark.slow
def test_slow_etcd_does_not_count_as_time_without_the_gil(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GIL_TIMEOUT_S", 2.0)
    num_checks, checked_again = 0, threading.Event()

    def wait_for_etcd(_: Any, now: float) -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 1:
            checked_again.wait(3.0)  # not set in between, as long as etcd does not answer
        else:
            checked_again.set()

    for each in ("_Hangs", "_Stragglers"):
        monkeypatch.setattr(watchdog, each, lambda *_: SimpleNamespace(check=lambda *_, **__: None))
    monkeypatch.setattr(watchdog, "_Memory", type("_Slow", (), {"__init__": lambda *_: None, "check": wait_for_etcd}))
    watch = watchdog.Watchdog(SimpleNamespace())  # type: ignore[arg-type]
    assert checked_again.wait(30.0)
    watch.close()
    assert "no Python thread" not in caplog.text


BUSY = """
import sys, threading
from lightning_dlrover.tuning.health import innermost_user_place, stacks

def churn(depth):
    for number in range(3):
        try:
            yield from churn(depth - 1) if depth else (1 / 0 for _ in [0])
        except ZeroDivisionError:
            yield number

def work(end):
    while not end.is_set():
        sum(churn(4))

end = threading.Event()
sys.setswitchinterval(1e-4)

def look():
    try:
        for _ in range(int(sys.argv[1])):
            assert stacks().startswith("thread MainThread:")
            innermost_user_place()
        print("done")
    finally:
        end.set()

threads = [threading.Thread(target=look, name="dlrover-looks"), threading.Thread(target=lambda: work(end), name="work")]
for thread in threads:
    thread.start()
work(end)
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_checks", [5000, pytest.param(50_000, marks=pytest.mark.on_demand)])
def test_busy_worker_survives_thousands_of_dumps(tmp_path: Path, num_checks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUSY)
    command = [sys.executable, str(script), str(num_checks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# --- stragglers --------------------------------------------------------------------------------------------------------------


MEMBERS = ("w0", "w1", "w2")


def record_of_worker(number: int) -> WorkerRecord:
    return WorkerRecord(f"w{number}", f"a{number}", f"host{number}", number, 0, "127.0.0.1", 1, "active", 1)


@dataclass
class Records:
    """The records as rank 0 of a job without a controller sees them."""

    view: WorkerView = field(default_factory=WorkerView)
    events: list[EventRecord] = field(default_factory=list)

    @property
    def workers(self) -> Records:
        return self

    def of(self, worker_ids: Sequence[str]) -> dict[str, WorkerRecord]:
        return {worker: record_of_worker(MEMBERS.index(worker)) for worker in worker_ids}

    @property
    def shared(self) -> Records:
        return self

    @property
    def journal(self) -> SimpleNamespace:
        return SimpleNamespace(events=lambda: self.events)

    def has_controller(self) -> bool:
        return False

    def event(self, event: Event, text: str) -> None:
        self.events.append(record_of(event, text, at=1.0))


class SlowJob:
    """Two fast workers and a slow one; the test passes the seconds."""

    def __init__(self, remaining_steps: float = 1e6) -> None:
        self.records = Records()
        self._began = time.monotonic() + 1e6  # ahead of the clock, by which the watch measures what a look costs
        self._heard: list[OwnTimes] = []
        self._pulse = SimpleNamespace(num_observations=0, observations=lambda _: self._heard)
        formation = SimpleNamespace(rank=0, round=SimpleNamespace(number=1, members=MEMBERS, hosts=[0, 1, 2]))
        fit: Any = SimpleNamespace(
            world=SimpleNamespace(membership=self.records),
            pulse=self._pulse,
            formation=formation,
            loads=(),
            remaining_steps=remaining_steps,
            now=SimpleNamespace(counts=(0,)),
        )
        self._watch = _Stragglers(fit)

    def train(self, slow: int, second: int) -> None:
        """Make steps with a slow worker, and let the watch look at them."""
        rng = random.Random(second)
        for _ in range(32):
            times = tuple((0.15 if rank == slow else 0.05) * rng.gauss(1, 0.02) for rank in range(len(MEMBERS)))
            self._heard.append(OwnTimes(2, max(times), times, (0.0,) * 3, (0.0,) * 3))
        self._heard = self._heard[-32:]
        self._pulse.num_observations += 32
        self._watch.check(self._began + second)

    @property
    def named(self) -> list[str]:
        return [found.worker_id for _, found in events_of(self.records.events, StragglerFound)]


def test_worker_that_stays_slow_is_reported_once_in_ten_minutes() -> None:
    job = SlowJob()
    for second in range(int(2 * REPORT_AGAIN_S)):
        job.train(slow=1, second=second)
    assert job.named == ["w1", "w1"]


def test_workers_that_are_slow_in_turn_are_each_reported_once_in_ten_minutes() -> None:
    job = SlowJob()
    for second in range(int(REPORT_AGAIN_S)):
        job.train(slow=1 + second % 2, second=second)
    assert sorted(job.named) == ["w1", "w2"]


@pytest.mark.parametrize("slow", [0, 2])
def test_newly_slow_worker_is_reported_at_once(slow: int) -> None:
    job = SlowJob()
    job.train(slow=1, second=0)
    job.train(slow=slow, second=1)
    assert job.named == ["w1", f"w{slow}"]


@pytest.mark.parametrize(("left_s", "act"), [(20.0, "none"), (100.0, "recommend")])
def test_a_replacement_is_recommended_only_if_it_can_start_before_the_end(left_s: float, act: str) -> None:
    job = SlowJob(remaining_steps=left_s / 0.15)
    job.train(slow=1, second=0)
    assert [found.act for _, found in events_of(job.records.events, StragglerFound)] == [act]
