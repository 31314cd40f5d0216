"""`dlrover run` and the commands beside it, with real nodes, real workers and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.tuning.samples import AGENT_BYTES
from tests.support.dlrover_process import Dlrover, Run
from tests.support.http_receiver import Receiver
from tests.support.secure_etcd import PASSWORD, secure_etcd

SCRIPT = Path(__file__).with_name("tiny_loop.py")
LIGHTNING_SCRIPT = Path(__file__).with_name("tiny_script.py")
PROBLEM = "the script's own error at step 3"
SIZE: Sequence[object] = ("--cpus", 1, "--mem", "1G") if len(os.sched_getaffinity(0)) > 1 else ("--mem", "1G")
"""Options that let two nodes run side by side on this machine."""


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
    run.wait_for_output(r"\[round\] round 1: 1 worker,", timeout_s=90)


def is_limited(run: Run) -> bool:
    """Whether this machine can limit the memory of nodes."""
    return "nodes run without a memory limit" not in run.output


@pytest.mark.long
@pytest.mark.timeout(400)
def test_secured_job_is_scaled_loses_a_worker_and_an_agent_and_finishes(dlrover: Dlrover, tmp_path: Path) -> None:
    until, greedy = tmp_path / "enough", tmp_path / "greedy"
    (tmp_path / "etcd").mkdir()
    with secure_etcd(tmp_path / "etcd") as etcd:
        access = [f"--{name.replace('_', '-')}={value}" for name, value in etcd.access.items()]
        place = ("--endpoint", etcd.endpoint, *access)
        run = dlrover.start("--workers", "1:2", *SIZE, *place, SCRIPT, "--until", until, "--greedy", greedy)
        wait_for_first_round(run)
        others_are_refused(dlrover, run, *place, "--run-dir", tmp_path / "other")

        assert dlrover("scale", "job", 2).returncode == 0
        first, second = wait_for_workers(run, 2)
        assert [first["rank"], second["rank"]] == [0, 1]
        status = json.loads(dlrover("status", "--json", "job").stdout)
        assert [w["worker_id"] for w in status["workers"]] == [first["worker_id"], second["worker_id"]]
        assert (status["phase"], status["min_workers"], status["max_workers"]) == ("training", 1, 2)
        assert status["plan"] == {"num_workers": 2, "source": "user", "reason": "set to 2 workers by hand", "binding": True}
        shown = dlrover("status", "job")
        assert shown.returncode == 0, shown.stderr
        assert "job job: training, 1 to 2 workers" in shown.stdout
        assert all(worker["worker_id"] in shown.stdout for worker in (first, second))
        seen = shown.stdout + all_arguments_and_variables(dlrover)
        assert etcd.access["password_file"] in seen  # proves that the search covered the places that may leak it

        cores = [os.sched_getaffinity(worker["pid"]) for worker in (first, second)]
        if "--cpus" in SIZE:
            assert [len(each) for each in cores] == [1, 1]
            assert cores[0] != cores[1]
        if is_limited(run):
            greedy.write_text(str(second["pid"]))
            run.wait_for_output(r"\[node2\] this machine: out of memory \(limit 1024 MiB\)")
        else:
            os.kill(second["pid"], signal.SIGKILL)
        kept, third = wait_for_workers(run, 2, without=(second["worker_id"],))
        assert kept["worker_id"] == first["worker_id"]
        assert os.sched_getaffinity(third["pid"]) == cores[1]  # the core was given back

        agent = psutil.Process(third["pid"]).parent()
        assert agent is not None
        assert "lightning_dlrover.rdzv.agents.program" in agent.cmdline()
        agent.kill()
        kept, fourth = wait_for_workers(run, 2, without=(third["worker_id"],))
        assert kept["worker_id"] == first["worker_id"]
        assert third["pid"] not in dlrover.processes()
        # It may share a core until the worker without an agent has ended.
        run.wait_for(lambda: os.sched_getaffinity(fourth["pid"]) == cores[1], "the core of the worker that has ended")

        assert dlrover("scale", "job", 1).returncode == 0
        assert [worker["worker_id"] for worker in wait_for_workers(run, 1)] == [first["worker_id"]]
        run.finish(until)
        dlrover.assert_all_ended()
        assert "have processes in them" not in run.output  # those of a control group that cannot be removed
        again = dlrover("run", "--rdzv-id", "job", SCRIPT)
        assert again.returncode == 2
        assert "holds an earlier job's files" in again.stderr

        events = run.events
        assert [e.at for e in events] == sorted(e.at for e in events)
        rounds = [e.data for e in events if e.kind == "round"]
        assert [r["number"] for r in rounds] == list(range(1, len(rounds) + 1))
        assert [r["kind"] for r in rounds if r["kind"] == "start"] == ["start"]
        assert events[-1].kind == "finished"
        assert {e.kind for e in events} - {"memory"} == {"round", "loss", "scale", "stall", "finished"}
        assert [e.data["num_workers"] for e in events if e.kind == "scale"] == [2, 1]
        # A worker that loses its agent hands over.
        assert [e.data["worker_id"] for e in events if e.kind == "loss"] == [second["worker_id"]]
        report = run.folder / "report.html"
        assert "<svg" in report.read_text()
        report.unlink()
        done = dlrover("report", "job")
        assert done.returncode == 0, done.stderr
        assert "workers lost      1" in done.stdout
        assert report.exists()

        seen += run.output + done.stdout
        files = [file for file in run.folder.rglob("*") if file.is_file()]
        assert {"job.json", "report.html", "events.jsonl"} <= {file.name for file in files}
        for path in files:
            seen += path.read_text(errors="replace")
        assert PASSWORD not in seen


def others_are_refused(dlrover: Dlrover, run: Run, *elsewhere: object) -> None:
    """Assert that the job cannot be run again meanwhile, neither in its folder nor in its etcd."""
    same_folder = dlrover("run", "--rdzv-id", "job", SCRIPT)
    assert same_folder.returncode == 2
    assert f"already run by process {run.process.pid} on" in same_folder.stderr
    same_etcd = dlrover("run", "--rdzv-id", "job", *elsewhere, SCRIPT)
    assert same_etcd.returncode == 2
    assert f"already run by process {run.process.pid} on {os.uname().nodename}" in same_etcd.stderr
    assert len(workers_of(dlrover)) == 1


def all_arguments_and_variables(dlrover: Dlrover) -> str:
    """Command lines and environments of all processes that the test has started."""
    files = [Path(f"/proc/{pid}/{file}") for pid in dlrover.processes() for file in ("cmdline", "environ")]
    return "\n".join(file.read_bytes().decode(errors="replace") for file in files)


@pytest.mark.parametrize(
    "number, to_group, code, is_training",
    [(signal.SIGINT, True, 130, True), (signal.SIGTERM, False, 143, True), (signal.SIGINT, False, 130, False)],
)
def test_a_signal_ends_the_job_in_order_and_nothing_else(
    dlrover: Dlrover,
    bystander: subprocess.Popen[bytes],
    number: signal.Signals,
    to_group: bool,
    code: int,
    is_training: bool,
) -> None:
    run = dlrover.start("--workers", "1:2", SCRIPT)
    if is_training:
        wait_for_first_round(run)
    else:
        run.wait_for(lambda: workers_of(dlrover), "a worker that imports torch")
    pid = run.process.pid
    os.killpg(pid, number) if to_group else os.kill(pid, number)
    assert run.wait_for_exit() == code, run.output
    dlrover.assert_all_ended()
    assert bystander.poll() is None
    announced, ended = f"{number.name}: ending all nodes", f"job job was ended by {number.name}"
    assert 0 < run.output.find(announced) < run.output.find(ended)
    assert "Traceback" not in run.output


def workers_of(dlrover: Dlrover) -> list[int]:
    """Process ids of the workers that run the script."""
    return [pid for pid, command in dlrover.processes().items() if SCRIPT.name in command and "--rdzv-" not in command]


@pytest.mark.long
def test_training_job_ends_when_its_run_or_its_own_etcd_is_killed(dlrover: Dlrover) -> None:
    """Two jobs side by side: a worker that cannot hand over for lack of etcd is killed after a while."""
    killed = dlrover.start("--workers", "1:1", SCRIPT, run_id="killed")
    [worker] = killed.wait_for(lambda: workers_of(dlrover), "a worker that imports torch")
    agent = psutil.Process(worker).parent()
    assert agent is not None
    agent.kill()
    killed.wait_for(lambda: worker not in dlrover.processes(), f"the end of worker {worker}, whose agent was killed")
    wait_for_first_round(killed)
    killed.wait_for(lambda: len(workers_of(dlrover)) == 1, "another worker")  # the killed one may have formed the first round
    run = dlrover.start("--workers", "1:1", SCRIPT)
    wait_for_first_round(run)

    killed.process.kill()
    killed.process.wait()
    [server] = [
        child.pid for child in psutil.Process(run.process.pid).children() if "--listen-client-urls" in str(child.cmdline())
    ]
    os.kill(server, signal.SIGKILL)
    run.wait_for_output(r"the embedded etcd has ended unexpectedly: ending all nodes")
    assert run.wait_for_exit(60) == 1, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith("dlrover: job job failed: the embedded etcd has ended unexpectedly: it was killed by SIGKILL; ")
    assert "ckpt_path" in last
    assert "--endpoint" in last
    dlrover.wait_for_end(45)


def test_nothing_outlives_a_run_that_is_killed_before_it_trains(cold_dlrover: Dlrover) -> None:
    run = cold_dlrover.start("--workers", "1:2", SCRIPT)
    run.wait_for(lambda: workers_of(cold_dlrover), "a worker that imports torch")
    run.process.kill()
    run.process.wait()
    cold_dlrover.wait_for_end(60)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_that_always_fails_in_training_is_not_started_for_ever(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:1", SCRIPT, "--fail-at", 3)
    assert run.wait_for_exit(200) == 1, run.output
    dlrover.assert_all_ended()
    last = run.output.splitlines()[-1]
    assert last.startswith("dlrover: job job failed: the same error stopped the job 3 times")
    assert f"ArithmeticError: {PROBLEM} (at " in last
    assert last.endswith("(main))")
    assert run.output.count("Traceback") == 1
    assert run.output.count(f"ArithmeticError: {PROBLEM} (its traceback was shown above)") == 2


def test_script_that_fails_on_import_runs_once_and_shows_its_traceback_once(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')\nfrom nowhere import nothing\n")
    run = dlrover.start("--workers", "1:2", script)
    assert run.wait_for_exit(60) == 1
    dlrover.assert_all_ended()
    assert run.output.count("] here") == 1
    assert run.output.count("Traceback") == 1
    *_, last = run.output.rstrip().splitlines()
    what = f"ModuleNotFoundError: No module named 'nowhere' (at {script}:2 (<module>))"
    assert last == f"dlrover: job job failed: node1 failed before the first step: {what}"


def test_failure_after_fit_fails_the_job(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:1", *SIZE, LIGHTNING_SCRIPT, "--until", until, "--fail-after-fit")

    def profiles() -> list[dict[str, Any]]:
        return [event.data for event in run.events if event.kind == "profile"]

    wait_for_first_round(run)
    run.wait_for(profiles, "a profile")
    until.touch()
    assert run.wait_for_exit(60) == 1, run.output
    dlrover.assert_all_ended()
    last = run.output[run.output.rindex("dlrover: job job failed: training has finished, but node1 failed after it: ") :]
    assert "OSError: could not write the final model" in last.splitlines()[0]
    assert len(last.splitlines()) == 1
    assert run.output.count("Traceback") == 1
    assert run.events[-1].kind == "error"
    if "--cpus" in SIZE:
        assert {profile["cores"] for profile in profiles()} == {1.0}
    if is_limited(run):
        assert {profile["memory_limit_bytes"] for profile in profiles()} == {(1 << 30) - AGENT_BYTES}


@pytest.mark.long
def test_worker_under_a_program_that_is_not_python_is_lost_and_replaced(dlrover: Dlrover, tmp_path: Path) -> None:
    # Without `exec`: the worker is a child of the program that the agent has started.
    until, program = tmp_path / "enough", tmp_path / "launch.sh"
    program.write_text(f'#!/bin/sh\n"{sys.executable}" "{SCRIPT}" "$@"\n')
    program.chmod(0o755)
    run = dlrover.start("--workers", "2:2", "--no-python", program, "--until", until)
    run.wait_for_output(r"\[round\] round 1: 2 workers,", timeout_s=90)
    first, second = wait_for_workers(run, 2)
    parent = psutil.Process(second["pid"]).parent()
    assert parent is not None
    assert parent.cmdline()[:2] == ["/bin/sh", str(program)]
    os.kill(second["pid"], signal.SIGKILL)
    assert wait_for_workers(run, 2, without=(second["worker_id"],))[0]["worker_id"] == first["worker_id"]
    run.finish(until)
    dlrover.assert_all_ended()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_people_are_notified_once_of_each_event_though_the_controller_is_killed(
    dlrover: Dlrover, tmp_path: Path, private_etcd: EmbeddedEtcd
) -> None:
    until, secret = tmp_path / "enough", "T0P-S3CR3T"
    with Receiver(500) as receiver, Receiver(then="hang") as hanging:
        to = ["--notify", f"{receiver.url}/{secret}", "--notify", f"{hanging.url}/{secret}", "--notify", f"cat {secret}"]
        command = ["--workers", "2:2", "--endpoint", private_etcd.endpoint, *to, SCRIPT, "--until", until]
        first = dlrover.start(*command)
        first.wait_for(lambda: receiver.events() == ["started"] or None, "the first notification", 90)
        [lost, *_] = wait_for_workers(first, 2)
        os.kill(lost["pid"], signal.SIGKILL)
        wait_for_workers(first, 2, without=(lost["worker_id"],))
        first.wait_for(lambda: len(receiver.documents) > 1 or None, "the notification of the loss")
        first.process.kill()
        first.process.wait(30)
        dlrover.wait_for_end()
        second = dlrover.start(*command)
        wait_for_workers(second, 2, without=(lost["worker_id"],))
        until.touch()
        began = time.monotonic()
        assert second.wait_for_exit(60) == 0, second.output
        assert time.monotonic() - began < 30.0
        documents = receiver.documents
        assert hanging.requests
    dlrover.assert_all_ended()
    [loss] = [document for document in documents if lost["worker_id"] in document.get("lost", [])]
    assert loss["event"] in ("lost", "replaced")
    assert [document["event"] for document in documents][-1] == "finished"
    assert len({document["id"] for document in documents}) == len(documents)  # none was under way when it was killed
    assert documents == sorted(documents, key=lambda document: document["at"])
    shown = first.output + second.output + dlrover("status", "job").stdout + dlrover("logs", "job").stdout
    kept = b"".join(file.read_bytes() for file in second.folder.rglob("*") if file.is_file()).decode(errors="replace")
    assert "not delivered: no answer in time" in second.output
    assert secret not in shown + kept


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
