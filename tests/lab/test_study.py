"""A study simulates every combination once, and reuses stored ones."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lightning_dlrover.lab.simulate import study
from lightning_dlrover.lab.simulate.simulator import Cluster
from lightning_dlrover.lab.simulate.study import (
    BY_MODEL,
    FILE_NAME,
    LIVE,
    Cost,
    Inputs,
    PolicyMaker,
    Question,
    Results,
    ResultsError,
    Simulated,
    Trace,
    answer,
    questions,
    read_inputs,
    registered_policy,
    run_study,
)
from lightning_dlrover.lab.simulate.traces import WorkloadError
from lightning_dlrover.tuning.cluster import Job, Policy, Profile, State
from tests.support.measured_clusters import write_speeds, write_trace
from tests.support.waiting import eventually

CLUSTER = Cluster(2, 2)
SAMPLES = {"toy": 64 * 100}


def inputs_of(tmp_path: Path, every_s: float = 60.0, num_jobs: int = 6) -> tuple[Inputs, list[Trace]]:
    path = write_trace(tmp_path / "week.csv", num_jobs)
    return read_inputs([path], write_speeds(tmp_path / "speeds"), CLUSTER, samples=SAMPLES, every_s=every_s)


def asked_of(traces: Sequence[Trace]) -> list[Question]:
    return questions(traces, ["as-requested", "srtf"], [1.0, 30.0], [0, 1])


def test_every_combination_is_asked_for_once(tmp_path: Path) -> None:
    inputs, traces = inputs_of(tmp_path)
    asked = asked_of(traces)
    assert len(asked) == len({question.key(inputs) for question in asked}) == 8


def test_a_key_depends_on_every_input(tmp_path: Path) -> None:
    inputs, (trace,) = inputs_of(tmp_path)
    question = Question(trace, "as-requested", 30.0, 0)
    others = [replace(question, policy="las"), replace(question, cost=BY_MODEL), replace(question, seed=1)]
    keys = {question.key(inputs), *(other.key(inputs) for other in others)}
    slower, (longer,) = inputs_of(tmp_path, every_s=30.0, num_jobs=7)
    keys |= {question.key(slower), Question(longer, "as-requested", 30.0, 0).key(inputs)}
    assert len(keys) == 6


def test_a_start_costs_the_same_whatever_a_resize_costs(tmp_path: Path) -> None:
    inputs, (trace,) = inputs_of(tmp_path, num_jobs=1)
    costs: list[tuple[float, Cost]] = [(10.0, 1.0), (10.0, 30.0), (10.0, LIVE), (25.0, 1.0)]
    times = [
        answer(replace(inputs, start_cost=start), Question(trace, "as-requested", cost, 0), registered_policy).ended
        for start, cost in costs
    ]
    assert times[0] == times[1] == times[2]
    assert times[3][0] == pytest.approx(times[0][0] + 15)


def test_no_policy_of_a_study_puts_a_long_wait_before_its_own_order() -> None:
    devices = Cluster(1, 1).devices()
    late, short = (
        Job(name, {"gpu": Profile(0, 1.0)}, steps_left=left, submitted_s=at_s)
        for name, left, at_s in (("late", 1e5, 0.0), ("short", 10.0, 9e5))
    )
    assert set(registered_policy("srtf", 0)(State(1e6, devices, (late, short)))) == {"short"}


def test_stored_simulations_are_not_repeated(tmp_path: Path) -> None:
    inputs, traces = inputs_of(tmp_path)
    asked = asked_of(traces)
    new: list[Simulated] = []
    with Results(tmp_path / "out") as results:
        first = run_study(inputs, asked[:3], results, ended=new.append)
    with Results(tmp_path / "out") as results:
        everything = run_study(inputs, asked, results, ended=new.append)
    assert everything[:3] == first
    assert [s.key for s in new] == [question.key(inputs) for question in asked]


def test_an_interrupted_study_keeps_what_has_ended(tmp_path: Path) -> None:
    inputs, traces = inputs_of(tmp_path)
    made: list[str] = []

    def interrupted(name: str, seed: int) -> Policy:
        made.append(name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return registered_policy(name, seed)

    with Results(tmp_path / "out") as results, pytest.raises(KeyboardInterrupt):
        run_study(inputs, asked_of(traces), results, make_policy=interrupted)
    # A process that is killed may leave a line without an end.
    with (tmp_path / "out" / FILE_NAME).open("a") as file:
        file.write('{"kind":"simul')
    with Results(tmp_path / "out") as results:
        assert len(results.by_key) == 2


def test_several_processes_give_the_same_answers_as_one(tmp_path: Path) -> None:
    inputs, traces = inputs_of(tmp_path)
    asked = asked_of(traces)[:3]
    with Results(tmp_path / "one") as one, Results(tmp_path / "two") as two:
        assert run_study(inputs, asked, one) == run_study(inputs, asked, two, processes=2)


def unusable(name: str, seed: int) -> Policy:
    raise ValueError(f"no policy {name}")


def lost(name: str, seed: int) -> Policy:
    os._exit(7)


@pytest.mark.parametrize(
    "make_policy, message", [(unusable, "no policy (as-requested|srtf)"), (lost, "has ended with exit code 7")]
)
def test_a_failure_in_another_process_ends_the_study(tmp_path: Path, make_policy: PolicyMaker, message: str) -> None:
    inputs, traces = inputs_of(tmp_path)
    with Results(tmp_path / "out") as results, pytest.raises((ValueError, RuntimeError), match=message):
        run_study(inputs, asked_of(traces), results, make_policy=make_policy, processes=2)
    assert not multiprocessing.active_children()


def stops_or_fails(folder: Path, name: str, seed: int) -> Policy:
    """Stop this process for `as-requested`; fail for another policy once that process has stopped."""
    if name == "as-requested":
        (folder / f"{os.getpid()}.pid").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    eventually(
        lambda: any(psutil.Process(int(path.stem)).status() == psutil.STATUS_STOPPED for path in folder.glob("*.pid")),
        "the process of the other policy stops",
    )
    return unusable(name, seed)


def test_a_process_that_does_not_end_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does not act on the signal that ends it."""
    monkeypatch.setattr(study, "END_WITHIN_S", 0.2)
    inputs, traces = inputs_of(tmp_path)
    asked = questions(traces, ["as-requested", "srtf"], [1.0], [0])
    make_policy = functools.partial(stops_or_fails, tmp_path)
    with Results(tmp_path / "out") as results, pytest.raises(RuntimeError, match=r"SpawnProcess-\d+ \(pid \d+\)") as raised:
        run_study(inputs, asked, results, make_policy=make_policy, processes=2)
    assert "no policy srtf" in str(raised.value.__context__)
    assert not multiprocessing.active_children()


