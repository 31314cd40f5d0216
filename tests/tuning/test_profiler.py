"""Profiles of windows of steps: a moved clock, parts of a step on a played GPU and on real devices, and the work of a model."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_dlrover import variables
from lightning_dlrover.spares import MEMORY_FILE
from lightning_dlrover.tuning import profiler, resources
from lightning_dlrover.tuning.health import OwnClock
from lightning_dlrover.tuning.profiler import (
    CUDA_CONTEXT_BYTES,
    CudaMark,
    Descriptors,
    ForwardWatch,
    GpuPeak,
    Model,
    ProfileKey,
    StepProfiler,
    StepTimes,
    dense_gradient_bytes,
    embedding_bytes,
    gpu_bytes,
    marks_of,
)
from lightning_dlrover.tuning.samples import STEP_PARTS, Measured, StepProfile

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
        patch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now))

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


def test_memory_limit_is_without_the_spare_process(
    childless: None, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def window() -> StepProfile:
        for _ in range(2):
            bench.train(place=PLACE)
        return bench.close()

    before = window()
    (tmp_path / f"{MEMORY_FILE}17").write_text(str(300 * 2**20))
    monkeypatch.setenv(variables.SPARES, str(tmp_path))
    monkeypatch.setenv(variables.AGENT_PID, "17")
    after = window()
    assert (before.spare_bytes, after.spare_bytes) == (0, 300 * 2**20)
    assert before.memory_limit_bytes - after.memory_limit_bytes == 300 * 2**20


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


def test_a_pause_does_not_count_as_time_of_a_step(bench: Bench) -> None:
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


# --- parts of a step ---------------------------------------------------------------------------------------------------------


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


def test_backward_pass_of_a_manual_training_step_is_not_counted_as_forward(gpu: PlayedGpu, times: StepTimes) -> None:
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


def test_wait_for_data_counts_only_while_the_device_waits(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_own_time_excludes_the_wait_of_the_device_for_others(gpu: PlayedGpu, times: StepTimes) -> None:
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


# --- descriptors -------------------------------------------------------------------------------------------------------------


SAMPLES = 6


def watched(module: nn.Module, run: Callable[[], object]) -> Descriptors:
    watch = ForwardWatch(module)
    with watch:
        run()
    return watch.descriptors(SAMPLES)


def test_flops_are_three_times_those_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    found = watched(model, lambda: model(torch.randn(SAMPLES, 10)))
    assert found == Descriptors(dense_flops=3 * 2 * (10 * 20 + 20 * 3), lookups_per_sample=0.0)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_is_counted_as_torchs_own_counter_does(layers: int) -> None:
    blocks = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32)]
    model = nn.Sequential(*blocks, *[nn.Linear(32, 32) for _ in range(layers)])
    rows = torch.randn(SAMPLES, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(rows).sum().backward()
    found = watched(model, lambda: model(rows))
    # The first layer needs no gradient of its input, so three times the forward pass is slightly more.
    assert counter.get_total_flops() / SAMPLES <= found.dense_flops <= 1.3 * counter.get_total_flops() / SAMPLES


def test_attention_counts_on_cpu_too() -> None:
    heads, length, width = 4, 16, 8
    query = torch.randn(SAMPLES, heads, length, width, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    found = watched(nn.Identity(), lambda: attention(query, query, query))
    assert found.dense_flops == 3 * 2 * 2 * heads * length * length * width


def test_lookups_are_rows_that_a_sample_reads() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(100, 8), "tags": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})

    def run() -> None:
        model["words"](torch.randint(0, 100, (SAMPLES, 3)))
        model["tags"](torch.arange(4 * SAMPLES), torch.arange(0, 4 * SAMPLES, 4))

    assert watched(model, run) == Descriptors(dense_flops=0, lookups_per_sample=7.0)
    assert embedding_bytes(model) == 4 * (100 * 8 + 50 * 4)
    assert dense_gradient_bytes(model, sharded=()) == 4 * 100 * 8
    assert dense_gradient_bytes(model, sharded={"words.weight"}) == 0


def test_a_backward_pass_inside_of_the_step_is_not_counted_again() -> None:
    """Manual optimization runs its backward pass inside the step."""
    model = nn.ModuleDict({"tags": nn.EmbeddingBag(50, 4, mode="sum"), "net": nn.Linear(4, 3)})

    def forward() -> torch.Tensor:
        result: torch.Tensor = model["net"](model["tags"](torch.arange(4 * SAMPLES), torch.arange(0, 4 * SAMPLES, 4)))
        return result.sum()

    assert watched(model, lambda: forward().backward()) == watched(model, forward)  # type: ignore[no-untyped-call]


def test_a_step_that_is_made_again_counts_once() -> None:
    model = nn.Linear(10, 20)
    watch = ForwardWatch(model)
    for _ in range(2):
        with watch:
            model(torch.randn(SAMPLES, 10))
    assert watch.descriptors(SAMPLES).dense_flops == 3 * 2 * 10 * 20


def test_observed_pass_has_the_results_of_an_unobserved_one() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.5))
    rows = torch.randn(SAMPLES, 10)
    results = []
    for watch in (ForwardWatch(model), None):
        torch.manual_seed(3)
        if watch is None:
            results.append(model(rows))
        else:
            with watch:
                results.append(model(rows))
        results[-1].sum().backward()
    assert torch.equal(results[0], results[1])


def test_an_error_of_the_model_comes_through_and_ends_the_watch() -> None:
    watch = ForwardWatch(nn.Linear(2, 2))
    with pytest.raises(ArithmeticError, match="the model's own"), watch:
        raise ArithmeticError("the model's own")
    before = watch.flops
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert watch.flops == before


def test_sharded_tables_are_counted_whole_and_their_lookups_by_feature() -> None:
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec")
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from lightning_dlrover.tables.sharded import ShardedTables

    tables = [
        torchrec.EmbeddingBagConfig(name="t1", num_embeddings=100, embedding_dim=8, feature_names=["a", "b"]),
        torchrec.EmbeddingBagConfig(name="t2", num_embeddings=60, embedding_dim=8, feature_names=["b"]),
    ]
    model = nn.ModuleDict({"tables": torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))})
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b", "unused"],
        values=torch.randint(0, 60, (SAMPLES * (2 + 1 + 5),)),
        lengths=torch.tensor([2] * SAMPLES + [1] * SAMPLES + [5] * SAMPLES),
    )
    if dist.is_initialized():  # a Trainer in another test has left its group to the process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sharded = ShardedTables(model, torch.device("cpu"))
        sharded.build(sharded.first_plan(["w"]), ["w"], lambda module, _: module)
        assert watched(model, lambda: model["tables"](features).wait()).lookups_per_sample == 2 + 1 + 1
        assert embedding_bytes(model) == 4 * 8 * (100 + 60)
        assert dense_gradient_bytes(model, sharded.parameter_names()) == 0
    finally:
        dist.destroy_process_group()


# --- memory of a GPU ---------------------------------------------------------------------------------------------------------


GPU = torch.device("cuda")


class PlayedAllocator:
    """Torch's counters of a GPU's memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.now)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.take(0))

    def take(self, size: int) -> None:
        """Allocate some bytes, and free them."""
        self.peak = max(self.now + size, self.peak if size else 0)


def allocate(size: int) -> None:
    torch.ones(size, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("is_played", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_peak_of_a_window_does_not_hide_a_smaller_one_nor_the_process_own(
    is_played: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PlayedAllocator(monkeypatch).take if is_played else allocate
    take(1)
    peak, other = GpuPeak(GPU), GpuPeak(torch.device("cuda:0"))
    before = torch.cuda.memory_reserved(GPU)
    take(800 * MIB)
    assert 800 * MIB <= peak.take() < 900 * MIB + before
    if not is_played:
        torch.cuda.empty_cache()
    take(100 * MIB)
    assert 100 * MIB <= peak.take() < 200 * MIB + before
    assert other.take() >= 800 * MIB
    now, most = gpu_bytes(GPU)
    assert most >= CUDA_CONTEXT_BYTES + 800 * MIB > now
    assert GpuPeak(torch.device("cpu")).take() == 0
