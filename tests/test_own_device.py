"""The device on which each worker trains. Devices have names without CUDA, too."""

from __future__ import annotations

import pytest
import torch

from lightning_dlrover.live.replica import own_device


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize("given", [gpus(0), gpus(2), gpus(3, 1), gpus(0, 1, 2, 3)])
def test_workers_of_a_node_have_different_gpus(given: list[torch.device]) -> None:
    found = [own_device(given, local_rank, 4) for local_rank in range(4)]
    assert found[: len(given)] == given
    assert sorted(device.index for device in found) == [0, 1, 2, 3]


def test_worker_without_a_gpu_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 1 has no GPU of its own, as 1 in all"):
        own_device(gpus(0), 1, 1)


@pytest.mark.parametrize("given, backend", [(gpus(0), "gloo"), ([torch.device("cpu")], None)])
def test_workers_share_a_cpu_and_gpus_with_gloo(given: list[torch.device], backend: str | None) -> None:
    assert [own_device(given, local_rank, 1, backend) for local_rank in range(3)] == given * 3
