from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.colocate.devices import Gpu
from lightning_dlrover.colocate.journal import Ended, JobSpec, Profiled
from lightning_dlrover.colocate.scheduler import AHEAD, Knowledge, Scheduler
from lightning_dlrover.colocate.tenants import (
    Action,
    End,
    Holding,
    LocalDevice,
    Memory,
    Pause,
    Resume,
    Start,
    Tenant,
    Waiting,
    after,
    memory_actions,
)
from tests.support.colocated_jobs import MIB, place

PLACE = place(memory_mib=8000, most_jobs=4)


def host(tenant: Tenant, resident_bytes: int, need_bytes: int) -> dict[Memory, Holding]:
    return {"host": replace(tenant.holdings["host"], resident_bytes=resident_bytes, need_bytes=need_bytes)}


class Pretended:
    """A queue of jobs that start, ask, run and end by arithmetic, under a real scheduler and real rules of memory."""

    def __init__(
        self,
        policy: str,
        jobs: Sequence[tuple[str, int, int, float]],
        wait_s: float = 1000.0,
        knows: bool = False,
        device: LocalDevice = PLACE,
        report: bool = True,
    ) -> None:
        self.device, self.report = device, report
        self.knowledge = Knowledge()
        self.scheduler = Scheduler(policy, self.knowledge, wait_s=wait_s)
        self.now = 0.0
        self.waiting = {
            f"j{number}": Waiting(f"j{number}", kind, priority, 0.001 * number)
            for number, (kind, priority, _, _) in enumerate(jobs)
        }
        self.needs = {f"j{number}": (mib * MIB, run_s) for number, (_, _, mib, run_s) in enumerate(jobs)}
        self.tenants: dict[str, Tenant] = {}
        self.ran_s: dict[str, float] = dict.fromkeys(self.waiting, 0.0)
        self.most_running = self.most_active = 0
        if knows:
            for kind in {kind for kind, _, _, _ in jobs}:
                self.learn(kind)

    def learn(self, kind: str) -> None:
        self.knowledge.learn(Profiled(kind, "cpu", {"cores": 0.2 if kind == "input" else 0.9}, 10.0))

    def step(self, measure: bool = True) -> None:
        self.now += 1.0
        for tenant in list(self.tenants.values()):
            need, run_s = self.needs[tenant.name]
            if tenant.phase == "starting" and self.now - tenant.since_s >= 3:
                if self.report:
                    self.put(tenant, "asks", holdings=host(tenant, 300 * MIB, need))
                else:
                    self.put(tenant, "running", holdings=host(tenant, need, need), is_admitted=True)
            elif tenant.phase == "running":
                self.ran_s[tenant.name] += 1.0
                self.put(tenant, "running", since_s=tenant.since_s, holdings=host(tenant, need, need))
                if self.ran_s[tenant.name] >= run_s:
                    del self.tenants[tenant.name]
        running = [tenant for tenant in self.tenants.values() if tenant.phase == "running"]
        self.most_running = max(self.most_running, len(running))
        if (
            measure
            and len(running) == len([t for t in self.tenants.values() if t.phase != "paused"]) == 1
            and self.ran_s[running[0].name] >= 2
        ):
            self.learn(running[0].kind)
        for action in memory_actions(self.device.sizes, list(self.tenants.values())):
            self.act(action)
        waiting, tenants = list(self.waiting.values()), list(self.tenants.values())
        for action in self.scheduler.actions(self.now, [self.device], waiting, tenants):
            self.act(action)
        num_active = sum(tenant.phase in ("starting", "running") for tenant in self.tenants.values())
        self.most_active = max(self.most_active, num_active)

    def act(self, action: Action) -> None:
        if isinstance(action, Start):
            job = self.waiting.pop(action.job)
            holdings: dict[Memory, Holding] = {memory: Holding(charge) for memory, charge in action.charges.items()}
            self.tenants[job.name] = Tenant(
                job.name,
                job.kind,
                "starting",
                "cpu",
                job.priority,
                job.submitted_s,
                self.now,
                holdings,
                since_s=self.now,
            )
            return
        assert not isinstance(action, End), f"no job of these lies or is too large: {action}"
        tenant = self.tenants[action.job]
        assert not isinstance(action, Pause) or tenant.phase in ("running", "starting")
        assert not isinstance(action, Resume) or tenant.phase == "paused"
        changed = after(tenant, action)
        self.tenants[tenant.name] = changed if changed.phase == tenant.phase else replace(changed, since_s=self.now)

    def put(self, tenant: Tenant, phase: str, **fields: object) -> None:
        self.tenants[tenant.name] = replace(tenant, **{"since_s": self.now, **fields}, phase=phase)  # type: ignore[arg-type]

    def finish(self, most_s: float) -> None:
        while self.waiting or self.tenants:
            assert self.now < most_s, (self.waiting, self.tenants)
            self.step()
            assert len(self.tenants) <= self.device.most_jobs + AHEAD


