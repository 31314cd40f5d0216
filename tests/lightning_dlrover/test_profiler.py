"""What a window of steps says, on a clock that the test moves."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover import profiler as profiler_module
from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile
from lightning_dlrover.profiler import Place, StepProfiler
from lightning_dlrover.strategy import StepTimes

PLACE = Place(round_number=1, global_rank=0, num_workers=2, num_nodes=1, global_batch=64, local_batch=32, loader_workers=0)


class Bench:
    """A profiler, and steps that take as long as they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0
        self.times = StepTimes()
        self.profiler = StepProfiler("worker", torch.device("cpu"), self.times)

    def train(
        self, forward: float = 0.01, backward: float = 0.02, rest: float = 0.0, wait: float = 0.0, place: Place = PLACE
    ) -> None:
        self.times.forward_s += forward
        self.times.backward_s += backward
        self.times.run_s += forward + backward + rest
        self.times.data_wait_s += wait
        self.now += forward + backward + rest + wait
        self.step += 1
        self.profiler.step_ended(place, self.step)

    def close(self) -> StepProfile:
        profile = self.profiler.close_window(self.step, torch.nn.Linear(2, 3))
        assert profile is not None
        return profile


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(profiler_module, "time", SimpleNamespace(perf_counter=lambda: made.now, time=lambda: made.now))
    return made


def parts_sum(profile: StepProfile) -> float:
    return float(sum(getattr(profile, f"{part}_s") for part in STEP_PARTS))


part = st.floats(min_value=1e-5, max_value=1.0)


@given(steps=st.lists(st.tuples(part, part, part, part), min_size=2, max_size=60))
def test_the_parts_of_a_step_add_up_to_its_time(steps: list[tuple[float, float, float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench()
        patch.setattr(profiler_module, "time", SimpleNamespace(perf_counter=lambda: bench.now, time=lambda: bench.now))
        for forward, backward, rest, wait in steps:
            bench.train(forward, backward, rest, wait)
        profile = bench.close()
        assert parts_sum(profile) == pytest.approx(profile.step_time_s, rel=1e-6)
        assert profile.num_steps == len(steps) - 1
        assert all(getattr(profile, f"{name}_s") >= 0 for name in STEP_PARTS)
        assert profile.samples_per_s == pytest.approx(64 / profile.step_time_s)


def test_each_part_is_what_it_was_measured_as(bench: Bench) -> None:
    for _ in range(5):
        bench.train(forward=0.01, backward=0.02, rest=0.005, wait=0.003)
    profile = bench.close()
    assert profile.forward_s == pytest.approx(0.01)
    assert profile.backward_s == pytest.approx(0.02)
    assert profile.optimizer_s == pytest.approx(0.005)
    assert profile.data_wait_s == pytest.approx(0.003)
    assert profile.other_s == pytest.approx(0.0, abs=1e-9)
    assert profile.dense_bytes == 4 * (2 * 3 + 3)
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


def test_a_pause_is_no_part_of_a_step(bench: Bench) -> None:
    bench.train()
    bench.profiler.pause()
    bench.now += 100.0
    bench.profiler.resume()
    bench.train()
    assert bench.close().step_time_s == pytest.approx(0.03)


def test_one_slow_step_in_many_does_not_count(bench: Bench) -> None:
    for number in range(41):
        bench.train(rest=5.0 if number == 20 else 0.0)
    assert bench.close().step_time_s == pytest.approx(0.03)


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
    assert bench.profiler.close_window(0, None) is None
    bench.train()
    assert bench.profiler.close_window(1, None) is None
