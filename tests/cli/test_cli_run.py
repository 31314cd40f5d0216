"""Refusals of `dlrover run`, and its work before and after a job. Whole jobs are in tests/e2e."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import psutil
import pytest

from lightning_dlrover.cli import run
from lightning_dlrover.cli.main import main
from lightning_dlrover.cli.parser import build_parser
from lightning_dlrover.cli.plugins import requested_ticket
from lightning_dlrover.cli.run import Announcer, own_etcd, run_folder, write_final_report
from lightning_dlrover.cli.run_options import objective
from lightning_dlrover.components.targets.slurm import SlurmOptions, SlurmTarget
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, Keys, encode
from lightning_dlrover.report.status import EVENTS_FILE, JobPlace
from tests.support.run_cli import RunCli


@pytest.mark.parametrize(
    ("visible", "gpus", "message"),
    [
        ("0,1", 1, "3 workers with 1 GPU each: 3 needed, 2 found (CUDA_VISIBLE_DEVICES is '0,1'); --workers 1:2 is the most"),
        ("GPU-a", 2, "3 workers with 2 GPUs each: 6 needed, 1 found (CUDA_VISIBLE_DEVICES is 'GPU-a'); use fewer"),
        ("", 1, "3 workers with 1 GPU each: 3 needed, 0 found"),
    ],
)
def test_more_gpus_than_there_are_cannot_be_asked_for(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code, output, errors = dlrover("run", "--workers", "1:3", "--gpus", gpus, "script.py")
    assert code == 2
    assert message in errors
    assert ("trains on one of its GPUs" in output + errors) == (gpus > 1)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("visible", "options", "message"),
    [
        ("0,1,2", ["--workers-per-node", 2, "--workers", "2:4"], "4 workers with 1 GPU each: 4 needed, 3 found"),
        ("0,1,2", ["--workers-per-node", "gpu", "--gpus", 2], "--workers 2:2 is the most that fits"),
        ("0", ["--workers-per-node", "gpu", "--gpus", 2], "(CUDA_VISIBLE_DEVICES is '0'); use fewer, or none"),
    ],
)
def test_workers_of_nodes_need_a_gpu_each_where_there_are_any(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, visible: str, options: list[object], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert message in dlrover.refused("run", *options, "script.py")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "nodes run on this machine, where these are ignored: --partition, --image"),
        (
            {"SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "h"},
            "nodes run on Slurm, where these are ignored: --image; `--target local` keeps them on this host",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "h", "KUBECONFIG": "script.py"},
            "nodes run on Kubernetes, where these are ignored: --partition; `--target local` keeps them on this host",
        ),
        # Without a service account nodes cannot be requested.
        ({"KUBERNETES_SERVICE_HOST": "h"}, "nodes run on this machine, where these are ignored: --partition, --image"),
    ],
)
def test_nodes_run_beside_their_controller_by_default(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning_dlrover.components.targets.kubernetes_api._NAMESPACE_FILE", tmp_path / "none")
    options = ("--target", "auto", "--partition", "p", "--image", "i", "--max-restarts", "-1")
    code, output, errors = dlrover("run", *options, "script.py")
    assert (code, output.strip()) == (2, said)
    assert "--max-restarts is -1" in errors  # the check continues with the other options


def test_a_job_that_has_ended_in_a_shared_etcd_is_not_run_again(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.job, encode(JobRecord("finished", True, 1, 3, "0")))
    assert "has finished" in dlrover.refused("run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "script.py")


def test_a_folder_of_an_earlier_job_is_not_written_into(dlrover: RunCli) -> None:
    Path("runs/job").mkdir(parents=True)
    Path("runs/job/events.jsonl").write_text("precious\n")
    assert "holds an earlier job's files" in dlrover.refused("run", "--rdzv-id", "job", "script.py")
    assert Path("runs/job/events.jsonl").read_text() == "precious\n"


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put commands of Slurm's names on PATH, for what is checked before they run."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_missing_commands_of_slurm_are_named_before_an_etcd_starts(
    dlrover: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output, errors = dlrover("run", "--target", "slurm", "--rdzv-id", "job", "script.py")
    assert (code, output) == (2, "")
    assert "sbatch, squeue, scancel, scontrol not found on PATH" in errors
    assert not Path("runs/job").exists()


@pytest.mark.usefixtures("slurm_commands")
def test_an_etcd_that_cannot_be_started_leaves_no_folder(dlrover: RunCli) -> None:
    # An address reserved for documentation, which no host has.
    code, _, errors = dlrover("run", "--target", "slurm", "--etcd-host", "192.0.2.1", "--rdzv-id", "job", "script.py")
    assert (code, "Traceback" in errors) == (2, False)
    assert not Path("runs/job").exists()


def test_own_etcd_of_nodes_that_outlast_this_host_waits_for_the_disk(tmp_path: Path) -> None:
    options = build_parser().parse_args(["run", "--target", "slurm", "--etcd-host", "127.0.0.1", "x.py"])
    before = set(psutil.Process().children(recursive=True))
    with own_etcd(options, tmp_path):
        started = set(psutil.Process().children(recursive=True)) - before
        commands = [command for child in started if "--data-dir" in " ".join(command := child.cmdline())]
    assert commands
    assert not any("--unsafe-no-fsync" in argument for command in commands for argument in command)


@pytest.mark.usefixtures("slurm_commands")
def test_job_whose_etcd_was_on_another_host_is_not_resumed_here(dlrover: RunCli) -> None:
    folder = Path("runs/job")
    (folder / "etcd").mkdir(parents=True)
    JobPlace("job", "192.0.2.1:2379").write(folder, "slurm", "mark")
    assert "used an etcd on 192.0.2.1, and its nodes still look for it there: resume the job on that host" in dlrover.refused(
        "run", "--target", "slurm", "--rdzv-id", "job", "script.py"
    )
    assert (folder / "etcd").exists()


def test_job_may_start_while_a_command_looks_for_it(dlrover: RunCli) -> None:
    Path("runs/job").mkdir(parents=True)
    with Path("runs/job/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.2, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with run_folder(Path("runs/job"), "job", None, "local") as folder:
            assert folder == Path("runs/job").resolve()


def test_jobs_on_slurm_do_not_share_a_folder_of_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = build_parser().parse_args(["run", "--target", "slurm", "--log-dir", str(tmp_path), "script.py"])
    spec = NodeSpec("script.py", (), "h:1", "job", "/dlrover", 1, 1)
    target = run._make_target(options, spec, tmp_path / "default", threading.Event(), has_own_etcd=False)
    assert isinstance(target, SlurmTarget)
    assert target._log_dir == tmp_path / "job"
    assert target._options == SlurmOptions()
    folder = tmp_path / "job/node1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("one\n")
    assert main(["logs", "--log-dir", str(tmp_path), "job"]) == 0
    assert capsys.readouterr().out == "[node1] one\n"


def test_run_refuses_a_job_that_others_have_started(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert "is training already" in dlrover.refused(
        "run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "--workers", "1:2", str(script)
    )


def test_run_refuses_a_user_without_an_endpoint(dlrover: RunCli) -> None:
    Path("password").write_text("secret")
    assert "--user, --password-file: only with --endpoint" in dlrover.refused(
        "run", "--user", "me", "--password-file", "password", "script.py"
    )


def test_run_refuses_more_workers_than_a_machine_can_bear(dlrover: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert "this machine has 8 cores, enough for 32 workers at most" in dlrover.refused(
        "run", "--workers", "10000:20000", "script.py"
    )


def test_run_caps_the_most_workers_of_a_machine(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    _, output, errors = dlrover("run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "--workers", "1:9999", "script.py")
    limit = max(16, 4 * len(os.sched_getaffinity(0)))
    assert f"at most {limit} workers, not 9999" in output
    assert "is training already" in errors


class Told:
    """A log that has news once."""

    def __init__(self, *events: EventRecord) -> None:
        self.events = [*events]

    def new(self) -> list[EventRecord]:
        news, self.events = self.events, []
        return news


def test_unchanged_size_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    def decision(current: int, chosen: int) -> EventRecord:
        text = f"{current} to {chosen}"
        return EventRecord("decision", 0.0, text, {"current": {"num_workers": current}, "chosen": {"num_workers": chosen}})

    made = [decision(1, 1), decision(1, 1), decision(1, 2), decision(2, 2), decision(2, 2), decision(1, 1)]
    Announcer(Told(*made))()  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [f"[decision] {text}" for text in ("1 to 1", "1 to 2", "2 to 2", "1 to 1")]


def test_job_has_finished_though_its_report_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no font\x1b[2J")

    monkeypatch.setattr(run, "write_report", fails)
    data = {"number": 1, "members": ["w"], "kind": "start", "planned": True, "reason": "it starts"}
    (tmp_path / EVENTS_FILE).write_bytes(encode(EventRecord("round", 1.0, "it starts", data)) + b"\n")
    write_final_report("job", tmp_path)
    out, complaint = capsys.readouterr()
    assert "no report was written: no font\\x1b[2J; then see `dlrover report job`" in complaint
    assert "job" in out
    assert "report:" not in out


def test_run_passes_the_objective_to_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = build_parser().parse_args(
        ["run", "--objective", "cheapest", "--deadline", "1.5h", "--prices", "core_hour=0.04", "--history", "h.sqlite", "x.py"]
    )
    assert objective(options) == {
        "DLROVER_OBJECTIVE": "cheapest",
        "DLROVER_DEADLINE_S": "5400.0",
        "DLROVER_PRICES": "core_hour=0.04",
        "DLROVER_HISTORY": f"sqlite:///{tmp_path / 'h.sqlite'}",
    }
    off = build_parser().parse_args(["run", "--history", "off", "x.py"])
    assert objective(off) == {"DLROVER_HISTORY": "off"}


@pytest.mark.parametrize("given, pool", [([], ""), (["--pool", "a"], "a")])
def test_nodes_learn_the_pool_of_their_own_job(given: list[str], pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_POOL", "of-the-job-around")
    options = build_parser().parse_args(["run", "--workers", "1:2", *given, "x.py"])
    asked = requested_ticket(options, "h:1", "/dlrover")
    spec = run._node_spec(options, ["x.py"], JobPlace("j", "h:1", "/dlrover", {}), asked)
    assert spec.environment == {"DLROVER_POOL": pool}


def test_a_budget_without_prices_is_refused_before_anything_is_started(dlrover: RunCli) -> None:
    assert "needs prices" in dlrover.refused("run", "--budget", "5", "script.py")
    assert not Path("runs").exists()
