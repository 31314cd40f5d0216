"""Each worker's own time per step: measured in real process groups, and exchanged in votes."""

from __future__ import annotations

import json
import os
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.observe.pulse import (
    NUM_SAID,
    OwnClock,
    OwnTime,
    Pulse,
    Throttling,
)
from lightning_dlrover.observe.step_times import HostMark, StepTimes
from lightning_dlrover.rdzv.group import waits

SLOW_S = 0.3
PARTS = ("forward", "backward", "collective")


class _Round:
    def now(self) -> tuple[int, bool]:
        return 1, False


def _train(rank: int, store: str, results: str) -> None:
    """Measure this worker's own time in all cases, and write it by part and guard."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    round_ = _Round()
    times = StepTimes()
    times.start(HostMark)
    clock = OwnClock(times)
    waits.time_with(clock.stopped)
    own = {}
    for is_guarded in (False, True):  # once guarded, a process stays so
        if is_guarded:
            waits.end_waits_with(weakref.WeakMethod(round_.now))
        for part in PARTS:
            name, slow_s = f"{part} {is_guarded}", SLOW_S if rank == 1 else 0.0
            own[name] = _own_time_s(clock, times, part, is_guarded, slow_s)
            seconds = times.end_step().seconds()
            assert seconds is not None
            own[f"{name} communication"] = seconds["communication"] / 3
    Path(results, str(rank)).write_text(json.dumps(own))
    dist.destroy_process_group()


def _own_time_s(clock: OwnClock, times: StepTimes, part: str, is_guarded: bool, slow_s: float) -> float:
    """Run three steps of DDP with buffers, sleep in one part of each, and return the median of the own times."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    clock.stop_in_forward(model)
    if is_guarded:
        waits.guard_replica(model)
    own = []
    for _ in range(3):
        dist.barrier()
        started = clock.read()
        time.sleep(slow_s if part == "forward" else 0)
        with times.measure("forward"):
            loss = model(torch.randn(8, 4)).sum()
        if part == "backward":
            loss.register_hook(lambda gradient: time.sleep(slow_s))
        with times.measure("backward"):
            clock.backward_begins(loss)
            loss.backward()
            clock.backward_ended()
        if part == "collective":
            time.sleep(slow_s)
            dist.all_reduce(torch.ones(1))
        own.append(clock.read().since(started).busy_s)
    return sorted(own)[1]


