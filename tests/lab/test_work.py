"""Work is read from a file of samples by application."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.lab.simulate.traces import RESTART_S, SAMPLES, USUAL_BATCHES, WorkloadError, read_work


def test_all_tables_hold_the_same_applications() -> None:
    assert set(SAMPLES) == set(RESTART_S) == set(USUAL_BATCHES)


def test_work_is_read_by_application(tmp_path: Path) -> None:
    path = tmp_path / "work.csv"
    path.write_text("application,samples\nncf,1e6\nbert,5\n")
    assert read_work(path) == {"ncf": 1_000_000, "bert": 5}


@pytest.mark.parametrize(
    "text, message",
    [
        ("model,samples\nncf,1\n", r"work.csv:1: no column application"),
        ("application,samples\nncf,1\nbert,-1\n", r"work.csv:3: samples is '-1'"),
        ("application,samples\nncf,many\n", r"work.csv:2: samples is 'many'"),
        ("application,samples\n,5\n", r"work.csv:2: the application has no name"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "work.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_work(path)
