"""The measured machine: its identity, and the resources that studies may use."""

from __future__ import annotations

import importlib.util
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.observe.resources import available_bytes, available_cores

__all__ = ["Machine", "has", "this_machine", "usable_memory_bytes", "whole_cores"]


@dataclass(frozen=True)
class Machine:
    """A machine, as the points of a folder belong to it."""

    name: str
    processor: str
    cores: float  # cores that this process may use
    memory_gib: int
    gpu: str  # empty: none in use
    torch: str


def this_machine(device: str) -> Machine:
    """Describe this machine.

    Raises:
        ValueError: there is no GPU, and `device` asks for one.
    """
    import psutil
    import torch

    gpu = ""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"--device cuda: torch {torch.__version__} finds no GPU here; use --device cpu, or install a CUDA build"
            )
        gpu = torch.cuda.get_device_name(0)
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    return Machine(platform.node(), _processor(), available_cores(), memory_gib, gpu, torch.__version__)


def usable_memory_bytes() -> int:
    return available_bytes()


def whole_cores() -> int:
    return max(1, min(int(available_cores()), len(os.sched_getaffinity(0))))


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
