"""Profiles of windows of steps, on a clock that the test moves."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.tuning import profiler, resources
from lightning_dlrover.tuning import profiler as profiler_module
from lightning_dlrover.tuning.profiler import Descriptors, Model, ProfileKey, StepProfiler, StepTimes
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile

PLACE = ProfileKey(
    round_number=1,
    global_rank=0,
    num_workers=2,
    num_nodes=1,
    global_batch=64,
    local_batch=32,
    loader_workers=0,
    prefetch_factor=0,
    intra_op_threads=1,
)
MODEL = Model(Descriptors(dense_flops=1000, lookups_per_sample=3.0), dense_bytes=36, embedding_bytes=4096)


class Bench:
    """A profiler, and steps of a chosen duration."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0
        self.times = StepTimes()
        self.profiler = StepProfiler("worker", torch.device("cpu"), self.times)

    def use_clock(self, patch: pytest.MonkeyPatch) -> None:
        for module in (profiler_module, profiler):
            patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now))

    def train(
        self,
        forward: float = 0.01,
        backward: float = 0.02,
        rest: float = 0.0,
        wait: float = 0.0,
        place: ProfileKey = PLACE,
        communication: float = 0.0,
    ) -> None:
        self.times.data_wait_s = wait
        self.now += wait
        with self.times.measure("optimizer"):
            with self.times.measure("forward"):
                self.now += forward
            with self.times.measure("backward"):
                self.now += backward
                self.times.wait_begins()
                self.now += communication
                self.times.wait_ends(communication)
            self.now += rest
        self.step += 1
        self.profiler.step_ended(place, self.step)

    def close(self) -> StepProfile:
        profile = self.profiler.close_window(self.step, MODEL)
        assert profile is not None
        return profile


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    made.use_clock(monkeypatch)
    yield made
    made.profiler.close()


def parts_sum(profile: StepProfile) -> float:
    return float(sum(getattr(profile, f"{part}_s") for part in STEP_PARTS))


MIB = 1 << 20

part = st.floats(min_value=1e-5, max_value=1.0)


