"""`dlrover run --target slurm` on a real Slurm, with real training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, missing_packages, slurm_cluster

from lightning_dlrover.components.targets.slurm import SlurmFeatures, SlurmOptions, SlurmTarget, release_of
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.test_dlrover_run import (
    LIGHTNING_SCRIPT,
    SCRIPT,
    all_arguments_and_variables,
    members,
    wait_for_first_round,
    wait_for_workers,
)
from tests.e2e.test_torchx import COMPONENT, torchx
from tests.support.dlrover_process import Dlrover, Run
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_hosts=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def slurms_environment(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)


def variables_of(pid: int) -> dict[str, str]:
    return dict(v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v)


def job_of(run: Run, slurm: SlurmCluster, pid: int) -> str:
    """Slurm job of a worker's process."""
    variables = variables_of(pid)
    number = variables["SLURM_JOB_ID"]
    assert slurm.jobs()[number][0].startswith(f"{run.run_id}.{variables['DLROVER_NODE']}.")
    return number


def size_of(pid: int) -> tuple[str, str]:
    """Cores and MiB of the Slurm job of a worker's process."""
    variables = variables_of(pid)
    return variables["SLURM_CPUS_PER_TASK"], variables["SLURM_MEM_PER_NODE"]


def kill_node(dlrover: Dlrover, job: str) -> None:
    """Kill every process of a job at once, as the loss of its host does. (`scancel` lets a worker hand over.)"""
    found = []
    for pid in dlrover.processes():
        with contextlib.suppress(OSError):
            if variables_of(pid).get("SLURM_JOB_ID") == job:
                found.append(pid)
    # The worker first: it would receive SIGTERM and leave as soon as its agent or the job's script is gone.
    for pid in sorted(found, reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)
