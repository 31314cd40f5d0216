"""`dlrover run` and the commands beside it, with real nodes, real workers and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dlrover_process import Dlrover, Run
from secure_etcd import PASSWORD, secure_etcd

from lightning_dlrover.perf.samples import AGENT_BYTES

SCRIPT = Path(__file__).with_name("tiny_script.py")
PROBLEM = "the script's own error at step 3"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A foreign process in the terminal that started the job."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def members(num_workers: int, without: tuple[str, ...] = ()) -> Callable[[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return a function that finds a round of `num_workers` workers in a status."""

    def look(status: dict[str, Any]) -> list[dict[str, Any]] | None:
        found = [w for w in status["workers"] if w["rank"] is not None]
        active = all(w["state"] == "active" for w in found)
        return found if len(found) == num_workers and active and not {w["worker_id"] for w in found} & {*without} else None

    return look


def wait_for_workers(
    run: Run, num_workers: int, without: tuple[str, ...] = (), timeout_s: float = 90.0
) -> list[dict[str, Any]]:
    look = members(num_workers, without)
    return run.wait_for(lambda: look(run.status()), f"{num_workers} workers without {without}", timeout_s)


def wait_for_first_round(run: Run) -> None:
    run.wait_for_output(r"\[round\] round 1: 1 workers", timeout_s=90)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_is_scaled_loses_a_worker_and_an_agent_and_finishes(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:3", SCRIPT, "--until", until)
    wait_for_first_round(run)

    assert dlrover("scale", "job", 3).returncode == 0
    three = wait_for_workers(run, 3)
    assert [w["rank"] for w in three] == [0, 1, 2]
    status = json.loads(dlrover("status", "--json", "job").stdout)
    assert [w["worker_id"] for w in status["workers"]] == [w["worker_id"] for w in three]
    assert (status["phase"], status["min_workers"], status["max_workers"]) == ("training", 1, 3)
    assert status["plan"] == {"num_workers": 3, "source": "user", "reason": "set to 3 workers by hand", "binding": True}
    text = dlrover("status", "job").stdout
    assert "job job: training, 1 to 3 workers" in text
    assert all(w["worker_id"] in text for w in three)

    os.kill(three[2]["pid"], signal.SIGKILL)
    replaced = wait_for_workers(run, 3, without=(three[2]["worker_id"],))
    assert {w["worker_id"] for w in three[:2]} < {w["worker_id"] for w in replaced}

    agent = psutil.Process(replaced[1]["pid"]).parent()
    assert agent is not None
    assert "lightning_dlrover.rdzv.agents.program" in agent.cmdline()
    agent.kill()
    wait_for_workers(run, 3, without=(replaced[1]["worker_id"],))
    assert replaced[1]["pid"] not in dlrover.processes()

    assert dlrover("scale", "job", 1).returncode == 0
    survivor = wait_for_workers(run, 1)
    assert survivor[0]["worker_id"] == three[0]["worker_id"]
    until.touch()
    assert run.wait_for_exit(60) == 0, run.output
    dlrover.assert_all_ended()

    events = run.events
    assert [e.at for e in events] == sorted(e.at for e in events)
    rounds = [e.data for e in events if e.kind == "round"]
    assert [r["number"] for r in rounds] == list(range(1, len(rounds) + 1))
    assert events[-1].kind == "finished"
    assert {"round", "loss", "scale", "profile", "stall", "finished"} <= {e.kind for e in events}
    assert [e.data["num_workers"] for e in events if e.kind == "scale"] == [3, 1]
    report = run.folder / "report.html"
    assert "<svg" in report.read_text()
    report.unlink()
    done = dlrover("report", "job")
    assert done.returncode == 0, done.stderr
    assert "finished after" in done.stdout or "workers lost" in done.stdout
    assert report.exists()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_have_a_core_each_and_a_too_large_one_is_replaced(dlrover: Dlrover, tmp_path: Path) -> None:
    until, greedy = tmp_path / "enough", tmp_path / "greedy"
    options = ["--workers", "2:2", "--cpus", 1, "--mem", "1G"]
    run = dlrover.start(*options, SCRIPT, "--until", until, "--greedy", greedy)
    run.wait_for_output(r"\[round\] round 1: 2 workers", timeout_s=90)
    first, second = wait_for_workers(run, 2)
    cores = [os.sched_getaffinity(worker["pid"]) for worker in (first, second)]
    assert [len(each) for each in cores] == [1, 1]
    assert cores[0] != cores[1]
    is_limited = "nodes run without a limit of memory" not in run.output
    if is_limited:
        greedy.write_text(str(second["pid"]))
        run.wait_for_output(r"\[node\d+\] this machine: out of memory \(limit 1024 MiB\)")
        run.wait_for_output(r"\[round\] round \d+: 2 workers, \S+ joined", timeout_s=90)
        [new] = (w for w in wait_for_workers(run, 2, without=(second["worker_id"],)) if w["pid"] != first["pid"])
        assert os.sched_getaffinity(new["pid"]) == cores[1]  # the CPU was given back
    run.wait_for(lambda: any(event.kind == "profile" for event in run.events), "a profile")
    until.touch()
    assert run.wait_for_exit(60) == 0, run.output
    assert dlrover.processes() == {}
    assert "have processes in them" not in run.output
    profiles = [event.data for event in run.events if event.kind == "profile"]
    assert {profile["cores"] for profile in profiles} == {1.0}
    if not is_limited:
        pytest.skip(f"memory cannot be limited here: {run.output}")
    assert {profile["memory_limit_bytes"] for profile in profiles} == {(1 << 30) - AGENT_BYTES}
    assert [event.data for event in run.events if event.kind == "loss"]


@pytest.mark.parametrize(
    "number, to_group, code", [(signal.SIGINT, False, 130), (signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)]
)
def test_a_signal_ends_the_job_in_order_and_nothing_else(
    dlrover: Dlrover, bystander: subprocess.Popen[bytes], number: signal.Signals, to_group: bool, code: int
) -> None:
    run = dlrover.start("--workers", "1:2", SCRIPT)
    wait_for_first_round(run)
    pid = run.process.pid
    os.killpg(pid, number) if to_group else os.kill(pid, number)
    assert run.wait_for_exit() == code, run.output
    dlrover.assert_all_ended()
    assert bystander.poll() is None
    assert f"job job was ended by {number.name}" in run.output
    assert "Traceback" not in run.output


def test_a_job_that_has_not_begun_to_train_is_ended_by_ctrl_c(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "2:2", SCRIPT)
    run.wait_for(lambda: workers_of(dlrover), "a worker that imports torch")
    run.process.send_signal(signal.SIGINT)
    assert run.wait_for_exit() == 130, run.output
    dlrover.assert_all_ended()


def workers_of(dlrover: Dlrover) -> list[int]:
    """Process ids of the workers that run the script, without the loader workers that they have forked."""
    found = {pid for pid, command in dlrover.processes().items() if "tiny_script.py" in command and "--rdzv-" not in command}
    return [pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).ppid() not in found]


