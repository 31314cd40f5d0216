"""The history holds every job's records, whatever other processes write beside it and however the job ends."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.event import listen

from lightning_dlrover.tuning import Population, StepTimeModel, configuration_of
from lightning_dlrover.tuning.candidates import suggest
from lightning_dlrover.tuning.history import HistoryAccess, HistoryError, JobHistory, export_windows, history_url
from lightning_dlrover.tuning.plan import Limits, Outcome, outcome
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.history_rows import DESCRIPTOR, decision, entry, window


@pytest.fixture
def history(tmp_path: Path) -> JobHistory:
    return JobHistory(f"sqlite:///{tmp_path / 'deep' / 'history.sqlite'}")


def test_records_given_twice_are_read_back_once(history: JobHistory) -> None:
    windows = [window(1.0), window(2.0, 2, 0.06), window(3.0, 2, 0.05)]
    judged: Outcome = outcome(decision(1), 0.09)
    for _ in range(3):
        history.record(entry("a@1"), windows, [decision(1)], [judged])
    history.record(replace(entry("a@1"), outcome="finished"), [*windows, window(4.0)], [decision(1), decision(2)])
    assert history.windows("a@1") == (*windows, window(4.0))
    assert history.decisions("a@1") == [decision(1), decision(2)]
    assert history.outcomes("a@1") == [judged]
    (job,) = history.jobs()
    assert (job.outcome, job.num_settings, job.descriptor) == ("finished", 2, DESCRIPTOR)


@pytest.mark.parametrize("kind, mode", [("ext4", "wal"), ("nfs4", "delete"), ("lustre", "delete"), ("unheard of", "delete")])
def test_history_on_a_file_system_of_several_hosts_has_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    file, shared = tmp_path / "home" / "history.sqlite", tmp_path / "home"
    with JobHistory(f"sqlite:///{file}") as former:  # by a release that knew of no file systems
        former.record(entry("a@1"), [window(1.0)])
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(shared), fstype=kind)]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    (tmp_path / "link").symlink_to(shared)
    with JobHistory(f"sqlite:///{tmp_path / 'link' / file.name}") as history:
        history.record(entry("b@1"), [window(2.0)])
        with contextlib.closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
        assert len(history.jobs()) == 2


def test_a_long_job_leaves_the_newest_windows_of_each_settings_and_no_more(history: JobHistory) -> None:
    history.record(entry("a@1"), [window(float(at)) for at in range(40)])
    history.record(entry("a@1"), [window(float(at)) for at in range(30, 100)] + [window(20.5, 2)])
    history.record(entry("a@1"), [window(5.0), window(99.0)])
    assert [w.at for w in history.windows("a@1")] == [20.5, *map(float, range(70, 100))]


def test_update_of_a_long_job_costs_only_its_new_records(history: JobHistory) -> None:
    decisions = [decision(number) for number in range(3000)]
    history.record(entry("a@1"), [window(1.0)], decisions)
    statements = []
    assert history._engine is not None
    listen(history._engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    history.record(entry("a@1"), [window(1.0), window(2.0)], [*decisions, decision(3000)])
    assert len(statements) < 20
    assert history.decisions("a@1") == [*decisions, decision(3000)]


def test_similar_jobs_are_found_nearest_first_and_others_are_not(history: JobHistory) -> None:
    two = [window(1.0), window(2.0, 2)]
    history.record(entry("twin@1"), two)
    history.record(entry("cousin@1", descriptor=replace(DESCRIPTOR, dense_flops=3e6)), two)
    history.record(entry("stranger@1", descriptor=replace(DESCRIPTOR, dense_flops=1e12, dense_bytes=1e10)), two)
    history.record(entry("gpu@1", descriptor=replace(DESCRIPTOR, device="H200")), two)
    history.record(entry("tried-nothing@1"), [window(1.0)])
    history.record(entry("me@1"), two)
    assert [job.job for job in history.similar(DESCRIPTOR, but="me@1")] == ["twin@1", "cousin@1"]


WRITER = """
import sys
from pathlib import Path
from tests.support.history_rows import entry, window, decision
from lightning_dlrover.tuning.history import JobHistory
history = JobHistory({url!r})
name = sys.argv[1]
for job in range(200 if name == "endless" else 8):
    windows = [window(float(at), 1 + at % 3) for at in range(30)]
    for part in (10, 20, 30):
        history.record(entry(f"{{name}}-{{job}}@1"), windows[:part], [decision(n) for n in range(part)])
    print(job, flush=True)