def test_slurm_job_survives_loss_of_its_controller_and_a_drain(dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    options: tuple[str, ...] = ("--target", "slurm", "--workers", "1:3", "--partition", "main", "--time", "30")
    options += ("--etcd-host", "127.0.0.1")
    options += ("--cpus", "1:2", "--mem", "900M:3G")
    run = dlrover.start(*options, SCRIPT, "--until", until)
    wait_for_first_round(run)
    [first] = wait_for_workers(run, 1)
    assert size_of(first["pid"]) == ("1", "900")
    assert_password_is_hidden(dlrover, run)
    refused = dlrover("scale", "job", "--mem", "4G")
    assert refused.returncode == 2
    assert "job 'job' was started for nodes of 900 to 3072 MiB of memory (--mem of `dlrover run`)" in refused.stderr
    assert dlrover("scale", "job", 3, "--cpus", 2, "--mem", "1500M").returncode == 0
    # The first node is too small, and replaced.
    three = run.wait_for(lambda: workers_of_size(run, 3, ("2", "1500")), "three workers on larger nodes", 120)
    assert first["worker_id"] not in {worker["worker_id"] for worker in three}
    run.wait_for(lambda: len(slurm.jobs()) == 3, "the end of the small nodes")

    refused = dlrover("run", "--rdzv-id", "job", *options, SCRIPT)
    assert refused.returncode == 2
    assert f"already run by process {run.process.pid}" in refused.stderr
    run.process.kill()
    run.process.wait()
    jobs = slurm.jobs()
    run = dlrover.start(*options, SCRIPT, "--until", until)
    run.wait_for_output(r"job job: 1 to 3 workers")
    assert {w["worker_id"] for w in wait_for_workers(run, 3)} == {w["worker_id"] for w in three}
    assert slurm.jobs() == jobs  # the new controller has taken over the existing jobs

    killed, preempted = three[1]["worker_id"], three[2]["worker_id"]
    urgent = slurm.preempt(job_of(run, slurm, three[2]["pid"]))
    kill_node(dlrover, job_of(run, slurm, three[1]["pid"]))
    last = wait_for_workers(run, 3, without=(killed, preempted))
    run.wait_for(lambda: slurm.jobs()[urgent][1] == "RUNNING", "the host for the job of higher priority")
    slurm("scancel", urgent)

    assert dlrover("drain", "job", last[0]["worker_id"]).returncode == 0
    run.wait_for(lambda: left_planned(run, last[0]["worker_id"]), "a planned leave")
    run.finish(until)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")
    dlrover.wait_for_end()
    # Python's own folders do not count.
    left = [path.name for path in dlrover.temporary.iterdir() if not path.name.startswith("pymp-")]
    assert len(left) <= 1, left  # folder of the killed node

    names = sorted(path.name for path in (run.folder / "logs").iterdir())
    assert names == [f"node{n}" for n in range(1, len(names) + 1)]
    assert len(names) in (6, 7)  # the small node, three larger ones, replacements of the killed, the preempted and the drained
    logs = dlrover("logs", "job").stdout
    assert re.search(r"^\[node\d\] trained for \d+ steps$", logs, re.MULTILINE)
    assert len(losses(run)) == 1, losses(run)
    notices = {event.data["worker_id"]: event.data for event in run.events if event.kind == "notice"}
    assert {worker: notice["source"] for worker, notice in notices.items()} == {preempted: "slurm"}
    assert notices[preempted]["taken_at"] > 0.0


def assert_password_is_hidden(dlrover: Dlrover, run: Run) -> None:
    """Assert that the password of the job's own etcd is in its file alone, and that the file's path is what nodes get."""
    file = run.folder / "etcd.password"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    seen = all_arguments_and_variables(dlrover) + run.output
    others = [path for path in run.folder.rglob("*") if path.is_file() and path != file and "etcd" not in path.parts]
    seen += "".join(path.read_text(errors="replace") for path in others)
    assert str(file) in seen
    assert file.read_text().strip() not in seen


def workers_of_size(run: Run, num_workers: int, size: tuple[str, str]) -> list[dict[str, Any]] | None:
    """All workers, once there are `num_workers` and each one's node has this size."""
    found = members(num_workers)(run.status())
    with contextlib.suppress(OSError):  # a worker has just left
        return found if found and {size_of(worker["pid"]) for worker in found} == {size} else None
    return None


def left_planned(run: Run, worker: str) -> bool:
    rounds = [event.data for event in run.events if event.kind == "round"]
    return bool(rounds) and rounds[-1]["planned"] and worker not in rounds[-1]["members"]


@pytest.mark.timeout(300)
def test_slurm_job_of_two_worker_nodes_loses_a_worker_a_node_and_gives_one_back(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "slurm", "--partition", "main", "--workers", "2:4", "--workers-per-node", 2)
    run = dlrover.start(*options, "--etcd-host", "127.0.0.1", SCRIPT, "--until", until)
    run.wait_for_output(r"\[round\] round 1: 2 workers", timeout_s=90)
    first = wait_for_workers(run, 2)
    assert {variables_of(worker["pid"])["SLURM_CPUS_PER_TASK"] for worker in first} == {"2"}  # a core for each
    assert len({job_of(run, slurm, worker["pid"]) for worker in first}) == 1
    assert dlrover("scale", "job", 4).returncode == 0
    four = wait_for_workers(run, 4)
    jobs = {worker["pid"]: job_of(run, slurm, worker["pid"]) for worker in four}
    assert len(slurm.jobs()) == len({*jobs.values()}) == 2

    [victim, neighbour] = [worker for worker in four if worker["node"] == "node1"]
    os.kill(victim["pid"], signal.SIGKILL)
    mended = wait_for_workers(run, 4, without=(victim["worker_id"],))
    assert neighbour["pid"] in {worker["pid"] for worker in mended}
    assert {job_of(run, slurm, worker["pid"]) for worker in mended} == {*jobs.values()}

    kill_node(dlrover, jobs[neighbour["pid"]])
    lost = tuple(worker["worker_id"] for worker in mended if worker["node"] == "node1")
    assert {worker["node"] for worker in wait_for_workers(run, 4, without=lost)} == {"node2", "node3"}
    assert dlrover("scale", "job", 2).returncode == 0
    run.wait_for(lambda: len(slurm.jobs()) == 1, "the end of a node")
    run.finish(until)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")
    dlrover.wait_for_end()


@pytest.mark.timeout(120)
def test_slurm_job_without_a_controller_is_cancelled(dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    run = dlrover.start("--target", "slurm", "--workers", "2:2", "--etcd-host", "127.0.0.1", script)
    run.wait_for(lambda: len(slurm.jobs()) == 2, "two nodes")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert len(slurm.jobs()) == 2
    done = dlrover("cancel", "job")
    assert done.returncode == 0, done.stderr
    assert "2 remaining nodes ended" in done.stdout
    assert slurm.jobs() == {}
    dlrover.wait_for_end()


def start_with_torchx(dlrover: Dlrover, slurm: SlurmCluster, script: Path, *arguments: object) -> tuple[str, Run]:
    """Start a job called `job` of one to two workers; return its controller's Slurm job number and output."""
    options = ("-s", "slurm", "-cfg", "partition=main,time=30", f"{COMPONENT}:train", "--script", script, "--workers", "1:2")
    ours = ("--rdzv_id", "job", "--partition", "main", "--time", "20", "--options=--etcd-host=127.0.0.1", "--", *arguments)
    done = dlrover.process(torchx("run", *options, *ours))
    # TorchX then queries the job's state, and may fail: 0.7.0 uses `sacct` alone, and this cluster has no accounting.
    submitted = re.search(r"^slurm://torchx/(\d+)$", done.stdout, re.MULTILINE)
    assert submitted is not None, done.stderr
    output = dlrover.folder / f"slurm-{submitted[1]}-controller-0.out"
    eventually(output.exists, f"the controller's start: {slurm.jobs()}", 60)
    return submitted[1], dlrover.follow(["tail", "--lines=+1", "--follow", str(output)], "job")


def wait_for_end(slurm: SlurmCluster, job: str) -> str:
    """Final state of a Slurm job."""
    eventually(lambda: job not in slurm.jobs(), f"the end of job {job}", 60)
    state = re.search(r"JobState=(\S+)", slurm("scontrol", "show", "job", job))
    assert state is not None
    return state[1]


@pytest.mark.timeout(400)
def test_torchx_submits_a_controller_which_submits_its_nodes(dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    app, run = start_with_torchx(dlrover, slurm, SCRIPT, "--until", until)
    wait_for_first_round(run)
    assert "nodes run on Slurm" in run.output
    assert dlrover("scale", "job", 2).returncode == 0
    workers = wait_for_workers(run, 2)
    assert len({app, *(job_of(run, slurm, worker["pid"]) for worker in workers)}) == 3
    until.touch()
    assert wait_for_end(slurm, app) == "COMPLETED", run.output
    assert slurm.jobs() == {}


@pytest.mark.on_demand
@pytest.mark.timeout(400)
def test_cancelling_the_app_on_slurm_ends_all_of_its_nodes(dlrover: Dlrover, slurm: SlurmCluster) -> None:
    app, run = start_with_torchx(dlrover, slurm, SCRIPT)
    wait_for_first_round(run)
    assert dlrover("scale", "job", 2).returncode == 0
    wait_for_workers(run, 2)
    slurm("scancel", app)  # the only action of `torchx cancel` after its query of the state
    assert wait_for_end(slurm, app) == "CANCELLED"
    eventually(lambda: not slurm.jobs(), "the end of all nodes")  # each node is a separate job, so this ended all of them


@pytest.mark.on_demand
@pytest.mark.timeout(200)
def test_the_app_on_slurm_has_failed_when_its_job_has(dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('bad')\n")
    app, run = start_with_torchx(dlrover, slurm, script)
    assert wait_for_end(slurm, app) == "FAILED", run.output
    assert "ValueError: bad" in (dlrover.folder / f"slurm-{app}-controller-0.err").read_text()
    assert slurm.jobs() == {}


@pytest.mark.timeout(180)
def test_node_that_exceeds_its_requested_memory_reports_it(
    dlrover: Dlrover, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_hosts=1, limits_memory=True) as strict:
        for name, value in strict.environment.items():
            monkeypatch.setenv(name, value)
        check_that_it_says_so(dlrover, strict)


def check_that_it_says_so(dlrover: Dlrover, slurm: SlurmCluster) -> None:
    run = dlrover.start("--target", "slurm", "--workers", "1:1", "--mem", "60M:70M", "--etcd-host", "127.0.0.1", SCRIPT)
    said = run.wait_for_output(r"node1, job \d+, has failed: .*out of memory: exceeded memory limit \((\d+) > 62914560\)")
    assert int(said[1]) > 62914560
    assert "\nSlurm: " in (run.folder / "logs/node1/stderr.log").read_text()
    run.wait_for_output(r"node1 was killed for lack of memory .* nodes have 70 MiB from now on")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait_for_exit(90) == 128 + signal.SIGTERM, run.output  # it may have been requesting the next node
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")


@pytest.mark.timeout(300)
def test_preempted_worker_has_one_notice_and_the_others_see_each_change_once(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path
) -> None:
    until, calls = tmp_path / "enough", tmp_path / "calls.jsonl"
    room = ("--target", "slurm", "--workers", "1:2", "--cpus", "2", "--exclude", "h2,h3", "--etcd-host", "127.0.0.1")
    notice = ("--partition", "main", "--preemption-notice", "0")
    run = dlrover.start(*room, *notice, LIGHTNING_SCRIPT, "--until", until, "--hook-log", calls)
    wait_for_first_round(run)
    assert dlrover("scale", "job", 2).returncode == 0
    kept, preempted = wait_for_workers(run, 2)
    urgent = slurm.preempt(job_of(run, slurm, preempted["pid"]))
    wait_for_workers(run, 1, without=(preempted["worker_id"],))
    run.wait_for(lambda: slurm.jobs()[urgent][1] == "RUNNING", "the host for the job of higher priority")
    slurm("scancel", urgent)
    last = wait_for_workers(run, 2, without=(preempted["worker_id"],))
    run.finish(until)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")
    found = [json.loads(line) for line in calls.read_text().splitlines()]
    [noticed] = [call for call in found if "notice" in call]
    assert noticed["pid"] == preempted["pid"]
    assert noticed["at"] < noticed["notice"] < noticed["at"] + 121
    changes = [call["change"] for call in found if call["pid"] == kept["pid"]]
    assert changes == [[1, 2], [2, 1], [1, 2]]
    rounds = [call["round"] for call in found if call["pid"] == kept["pid"]]
    assert rounds == sorted({*rounds})
    [replacement] = [worker["pid"] for worker in last if worker["pid"] != kept["pid"]]
    assert next(call["change"] for call in found if call["pid"] == replacement) == [None, 2]


def losses(run: Run) -> list[str]:
    return [event.text for event in run.events if event.kind == "loss"]


def finish(run: Run, slurm: SlurmCluster, until: Path) -> None:
    """Finish a job; assert that no node is left, none was refused, and none came without a request."""
    run.finish(until)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")
    assert not re.search("could not be started|no request for it exists", run.output), run.output


@pytest.mark.on_demand
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--partition", "main", "--preemption-notice", "0"), id="SIGTERM at the end of the grace"),
        pytest.param(("--partition", "requeued"), id="no grace"),
    ],
)
def test_preempted_node_hands_over_and_is_replaced_later(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    until = tmp_path / "enough"
    room = ("--target", "slurm", "--workers", "1:2", "--cpus", "2", "--exclude", "h2,h3", "--etcd-host", "127.0.0.1")
    run = dlrover.start(*room, *options, SCRIPT, "--until", until)
    wait_for_first_round(run)
    assert dlrover("scale", "job", 2).returncode == 0
    two = wait_for_workers(run, 2)
    preempted = two[1]["worker_id"]
    urgent = slurm.preempt(job_of(run, slurm, two[1]["pid"]))
    wait_for_workers(run, 1, without=(preempted,))
    assert left_planned(run, preempted)
    run.wait_for(lambda: sorted(s for _, s in slurm.jobs().values()) == ["PENDING", "RUNNING", "RUNNING"], "one that waits")
    assert slurm.jobs()[urgent][1] == "RUNNING"
    slurm("scancel", urgent)
    wait_for_workers(run, 2, without=(preempted,))
    finish(run, slurm, until)
    assert losses(run) == []


@pytest.mark.on_demand
@pytest.mark.timeout(900)
def test_requeued_nodes_and_nodes_of_dead_hosts_are_replaced_for_good(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "slurm", "--workers", "1:2", "--cpus", "2", "--partition", "requeued", "--sbatch-arg=--requeue")
    run = dlrover.start(*options, "--etcd-host", "127.0.0.1", SCRIPT, "--until", until)
    wait_for_first_round(run)
    assert dlrover("scale", "job", 2).returncode == 0
    two = wait_for_workers(run, 2)
    for cause in ("requeue", "requeuehold", "preemption", "host"):
        old = job_of(run, slurm, two[1]["pid"])
        name = slurm.jobs()[old][0]
        urgent = ""
        if cause == "preemption":
            urgent = slurm.preempt(old)
        elif cause == "host":
            assert losses(run) == []  # every drained worker had time to hand over
            slurm("scontrol", "update", f"NodeName={slurm.host(old)}", "State=DOWN", "Reason=test")
        else:
            slurm("scontrol", cause, old)
        two = wait_for_workers(run, 2, without=(two[1]["worker_id"],), timeout_s=200)
        eventually(lambda n=name: n not in [each for each, _ in slurm.jobs().values()], f"the end of {name} after {cause}", 60)  # type: ignore[misc]
        if urgent:
            slurm("scancel", urgent)
        eventually(lambda: len(slurm.jobs()) == 2, f"two nodes after {cause}: {slurm.jobs()}", 60)
    assert run.output.count("no request for it exists") >= 3, run.output  # Slurm would have restarted these
    run.finish(until)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs")
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == [f"node{n}" for n in range(1, 7)]


@pytest.mark.on_demand
@pytest.mark.timeout(600)
def test_a_job_lasts_longer_than_the_time_limit_of_its_nodes(dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    options = ("--target", "slurm", "--workers", "1:1", "--time", "3", "--preemption-notice", "120", "--etcd-host", "127.0.0.1")
    run = dlrover.start(*options, SCRIPT, "--until", until)
    wait_for_first_round(run)
    began = time.monotonic()
    former: tuple[str, ...] = ()
    for _ in range(3):
        [worker] = run.wait_for(lambda f=former: members(1, f)(run.status()), f"a worker after {former}", 200)  # type: ignore[misc]
        former = (*former, worker["worker_id"])
    assert time.monotonic() - began > 30  # the third worker came near the end of the second one's time limit
    finish(run, slurm, until)
    assert losses(run) == []
    assert all(event.data["planned"] for event in run.events if event.kind == "round")


KILLS = {
    "before it is submitted": 'kill -9 "$PPID"',
    "while it is submitted": 'kill -9 "$PPID"; sleep 1; exec {real} "$@"',
    "after it was submitted": '{real} "$@"; kill -9 "$PPID"',
}
"""Faults of `sbatch` that kill the `dlrover run` that calls it."""


@pytest.mark.on_demand
@pytest.mark.timeout(900)
def test_controller_killed_while_it_submits_duplicates_no_node(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, etcd: EmbeddedEtcd
) -> None:
    real, until = shutil.which("sbatch"), tmp_path / "enough"
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    options = ("--target", "slurm", "--workers", "1:3", "--endpoint", etcd.endpoint, SCRIPT, "--until", until)
    run_id = f"job-{tmp_path.name[-6:]}-{os.getpid()}"
    run = dlrover.start(*options, run_id=run_id)
    wait_for_first_round(run)
    workers = wait_for_workers(run, 1)
    for step in ("add", "drain", "replace"):
        for when, shell in KILLS.items():
            sbatch.write_text(f"#!/bin/bash\nrm {sbatch}\n{shell.format(real=real)}\n")
            sbatch.chmod(0o755)
            gone: tuple[str, ...] = ()
            if step == "add":
                wanted = len(workers) % 3 + 1
                assert wanted > len(workers), "already as many as there may be"
                assert dlrover("scale", run_id, wanted).returncode == 0
            else:
                gone = (workers[-1]["worker_id"],)
                more = ["--replace"] if step == "replace" else []
                assert dlrover("drain", run_id, *gone, *more).returncode == 0
                wanted = len(workers)
            run.process.wait(30)
            run = dlrover.start(*options, run_id=run_id)
            workers = wait_for_workers(run, wanted, without=gone)
            eventually(lambda n=wanted: len(slurm.jobs()) == n, f"{wanted} nodes ({step}, killed {when}): {slurm.jobs()}", 60)  # type: ignore[misc]
            names = [name for name, _ in slurm.jobs().values()]
            assert len(set(names)) == len(names), names
            if step == "add" and wanted == 3:
                assert dlrover("scale", run_id, 2).returncode == 0
                workers = wait_for_workers(run, 2)
    run.finish(until)
    assert slurm.jobs() == {}


@pytest.mark.on_demand
@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", KILLS)
def test_controller_killed_while_it_cancels_leaves_nothing_behind(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, etcd: EmbeddedEtcd, when: str
) -> None:
    real, script = shutil.which("scancel"), tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    scancel = tmp_path / "bin/scancel"
    scancel.parent.mkdir()
    scancel.write_text(f"#!/bin/bash\nrm {scancel}\n{KILLS[when].format(real=real)}\n")
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scancel.parent}:{os.environ['PATH']}")
    run_id = f"job-{tmp_path.name[-6:]}-{os.getpid()}"
    run = dlrover.start("--target", "slurm", "--workers", "2:2", "--endpoint", etcd.endpoint, script, run_id=run_id)
    run.wait_for(lambda: [s for _, s in slurm.jobs().values()] == ["RUNNING"] * 2, "two nodes")
    done = dlrover("cancel", run_id, "--endpoint", etcd.endpoint, timeout_s=150)
    assert run.wait_for_exit() == -signal.SIGKILL
    assert done.returncode == 0, done.stderr
    assert slurm.jobs() == {}
    dlrover.wait_for_end()


FAULTS = """#!/bin/bash
n=$(cat {count} 2>/dev/null || echo 0)
echo $((n + 1)) > {count}
case $n in
2) sleep 600 ;;
5) echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1 ;;
esac
case $((n % 4)) in
1) echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1 ;;
3) {real} "$@" > /dev/null 2>&1; echo '@#!% \\001'; exit 0 ;;
esac
exec {real} "$@"
"""
"""Faults of Slurm's commands: hang, fail, execute the request and print garbage, or work normally."""


@pytest.mark.on_demand
@pytest.mark.timeout(900)
def test_failing_or_hanging_commands_duplicate_no_node(
    dlrover: Dlrover, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until, folder = tmp_path / "enough", tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (folder / name).write_text(FAULTS.format(count=tmp_path / f"{name}.count", real=shutil.which(name)))
        (folder / name).chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    run = dlrover.start("--target", "slurm", "--workers", "1:3", "--etcd-host", "127.0.0.1", SCRIPT, "--until", until)
    monkeypatch.setenv("PATH", path)
    wait_for_first_round(run)
    wanted, gone = 1, ""
    for step in ("add", "drain", "replace", "add"):
        if step == "add":
            wanted += 1
            assert dlrover("scale", "job", wanted).returncode == 0
        else:
            more = ["--replace"] if step == "replace" else []
            assert dlrover("drain", "job", gone, *more).returncode == 0
        look = members(wanted, (gone,))
        workers = run.wait_for(lambda look=look: look(run.status()), f"{wanted} workers without {gone} ({step})", 200)  # type: ignore[misc]
        names = [name for name, _ in slurm.jobs().values()]
        assert len(set(names)) == len(names), names
        gone = workers[-1]["worker_id"]
    run.finish(until, 120)
    eventually(lambda: slurm.jobs() == {}, "the end of all jobs", 60)
    dlrover.wait_for_end()
    assert losses(run) == []
    calls = {name: int((tmp_path / f"{name}.count").read_text()) for name in ("sbatch", "squeue")}
    assert min(calls.values()) > 5, calls


def test_release_of_the_tests_slurm_expedites_no_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Debian's Slurm is older than 25.11. Newer ones are played in tests/components/targets/test_slurm.py."""
    client, config = (subprocess.check_output(["scontrol", *words], text=True) for words in (["--version"], ["show", "config"]))
    assert release_of(client) == release_of(re.search("SLURM_VERSION.*", config)[0])  # type: ignore[index]
    if release_of(client) >= (25, 11):
        pytest.skip(f"{client.strip()} may expedite requeued jobs")
    assert SlurmFeatures.of(client, config) == SlurmFeatures()
    spec = NodeSpec("/bin/true", (), "127.0.0.1:1", "gate", "/dlrover", 1, 1)
    target = SlurmTarget(spec, SlurmOptions(partition="main"), tmp_path / "logs")
    target.open("0123456789")
    handle = target.start("node1")
    assert target.features == SlurmFeatures()
    shown = subprocess.check_output(["scontrol", "show", "job", handle.split("/")[0]], text=True)
    assert "Requeue=0" in shown
    target.cancel([handle])
