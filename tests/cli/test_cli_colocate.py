"""`dlrover colocate`: what its users see, with small jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_dlrover import variables
from lightning_dlrover.cli.main import main
from lightning_dlrover.colocate import plugin, policies
from lightning_dlrover.colocate.devices import marked
from tests.support.colocated_jobs import SEATED
from tests.support.http_receiver import Receiver
from tests.support.run_cli import RunCli
from tests.support.waiting import eventually


def queue_of(tmp_path: Path, jobs: Sequence[dict[str, object]]) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(json.dumps({"jobs": jobs}))
    return path


def seated(name: str, steps: int = 30) -> dict[str, object]:
    return {"name": name, "command": [sys.executable, "-c", SEATED, 30, 10, steps, 0.01]}


def test_report_and_summary_show_every_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = queue_of(tmp_path, [seated("a"), seated("b"), {"name": "bad", "command": "sh -c 'echo \"<b>boom\"; exit 3'"}])
    code = main(["colocate", str(path), "--out", str(tmp_path / "out"), "--policy", "fifo"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "2 of 3 jobs done" in shown
    assert "bad: failed after" in shown
    page = (tmp_path / "out" / "report.html").read_text()
    assert "exit code 3: &lt;b&gt;boom" in page
    assert "<svg" in page


def test_same_command_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    path = queue_of(tmp_path, [seated("quick", steps=2), seated("long", steps=300)])
    command = [sys.executable, "-m", "lightning_dlrover.cli", "colocate", str(path)]
    command += ["--policy", "sequential", "--out", str(tmp_path / "out")]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    journal = tmp_path / "out" / "queue.jsonl"
    eventually(lambda: journal.exists() and '"job":"long"' in journal.read_text(), "the start of the second job")
    first.send_signal(signal.SIGINT)
    out, errors = first.communicate(timeout=60)
    assert first.returncode == 130, out + errors
    assert "continues with 1 job that has not ended" in errors
    queue = json.loads(journal.read_text().splitlines()[0])["queue"]
    assert not marked(variables.QUEUE, queue)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "quick: started" not in again.stdout
    assert "long: started on cpu again, attempt 2" in again.stdout
    assert "2 of 2 jobs done" in again.stdout
    assert "jobs/h" not in again.stdout, "a few seconds tell nothing about an hour"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "nothing was left to do" in done.stdout
    assert "nothing was left to do" not in again.stdout


def test_job_whose_memory_no_device_has_is_refused_with_both_figures(tmp_path: Path, dlrover: RunCli) -> None:
    path = queue_of(tmp_path, [{**seated("a"), "memory": "60T"}])
    assert re.search(
        r"job 'a': memory is 62914560 MiB, and the largest device has \d+ MiB",
        dlrover.refused("colocate", str(path), "--out", str(tmp_path / "out")),
    )


def test_parser_offers_every_policy() -> None:
    assert set(plugin.POLICIES) == set(policies.POLICIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "gpu:0"], "NVML finds no GPU"),
        (["--memory", "9T"], "are available; give less"),
        (["--devices", "cpu:100000-99999"], "is not a core or range of cores"),
        (["--devices", "cpu:2000-2098"], "not 2000 to 2098"),
        (["--profiles", "nowhere"], "nowhere holds no queue"),
    ],
)
def test_wrong_use_starts_nothing(tmp_path: Path, dlrover: RunCli, options: list[str], message: str) -> None:
    path = queue_of(tmp_path, [seated("a")])
    assert message in dlrover.refused("colocate", str(path), "--out", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out" / "jobs").exists()


def test_starts_and_ends_of_a_queue_are_notified_once_across_its_dispatchers(tmp_path: Path) -> None:
    path = queue_of(tmp_path, [seated("quick", steps=2), {"name": "bad", "command": "sh -c 'exit 3'"}])
    with Receiver() as receiver:
        command = ["colocate", str(path), "--out", str(tmp_path / "out"), "--policy", "sequential", "--notify", receiver.url]
        assert main(command) == 1
        found = [(each["event"], each["job"]) for each in receiver.documents]
        assert found[-1] == ("failed", "")
        assert sorted(found[:-1]) == [("failed", "bad"), ("finished", "quick"), ("started", "bad"), ("started", "quick")]
        assert "1 of 2 jobs done" in receiver.documents[-1]["text"]
        assert {each["source"] for each in receiver.documents} == {"colocate"}
        # A dispatcher that was killed before its newest notifications were settled: they come again, with the same ids.
        cursors = tmp_path / "out" / "notified"
        [[name, passed]] = json.loads(cursors.read_text()).items()
        assert passed >= 4
        cursors.write_text(json.dumps({name: 0}))
        before = [each["id"] for each in receiver.documents]
        receiver.documents.clear()
        assert main(command) == 1
        assert [each["id"] for each in receiver.documents] == before[:-1]
