from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.colocate import devices as gpus_module
from lightning_dlrover.colocate.devices import Gpu, GpuSums, GpuUse, GpuWatch, JobOnGpu, bytes_of_jobs, find_gpus
from lightning_dlrover.colocate.tenants import LocalDevice, local_devices
from lightning_dlrover.tuning.cluster import RESOURCES
from tests.support.fake_nvml import FakeNvml
from tests.support.waiting import eventually

GIB = 1 << 30


GPU = Gpu(0, "GPU-0", "Fake", 8 * GIB, 5 * GIB, {"gpu": 1.0})


def made(devices: Sequence[str], memory_bytes: int = 0, num_cores: float = 4.0) -> list[LocalDevice]:
    return local_devices(devices, memory_bytes, usable={0, 1, 2, 3}, num_cores=num_cores, available=10 * GIB, gpus={0: GPU})


def test_one_device_has_all_cores_and_most_of_the_memory() -> None:
    (place,) = made(["cpu"])
    assert (place.cores, place.num_cores, place.memory_bytes, place.most_jobs) == ((0, 1, 2, 3), 4.0, 9 * GIB, 8)


def test_policy_may_run_more_jobs_for_each_core() -> None:
    (place,) = local_devices(["cpu"], jobs_per_core=4, usable={0, 1}, num_cores=2.0, available=10 * GIB)
    assert place.most_jobs == 8


def test_devices_share_the_memory_by_their_cores() -> None:
    first, second = made(["cpu:0-2", "cpu:3"], memory_bytes=8 * GIB)
    assert (first.cores, first.memory_bytes) == ((0, 1, 2), 6 * GIB)
    assert (second.cores, second.memory_bytes) == ((3,), 2 * GIB)


def test_gpu_has_its_free_memory_and_a_part_of_the_cores() -> None:
    cores, gpu = made(["cpu", "gpu:0"], memory_bytes=8 * GIB)
    assert (cores.cores, cores.sizes, cores.limits) == ((0, 1), {"host": 4 * GIB}, {"cores": 2.0})
    assert (gpu.cores, gpu.sizes) == ((2, 3), {"host": 4 * GIB, "gpu": int(0.9 * 5 * GIB)})
    assert (gpu.kind, gpu.limits, gpu.most_jobs) == ("Fake", {"cores": 2.0, "gpu": 1.0}, 4)
    assert gpu.environment(1)["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert cores.environment(1)["CUDA_VISIBLE_DEVICES"] == ""


def test_gpu_may_name_its_cores_and_the_others_share_the_rest() -> None:
    gpu, cores = made(["gpu:0:3", "cpu"])
    assert (gpu.name, gpu.cores, cores.cores) == ("gpu:0", (3,), (0, 1, 2))


def test_gpu_that_is_nearly_full_is_refused() -> None:
    full = replace(GPU, free_bytes=GIB)
    with pytest.raises(ValueError, match="gpu:0 has only 1024 MiB free"):
        local_devices(["gpu:0"], usable={0, 1}, num_cores=2.0, available=10 * GIB, gpus={0: full})


def test_quota_of_cpu_time_leaves_fewer_cores() -> None:
    (place,) = made(["cpu"], num_cores=1.5)
    assert (place.num_cores, place.most_jobs) == (1.5, 4)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["gpu"], "'gpu' is not `cpu`, `cpu:CORES`"),
        (["gpu:x"], "'gpu:x' is not `cpu`"),
        (["gpu:0:"], "'gpu:0:' is not `cpu`"),
        (["gpu:1"], r"no gpu:1 that this process may use; there are: gpu:0 \(Fake\)"),
        (["gpu:0", "gpu:0:1"], "gpu:0 is named twice"),
        (["cpu:0-3", "gpu:0"], "0 of 4 cores are left for gpu:0; each needs at least one"),
        (["cuda:0"], "'cuda:0' is not `cpu`"),
        (["cpu:"], "names no cores"),
        (["cpu:x"], "'x' is not a core"),
        (["cpu:3-1"], "'3-1' is not a core or range"),
        (["cpu:2-5"], r"may use the cores 0 to 3, not 4 to 5"),
        (["cpu:0-1", "cpu:1"], "share core 1"),
        (["cpu", "cpu"], "cpu is named twice"),
    ],
)
def test_wrong_device_is_refused(devices: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(devices)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="--memory is 20480 MiB, and 10240 MiB are available"):
        made(["cpu"], memory_bytes=20 * GIB)


GIB = 1 << 30


def occupy(folder: Path, gib: float, gpu: int = 0) -> None:
    """Give this process memory on a GPU."""
    (folder / str(gpu)).mkdir(exist_ok=True)
    (folder / str(gpu) / str(os.getpid())).write_text(str(int(gib * GIB)))


