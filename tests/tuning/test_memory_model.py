"""The memory model predicts peaks of processes that really trained, and states its uncertainty."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.tuning import MemoryModel, StepProfile, configuration_of
from tests.support.windows import window

MIB = 1 << 20
TABLES = 768 * MIB


def grown(
    workers: int = 1, *, batch: int = 64, loaders: int = 0, prefetch: int = 2, tables: int = 0, peak: float = 0.0
) -> StepProfile:
    """A window with a peak that follows its own rule, unless `peak` is given."""
    by_rule = 300 * MIB + 0.5 * MIB * batch + loaders * (80 * MIB + 0.1 * MIB * prefetch * batch) + 1.5 * tables / workers
    return replace(
        window(workers, 0.1, global_batch=batch * workers, dense_bytes=8 * MIB),
        loader_workers=loaders,
        prefetch_factor=prefetch,
        embedding_bytes=tables,
        peak_memory_bytes=int(peak or by_rule),
        memory_bytes=0,
    )


def test_a_rule_of_named_terms_is_found_and_holds_far_beyond_the_samples() -> None:
    seen = [
        grown(workers, batch=batch, loaders=loaders, tables=TABLES)
        for workers, batch, loaders in itertools.product((1, 2), (16, 64), (0, 1, 2))
    ]
    far = grown(4, batch=512, loaders=4, prefetch=4, tables=TABLES)
    predicted = MemoryModel.fit(seen).predict(configuration_of(far))
    assert predicted.peak_bytes == pytest.approx(far.peak_memory_bytes, rel=0.05)
    assert predicted.low_bytes < far.peak_memory_bytes < predicted.high_bytes


def test_one_sample_suffices_and_larger_inputs_never_need_less() -> None:
    model = MemoryModel.fit([grown(batch=64)])
    here = configuration_of(grown(batch=64))
    peak = model.predict(here).peak_bytes
    assert peak == pytest.approx(grown(batch=64).peak_memory_bytes, rel=0.05)
    for more in (
        replace(here, local_batch=128),
        replace(here, loader_workers=2),
        replace(here, loader_workers=2, prefetch_factor=8),
        replace(here, embedding_bytes=TABLES),
    ):
        assert model.predict(more).peak_bytes >= peak


def test_more_workers_hold_less_of_the_tables_each() -> None:
    model = MemoryModel.fit([grown(w, tables=TABLES) for w in (1, 2)])
    peaks = [model.predict(configuration_of(grown(w, tables=TABLES))).peak_bytes for w in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.5 * peaks[-1]


def test_interval_is_wider_beyond_the_measured_range() -> None:
    model = MemoryModel.fit([grown(batch=b) for b in (16, 32, 64, 128, 256)])
    near, far = (model.predict(configuration_of(grown(batch=b))) for b in (100, 10_000))
    assert far.high_bytes / far.peak_bytes > 1.05 * near.high_bytes / near.peak_bytes


def test_no_peaks_are_refused() -> None:
    with pytest.raises(ValueError, match="none of 1 samples has peak_memory_bytes"):
        MemoryModel.fit([replace(window(1, 0.1), memory_bytes=0)])


def test_a_negative_peak_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 \(worker 'w0'.* has peak_memory_bytes=-5"):
        MemoryModel.fit([grown(), replace(grown(), peak_memory_bytes=-5)])


# --- measured ---


def measured(configurations: Sequence[dict[str, int]]) -> list[StepProfile]:
    """Peaks of processes that trained in these configurations."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_worker.py"))],
        input="".join(json.dumps(configuration) + "\n" for configuration in configurations),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(configurations), done.stderr[-2000:]
    return [
        grown(
            row["num_workers"],
            batch=row["local_batch"],
            loaders=row["loader_workers"],
            prefetch=row["prefetch_factor"],
            tables=row["embedding_bytes"],
            peak=row["peak_memory_bytes"],
        )
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.timeout(700)
def test_measured_peaks_of_held_out_configurations_are_predicted() -> None:
    grid = [
        {
            "local_batch": batch,
            "loader_workers": loaders,
            "prefetch_factor": prefetch,
            "num_workers": workers,
            "embedding_bytes": TABLES,
        }
        for batch, (loaders, prefetch), workers in itertools.product((16, 64, 256), ((0, 2), (1, 2), (2, 2), (2, 4)), (1, 2, 4))
    ]
    random.Random(0).shuffle(grid)
    profiles = measured(grid[:14])
    model = MemoryModel.fit(profiles[:8])
    held_out = profiles[8:]
    predictions = [model.predict(configuration_of(p)) for p in held_out]
    errors = [abs(p.peak_bytes / h.peak_memory_bytes - 1) for p, h in zip(predictions, held_out, strict=True)]
    inside = [p.low_bytes <= h.peak_memory_bytes <= p.high_bytes for p, h in zip(predictions, held_out, strict=True)]
    usual = statistics.median(p.peak_memory_bytes for p in profiles[:8])
    by_the_usual = statistics.median(abs(usual / h.peak_memory_bytes - 1) for h in held_out)
    assert statistics.median(errors) <= 0.10
    assert statistics.median(errors) < by_the_usual / 2  # the configurations do differ
    assert sum(inside) >= 5
