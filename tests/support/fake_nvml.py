"""A fake NVML driver: it reports GPUs from files that the processes under test write their memory to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


class NVMLError(Exception):
    """Base of NVML's errors."""


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


def use_gpu(patch: pytest.MonkeyPatch, uuid: str) -> None:
    """Let CUDA see one GPU alone, as by `CUDA_VISIBLE_DEVICES`."""
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(uuid=uuid))


class FakeNvml:
    """GPUs of one machine. Handles are indices.

    Args:
        folder: holds a file of each process, ``GPU/PID``, with its bytes on that GPU.
        total_bytes: memory of each GPU.
        busy: percent of the time that kernels run, while any process has memory there.
        knows_processes: False as in a container with process ids of its own.
        has_counters: False for a GPU that does not report its link.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NotFound = NVMLError_NotFound
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(
        self,
        folder: Path,
        total_bytes: Sequence[int] = (4 << 30,),
        busy: int = 40,
        knows_processes: bool = True,
        has_counters: bool = True,
        mig: Sequence[int] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.folder, self.total_bytes, self.busy = folder, total_bytes, busy
        self.knows_processes, self.has_counters, self.mig = knows_processes, has_counters, mig
        self.names = names
        self.samples: list[tuple[int, int]] = []  # microseconds and percent, of the first GPU
        self.joules = [0.0] * len(total_bytes)
        self.is_lost = False
        self.hangs, self.is_asked = threading.Event(), threading.Event()  # it hangs while the first is clear
        self.hangs.set()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.total_bytes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for handle in range(len(self.total_bytes)):
            if uuid == self.nvmlDeviceGetUUID(handle):
                return handle
        raise NVMLError_NotFound

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return round(1e3 * self.joules[handle])

    def nvmlDeviceGetSamples(self, handle: int, kind: int, newer_than_us: int) -> tuple[int, list[SimpleNamespace]]:
        assert (handle, kind) == (0, self.NVML_GPU_UTILIZATION_SAMPLES)
        self._check()
        found = [(at, percent) for at, percent in self.samples if at > newer_than_us]
        if not found:
            raise NVMLError_NotFound
        return 0, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent)) for at, percent in found]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle] if self.names else "Fake 4G"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._check()
        used = sum(self._processes(handle).values())
        return SimpleNamespace(total=self.total_bytes[handle], used=used, free=self.total_bytes[handle] - used)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if not self.mig:
            raise NVMLError_NotSupported
        return self.mig[handle], self.mig[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if not self.hangs.is_set():
            self.is_asked.set()
            assert self.hangs.wait(60)
        busy = self.busy if self._processes(handle) else 0
        return SimpleNamespace(gpu=busy, memory=busy // 2)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self._counter(4)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._counter(16)

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        return self._counter(1000 * self.busy if self._processes(handle) else 0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        known = self._processes(handle).items() if self.knows_processes else ()
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in known]

    def _check(self) -> None:
        if self.is_lost:
            raise NVMLError("GPU is lost")

    def _counter(self, value: int) -> int:
        if not self.has_counters:
            raise NVMLError_NotSupported
        return value

    def _processes(self, handle: int) -> dict[int, int]:
        found = {}
        for path in (self.folder / str(handle)).glob("*"):
            with suppress(OSError):
                # A process that has ended and was not reaped has no command line.
                if Path(f"/proc/{path.name}/cmdline").read_bytes() and (text := path.read_text()):
                    found[int(path.name)] = int(text)
        return found