def test_gpus_have_their_free_memory_and_the_limits_that_policies_know(tmp_path: Path) -> None:
    occupy(tmp_path, 1.0)
    found = find_gpus(FakeNvml(tmp_path, (4 * GIB, 8 * GIB)), [0])
    assert {index: gpu.free_bytes for index, gpu in found.items()} == {0: 3 * GIB, 1: 8 * GIB}
    assert found[1].limits == {"gpu": 1.0, "pcie": pytest.approx(63e9, rel=0.01)}
    assert found[0].limits.keys() <= {*RESOURCES}


def test_gpu_without_counters_is_limited_by_its_time_alone(tmp_path: Path) -> None:
    assert find_gpus(FakeNvml(tmp_path, has_counters=False), [0])[0].limits == {"gpu": 1.0}


@pytest.mark.parametrize(
    ("visible", "indices"), [("1", [1]), ("GPU-0a", [0]), ("0, 1", [0, 1]), ("1,-1,0", [1]), ("", []), ("-1", [])]
)
def test_only_visible_gpus_are_found(visible: str, indices: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [*find_gpus(FakeNvml(tmp_path, (GIB, GIB)), [0])] == indices


def test_numbers_of_gpus_of_different_models_are_refused_where_cuda_counts_in_its_own_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(tmp_path, (4 * GIB, 8 * GIB), names=("Slow", "Fast"))
    assert [*find_gpus(nvml, [0], "GPU-1abc")] == [1]
    with pytest.raises(ValueError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        find_gpus(nvml, [0], "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [*find_gpus(nvml, [0], "1")] == [1]


def test_gpu_that_is_divided_is_refused_only_if_it_is_wanted(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, (GIB, GIB), mig=(0, 1))
    assert [*find_gpus(nvml, [0])] == [0]
    with pytest.raises(ValueError, match="gpu:1 cannot be shared: it is divided by MIG; leave it out of --devices"):
        find_gpus(nvml, [0, 1])


def test_busy_time_and_traffic_of_a_window_are_those_of_the_window(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, busy=40)
    gpus = find_gpus(nvml, [0])
    with GpuWatch(nvml, gpus.values()) as watch:
        eventually(lambda: watch.use(0).sums.at_s > time.monotonic() - 10, "a measurement")
        assert watch.use(0).sums.busy_s == 0
        occupy(tmp_path, 1.0)
        watch.sample()
        first = watch.use(0).sums
        eventually(lambda: watch.use(0).sums.at_s > first.at_s + 0.5, "half a second of measurements")
        rates = watch.use(0).sums.rates_since(first)
        assert watch.use(0).of_processes == {os.getpid(): GIB}
    assert rates == {"gpu": pytest.approx(0.4), "pcie": pytest.approx(80e6)}
    assert first.rates_since(first) == {}


def test_gpu_that_is_lost_keeps_its_last_measurement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml(tmp_path)
    occupy(tmp_path, 1.0)
    watch = GpuWatch(nvml, find_gpus(nvml, [0]).values())
    watch.sample()
    nvml.is_lost = True
    watch.sample()
    watch.sample()
    assert watch.use(0).used_bytes == GIB
    assert watch.use(0, time.monotonic()).used_bytes == GIB
    assert [record.getMessage() for record in caplog.records] == ["gpu:0 is not measured: GPU is lost"]
    nvml.is_lost = False
    occupy(tmp_path, 2.0)
    watch.sample()
    assert watch.use(0).used_bytes == 2 * GIB


def test_look_does_not_wait_for_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "WAIT_S", 0.1)
    nvml = FakeNvml(tmp_path)
    occupy(tmp_path, 1.0)
    with GpuWatch(nvml, find_gpus(nvml, [0]).values()) as watch:
        nvml.hangs.clear()
        assert nvml.is_asked.wait(10)
        assert watch.use(0, time.monotonic()).used_bytes == GIB
        nvml.hangs.set()


def test_measurement_after_a_moment_is_made_where_there_is_none(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    watch = GpuWatch(nvml, find_gpus(nvml, [0]).values())
    occupy(tmp_path, 1.0)
    assert watch.use(0).used_bytes == 0
    assert watch.use(0, time.monotonic()).used_bytes == GIB


def test_memory_of_a_job_is_that_of_its_processes_or_what_it_reports() -> None:
    use = GpuUse(GpuSums(), 10, {1: 2, 2: 3, 7: 4})
    jobs = [JobOnGpu((1, 2, 5), 0), JobOnGpu((7,), None), JobOnGpu((8,), 6), JobOnGpu((1,), 9)]
    assert bytes_of_jobs(use, 0, jobs) == [5, 4, 6, 9]


def test_jobs_that_report_nothing_share_what_exceeds_the_charges_of_the_others() -> None:
    in_container = GpuUse(GpuSums(), 20, {4000: 2, 4001: 3, 4002: 4})
    jobs = [JobOnGpu((1,), 3, charge_bytes=5), JobOnGpu((2,), None), JobOnGpu((3,), None)]
    assert bytes_of_jobs(in_container, 1, jobs) == [3, 7, 7]
    assert bytes_of_jobs(in_container, 1, [JobOnGpu((1,), 3, charge_bytes=30), JobOnGpu((2,), None)]) == [3, 0]
