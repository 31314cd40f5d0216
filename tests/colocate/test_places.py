from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_dlrover.colocate.devices import Gpu
from lightning_dlrover.colocate.tenants import LocalDevice, local_devices

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
