"""`dlrover lab simulate`: figures, report and records of tiny traces, and clear refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.lab import plugin
from lightning_dlrover.lab.simulate.baselines import ELASTIC_POLICIES
from tests.support.measured_clusters import write_speeds, write_trace
from tests.support.run_cli import RunCli
from tests.support.waiting import eventually


def command(tmp_path: Path, *more: str) -> list[str]:
    trace, speeds = write_trace(tmp_path / "week.csv"), write_speeds(tmp_path / "speeds")
    work = tmp_path / "work.csv"
    work.write_text("application,samples\ntoy,6400\n")
    places = ["--speeds", str(speeds), "--work", str(work), "--nodes", "2x2", "--out", str(tmp_path / "out")]
    return ["lab", "simulate", str(trace), *places, *more]


def test_a_table_and_a_page_hold_every_policy_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--policy", "as-requested", "srtf", "jct", "--resize-cost", "live", "30", "--seeds", "2")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for policy in ("as-requested", "srtf", "jct"):
        assert re.search(rf"^{policy} +live ", shown, re.MULTILINE)
        assert re.search(rf"^{policy} +30 s ", shown, re.MULTILINE)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "JCT and the cost of a resize" in page
    assert not re.search(r"[a-z]\.[A-Z]", re.sub(r"<[^>]*>", "", page))  # a space follows each sentence
    assert "mean JCT (seconds)" in page  # a unit that fits these jobs
    records = (tmp_path / "out" / "simulations.jsonl").read_bytes()
    assert records.count(b'"kind":"simulated"') == 12
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown
    assert (tmp_path / "out" / "simulations.jsonl").read_bytes() == records


def test_an_oracle_and_one_cost_need_no_curve(tmp_path: Path) -> None:
    assert main(command(tmp_path, "--policy", "las", "--oracle", "--interval", "30")) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "They know the real speeds." in page


@pytest.mark.parametrize(
    "row, message",
    [
        ("late,-5,toy,1,64", "week.csv:8: the job comes at -5 s; times begin at 0"),
        ("other,5,gpt,1,64", "week.csv:8: model 'gpt' is unknown; known are toy"),
        ("large,5,toy,5,64", "week.csv:8: the job asks for 5 devices, the cluster has 4"),
        ("late,1e300,toy,1,64", "week.csv:8: time is 1e300, and the largest is 100,000,000"),
        ("large,5,toy,1,999999999999999999999", "week.csv:8: batch_size is 999999999999999999999, and the largest is"),
        ("short,5,toy,1", "week.csv:8: the line has 4 of 5 fields"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_line(tmp_path: Path, dlrover: RunCli, row: str, message: str) -> None:
    arguments = command(tmp_path)
    with (tmp_path / "week.csv").open("a") as trace:
        trace.write(row + "\n")
    assert message in dlrover.refused(*arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--nodes", "16", "'16' is not NODESxDEVICES"),
        ("--resize-cost", "-1", "'-1' is neither a number of seconds from 0 to 1,000,000 nor by-model or live"),
        ("--start-cost", "live", "'live' is neither a number of seconds from 0 to 1,000,000 nor by-model"),
        ("--seeds", "0", "'0' is not a whole number from 1 to 999999"),
        ("--seeds", "100000000", "'100000000' is not a whole number from 1 to 999999"),
        ("--nodes", "100000x100000", "up to 999999 nodes of 9999"),
        ("--processes", "100000", "'100000' is not a whole number from 1 to 1024"),
        ("--resize-cost", "1e300", "'1e300' is neither a number of seconds from 0 to 1,000,000"),
        ("--policy", "best", "invalid choice: 'best'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, dlrover: RunCli, option: str, value: str, message: str) -> None:
    assert message in dlrover.refused(*[*command(tmp_path), f"{option}={value}"])


@pytest.mark.parametrize(
    "samples, message", [("toy,64\ngpt,5", "has no speeds of gpt, only of toy"), ("toy,1e30", "samples is 1e30, and the")]
)
def test_work_that_no_simulation_can_use_is_refused(tmp_path: Path, dlrover: RunCli, samples: str, message: str) -> None:
    arguments = command(tmp_path)
    (tmp_path / "work.csv").write_text(f"application,samples\n{samples}\n")
    assert message in dlrover.refused(*arguments)


@pytest.mark.parametrize("content, message", [(b"\xe8\x00", "is not UTF-8"), (None, "cannot be used: No such file")])
def test_trace_that_cannot_be_read_is_named(tmp_path: Path, dlrover: RunCli, content: bytes | None, message: str) -> None:
    arguments = command(tmp_path)
    trace = tmp_path / "week.csv"
    trace.unlink() if content is None else trace.write_bytes(content)
    assert f"{trace} {message}" in dlrover.refused(*arguments)


def test_folder_that_cannot_be_made_is_named_with_its_option(tmp_path: Path, dlrover: RunCli) -> None:
    (tmp_path / "file").write_text("")
    for out in ("/proc/x", str(tmp_path / "file")):
        errors = dlrover.refused(*[*command(tmp_path), "--out", out])
        assert f"--out {out} cannot be written: " in errors
        assert "; choose another --out" in errors


def test_parser_offers_every_policy_of_the_registry() -> None:
    assert set(plugin.ELASTIC_POLICIES) == set(ELASTIC_POLICIES)


@pytest.mark.long
@pytest.mark.parametrize("processes", ["1", "2"])
def test_same_command_goes_on_after_ctrl_c(tmp_path: Path, processes: str) -> None:
    arguments = command(tmp_path, "--policy", "as-requested", "--seeds", "400", "--processes", processes)
    run = [sys.executable, "-m", "lightning_dlrover.cli", *arguments]
    first = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    records = tmp_path / "out" / "simulations.jsonl"
    eventually(lambda: records.exists() and records.read_bytes().count(b"\n") > 3, "the first simulations")
    os.killpg(first.pid, signal.SIGINT)  # a terminal does so
    out, errors = first.communicate(timeout=60)
    assert first.returncode == 130, out + errors
    found = re.search(r"interrupted; (\d+) of 400 simulations are recorded", errors)
    assert found, errors
    kept = records.read_bytes().count(b"\n") - 1
    assert int(found[1]) == kept < 400
    run[run.index("400")] = str(kept + 1)
    assert subprocess.run(run, capture_output=True, timeout=120, check=False).returncode == 0
    assert records.read_bytes().count(b"\n") - 1 == kept + 1