job = st.tuples(
    st.sampled_from(["compute", "input", "memory"]), st.integers(0, 2), st.integers(320, 3000), st.floats(1.0, 20.0)
)


@given(
    st.sampled_from(["complementary", "fifo", "sequential", "random_sets", "rmixer", "rmixer_mixed", "muri"]),
    st.lists(job, min_size=1, max_size=12),
    st.booleans(),
)
@settings(max_examples=60)
def test_every_queue_comes_to_its_end(policy: str, jobs: list[tuple[str, int, int, float]], knows: bool) -> None:
    queue = Pretended(policy, jobs, knows=knows)
    queue.finish(most_s=60.0 + sum(run_s + 20 for _, _, _, run_s in jobs))
    assert queue.most_running <= queue.most_active <= PLACE.most_jobs


@pytest.mark.parametrize("most_jobs", [1, 2])
@pytest.mark.parametrize("report", [True, False])
def test_starting_jobs_count_towards_the_maximum_of_a_device(most_jobs: int, report: bool) -> None:
    jobs = [("compute", 0, 400, 8.0), ("input", 0, 400, 8.0), ("memory", 0, 400, 8.0)] * 2
    queue = Pretended("complementary", jobs, device=place(8000, most_jobs, num_cores=16.0), report=report)
    queue.finish(200.0)
    assert queue.most_active == most_jobs


def test_sequential_runs_one_job_at_a_time() -> None:
    queue = Pretended("sequential", [("compute", 0, 400, 5.0)] * 4)
    queue.finish(60.0)
    assert queue.most_running == 1


def test_jobs_whose_needs_fit_into_two_sets_take_the_time_of_two() -> None:
    queue = Pretended("complementary", [("compute", 0, 400, 200.0)] * 3 + [("input", 0, 400, 200.0)] * 3, knows=True)
    queue.finish(460.0)


def test_jobs_that_would_leave_cores_idle_at_the_end_start_first() -> None:
    compute, waits = (JobSpec(name, (name,), "/") for name in ("compute", "input"))
    queue = Pretended("complementary", [(compute.kind, 0, 400, 20.0)] * 6 + [(waits.kind, 0, 400, 20.0)])
    for spec, cores in ((compute, 1.9), (waits, 0.2)):
        queue.knowledge.learn(Profiled(spec.kind, "cpu", {"cores": cores}, 10.0))
        queue.knowledge.learn_end(spec, Ended(spec.name, 1, "done", 0, "", 0.0, 20.0, 0.0, 1.0, MIB, num_steps=200))
    queue.step()
    assert "j6" in queue.tenants


def test_last_jobs_of_a_queue_end_together() -> None:
    queue = Pretended("complementary", [("compute", 0, 400, 40.0)] * 4, knows=True)
    while len(queue.waiting) + len(queue.tenants) == 4:
        queue.step()
    assert min(queue.ran_s.values()) >= 32.0  # the first one has run alone for some seconds


def test_only_jobs_that_can_use_idle_cores_get_more_threads() -> None:
    queue = Pretended("complementary", [("compute", 0, 400, 20.0)])
    for kind, cores in (("compute", 1.9), ("input", 0.2)):
        queue.knowledge.learn(Profiled(kind, "cpu", {"cores": cores}, 10.0))
    assert queue.scheduler.thread_shares(PLACE, ["compute", "input", "input"]) == [2, 1, 1]
    assert queue.scheduler.thread_shares(PLACE, ["compute", "", "input"]) == [1, 1, 1]
    equal = Scheduler("fifo", queue.knowledge)
    assert equal.thread_shares(PLACE, ["compute", "input"]) == [1, 1]


def test_each_kind_is_measured_alone_once() -> None:
    queue = Pretended("complementary", [("compute", 0, 400, 60.0), ("input", 0, 400, 60.0), ("compute", 0, 400, 60.0)])
    queue.finish(300.0)
    assert queue.knowledge.is_profiled("compute", "cpu")
    assert queue.knowledge.is_profiled("input", "cpu")


def test_kind_whose_job_ends_before_it_is_measured_is_not_measured_again() -> None:
    queue = Pretended("complementary", [("input", 0, 400, 60.0)] + [("short", 0, 400, 1.0)] * 6)
    pauses = 0
    while queue.waiting or len(queue.tenants) > 1:
        queue.step()
        pauses += queue.tenants["j0"].phase == "paused"
    assert queue.knowledge.profile("short", "cpu") is None
    assert pauses <= 2


def test_job_of_slow_steps_keeps_the_device_until_it_is_measured_and_one_without_steps_does_not() -> None:
    for step_s, is_measured in ((12, True), (1000, False)):
        queue = Pretended("complementary", [("input", 0, 400, 400.0), ("slow", 0, 400, 200.0)])
        queue.learn("input")
        alone_s = 0
        while "j1" not in queue.tenants or queue.tenants["j1"].phase in ("starting", "asks"):
            queue.step()
        while queue.now < 150.0:
            queue.step(measure=False)
            slow = queue.tenants["j1"]
            queue.put(slow, slow.phase, since_s=slow.since_s, num_steps=int(queue.ran_s["j1"] / step_s))
            alone_s += queue.tenants["j0"].phase == "paused"
            if queue.ran_s["j1"] == 5 * step_s:
                queue.learn("slow")
        assert queue.knowledge.is_profiled("slow", "cpu") == is_measured
        assert 50 <= alone_s <= 62 if is_measured else alone_s <= 32


