"""Decide which device a worker trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["own_device"]


def own_device(devices: Sequence[torch.device], local_rank: int, num_gpus: int, backend: str | None = None) -> torch.device:
    """Return the device of the worker with this local rank.

    `Trainer(devices=...)` does not decide how many workers a node has, so there may be more workers than devices. NCCL refuses
    two workers on one GPU, so the extra workers get the GPUs that the Trainer was not given. Workers share a CPU. They also
    share GPUs if they communicate through gloo.

    Args:
        devices: devices of the Trainer.
        num_gpus: number of GPUs visible to this process.
        backend: the user's choice for the process groups; None: NCCL on GPUs.

    Raises:
        ValueError: this worker would have to share a GPU.
    """
    if devices[0].type != "cuda" or backend == "gloo":
        return devices[local_rank % len(devices)]
    others = [torch.device("cuda", i) for i in range(num_gpus) if all(device.index != i for device in devices)]
    own = [*devices, *others]
    if local_rank >= len(own):
        raise ValueError(
            f"the worker with local rank {local_rank} has no GPU of its own, as {len(own)} in all are visible to it, and NCCL "
            "refuses two workers on one GPU: start as many workers per node as it has GPUs (--nproc-per-node), show more of "
            "them in CUDA_VISIBLE_DEVICES, or share them with DLRoverStrategy(process_group_backend='gloo')"
        )
    return own[local_rank]
