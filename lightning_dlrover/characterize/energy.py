"""Energy that the machine reports: RAPL of the processors, NVML of the GPUs. Without either, there is no figure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_dlrover.observe.nvml import handle_of, load_nvml

__all__ = ["POWERCAP", "EnergyMeter"]

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads energy counters.

    Args:
        counters: functions that return the joules of one counter since some moment; None for no counter.
    """

    def __init__(self, counters: list[Callable[[], float]]) -> None:
        self._counters = counters

    @classmethod
    def of_machine(cls, cuda: bool, powercap: Path = POWERCAP) -> EnergyMeter:
        """Use all packages of the processors, and the GPU in use. A GPU without a counter gives no figure at all."""
        counters: list[Callable[[], float]] = [
            _Rapl(zone) for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1 and _is_readable(zone)
        ]
        if cuda:
            counter = _gpu_counter()
            counters = [*counters, counter] if counter else []
        return cls(counters)

    @property
    def is_available(self) -> bool:
        return bool(self._counters)

    def joules(self) -> float | None:
        """Return joules since some moment; None if the machine does not report them."""
        return sum(counter() for counter in self._counters) if self._counters else None


class _Rapl:
    """One package's counter, which wraps around."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range = float((zone / "max_energy_range_uj").read_text())
        self._last = float(self._file.read_text())
        self._sum = 0.0

    def __call__(self) -> float:
        now = float(self._file.read_text())
        self._sum += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._sum / 1e6


def _is_readable(zone: Path) -> bool:
    with suppress(OSError, ValueError):  # only root may read it, since it can reveal secrets of other processes
        float((zone / "energy_uj").read_text())
        float((zone / "max_energy_range_uj").read_text())
        return True
    return False


def _gpu_counter() -> Callable[[], float] | None:
    try:
        nvml = load_nvml()
        handle = handle_of(nvml)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, a slice of a GPU (MIG), or a GPU older than Volta
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
