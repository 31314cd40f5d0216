"""Named TorchX resources for a job's nodes, sized for one worker. TorchX's own, such as `gpu.small`, work as well."""

from __future__ import annotations

from torchx.specs import Resource

GIB = 1024  # MB as TorchX counts them, which schedulers read as MiB


def cpu_small() -> Resource:
    """Resources for a dense model: as many small workers as the planner can use."""
    return Resource(cpu=2, gpu=0, memMB=4 * GIB)


def cpu_large() -> Resource:
    """Resources for a model with embedding tables: each worker holds its share and a copy of a neighbour's."""
    return Resource(cpu=8, gpu=0, memMB=32 * GIB)


def gpu_1() -> Resource:
    """Resources of one accelerator, with the cores and memory that its loader workers need."""
    return Resource(cpu=8, gpu=1, memMB=32 * GIB)