"""


@pytest.mark.slow
def test_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(url=f"sqlite:///{file}"))

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    writers = [start(name) for name in ("a", "b", "c", "endless")]
    killed = writers.pop()
    assert killed.stdout is not None
    killed.stdout.readline()  # the process has written one job and is at the next
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    ends = [writer.communicate(timeout=120) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], ends

    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    history = JobHistory(f"sqlite:///{file}")
    jobs = {job.key for job in history.jobs()}
    assert {f"{name}-{number}@1" for name in "abc" for number in range(8)} <= jobs
    assert "endless-199@1" not in jobs
    for key in jobs:
        counts = len(history.windows(key)), len(history.decisions(key))
        assert counts in {(10, 10), (20, 20), (30, 30)}, f"{key} is half written: {counts}"
        assert key.startswith("endless") or counts == (30, 30)


@pytest.mark.parametrize("broken", ["no database", "a folder", "read-only", "no driver", "no URL", "newer format"])
def test_a_history_that_cannot_be_used_is_named_with_the_way_out(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "history.sqlite"
    url = f"sqlite:///{file}"
    if broken == "no database":
        file.write_bytes(b"this is no database, and long enough to be seen as none" * 100)
    elif broken == "a folder":
        file.mkdir()
    elif broken == "read-only":
        JobHistory(url).record(entry("a@1"))
        url = f"sqlite:///file:{file}?mode=ro&uri=true"
    elif broken == "no driver":
        url = "nonsense://user:secret@host/db"
    elif broken == "no URL":
        url = "://"
    else:
        JobHistory(url).record(entry("a@1"))
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE dlrover_schema SET version = 99")
    with pytest.raises(HistoryError, match="DLROVER_HISTORY") as caught:
        JobHistory(url).record(entry("b@1"), [window(1.0)])
    assert "secret" not in str(caught.value)


def test_a_read_only_history_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    file = tmp_path / "history.sqlite"
    JobHistory(f"sqlite:///{file}").record(entry("a@1"), [window(1.0)])
    history = JobHistory(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert [job.key for job in history.jobs()] == ["a@1"]
    assert history.windows("a@1") == (window(1.0),)
    assert not list(elsewhere.iterdir())


def test_rows_that_others_have_spoilt_are_left_out(history: JobHistory) -> None:
    history.record(entry("a@1"), [window(1.0), window(2.0)], [decision(1), decision(2)])
    with sqlite3.connect(history.url.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE dlrover_windows SET data = '{' WHERE at = 1")
        connection.execute("UPDATE dlrover_decisions SET data = '{\"at\": 3}' WHERE decision_id = 1")
    assert history.windows("a@1") == (window(2.0),)
    assert history.decisions("a@1") == [decision(2)]


@pytest.mark.parametrize(
    "spoilt",
    [
        "UPDATE dlrover_windows SET data = replace(data, '\"step_time_s\": 0.1', '\"step_time_s\": 0.0') WHERE at = 1",
        "UPDATE dlrover_windows SET data = replace(data, '\"step_time_s\": 0.1', '\"step_time_s\": -0.1') WHERE at = 1",
        "UPDATE dlrover_windows SET data = replace(data, '\"num_workers\": 1', '\"num_workers\": 0') WHERE at = 1",
        "UPDATE dlrover_windows SET data = NULL WHERE at = 1",
        "UPDATE dlrover_windows SET data = '[1]' WHERE at = 1",
        "UPDATE dlrover_decisions SET data = '[1]' WHERE decision_id = 1",
        "UPDATE dlrover_jobs SET num_settings = 'many' WHERE key = 'b@1'",
    ],
)
def test_new_job_learns_from_the_readable_part_of_a_damaged_history(history: JobHistory, spoilt: str) -> None:
    for key in ("a@1", "b@1"):
        history.record(entry(key), [window(1.0), window(2.0, 2, 0.06)], [decision(1), decision(2)])
    with sqlite3.connect(history.url.removeprefix("sqlite:///")) as connection:
        connection.execute(spoilt)
    similar = history.similar(DESCRIPTOR)
    assert any(job.windows for job in similar)
    assert all(window_.step_time_s > 0 and window_.num_workers > 0 for job in similar for window_ in job.windows)
    StepTimeModel.fit([window(3.0)], earlier=[w for job in similar for w in job.windows])
    suggest(window(3.0), similar, Limits(1, 4), node_cores=4.0, at=2000.0)
    assert history.decisions("a@1")[-1] == decision(2)


def test_the_place_follows_option_variable_and_xdg_in_this_order(tmp_path: Path) -> None:
    home = {"XDG_DATA_HOME": "/data"}
    assert history_url(None, home) == "sqlite:////data/dlrover/history.sqlite"
    assert history_url(None, {}) == f"sqlite:///{Path.home()}/.local/share/dlrover/history.sqlite"
    assert history_url(None, {**home, "DLROVER_HISTORY": "/other/file"}) == "sqlite:////other/file"
    assert history_url("postgresql://host/db", {"DLROVER_HISTORY": "/other/file"}) == "postgresql://host/db"
    assert history_url(None, {"DLROVER_HISTORY": "off"}) is None
    assert history_url("off", home) is None


def test_exported_windows_are_those_that_were_recorded(history: JobHistory) -> None:
    random.seed(0)
    windows = [window(float(at), 1 + at % 2, random.random()) for at in range(5)]
    history.record(entry("a@1"), windows)
    lines, table = io.StringIO(), io.StringIO()
    assert export_windows(history, history.jobs(), "jsonl", lines) == 5
    assert [StepProfile(**json.loads(line)) for line in lines.getvalue().splitlines()] == windows
    assert export_windows(history, history.jobs(), "csv", table) == 5
    rows = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert [float(row["step_time_s"]) for row in rows] == [w.step_time_s for w in windows]


# --- other jobs on the same hardware ---


def test_only_jobs_on_the_same_hardware_are_found(history: JobHistory) -> None:
    two = [window(1.0), window(2.0, 2)]
    history.record(entry("stranger@1", at=1.0, descriptor=replace(DESCRIPTOR, dense_flops=1e12, dense_bytes=1e10)), two)
    history.record(entry("more-cores@1", at=2.0, descriptor=replace(DESCRIPTOR, node_cores=64.0)), two)
    history.record(entry("gpu@1", at=3.0, descriptor=replace(DESCRIPTOR, device="H200")), two)
    history.record(entry("one-setting@1", at=4.0), [window(1.0)])
    history.record(entry("me@1", at=5.0), two)
    assert history.on_hardware_of(DESCRIPTOR, but="me@1") == [tuple(two)]


def scaling(slow: float, cores: float) -> list[StepProfile]:
    """Return windows of a job whose machine synchronises two workers badly, and more of them no worse."""
    sizes = [(workers, batch) for workers in (1, 2, 3, 4, 6, 8) for batch in (128, 256, 512)]
    return [
        replace(
            window(float(at), workers, slow * (0.01 + 1e-4 * batch / workers + 0.05 * (workers > 1))),
            global_batch=batch,
            local_batch=-(-batch // workers),
            cores=cores,
            forward_s=0.0,
        )
        for at, (workers, batch) in enumerate(sizes)
    ]


def test_job_predicts_better_with_others_on_its_hardware_and_ignores_those_on_other_hardware(tmp_path: Path) -> None:
    def access(cores: float) -> HistoryAccess:
        url = f"sqlite:///{tmp_path / f'{cores}.sqlite'}"
        with JobHistory(url) as history:
            for number, slow in enumerate((0.5, 3.0, 10.0)):
                descriptor = replace(DESCRIPTOR, node_cores=cores)
                history.record(entry(f"other{number}@1", descriptor=descriptor), scaling(slow, cores))
        return HistoryAccess(url, node_cores=4.0)

    mine = scaling(1.0, 4.0)
    known, asked = [w for w in mine if w.num_workers <= 2], [w for w in mine if w.num_workers > 2]
    same, other = (access(cores).population(known[-1], "me@1") for cores in (4.0, 64.0))
    assert other is None

    def error(population: Population | None) -> float:
        model = StepTimeModel.fit(known, node_cores=4.0, population=population)
        predicted = [model.predict(configuration_of(w, 4.0)).step_time_s for w in asked]
        return sum(abs(p / w.step_time_s - 1) for p, w in zip(predicted, asked, strict=True)) / len(asked)

    assert error(same) < 0.7 * error(None)
