"""NVML, the library that reports the state of NVIDIA's GPUs: loading it, and the state of the GPU in use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def load_nvml() -> Any:
    """Return NVML's module, ready for use.

    Raises:
        ValueError: the module or the driver is missing.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise ValueError("GPUs are measured with NVML: pip install 'lightning-dlrover[gpu]'") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ValueError(f"NVML finds no GPU: {error}; install NVIDIA's driver, or use --devices cpu") from error
    return nvml


def known(nvml: Any, ask: Callable[[], T]) -> T | None:
    """Return NVML's answer; None where this GPU or driver does not support the question."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotFound):
        return None


def handle_of(nvml: Any, device: torch.device | None = None) -> Any:
    """Return NVML's handle of a device of this process, None: of the current one.

    CUDA and NVML count GPUs in different orders, and CUDA only those in `CUDA_VISIBLE_DEVICES`. The UUID is the same for both.

    Raises:
        NVMLError: NVML has no such GPU, as for a slice of a GPU (MIG): counters exist for the whole GPU only.
    """
    import torch

    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


class BusyTime:
    """Percentage of the time in which at least one kernel, of any process, ran on this process's GPU.

    NVML keeps samples of the last seconds, each of a sixth of a second to a second. The mean covers those since the last call.
    """

    def __init__(self, device: torch.device) -> None:
        self._ask: Callable[[], float] | None = None
        self._newest_us = 0
        if device.type == "cuda":
            try:
                nvml = load_nvml()
                handle = handle_of(nvml, device)
            except Exception:  # NVML is missing, or has no figure for a slice of a GPU; its errors share no base class
                return
            self._ask = lambda: self._percent(nvml, handle)

    def take(self) -> float:
        """Return the percentage since the last call, or in the last second at the first one; 0 where NVML has none."""
        return self._ask() if self._ask is not None else 0.0

    def _percent(self, nvml: Any, handle: Any) -> float:
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            found = known(nvml, lambda: nvml.nvmlDeviceGetSamples(handle, kind, self._newest_us))
            samples = [(int(s.timeStamp), float(s.sampleValue.uiVal)) for s in (found[1] if found is not None else ())]
            is_first, self._newest_us = not self._newest_us, max([self._newest_us, *(at for at, _ in samples)])
            if samples and not is_first:
                return sum(percent for _, percent in samples) / len(samples)
            rates = known(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))  # the newest sample alone
        except nvml.NVMLError:  # the GPU is lost, or was reset
            return 0.0
        return float(rates.gpu) if rates is not None else 0.0
