"""Parts of a step on the timeline of a device: of a played GPU that computes later than it is asked, and of real devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lightning_dlrover.tuning import profiler
from lightning_dlrover.tuning.health import OwnClock
from lightning_dlrover.tuning.profiler import CudaMark, StepProfiler, StepTimes, marks_of
from lightning_dlrover.tuning.samples import Measured, StepProfile
from tests.tuning.test_profiler import MODEL, PLACE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class PlayedGpu:
    """A GPU with one stream. Whoever waits for it fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.free_at = 0.0  # when the stream has done all its work
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = math.inf

            def record(self, stream: PlayedGpu) -> None:
                self.at = stream.free_at = max(gpu.now, stream.free_at)

            def query(self) -> bool:
                return self.at <= gpu.now

            def elapsed_time(self, later: Event) -> float:
                assert self.query()
                assert later.query()
                return 1e3 * (later.at - self.at)

        def fail(*_: object) -> None:
            raise AssertionError("the host waits for the device")

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.cuda, "synchronize", fail)
        patch.setattr(torch.cuda.Stream, "synchronize", fail, raising=False)

    def compute(self, seconds: float) -> None:
        """Give the stream some work, and return at once."""
        self.free_at = max(self.now, self.free_at) + seconds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    return PlayedGpu(monkeypatch)


@pytest.fixture
def times(gpu: PlayedGpu) -> StepTimes:
    times = StepTimes()
    times.start(lambda: CudaMark(torch.device("cuda")))
    return times


def train(gpu: PlayedGpu, times: StepTimes) -> None:
    """Ask for one step of 10, 20, 5 and 3 ms. The host needs no time for it."""
    with times.measure("optimizer"):
        with times.measure("forward"):
            gpu.compute(0.010)
        with times.measure("backward"):
            gpu.compute(0.020)
            times.wait_begins()
            gpu.compute(0.005)  # the stream stands still until NCCL is done
            times.wait_ends(0.0)
        gpu.compute(0.003)


def test_parts_are_those_of_the_device_once_it_has_reached_them(gpu: PlayedGpu, times: StepTimes) -> None:
    train(gpu, times)
    first = times.end_step()
    train(gpu, times)
    second = times.end_step()
    assert first.seconds() is None
    gpu.now = 0.0385
    expected = {"forward": 0.010, "backward": 0.020, "communication": 0.005, "optimizer": 0.003, "between": 0.0}
    assert first.seconds() == pytest.approx(expected)
    assert second.seconds() is None
    gpu.now = 1.0
    assert second.seconds() == pytest.approx(expected)


def test_time_without_work_belongs_to_the_part_that_the_device_waits_for(gpu: PlayedGpu, times: StepTimes) -> None:
    train(gpu, times)
    times.end_step()
    gpu.now = 0.100
    with times.measure("optimizer"), times.measure("forward"):
        gpu.now = 0.130
    gpu.now = 0.150
    seconds = times.end_step().seconds()
    assert seconds == pytest.approx(
        {"between": 0.062, "forward": 0.030, "backward": 0.0, "communication": 0.0, "optimizer": 0.0}
    )


def test_backward_pass_within_a_manual_training_step_is_no_forward_pass(gpu: PlayedGpu, times: StepTimes) -> None:
    with times.measure("optimizer"), times.measure("forward"):
        gpu.compute(0.010)
        with times.measure("backward"):
            gpu.compute(0.020)
        gpu.compute(0.001)
    gpu.now = 1.0
    seconds = times.end_step().seconds()
    assert seconds is not None
    assert [seconds["forward"], seconds["backward"]] == pytest.approx([0.011, 0.020])


def test_step_that_fails_leaves_no_part_open(gpu: PlayedGpu, times: StepTimes) -> None:
    def fail() -> None:
        with times.measure("optimizer"), times.measure("backward"):
            times.wait_begins()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    gpu.now = 1.0
    with times.measure("optimizer"):
        gpu.compute(0.010)
    gpu.now = 2.0
    seconds = times.end_step().seconds()
    assert seconds is not None
    assert [seconds["optimizer"], seconds["communication"]] == pytest.approx([0.010, 0.0])


def window(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch, step: Callable[[StepTimes], None], end_s: float) -> StepProfile:
    """Return the profile of five steps by a host whose clock stands at the same time as the GPU's.

    Args:
        end_s: seconds that the GPU gets after the last step.
    """
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: gpu.now, time=lambda: gpu.now))
    times = StepTimes()
    collector = StepProfiler("worker", torch.device("cpu"), times)
    times.start(lambda: CudaMark(torch.device("cuda")))
    for number in range(6):
        step(times)
        collector.step_ended(PLACE, number)
    gpu.now += end_s
    profile = collector.close_window(6, MODEL)
    collector.close()
    assert profile is not None
    return profile


def test_wait_for_data_counts_only_as_far_as_the_device_waits(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(times: StepTimes) -> None:
        gpu.now += 0.030  # the device still computes the former step for 18 of these 30 ms
        times.data_wait_s = 0.030
        train(gpu, times)
        gpu.now += 0.020

    profile = window(gpu, monkeypatch, step, 1.0)
    assert profile.step_time_s == pytest.approx(0.050)
    assert profile.data_wait_s == pytest.approx(0.012)
    assert [profile.forward_s, profile.communication_s] == pytest.approx([0.010, 0.005])
    assert profile.other_s == pytest.approx(0.0, abs=1e-9)
    assert not any(map(math.isnan, Measured.of([[profile]], [1.0]).shares[0]))


def test_window_that_the_device_has_not_reached_has_no_parts(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(times: StepTimes) -> None:
        gpu.compute(1000.0)
        train(gpu, times)
        gpu.now += 0.040

    profile = window(gpu, monkeypatch, step, 0.0)
    assert profile.step_time_s == pytest.approx(0.040)
    assert {profile.forward_s, profile.communication_s, profile.optimizer_s, profile.other_s} == {0.0}
    assert math.isnan(Measured.of([[profile]], [1.0]).compute_s[0])


def test_own_time_leaves_out_what_the_device_waited_for_others(gpu: PlayedGpu, times: StepTimes) -> None:
    """The host waits for the device once in a step, so that its own clock counts the device's wait as work."""
    clock = OwnClock(times)
    before = clock.read()
    train(gpu, times)
    times.end_step()
    assert times.late_s == 0.0
    gpu.now = 1.0
    train(gpu, times)
    assert times.late_s == pytest.approx(0.005)
    assert clock.read().since(before).busy_s < 0.0  # no real time has passed
    clock.close()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_measured_without_a_wait_for_the_device(device: str) -> None:
    place = torch.device(device)
    model = torch.nn.Linear(256, 256).to(place)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randn(512, 256, device=place)
    times, steps = StepTimes(), []
    clock = OwnClock(times)
    times.start(marks_of(place))
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            with times.measure("optimizer"):
                with times.measure("forward"):
                    loss = model(rows).square().mean()
                with times.measure("backward"):
                    clock.backward_begins(loss)
                    loss.backward()
                    clock.backward_ended()
                optimizer.step()
            steps.append(times.end_step())
            steps[-1].seconds()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    clock.close()
    for step in steps[1:]:
        seconds = step.seconds()
        assert seconds is not None
        assert min(seconds["forward"], seconds["backward"], seconds["optimizer"]) > 1e-6
        assert seconds["communication"] < seconds["backward"]
