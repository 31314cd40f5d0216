"""A worker's signs of life: its own times in the votes, and the stacks of its threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.transport import waits
from lightning_dlrover.rdzv.transport.process_groups import wait_for_device
from lightning_dlrover.tuning.health import (
    MAX_CHARACTERS,
    NUM_PER_WORKER,
    OwnClock,
    OwnTime,
    Pulse,
    Throttling,
    innermost_user_place,
    is_in_debugger,
    stacks,
)
from lightning_dlrover.tuning.profiler import StepTimes, marks_of

SLOW_S = 0.3
PARTS = ("forward", "backward", "collective")


class _Round:
    def now(self) -> tuple[int, bool]:
        return 1, False


def _train(rank: int, store: str, results: str, device: str) -> None:
    """Measure this worker's own time and communication in all cases, and write them by part and guard."""
    torch.set_num_threads(1)
    # To NCCL, two ranks on one GPU are two hosts.
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    round_ = _Round()
    times = StepTimes()
    times.start(marks_of(torch.device(device)))
    clock = OwnClock(times)
    waits.time_with(clock.stopped)
    measured = {}
    for is_guarded in (False, True) if device == "cpu" else (False,):  # once guarded, a process stays so
        if is_guarded:
            waits.end_waits_with(weakref.WeakMethod(round_.now))
        for part in PARTS:
            slow_s = SLOW_S if rank == 1 else 0.0
            measured[f"{part} {is_guarded}"] = _own_and_communication_s(clock, times, part, is_guarded, slow_s, device)
    Path(results, str(rank)).write_text(json.dumps(measured))
    dist.destroy_process_group()


def _own_and_communication_s(
    clock: OwnClock, times: StepTimes, part: str, is_guarded: bool, slow_s: float, device: str
) -> tuple[float, float]:
    """Run steps of DDP with buffers, sleep in one part of the last three, and return the medians of these."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(device))
    clock.stop_in_forward(model)
    if is_guarded:
        waits.guard_replica(model)
    own, steps = [], []
    for number in range(5):
        sleep_s = slow_s if number > 1 else 0.0  # before, NCCL connects, and DDP agrees on its buckets
        dist.all_reduce(torch.zeros(1))
        started = clock.read()
        with times.measure("optimizer"):
            with times.measure("forward"):
                time.sleep(sleep_s if part == "forward" else 0)
                loss = model(torch.randn(8, 4, device=device)).sum()
            if part == "backward":
                loss.register_hook(lambda gradient, seconds=sleep_s: time.sleep(seconds))
            with times.measure("backward"):
                clock.backward_begins(loss)
                loss.backward()
                clock.backward_ended()
            if part == "collective":
                time.sleep(sleep_s)
                dist.all_reduce(torch.ones(1))
            wait_for_device(torch.device(device))  # as before each optimizer step
        own.append(clock.read().since(started).busy_s)
        steps.append(times.end_step())
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = [found["communication"] for step in steps[2:] if (found := step.seconds()) is not None]
    return sorted(own[2:])[1], sorted(seconds)[1]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def times_s(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """Own time and communication of a fast and a slow worker."""
    folder = tmp_path_factory.mktemp("pulse")
    mp.spawn(_train, (str(folder / "store"), str(folder), request.param), nprocs=2)  # type: ignore[no-untyped-call]
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_own_time_excludes_waiting_for_a_slow_worker(
    times_s: list[dict[str, list[float]]], part: str, is_guarded: bool
) -> None:
    if f"{part} {is_guarded}" in times_s[0]:
        fast, slow = (times[f"{part} {is_guarded}"][0] for times in times_s)
        assert fast < SLOW_S / 2
        assert slow > SLOW_S * 0.95


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_waiting_for_a_slow_worker_in_a_pass_is_communication(
    times_s: list[dict[str, list[float]]], part: str, is_guarded: bool
) -> None:
    if f"{part} {is_guarded}" in times_s[0]:
        fast, slow = (times[f"{part} {is_guarded}"][1] for times in times_s)
        assert SLOW_S * 0.9 < fast < SLOW_S * 1.5
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
    said = [pulse.encode(round_number, rank, len(pulses)) for rank, pulse in enumerate(pulses)]
    assert {len(numbers) for numbers in said} == {NUM_PER_WORKER * len(pulses)}
    least = [min(numbers) for numbers in zip(*said, strict=True)]
    for pulse in pulses:
        pulse.decode(least, step_time_s=0.5)


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
        (seen,) = pulse.observations(1)
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
    assert len(pulses[0].observations(1)) == 1
    assert pulses[0].observations(2) == []
    step(pulses)  # contains the change of the world
    vote(pulses, 2)
    assert pulses[0].observations(2) == []
    step(pulses)
    vote(pulses, 2)
    assert len(pulses[0].observations(2)) == 1


def test_silent_worker_leaves_the_others_without_a_comparison() -> None:
    pulses = [Pulse() for _ in range(2)]
    vote(pulses, 1)
    pulses[0].step_ended(OwnTime(0.1, 0.0), OwnTime(0.0, 0.0))
    vote(pulses, 1)
    assert pulses[0].observations(1) == []


# --- stacks ------------------------------------------------------------------------------------------------------------------


@contextmanager
def waiting_threads(num: int, name: str) -> Iterator[None]:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=f"{name}{i}") for i in range(num)]
    for thread in threads:
        thread.start()
    yield
    end.set()
    for thread in threads:
        thread.join()


SEVERAL = """
import threading
from lightning_dlrover.tuning.health import stacks