def test_a_simulation_holds_every_job_and_all_of_its_time_on_devices(tmp_path: Path) -> None:
    inputs, (trace,) = inputs_of(tmp_path)
    simulated = answer(inputs, Question(trace, "as-requested", 10.0, 0), registered_policy)
    assert sorted(simulated.jobs) == [f"toy-{n}" for n in range(6)]
    assert (simulated.completions_s > 0).all()
    device_s = sum((ended - began) * devices for _, began, ended, devices in simulated.spans)
    assert device_s == pytest.approx(simulated.busy_device_s)
    assert 0 < simulated.utilisation <= 1


def test_another_process_may_not_add_to_the_same_folder(tmp_path: Path) -> None:
    with Results(tmp_path), pytest.raises(ResultsError, match="in use by another dlrover lab simulate"):
        Results(tmp_path)


def test_unusable_traces_are_refused_before_the_first_simulation(tmp_path: Path) -> None:
    speeds = write_speeds(tmp_path / "speeds")
    path = write_trace(tmp_path / "week.csv", batch=3)
    with pytest.raises(WorkloadError, match=r"week.csv:2: 1 devices share 3 samples"):
        read_inputs([path], speeds, CLUSTER, samples=SAMPLES)
    with pytest.raises(WorkloadError, match=r"week.csv:2: the work of 'toy' is unknown"):
        read_inputs([write_trace(tmp_path / "week.csv")], speeds, CLUSTER)
    (tmp_path / "empty.csv").write_text("time,application,num_replicas,batch_size\n")
    with pytest.raises(WorkloadError, match=r"empty.csv holds no job"):
        read_inputs([tmp_path / "empty.csv"], speeds, CLUSTER, samples=SAMPLES)
    (tmp_path / "again").mkdir()
    twice = [write_trace(tmp_path / "week.csv"), write_trace(tmp_path / "again" / "week.csv")]
    with pytest.raises(WorkloadError, match="two traces are called 'week'"):
        read_inputs(twice, speeds, CLUSTER, samples=SAMPLES)
