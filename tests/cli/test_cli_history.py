"""`dlrover history` and `dlrover explain`, and what `dlrover run` is told to aim at."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import pytest
from history_rows import decision, entry, window

from lightning_dlrover.cli import main as cli
from lightning_dlrover.learn.history import JobHistory
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.rdzv.job.records import (
    EventRecord,
    encode,
)
from lightning_dlrover.report.status import JobPlace


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A history of two jobs of one name and one of another."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'history.sqlite'}"
    with JobHistory(url) as history:
        history.record(entry("ctr@1", at=1000.0), [window(950.0), window(960.0, 2, 0.06)], [decision(1)])
        history.record(entry("ctr@2", at=2000.0), [window(1950.0), window(1960.0, 2, 0.05)], [decision(1)])
        history.record(entry("other@1", at=1500.0), [window(1450.0)])
    return url


def dlrover(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_list_shows_all_jobs_newest_first(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = dlrover(capsys, "history", "list", "--history", place)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["ctr@2", "other@1", "ctr@1"]


def test_show_takes_a_name_for_its_newest_job_and_a_key_for_that_job(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ctr@2: running, 2 windows, 1 plans" in dlrover(capsys, "history", "show", "ctr", "--history", place)[1]
    text = dlrover(capsys, "history", "show", "ctr@1", "--history", place)[1]
    assert "ctr@1: running" in text
    assert text.index("2x1") < text.index("1x1 "), "the fastest settings come first"


def test_export_writes_what_was_measured_of_all_jobs_or_of_one(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = dlrover(capsys, "history", "export", "--history", place)
    assert len(list(csv.DictReader(io.StringIO(text)))) == 5
    code, _, said = dlrover(
        capsys, "history", "export", "ctr@1", "--format", "jsonl", "--output", "out.jsonl", "--history", place
    )
    assert (code, said) == (0, "2 windows of 1 jobs in out.jsonl\n")
    assert [StepProfile(**json.loads(line)).at for line in Path("out.jsonl").read_text().splitlines()] == [950.0, 960.0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("history", "show", "nobody"), "`dlrover history list` shows those it knows"),
        (("history", "export", "ctr", "nobody"), "nobody"),
        (("explain", "nobody"), "job 'nobody' is neither in etcd, nor in runs"),
        (("explain", "ctr", "--plan", "7"), "has made no plan 7; its plans are 1"),
    ],
)
def test_what_is_not_known_is_said(
    place: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _, errors = dlrover(capsys, *arguments, "--history", place)
    assert code == cli.EXIT_USAGE
    assert said in errors


def test_a_history_that_is_switched_off_or_broken_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database at all" * 100)
    assert "switched off" in dlrover(capsys, "history", "list", "--history", "off")[2]
    code, _, errors = dlrover(capsys, "history", "list", "--history", broken)
    assert code == cli.EXIT_USAGE
    assert str(broken) in errors


def test_a_job_is_explained_from_its_folder_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    JobPlace("job", "127.0.0.1:1").write(folder)
    made = decision(1)
    lines = [encode(EventRecord("decision", made.at, made.reason, made.to_data()))]
    (folder / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    code, text, errors = dlrover(capsys, "explain", "job", "--history", "off")
    assert code == 0, errors
    assert "plan 1" in text
    picture = (folder / "plans.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000
    assert height > 400


def test_a_job_that_has_gone_from_etcd_and_folder_is_explained_from_the_history(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, errors = dlrover(capsys, "explain", "ctr", "--history", place, "--output", "plans.svg")
    assert code == 0, errors
    assert "plan 1" in text
    assert "<svg" in Path("plans.svg").read_text()


def test_run_tells_its_nodes_what_to_aim_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = cli._parser().parse_args(
        ["run", "--objective", "cheapest", "--deadline", "1.5h", "--prices", "core_hour=0.04", "--history", "h.sqlite", "x.py"]
    )
    assert cli._objective(options) == {
        "DLROVER_OBJECTIVE": "cheapest",
        "DLROVER_DEADLINE_S": "5400.0",
        "DLROVER_PRICES": "core_hour=0.04",
        "DLROVER_HISTORY": f"sqlite:///{tmp_path / 'h.sqlite'}",
    }
    assert cli._objective(cli._parser().parse_args(["run", "x.py"])) == {}
    off = cli._parser().parse_args(["run", "--history", "off", "x.py"])
    assert cli._objective(off) == {"DLROVER_HISTORY": "off"}


def test_a_budget_without_prices_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("print('never run')\n")
    code, _, errors = dlrover(capsys, "run", "--budget", "5", "script.py")
    assert code == cli.EXIT_USAGE
    assert "needs prices" in errors
    assert not Path("runs").exists()


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert cli._duration(text) == seconds
