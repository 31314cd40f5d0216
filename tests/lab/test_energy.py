"""Energy of the GPU in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.lab.characterize import measure
from lightning_dlrover.lab.characterize.measure import EnergyMeter
from tests.support.fake_nvml import FakeNvml, use_gpu


def test_energy_is_that_of_the_gpu_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(tmp_path, (1, 1, 1))
    monkeypatch.setattr(measure, "load_nvml", lambda: nvml)
    use_gpu(monkeypatch, "2abc")
    nvml.joules = [1.0, 2.0, 3.0]
    meter = EnergyMeter.of_machine(cuda=True, powercap=tmp_path)
    assert meter.joules() == 3.0
    nvml.joules = [10.0, 20.0, 30.5]
    assert meter.joules() == 30.5


def test_slice_of_a_gpu_has_no_energy_because_the_counter_is_the_whole_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "load_nvml", lambda: FakeNvml(tmp_path))
    use_gpu(monkeypatch, "slice-of-0abc")
    assert not EnergyMeter.of_machine(cuda=True, powercap=tmp_path).is_available