@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_outlives_a_dlrover_run_that_was_killed(dlrover: Dlrover, is_training: bool) -> None:
    run = dlrover.start("--workers", "1:2", SCRIPT)
    if is_training:
        wait_for_first_round(run)
    else:
        run.wait_for(lambda: workers_of(dlrover), "a worker that imports torch")
    run.process.kill()
    run.process.wait()
    left = dlrover.processes
    with_deadline(lambda: not left(), lambda: f"the end of {left()}", timeout_s=60)


def test_job_fails_in_words_when_its_own_etcd_is_killed(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:1", SCRIPT)
    wait_for_first_round(run)
    [server] = [pid for pid, command in dlrover.processes().items() if "--listen-client-urls" in command]
    os.kill(server, signal.SIGKILL)
    run.wait_for_output(r"the embedded etcd has ended unasked: ending all nodes")
    assert run.wait_for_exit(60) == 1, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith("dlrover: job job failed: the embedded etcd has ended unasked: it was killed by SIGKILL; ")
    assert "ckpt_path" in last
    assert "--endpoint" in last
    with_deadline(lambda: not dlrover.processes(), lambda: f"the end of {dlrover.processes()}", timeout_s=15)


def test_a_worker_whose_agent_is_killed_while_it_imports_torch_ends(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:1", SCRIPT, "--until", until)
    [worker] = run.wait_for(lambda: workers_of(dlrover), "a worker that imports torch")
    agent = psutil.Process(worker).parent()
    assert agent is not None
    agent.kill()
    with_deadline(lambda: worker not in dlrover.processes(), lambda: f"the end of worker {worker}", timeout_s=40)
    wait_for_first_round(run)
    assert len(workers_of(dlrover)) == 1
    until.touch()
    assert run.wait_for_exit(60) == 0, run.output


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_that_always_fails_in_training_is_not_started_for_ever(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:1", SCRIPT, "--fail-at", 3)
    assert run.wait_for_exit(200) == 1, run.output
    dlrover.assert_all_ended()
    lines = run.output.rstrip().splitlines()
    assert lines[-1] == f"ArithmeticError: {PROBLEM}"
    last = run.output.rindex("dlrover: job job failed: ")
    shown = run.output[last:].splitlines()
    assert PROBLEM in shown[0]
    assert shown[1] == "Traceback (most recent call last):"
    assert any("tiny_script.py" in line and "training_step" in line for line in shown)


def test_script_that_fails_on_import_runs_once_and_its_traceback_is_last(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\nfrom nowhere import nothing\n")
    run = dlrover.start("--workers", "1:2", script)
    assert run.wait_for_exit(60) == 1
    dlrover.assert_all_ended()
    assert run.output.count("] here") == 1
    *_, first, where, what, last = run.output.rstrip().splitlines()
    assert first == "Traceback (most recent call last):"
    assert where == f'  File "{script}", line 2, in <module>'
    assert what == "    from nowhere import nothing"
    assert last == "ModuleNotFoundError: No module named 'nowhere'"


def test_failure_after_fit_fails_the_job(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:1", SCRIPT, "--steps", 3, "--fail-after-fit")
    assert run.wait_for_exit(90) == 1, run.output
    dlrover.assert_all_ended()
    last = run.output[run.output.rindex("dlrover: job job failed: training has finished, but node1 failed after it: ") :]
    assert "OSError: could not write the final model" in last.splitlines()[0]
    assert last.splitlines()[1] == "Traceback (most recent call last):"
    assert last.rstrip().endswith("\nOSError: could not write the final model")
    assert run.events[-1].kind == "error"


def test_script_without_training_is_noted(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(0)\n")
    done = dlrover("run", "--rdzv-id", "job", "--workers", "1:1", script)
    assert done.returncode == 0, done.stderr
    assert "dlrover: job job: the script ended without training: no worker joined the job" in done.stderr


def test_a_job_is_followed_and_cancelled_from_outside(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    run = dlrover.start("--workers", "1:2", script)
    run.wait_for_output(r"\[node1\] here")
    assert dlrover("logs", "job").stdout == "[node1] here\n"
    done = dlrover("cancel", "job")
    assert (done.returncode, done.stderr) == (0, "")
    assert run.wait_for_exit() == 1
    assert "job job failed: cancelled by `dlrover cancel`" in run.output
    dlrover.assert_all_ended()


@pytest.mark.long
def test_two_runs_of_one_job_cannot_exist(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:1", SCRIPT, "--until", until)
    wait_for_first_round(run)
    endpoint = run.status()["endpoint"]

    same_folder = dlrover("run", "--rdzv-id", "job", SCRIPT)
    assert same_folder.returncode == 2
    assert f"already run by process {run.process.pid} on" in same_folder.stderr
    same_etcd = dlrover("run", "--rdzv-id", "job", "--endpoint", endpoint, "--run-dir", tmp_path / "other", SCRIPT)
    assert same_etcd.returncode == 2
    assert f"already run by process {run.process.pid} on {os.uname().nodename}" in same_etcd.stderr

    assert len(workers_of(dlrover)) == 1
    until.touch()
    assert run.wait_for_exit(60) == 0, run.output
    assert [e.data["kind"] for e in run.events if e.kind == "round"] == ["start"]
    assert "loss" not in {e.kind for e in run.events}
    dlrover.assert_all_ended()
    again = dlrover("run", "--rdzv-id", "job", SCRIPT)
    assert again.returncode == 2
    assert "holds an earlier job's files" in again.stderr


@pytest.mark.long
def test_no_secret_of_a_job_is_seen_anywhere(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    (tmp_path / "etcd").mkdir()
    with secure_etcd(tmp_path / "etcd") as etcd:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in etcd.access.items()]
        run = dlrover.start("--workers", "1:1", "--endpoint", etcd.endpoint, *options, SCRIPT, "--until", until)
        wait_for_first_round(run)
        shown = dlrover("status", "job")
        assert shown.returncode == 0, shown.stderr
        seen = shown.stdout
        for pid in dlrover.processes():
            for file in ("cmdline", "environ"):
                seen += Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
        assert etcd.access["password_file"] in seen  # proves that the search covered the places that may leak it
        until.touch()
        assert run.wait_for_exit(90) == 0, run.output
        report = dlrover("report", "job")
        assert report.returncode == 0, report.stderr
        seen += run.output + report.stdout
        files = [file for file in run.folder.rglob("*") if file.is_file()]
        assert {"job.json", "report.html", "events.jsonl"} <= {file.name for file in files}
        for path in files:
            seen += path.read_text(errors="replace")
        assert PASSWORD not in seen


def with_deadline(found: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
    """Like `eventually`, but with a description that is built only after the wait has failed."""
    from waiting import eventually

    try:
        eventually(found, "it", timeout_s)
    except AssertionError:
        raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what()}") from None