@pytest.fixture(scope="module")
def own_times_s(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Own times of a fast and a slow worker."""
    folder = tmp_path_factory.mktemp("pulse")
    mp.spawn(_train, (str(folder / "store"), str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_waiting_for_a_slow_worker_is_no_time_of_ones_own(
    own_times_s: list[dict[str, float]], part: str, is_guarded: bool
) -> None:
    fast, slow = (own[f"{part} {is_guarded}"] for own in own_times_s)
    assert 0 < fast < SLOW_S / 2
    assert slow > SLOW_S * 0.95


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_waiting_for_a_slow_worker_in_a_pass_is_communication(
    own_times_s: list[dict[str, float]], part: str, is_guarded: bool
) -> None:
    fast, slow = (own[f"{part} {is_guarded} communication"] for own in own_times_s)
    assert SLOW_S * 0.6 < fast < SLOW_S * 1.5  # DDP agrees on its buckets in the second of three forward passes, unseen
    assert 0 < slow < SLOW_S / 2


@pytest.mark.parametrize(
    ("own", "stat"),
    [
        ("0::/job/worker\n", "job/worker/cpu.stat"),
        ("0::/job/worker\n", "job/cpu.stat"),  # the quota of the parent group also applies
        ("7:cpu,cpuacct:/job\n5:memory:/other\n", "cpu,cpuacct/job/cpu.stat"),
    ],
)
def test_throttled_seconds_are_those_of_the_group_with_a_quota(tmp_path: Path, own: str, stat: str) -> None:
    proc, file = tmp_path / "proc/self/cgroup", tmp_path / "cgroup" / stat
    for each in (proc, file):
        each.parent.mkdir(parents=True)
    proc.write_text(own)
    assert Throttling(tmp_path / "proc", tmp_path / "cgroup").seconds() == 0.0
    name, number = ("throttled_time", 1_000_000_000) if "cpuacct" in own else ("throttled_usec", 1_000_000)
    file.write_text(f"nr_periods 7\n{name} 0\n")
    throttling = Throttling(tmp_path / "proc", tmp_path / "cgroup")
    assert throttling.seconds() == 0.0
    file.write_text(f"nr_periods 9\n{name} {5 * number // 2}\n")
    assert throttling.seconds() == 2.5


def test_files_of_throttling_are_closed_with_their_owner(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "cpu.stat").write_text("throttled_usec 1000000\n")
    open_before = len(os.listdir("/proc/self/fd"))
    throttling = Throttling(tmp_path, tmp_path)
    assert throttling.seconds() == 1.0
    assert len(os.listdir("/proc/self/fd")) > open_before
    del throttling
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_time_without_a_core_is_measured_apart() -> None:
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("this kernel does not tell how long a thread waits for a core")
    clock = OwnClock()
    started = clock.read()
    cpu = time.thread_time()
    while time.thread_time() - cpu < 0.2:
        pass
    own = clock.read().since(started)
    # Under any other load, time not spent computing was spent waiting for a core.
    assert own.busy_s - own.queued_s == pytest.approx(0.2, abs=0.05)
    clock.close()


def vote(pulses: list[Pulse], round_number: int) -> None:
    said = [pulse.say(round_number, rank, len(pulses)) for rank, pulse in enumerate(pulses)]
    assert {len(numbers) for numbers in said} == {NUM_SAID * len(pulses)}
    least = [min(numbers) for numbers in zip(*said, strict=True)]
    for pulse in pulses:
        pulse.hear(least, step_time_s=0.5)


def step(pulses: list[Pulse]) -> None:
    for rank, pulse in enumerate(pulses):
        pulse.step_ended(compute=OwnTime(0.1 * (rank + 1), 0.01 * rank), data=OwnTime(0.02, 0.0))


def test_a_vote_brings_the_times_of_all_workers_to_all() -> None:
    pulses = [Pulse() for _ in range(3)]
    vote(pulses, 1)  # earlier steps belong to no round
    for _ in range(4):
        step(pulses)
    vote(pulses, 1)
    for pulse in pulses:
        (seen,) = pulse.heard(1)
        assert (seen.num_steps, seen.step_time_s) == (4, 0.5)
        assert seen.compute_s == pytest.approx((0.1, 0.19, 0.28))
        assert seen.data_s == pytest.approx((0.02,) * 3)
        assert seen.queued_s == pytest.approx((0.0, 0.01, 0.02))
        assert len(pulse.threads) == 3


def test_times_of_another_round_are_not_given_out_for_this_one() -> None:
    """Ranks change between rounds, so the slow worker's times would be attributed to another one."""
    pulses = [Pulse() for _ in range(2)]
    vote(pulses, 1)
    step(pulses)
    vote(pulses, 1)
    assert len(pulses[0].heard(1)) == 1
    assert pulses[0].heard(2) == []
    step(pulses)  # contains the change of the world
    vote(pulses, 2)
    assert pulses[0].heard(2) == []
    step(pulses)
    vote(pulses, 2)
    assert len(pulses[0].heard(2)) == 1


def test_silent_worker_leaves_the_others_without_a_comparison() -> None:
    pulses = [Pulse() for _ in range(2)]
    vote(pulses, 1)
    pulses[0].step_ended(OwnTime(0.1, 0.0), OwnTime(0.0, 0.0))
    vote(pulses, 1)
    assert pulses[0].heard(1) == []