def test_jobs_that_were_not_measured_share_the_cores_and_run_side_by_side() -> None:
    queue = Pretended("complementary", [("one", 0, 400, 60.0), ("other", 0, 400, 60.0)])
    large = place(num_cores=16.0)
    assert queue.scheduler.thread_shares(large, ["one", "other"]) == [8, 8]
    queue.knowledge.learn(Profiled("usual", "cpu", {"cores": 4.0}, 10.0))
    assert queue.scheduler.thread_shares(large, ["one", "other", ""]) == [4, 4, 1]


def sweep(num_values: int, knowledge: Knowledge) -> list[JobSpec]:
    specs = [JobSpec(f"value-{value}", ("python", "train.py", str(value)), "/") for value in range(num_values)]
    for spec in specs:
        knowledge.meet(spec)
    return specs


def test_values_of_a_sweep_start_from_those_that_were_measured() -> None:
    queue = Pretended("complementary", [])
    measured, new = sweep(2, queue.knowledge)
    queue.knowledge.learn(Profiled("stranger", "cpu", {"cores": 2.0}, 10.0))
    queue.knowledge.learn(Profiled(measured.kind, "cpu", {"cores": 6.0}, 10.0))
    large = place(num_cores=16.0)
    assert queue.scheduler.thread_shares(large, [new.kind, "", ""]) == [6, 1, 1]
    assert queue.scheduler.thread_shares(large, ["unknown", "", ""]) == [4, 1, 1]


@pytest.mark.parametrize(("speeds", "num_alone"), [((10.0, 10.5, 10.0, 10.0), 2), ((10.0, 20.0, 5.0, 40.0), 4)])
def test_only_two_values_of_a_sweep_are_measured_alone_if_these_are_alike(speeds: Sequence[float], num_alone: int) -> None:
    knowledge = Knowledge()
    specs = sweep(4, knowledge)
    queue = Pretended("complementary", [(spec.kind, 0, 400, 40.0) for spec in specs])
    queue.knowledge, queue.scheduler = knowledge, Scheduler("complementary", knowledge)
    speed_of = {spec.kind: speed for spec, speed in zip(specs, speeds, strict=True)}
    measured = []

    def learn(kind: str) -> None:
        if not knowledge.is_profiled(kind, "cpu") and len(queue.tenants) > 1:
            measured.append(kind)
            knowledge.learn(Profiled(kind, "cpu", {"cores": 0.9}, speed_of[kind]))

    queue.learn = learn  # type: ignore[method-assign]
    queue.finish(400.0)
    assert len(measured) == num_alone


def test_job_that_shows_its_peak_on_a_gpu_is_not_paused() -> None:
    knowledge = Knowledge(device_kinds={"gpu:0": "a GPU"})
    gpu = replace(
        PLACE,
        name="gpu:0",
        kind="a GPU",
        gpu=Gpu(0, "GPU-0", "a GPU", 4000 * MIB, 4000 * MIB, {"gpu": 1.0}),
        gpu_bytes=4000 * MIB,
    )
    scheduler = Scheduler("complementary", knowledge)
    measured = Tenant("first", "one", "running", "gpu:0", 0, 0.0, 0.0, {"gpu": Holding(MIB), "host": Holding(MIB)}, True)
    assert scheduler.actions(1.0, [gpu], [], [measured, replace(measured, name="other", kind="two")]) == [
        Pause("other", "first is measured alone")
    ]
    guess: dict[Memory, Holding] = {"gpu": Holding(3000 * MIB, is_guess=True), "host": Holding(MIB)}
    shows = replace(measured, name="other", kind="two", holdings=guess)
    assert scheduler.actions(1.1, [gpu], [], [measured, shows]) == []
    assert scheduler.actions(1.2, [gpu], [], [measured, replace(shows, phase="paused")]) == [Resume("other")]


def test_job_of_a_low_priority_runs_for_a_part_of_the_time() -> None:
    jobs = [("compute", 1, 400, 4000.0)] * 4 + [("compute", 0, 400, 4000.0)]
    queue = Pretended("complementary", jobs, wait_s=60.0, knows=True)
    for _ in range(900):
        queue.step()
    assert queue.ran_s["j4"] >= 0.1 * 900, queue.ran_s


def test_higher_priority_starts_first() -> None:
    queue = Pretended("complementary", [("compute", 0, 400, 50.0)] * 6 + [("compute", 1, 400, 50.0)])
    queue.step()
    assert "j6" in queue.tenants