def of_the_script():
    return stacks()

end = threading.Event()
for name in ("user-0", "user-1", "dlrover-0", "dlrover-1"):
    threading.Thread(target=end.wait, name=name).start()
print(of_the_script())
end.set()
"""


def test_the_main_thread_comes_first_and_threads_of_ours_are_left_out() -> None:
    # In an interpreter of its own: threads that other tests have left in this one would take the room.
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, timeout=60, check=True)
    text = done.stdout
    assert text.startswith("thread MainThread:")
    assert "in of_the_script" in text
    assert ("thread user-0:" in text, "thread user-1:" in text, "dlrover-0" in text) == (True, True, False)


DEEP = """
import threading
from lightning_dlrover.tuning.health import stacks

def deep_LONG(calls):
    return deep_LONG(calls - 1) if calls else stacks()

end = threading.Event()
for number in range(2):
    threading.Thread(target=end.wait, name=f"user-{number}").start()
print(deep_LONG(100))
end.set()
""".replace("LONG", "g" * 250)


def test_deep_main_thread_leaves_room_for_the_others() -> None:
    # In an interpreter of its own: other threads of this one, and the length of its paths, would decide what fits.
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60, check=True)
    text = done.stdout.rstrip("\n")
    assert MAX_CHARACTERS / 2 < len(text) <= MAX_CHARACTERS
    assert (text.count("thread user-"), "shortened" in text, " in deep" in text) == (2, False, True)


def test_text_of_deep_stacks_stays_small_with_the_innermost_calls() -> None:
    def deep(calls: int) -> str:
        return deep(calls - 1) if calls else innermost()

    def innermost() -> str:
        return stacks()

    with waiting_threads(50, "user-"):
        text = deep(300)
    assert len(text) <= MAX_CHARACTERS
    assert "calls left out" in text
    assert "in innermost" in text


def test_the_innermost_place_is_one_of_the_users_code() -> None:
    found: list[str] = []

    def user_code(end: threading.Event) -> None:
        def look() -> None:
            found.append(innermost_user_place())
            end.set()

        watcher = threading.Thread(target=look)
        watcher.start()
        end.wait()  # the innermost call is one of the standard library

    user_code(threading.Event())
    assert found[0].startswith(__file__)
    assert found[0].endswith("in user_code")


def test_tests_run_without_a_debugger() -> None:
    assert not is_in_debugger()
