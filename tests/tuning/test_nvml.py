"""Figures of the GPU in use, whatever its number for CUDA and for NVML."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from lightning_dlrover.tuning import nvml as nvml_module
from lightning_dlrover.tuning.nvml import BusyTime, handle_of, load_nvml
from tests.support.fake_nvml import FakeNvml, NVMLError_NotFound, use_gpu

GPU = torch.device("cuda")
MIB = 1 << 20


def test_machine_without_a_driver_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = importlib.import_module("pynvml")

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(ValueError, match=r"NVML finds no GPU: .*use --devices cpu"):
        load_nvml()


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml(tmp_path, (MIB, MIB, MIB))
    monkeypatch.setattr(nvml_module, "load_nvml", lambda: made)
    use_gpu(monkeypatch, "0abc")
    return made


def test_gpu_in_use_is_found_by_its_uuid_and_a_slice_of_one_is_none(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, "2abc")
    assert handle_of(nvml) == 2
    use_gpu(monkeypatch, "slice-of-0abc")
    with pytest.raises(NVMLError_NotFound):
        handle_of(nvml)
    assert BusyTime(GPU).take() == 0.0


def test_busy_time_is_the_mean_of_the_samples_since_the_last_call(nvml: FakeNvml) -> None:
    busy = BusyTime(GPU)
    nvml.samples = [(1, 100), (2, 100)]
    assert busy.take() == 0.0  # the newest figure: nothing holds memory there
    nvml.samples += [(3, 10), (4, 50)]
    assert busy.take() == 30.0
    assert busy.take() == 0.0
    nvml.samples.append((5, 70))
    nvml.is_lost = True
    assert busy.take() == 0.0
    nvml.is_lost = False
    assert busy.take() == 70.0
    assert BusyTime(torch.device("cpu")).take() == 0.0