@given(steps=st.lists(st.tuples(part, part, part, part, part), min_size=2, max_size=16))
def test_the_parts_of_a_step_add_up_to_its_time(steps: list[tuple[float, float, float, float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench()
        bench.use_clock(patch)
        for forward, backward, rest, wait, communication in steps:
            bench.train(forward, backward, rest, wait, communication=communication)
        profile = bench.close()
        bench.profiler.close()
        assert parts_sum(profile) == pytest.approx(profile.step_time_s, rel=1e-6)
        assert profile.num_steps == len(steps) - 1
        assert all(getattr(profile, f"{name}_s") >= 0 for name in STEP_PARTS)
        assert profile.samples_per_s == pytest.approx(64 / profile.step_time_s)


def test_each_part_has_its_measured_time(bench: Bench) -> None:
    for _ in range(5):
        bench.train(forward=0.01, backward=0.02, communication=0.007, rest=0.005, wait=0.003)
    profile = bench.close()
    assert profile.forward_s == pytest.approx(0.01)
    assert profile.backward_s == pytest.approx(0.02)
    assert profile.optimizer_s == pytest.approx(0.005)
    assert profile.data_wait_s == pytest.approx(0.003)
    assert profile.other_s == pytest.approx(0.0, abs=1e-9)
    assert profile.communication_s == pytest.approx(0.007)
    assert (profile.dense_bytes, profile.dense_flops) == (36, 1000)
    assert (profile.embedding_bytes, profile.lookups_per_sample) == (4096, 3.0)
    assert profile.first_step == 1


def test_the_first_step_after_a_change_of_place_belongs_to_no_window(bench: Bench) -> None:
    for _ in range(3):
        bench.train()
    grown = dataclasses.replace(PLACE, round_number=2, num_workers=3)
    bench.train(forward=9.0, place=grown)
    assert bench.profiler.num_steps == 0
    bench.train(place=grown)
    profile = bench.close()
    assert (profile.num_workers, profile.num_steps) == (3, 1)
    assert profile.step_time_s == pytest.approx(0.03)


def test_batches_ready_at_a_change_of_loader_workers_count_in_no_window(bench: Bench) -> None:
    """They would make a slow input look fast enough."""
    bench.train()
    more = dataclasses.replace(PLACE, loader_workers=2, prefetch_factor=3)
    for number in range(7 + 5):
        bench.train(wait=0.0 if number < 7 else 0.04, place=more)
    profile = bench.close()
    assert (profile.num_steps, profile.loader_workers, profile.prefetch_factor) == (5, 2, 3)
    assert profile.data_wait_s == pytest.approx(0.04)
    assert profile.first_step == 8
    assert bench.profiler.num_steps == 0
    bench.train(place=more)
    assert bench.close().num_steps == 1


def test_many_batches_ahead_do_not_keep_a_window_from_beginning(bench: Bench) -> None:
    far_ahead = dataclasses.replace(PLACE, loader_workers=8, prefetch_factor=100)
    for _ in range(22):
        bench.train(place=far_ahead)
    assert bench.close().num_steps == 1


@pytest.fixture
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other tests' processes, which come and go. Request this before `bench`, which counts at once."""
    monkeypatch.setattr(resources, "_children", lambda parents: [])


def test_memory_limit_is_shared_by_the_workers_of_a_node(childless: None, bench: Bench) -> None:
    def window(**place: int) -> StepProfile:
        for _ in range(2):
            bench.train(place=dataclasses.replace(PLACE, **place))
        return bench.close()

    before = window()
    assert 10 * MIB < before.memory_bytes <= before.peak_memory_bytes
    with mmap.mmap(-1, 400 * MIB) as block:  # large enough to outweigh other allocations of this process
        for _ in range(400):  # piece by piece: malloc may keep memory that it gets
            block.write(b"1" * MIB)
    after = window()
    assert after.peak_memory_bytes >= before.memory_bytes + 300 * MIB
    assert after.memory_bytes < before.memory_bytes + 200 * MIB
    assert window().peak_memory_bytes < after.peak_memory_bytes - 150 * MIB
    assert window(workers_here=4).memory_limit_bytes == before.memory_limit_bytes // 4 > 0


def test_a_pause_is_no_part_of_a_step(bench: Bench) -> None:
    bench.train()
    bench.profiler.pause()
    bench.now += 100.0
    bench.profiler.resume()
    bench.train()
    assert bench.close().step_time_s == pytest.approx(0.03)


def test_one_slow_step_in_many_counts_in_no_part(bench: Bench) -> None:
    for number in range(41):
        bench.train(rest=5.0 if number == 20 else 0.0)
    profile = bench.close()
    assert [profile.step_time_s, profile.forward_s] == pytest.approx([0.03, 0.01])
    assert profile.optimizer_s == pytest.approx(0.0, abs=1e-9)


def test_windows_follow_each_other_without_a_gap(bench: Bench) -> None:
    for _ in range(4):
        bench.train()
    first = bench.close()
    for _ in range(4):
        bench.train()
    second = bench.close()
    assert (first.num_steps, second.num_steps) == (3, 4)
    assert second.first_step == first.first_step + first.num_steps


def test_a_window_without_steps_is_none(bench: Bench) -> None:
    assert bench.profiler.close_window(0, MODEL) is None
    bench.train()
    assert bench.profiler.close_window(1, MODEL) is None


def test_newest_step_is_known_even_if_it_does_not_count(bench: Bench) -> None:
    bench.train()
    assert bench.profiler.newest_step_s is None
    bench.train(forward=0.08)
    assert bench.profiler.newest_step_s == pytest.approx(0.1)
    bench.profiler.pause()
    bench.now += 60.0
    bench.profiler.resume()
    bench.train(forward=0.28, place=dataclasses.replace(PLACE, intra_op_threads=2))
    assert bench.profiler.num_steps == 0
    assert bench.profiler.newest_step_s == pytest.approx(0.3)
