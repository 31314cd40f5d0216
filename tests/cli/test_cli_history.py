"""`dlrover history`."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest

from lightning_dlrover.cli.errors import EXIT_USAGE
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.run_cli import RunCli


def test_list_shows_all_jobs_newest_first(history: str, dlrover: RunCli) -> None:
    text = dlrover.output("history", "list", "--history", history)
    assert [line.split()[0] for line in text.splitlines()] == ["ctr@2", "other@1", "ctr@1"]
    found = json.loads(dlrover.output("history", "list", "--json", "--history", history))
    assert [(job["key"], job["updated_at"]) for job in found] == [("ctr@2", 2000.0), ("other@1", 1500.0), ("ctr@1", 1000.0)]


def test_show_takes_a_name_for_its_newest_job_and_a_key_for_that_job(history: str, dlrover: RunCli) -> None:
    assert "ctr@2: no end recorded, 2 windows, 1 plan" in dlrover("history", "show", "ctr", "--history", history)[1]
    text = dlrover("history", "show", "ctr@1", "--history", history)[1]
    assert "ctr@1: no end recorded" in text
    assert text.index("2x1") < text.index("1x1 "), "the fastest settings come first"


def test_export_writes_the_measurements_of_all_jobs_or_of_one(history: str, dlrover: RunCli) -> None:
    _, text, _ = dlrover("history", "export", "--history", history)
    assert len(list(csv.DictReader(io.StringIO(text)))) == 5
    code, _, said = dlrover("history", "export", "ctr@1", "--format", "jsonl", "--output", "out.jsonl", "--history", history)
    assert (code, said) == (0, "2 windows of 1 job in out.jsonl\n")
    assert [StepProfile(**json.loads(line)).at for line in Path("out.jsonl").read_text().splitlines()] == [950.0, 960.0]


def test_a_removed_job_leaves_nothing_and_the_others_stay(history: str, dlrover: RunCli) -> None:
    assert "removed ctr@2, other@1" in dlrover.output("history", "remove", "ctr@2", "other", "--history", history)
    assert [line.split()[0] for line in dlrover("history", "list", "--history", history)[1].splitlines()] == ["ctr@1"]
    with contextlib.closing(sqlite3.connect(history.removeprefix("sqlite:///"))) as database:
        for table in ("windows", "decisions", "outcomes"):
            assert database.execute(f"select distinct job from dlrover_{table} where job != 'ctr@1'").fetchall() == []
        assert database.execute("select count(*) from dlrover_windows").fetchone() == (2,)


def test_a_name_of_several_jobs_removes_none(history: str, dlrover: RunCli) -> None:
    code, _, errors = dlrover("history", "remove", "other", "ctr", "--history", history)
    assert (code, "'ctr' is the name of 2 jobs, none was removed; name ctr@2, ctr@1" in errors) == (EXIT_USAGE, True)
    assert len(dlrover("history", "list", "--history", history)[1].splitlines()) == 3


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("history", "show", "nobody"), "`dlrover history list` shows its jobs"),
        (("history", "export", "ctr", "nobody"), "nobody"),
        (("explain", "nobody"), "job 'nobody' is neither in etcd nor in runs"),
        (("explain", "ctr", "--plan", "7"), "has made no plan 7; its plans are 1"),
    ],
)
def test_unknown_figures_are_shown_as_unknown(history: str, dlrover: RunCli, arguments: tuple[str, ...], said: str) -> None:
    assert said in dlrover.refused(*arguments, "--history", history)


def test_history_that_is_off_or_broken_is_reported(tmp_path: Path, dlrover: RunCli) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database at all" * 100)
    assert "switched off" in dlrover("history", "list", "--history", "off")[2]
    assert str(broken) in dlrover.refused("history", "list", "--history", broken)
