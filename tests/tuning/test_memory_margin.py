from __future__ import annotations

import random

import pytest

from lightning_dlrover.tuning.memory import DEFAULT_SHARE, MAX_RECORDS, MIN_SHARE, MemoryMargin


def test_margin_without_records_is_the_default() -> None:
    assert MemoryMargin.of().bytes_for(1000) == DEFAULT_SHARE * 1000


def test_one_large_error_raises_the_margin_at_once() -> None:
    assert MemoryMargin.of([(100, 140)]).share == pytest.approx(0.4)


def test_few_good_records_do_not_shrink_the_margin() -> None:
    assert MemoryMargin.of([(100, 100)] * 18).share == DEFAULT_SHARE
    assert MemoryMargin.of([(100, 100)] * 19).share == MIN_SHARE


def test_margin_covers_new_jobs_as_often_as_the_risk_allows() -> None:
    draw = random.Random(0)
    missed = 0
    for _ in range(400):
        errors = [draw.gauss(0.0, 0.1) for _ in range(60)]
        margin = MemoryMargin.of([(1_000_000, round(1_000_000 * (1 + error))) for error in errors], risk=0.1)
        missed += draw.gauss(0.0, 0.1) > margin.share
    assert 0.05 < missed / 400 < 0.13


def test_old_records_are_forgotten() -> None:
    assert MemoryMargin.of([(100, 300)] * MAX_RECORDS + [(100, 101)] * MAX_RECORDS).share == MIN_SHARE


@pytest.mark.parametrize("record", [(0, 10), (10, 0), (-1, 10)])
def test_record_without_both_figures_is_refused(record: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"memory record 1 of 2 .* leave out jobs"):
        MemoryMargin.of([(10, 10), record])


@pytest.mark.parametrize("risk", [0.0, 1.0, -0.1])
def test_risk_outside_its_range_is_refused(risk: float) -> None:
    with pytest.raises(ValueError, match=f"risk={risk}"):
        MemoryMargin.of([], risk)
