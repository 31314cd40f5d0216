"""`dlrover report` and `dlrover explain`."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dlrover.cli.run import write_final_report
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.events import DecisionMade, RoundFormed, record_of
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, PlanRecord, encode
from lightning_dlrover.report.status import JobPlace
from lightning_dlrover.tuning import Limits, Objective, PlanRequest, StepTimeModel, plan
from lightning_dlrover.tuning.plan import Settings
from tests.support.history_rows import decision
from tests.support.run_cli import RunCli, left_folder
from tests.support.simulated_jobs import dense_heavy, window


def test_a_file_that_cannot_be_written_gets_one_line(dlrover: RunCli, at: tuple[str, ...], tmp_path: Path) -> None:
    errors = dlrover.refused("report", *at, "--output", str(tmp_path))
    assert errors.startswith("dlrover: ")


def test_the_report_of_a_job_comes_from_its_folder_when_its_etcd_is_gone(dlrover: RunCli) -> None:
    folder = left_folder()
    event = EventRecord("round", 1.0, "", {"number": 1, "members": ["w"], "kind": "start", "planned": True, "reason": "start"})
    (folder / "events.jsonl").write_bytes(encode(event) + b'\n{"half')
    output = dlrover.output("report", "job")
    assert "rounds            1" in output
    assert (folder / "report.html").exists()
    assert dlrover("report", "job", "--output", "other.html")[0] == 0
    assert Path("other.html").exists()


@pytest.mark.parametrize("browser", ["python3", "/no/such/browser"])
def test_a_report_is_opened_in_the_users_browser(browser: str, dlrover: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "runs/job"
    folder.mkdir(parents=True)
    JobPlace("job", "127.0.0.1:1").write(folder)
    (folder / "events.jsonl").write_bytes(encode(EventRecord("round", 1.0, "", {})) + b"\n")
    shows = tmp_path / "shows.py"
    shows.write_text(f"import pathlib, sys; pathlib.Path({str(tmp_path / 'shown')!r}).write_text(sys.argv[1])")
    command = [sys.executable, "-m", "lightning_dlrover.cli", "report", "job", "--open"]
    surroundings = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": str(tmp_path)}
    done = subprocess.run(
        command,
        env={**surroundings, "BROWSER": f"{browser} {shows} %s"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    if browser == "python3":
        assert (tmp_path / "shown").read_text() == (folder / "report.html").as_uri()
    else:
        assert done.stderr == "dlrover: no browser can be started here (BROWSER names one); the report is written\n"


def test_a_job_is_explained_from_its_folder_and_drawn(dlrover: RunCli) -> None:
    folder = left_folder()
    made = decision(1)
    lines = [encode(EventRecord("decision", made.at, made.reason, made.to_data()))]
    (folder / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    text = dlrover.output("explain", "job", "--history", "off")
    assert "plan 1" in text
    picture = (folder / "plans.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000
    assert height > 400


def test_job_that_has_only_begun_is_not_called_unknown(
    history: str, dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys
) -> None:
    client.put(keys.plan, encode(PlanRecord(1, "initial", "start with the fewest workers, 1", True)))
    code, _, errors = dlrover("explain", "--endpoint", etcd.endpoint, keys.run_id, "--history", history)
    assert (code, "has recorded nothing yet" in errors, "neither" in errors) == (2, True, False)


def test_size_that_is_not_listed_is_explained(dlrover: RunCli) -> None:
    """Three workers would be fastest, and the job's sizes are 1 and 2."""
    settings, truth, rng = [Settings(n, 0, 1, 0) for n in (1, 3, 2)], dense_heavy(3), random.Random(1)
    windows = [window(truth, each, rng, 0.0) for each in settings for _ in range(3)]
    request, model = PlanRequest(windows, 3.0, 1e5 * truth.global_batch), StepTimeModel.fit(windows, node_cores=3.0)
    made = plan(request, model, Limits(1, 3, listed_sizes=(1, 2)), Objective(), decision_id=1, at=0.0)
    event = record_of(DecisionMade(made.to_data()), made.reason)
    (left_folder() / "events.jsonl").write_bytes(encode(event) + b"\n")
    text = " ".join(dlrover.output("explain", "job", "--history", "off", "--plan", 1).split())
    assert re.search(r"stay at 2 workers: .*; 3x1 would take [\d.]+ ms \(measured\), but the job's sizes are 1 or 2", text), (
        text
    )
    assert text.count("the job's sizes are 1 or 2") == 2, "also as the note of the candidate"


def test_job_known_only_to_the_history_is_explained_from_it(history: str, dlrover: RunCli) -> None:
    text = dlrover.output("explain", "ctr", "--history", history, "--output", "plans.svg")
    assert "plan 1" in text
    assert "<svg" in Path("plans.svg").read_text()


def test_without_matplotlib_the_job_s_end_and_the_commands_that_draw_give_the_remedy(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    formed = record_of(RoundFormed(1, ["w0"], "start", num_members=1), "round 1")
    folder = left_folder(formed)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    remedy = "matplotlib, which draws reports and pictures, is not installed; run `pip install matplotlib`"
    assert dlrover.refused("report", "job").strip() == f"dlrover: {remedy}"
    write_final_report("job", folder)
    shown = capsys.readouterr()
    assert f"no report was written: {remedy}; then see `dlrover report job`" in shown.err
    assert "rounds            1" in shown.out


def test_commands_and_controllers_start_without_what_only_reports_and_models_need() -> None:
    late = ("matplotlib", "scipy", "sklearn", "sqlalchemy", "jinja2", "torch", "lightning", "urllib.request")
    for module in ("lightning_dlrover", *(f"lightning_dlrover.{name}" for name in ("cli.show", "cli.run", "report.notify"))):
        code = f"import sys, {module}; print(*(name for name in {late} if name in sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "", module
