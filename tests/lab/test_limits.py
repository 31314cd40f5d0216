"""Limits of a device, measured on it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from lightning_dlrover.lab.characterize.measure import measure_limit


@pytest.mark.gpu
def test_random_rows_come_from_memory_and_not_from_a_cache(tmp_path: Path) -> None:
    copied, read = (statistics.median(measure_limit(name, 1, tmp_path)) for name in ("gpu_copy", "gpu_rows"))
    assert 0.05 * copied < read < copied
