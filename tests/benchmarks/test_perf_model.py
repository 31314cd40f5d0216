"""Each layer of the resource-performance model counts in its benchmark, which names a folder without traces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import perf_model
import pytest

from tests.support.windows import TRACES, needs_traces

ROOT = Path(__file__).resolve().parents[2]


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layers, of_others", [(perf_model.LAYERS, False), (perf_model.OF_HISTORY, True)])
def test_each_layer_that_is_left_out_changes_a_prediction(layers: tuple[perf_model.Layer, ...], of_others: bool) -> None:
    job, *others = (
        perf_model.with_bytes(model, perf_model.read(TRACES, model, "placements", with_sync=True))
        for model in ("bert", "cifar10", "imagenet", "yolov3")
    )
    cases = [next(perf_model.splits(split, job, (), 1)) for split in ("interp", "off_node")]
    found = {
        layer.name: perf_model.errors_without(layer, cases, others if of_others else [])
        for layer in (perf_model.WHOLE, *layers)
    }
    unchanged = [name for name, errors in found.items() if errors == found[perf_model.WHOLE.name]]
    assert unchanged == [perf_model.WHOLE.name]


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "perf_model.py"), "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "step_traces does not exist" in done.stderr
