"""What `dlrover` says and returns when nothing has to be trained for it; whole jobs are in tests/e2e."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_dlrover.cli import main as cli
from lightning_dlrover.components import elastic
from lightning_dlrover.components.targets.logs import LogFile
from lightning_dlrover.components.targets.slurm import (
    SlurmOptions,
    SlurmTarget,
)
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.planner.plan import Candidate, Decision, Settings
from lightning_dlrover.rdzv.etcd.client import (
    EtcdClient,
    EtcdUnavailableError,
    Mirror,
)
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import (
    ControllerRecord,
    DrainRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    RoundRecord,
    WorkerRecord,
    decode,
    encode,
)
from lightning_dlrover.report import status as job_view
from lightning_dlrover.report.status import (
    EventLog,
    JobPlace,
    JobSummary,
    list_jobs,
    read_event_file,
)

RunCli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dlrover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Runs a command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DLROVER_")]:
        monkeypatch.delenv(name)
    Path("script.py").write_text("print('never run')\n")

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(str(end.code))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def job(client: EtcdClient, keys: Keys) -> Keys:
    """A job of 1 to 3 workers that trains with two."""
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0", global_batch_size=64)))
    client.put(keys.plan, encode(PlanRecord(2, "planner", "2 is best", True)))
    client.put(keys.round, encode(RoundRecord(4, ["w-b", "w-a"], "w-a joined", "grow", True)))
    for number, worker in enumerate(["w-a", "w-b", "w-c"]):
        state = "standby" if worker == "w-c" else "active"
        record = WorkerRecord(worker, "agent", "host", 100 + number, 0, "127.0.0.1", 1, state, 4)  # type: ignore[arg-type]
        client.put(keys.workers + worker, encode(record))
    client.put(f"{keys.events}{1:020d}-x", encode(EventRecord("round", 1.0, "round 4: w-a joined")))
    return keys


def test_help_takes_less_than_half_a_second_of_computing() -> None:
    code = (
        "import os, sys; from lightning_dlrover.cli.main import main; sys.argv = ['dlrover', '--help']\ntry: main()\nfinally: "
    )
    code += "print(os.times().user + os.times().system, *(m for m in ('torch', 'lightning', 'torchx') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "COMMAND" in done.stdout
    seconds, *imported = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 0.5
    assert imported == []


def test_asking_about_a_job_imports_neither_torch_nor_torchx(etcd: EmbeddedEtcd, job: Keys) -> None:
    code = "import sys; from lightning_dlrover.cli.main import main; main(sys.argv[1:])\n"
    code += "print('IMPORTED', *(m for m in ('torch', 'lightning', 'torchx') if m in sys.modules))"
    command = [sys.executable, "-c", code, "status", "--endpoint", etcd.endpoint, job.run_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED"


KUBERNETES = ("--target", "kubernetes", "--image", "trainer:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--workers", "3:1", "script.py"], "'3:1': MIN must be at least 1 and at most MAX, such as 1:3"),
        (["run", "--workers", "0:2", "script.py"], "MIN must be at least 1"),
        (["run", "--workers", "two", "script.py"], "'two' is not MIN:MAX, such as 1:3"),
        (["run", "--workers", "-1:2", "script.py"], "--workers"),
        (["run", "nowhere.py"], "script 'nowhere.py' does not exist or is not a file"),
        (["run", "."], "script '.' does not exist or is not a file"),
        (["run", "broken.py"], "script 'broken.py' is not valid Python"),
        (["run", "binary.py"], "script 'binary.py' is not valid Python"),
        (["run", "--rdzv-id", "a/b", "script.py"], "--rdzv-id 'a/b' cannot name a folder"),
        (["run", "--rdzv-id", "..", "script.py"], "--rdzv-id '..' cannot name a folder"),
        (["run", "--max-restarts", "-1", "script.py"], "--max-restarts is -1"),
        (["run", "--key-prefix", "jobs", "script.py"], "--key-prefix 'jobs' must start with '/'"),
        (["run", "--key-prefix", "/a,live=0", "script.py"], "--key-prefix '/a,live=0'"),
        (["run", "--endpoint", "nonsense", "script.py"], "etcd endpoint 'nonsense'"),
        (["run", "--run-dir", "script.py", "script.py"], "choose another --run-dir"),
        (["run", "--partition", "p", "script.py"], "--partition: only with --target slurm"),
        (["run", "--target", "moon", "script.py"], "invalid choice: 'moon'"),
        (["run", "--work-dir", "/", "--notice", "0", "script.py"], "--work-dir, --notice: only with --target slurm or"),
        (["run", "--cpus", "5000", "script.py"], "--cpus 5000, and only"),
        (["run", "--cpus", "1:5000", "script.py"], "--cpus 1:5000, and only"),
        (["run", "--gpus", "tesla:1", "script.py"], "--gpus 'tesla:1' is not a number of GPUs"),
        (["run", "--target", "slurm", "--cpus", "0", "script.py"], "'0' is not N or N:MAX"),
        (["run", "--target", "slurm", "--cpus", "4:2", "script.py"], "'4:2' is not N or N:MAX"),
        (["run", "--target", "slurm", "--mem", "4", "script.py"], "'4' is no size of memory, such as 512M or 16G"),
        (["run", "--target", "slurm", "--mem", "4G:2G", "script.py"], "'4G:2G': SIZE must be at most MAX"),
        (["run", "--target", "slurm", "--notice", "-1", "script.py"], "--notice is -1"),
        (["run", "--target", "slurm", "--etcd-host", "h", "--endpoint", "e:1", "script.py"], "this job uses the one at e:1"),
        (["run", "--target", "slurm", "--image", "i", "script.py"], "--image: only with --target kubernetes"),
        (["run", *KUBERNETES, "/s.py"], "pods cannot reach an etcd that is started here; name one that they reach"),
        (["run", "--target", "kubernetes", "--endpoint", "h:1", "/s.py"], "needs the --image that nodes run"),
        (["run", "--env", "LEVEL", "script.py"], "--env 'LEVEL' is not NAME=VALUE"),
        (["run", *KUBERNETES, "--node-selector", "=x", "/s.py"], "--node-selector '=x' is not LABEL=VALUE"),
        (["run", *KUBERNETES, "--mount", "data", "/s.py"], "--mount 'data' is not CLAIM:PATH[:ro]"),
        (["run", *KUBERNETES, "--gpus", "many", "/s.py"], "--gpus 'many' is not [RESOURCE:]NUMBER"),
        (["run", *KUBERNETES, "--queue", "ads", "--plain-jobs", "/s.py"], "--queue ads is one of Volcano, which --plain-jobs"),
        (["run", "--plain-jobs", "script.py"], "--plain-jobs: only with --target kubernetes"),
        (["run", *KUBERNETES, "--pod-template", "broken.py", "/s.py"], "--pod-template broken.py: it"),
        (["run", *KUBERNETES, "--pod-template", "nowhere.yaml", "/s.py"], "nowhere.yaml"),
        (["run"], "script"),
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["scale", "job", "2"], "job 'job' is not known: runs/job/job.json does not exist"),
        (["status", "job"], "job 'job' is not known"),
        (["drain", "job", "w"], "job 'job' is not known"),
        (["report", "job"], "runs/job/events.jsonl does not exist"),
        (["cancel", "job"], "job 'job' is not known"),
        (["logs", "job"], "folder 'runs/job/logs' does not exist"),
    ],
)
def test_bad_usage_ends_with_code_2_and_says_why(dlrover: RunCli, arguments: list[str], message: str) -> None:
    Path("broken.py").write_text("def f(:\n")
    Path("binary.py").write_bytes(b"\x00\x01")
    code, _, errors = dlrover(*arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_arguments_that_others_must_not_touch_arrive_as_they_were(dlrover: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(cli, "_run", lambda options: seen.append([options.script, *options.script_args]) or 0)  # type: ignore[func-returns-value]
    words = ["${app_id}", "a$$b", "$(HOME)", "100%25", 'it\'s "so"', "two\nlines", "--escaped", ""]
    [role] = elastic.train(*words, script="train.py").roles
    assert "$" not in "".join(role.args).replace("${app_id}", "", 1)  # that of the job's name is TorchX's to replace
    assert dlrover(*role.args[2:])[0] == 0
    assert seen == [["train.py", *words]]


@pytest.mark.parametrize(
    ("visible", "gpus", "message"),
    [
        ("0,1", 1, "3 workers with 1 GPUs each need 3, and 2 are there (CUDA_VISIBLE_DEVICES is '0,1'); --workers 1:2 is what"),
        (
            "GPU-a",
            2,
            "3 workers with 2 GPUs each need 6, and 1 are there (CUDA_VISIBLE_DEVICES is 'GPU-a'); use fewer",
        ),
        ("", 1, "3 workers with 1 GPUs each need 3, and 0 are there"),
    ],
)
def test_more_gpus_than_there_are_cannot_be_asked_for(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code, _, errors = dlrover("run", "--workers", "1:3", "--gpus", gpus, "script.py")
    assert code == 2
    assert message in errors
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "nodes run on this machine, where these mean nothing: --partition, --image"),
        (
            {"SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "h"},
            "nodes run on Slurm, where these mean nothing: --image; `--target local` keeps them on this host",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "h", "KUBECONFIG": "script.py"},
            "nodes run on Kubernetes, where these mean nothing: --partition; `--target local` keeps them on this host",
        ),
        # Without a service account there is nobody as whom nodes could be asked for.
        ({"KUBERNETES_SERVICE_HOST": "h"}, "nodes run on this machine, where these mean nothing: --partition, --image"),
    ],
)
def test_nodes_run_where_their_controller_does_unless_told_otherwise(
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
    assert "--max-restarts is -1" in errors  # and went on to what else is wrong


def test_the_pages_on_schedulers_name_only_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for page in ("local", "slurm", "kubernetes"):
        text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
        rows = [line for line in text.splitlines() if line.startswith("| `--")]
        started = re.findall(r"dlrover run ((?:[^\n]*\\\n)*[^\n`]*)", text)
        started = [options.split(".py")[0] for options in started]  # what comes then is for the script
        named = {
            name for part in (*(row.split("|")[1] for row in rows), *started) for name in re.findall(r"--[a-z][a-z-]*", part)
        }
        assert len(named) > 10
        assert named <= known


def test_an_etcd_that_does_not_answer_is_named_within_seconds(dlrover: RunCli) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
    started = time.monotonic()
    code, _, errors = dlrover("run", "--endpoint", endpoint, "script.py")
    assert code == 2
    assert endpoint in errors
    assert time.monotonic() - started < 20


def test_a_port_that_is_not_etcd_is_named_within_seconds(dlrover: RunCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        code, _, errors = dlrover("status", "--endpoint", endpoint, "job")
    assert code == 2
    assert endpoint in errors


def test_a_job_that_has_ended_in_a_shared_etcd_is_not_run_again(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.job, encode(JobRecord("finished", True, 1, 3, "0")))
    code, _, errors = dlrover("run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "script.py")
    assert code == 2
    assert "has finished" in errors


def test_a_folder_of_an_earlier_job_is_not_written_into(dlrover: RunCli) -> None:
    Path("runs/job").mkdir(parents=True)
    Path("runs/job/events.jsonl").write_text("precious\n")
    code, _, errors = dlrover("run", "--rdzv-id", "job", "script.py")
    assert code == 2
    assert "holds an earlier job's files" in errors
    assert Path("runs/job/events.jsonl").read_text() == "precious\n"


def test_scale_writes_a_binding_plan_and_an_event(dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys) -> None:
    code, output, _ = dlrover("scale", "--endpoint", etcd.endpoint, job.run_id, 3)
    assert code == 0
    assert "3 workers wanted" in output
    entry = client.get(job.plan)
    assert entry is not None
    plan = decode(PlanRecord, entry.value, entry.key)
    assert (plan.num_workers, plan.source, plan.binding) == (3, "user", True)
    events = [decode(EventRecord, e.value, e.key) for e in client.get_prefix(job.events)[1]]
    assert [e.data for e in events if e.kind == "scale"] == [{"num_workers": 3, "source": "user"}]


def test_scale_sets_how_workers_work_and_keeps_what_it_was_not_asked_to_change(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    def plan() -> PlanRecord:
        entry = client.get(job.plan)
        assert entry is not None
        return dataclasses.replace(decode(PlanRecord, entry.value, entry.key), created_at=0.0)

    scale = ("scale", "--endpoint", etcd.endpoint, job.run_id)
    code, output, _ = dlrover(*scale, "--loader-workers", 0, "--threads", 2)
    assert (code, "0 loader workers, 2 threads wanted" in output) == (0, True)
    reason = "set to 0 loader workers, 2 threads by hand"
    assert plan() == PlanRecord(2, "user", reason, True, loader_workers=0, intra_op_threads=2)
    assert dlrover(*scale, 3, "--prefetch", 4)[0] == 0
    reason = "set to 3 workers, 4 batches ahead each by hand"
    assert plan() == PlanRecord(3, "user", reason, True, loader_workers=0, intra_op_threads=2, prefetch_factor=4)
    text = dlrover("status", "--endpoint", etcd.endpoint, job.run_id)[1]
    assert "plan: 3 workers, 0 loader workers, 2 threads, 4 batches ahead each, by user" in text


def test_a_setting_by_hand_leaves_the_number_of_workers_a_recommendation(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    """Nobody asked for another size, and the workers that are there must not be sent away."""
    client.put(job.plan, encode(PlanRecord(1, "planner", "1 would do", False)))
    assert dlrover("scale", "--endpoint", etcd.endpoint, job.run_id, "--threads", 1)[0] == 0
    entry = client.get(job.plan)
    assert entry is not None
    plan = decode(PlanRecord, entry.value, entry.key)
    assert (plan.num_workers, plan.binding, plan.intra_op_threads) == (1, False, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--threads", "-1"], "'-1' is not a number from 0 to 1024"),
        (["--loader-workers", "1025"], "'1025' is not a number from 0 to 1024"),
        (["--prefetch", "two"], "'two' is not a number from 0 to 1024"),
        ([], "give a number of workers, or one of --loader-workers, --threads, --prefetch"),
    ],
)
def test_scale_refuses_settings_that_no_worker_can_have(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys, asked: list[str], message: str
) -> None:
    before = client.get(job.plan)
    code, _, errors = dlrover("scale", "--endpoint", etcd.endpoint, job.run_id, *asked)
    assert (code, message in errors) == (2, True), errors
    assert client.get(job.plan) == before


@pytest.mark.parametrize("num_workers", [0, 4, -1])
def test_scale_refuses_what_the_job_was_not_started_for(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys, num_workers: int
) -> None:
    before = client.get(job.plan)
    code, _, errors = dlrover("scale", "--endpoint", etcd.endpoint, job.run_id, num_workers)
    assert code == 2
    assert "was started for 1 to 3 workers" in errors
    assert client.get(job.plan) == before


def test_scale_refuses_a_job_that_is_over_or_unknown(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.job, encode(JobRecord("failed", True, 1, 3, "0")))
    code, _, errors = dlrover("scale", "--endpoint", etcd.endpoint, job.run_id, 2)
    assert (code, "has failed" in errors) == (2, True)
    code, _, errors = dlrover("scale", "--endpoint", etcd.endpoint, "unknown", 2)
    assert (code, "holds no job 'unknown'" in errors) == (2, True)


def decided(client: EtcdClient, keys: Keys, rates: Sequence[float], gpus: int = 0) -> None:
    """A job of 1 to 3 workers of two cores each, that runs with one and predicts these rates."""
    candidates = tuple(
        Candidate(Settings(n, 0, 1, 0), 64 / r, 60 / r, 70 / r, r, 0.0, n == 1, True, cores=2.0 * n, gpus=gpus * n)
        for n, r in enumerate(rates, start=1)
    )
    alone = Settings(1, 0, 1, 0)
    decision = Decision(1, 1.0, alone, alone, "", candidates, 64 / rates[0], 64 / rates[0], False)
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0", global_batch_size=64)))
    client.put(f"{keys.events}{1:020d}-x", encode(EventRecord("decision", 1.0, "", decision.to_data())))


@pytest.fixture
def competitors(client: EtcdClient, keys: Keys) -> list[Keys]:
    """Two jobs: one hardly gains by a second worker, the other one does."""
    both = [Keys(f"{keys.run_id}-{name}") for name in ("flat", "steep")]
    decided(client, both[0], [100.0, 105.0, 106.0])
    decided(client, both[1], [10.0, 19.0, 27.0])
    return both


def plan_of(client: EtcdClient, keys: Keys) -> PlanRecord | None:
    entry = client.get(keys.plan)
    return decode(PlanRecord, entry.value, entry.key) if entry else None


def test_a_budget_is_divided_among_running_jobs_by_what_each_gains(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys]
) -> None:
    flat, steep = competitors
    divide = ("divide", "--endpoint", etcd.endpoint, flat.run_id, f"{steep.run_id}=1", "--budget", 8)
    code, output, _ = dlrover(*divide)
    assert (code, plan_of(client, flat), plan_of(client, steep)) == (0, None, None)
    assert f"{steep.run_id}: 3 workers" in output
    assert "2.70 times as many as now" in output
    code, _, errors = dlrover(*divide, "--apply")
    assert code == 0, errors
    shares = [plan_of(client, keys) for keys in competitors]
    assert [(plan.num_workers, plan.binding, plan.source) for plan in shares if plan] == [(1, True, "user"), (3, True, "user")]
    dlrover("divide", "--endpoint", etcd.endpoint, f"{flat.run_id}=100", steep.run_id, "--budget", 8, "--apply")
    assert [plan.num_workers for keys in competitors if (plan := plan_of(client, keys))] == [3, 1]


@pytest.mark.parametrize(
    ("budget", "message"),
    [("3", "the cheapest settings of 2 jobs need 4, the budget is 3"), ("nan", "not a number of cores"), ("-1", "above 0")],
)
def test_a_budget_that_is_none_or_too_small_is_refused(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys], budget: str, message: str
) -> None:
    names = [keys.run_id for keys in competitors]
    code, _, errors = dlrover("divide", "--endpoint", etcd.endpoint, *names, f"--budget={budget}", "--apply")
    assert (code, message in errors) == (2, True), errors
    assert [plan_of(client, keys) for keys in competitors] == [None, None]


def test_jobs_that_do_not_compete_are_not_divided_and_none_is_changed(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys], job: Keys
) -> None:
    names = [keys.run_id for keys in competitors]
    code, _, errors = dlrover("divide", "--endpoint", etcd.endpoint, *names, job.run_id, "--budget", 8, "--apply")
    assert (code, "has not said yet what it would gain" in errors) == (2, True)
    code, _, errors = dlrover("divide", "--endpoint", etcd.endpoint, names[0], names[0], "--budget", 8, "--apply")
    assert (code, "have one name" in errors) == (2, True)
    code, _, errors = dlrover("divide", "--endpoint", etcd.endpoint, f"{names[0]}=much", "--budget", 8, "--apply")
    assert (code, "'much' is no weight" in errors) == (2, True)
    decided(client, competitors[1], [10.0, 19.0], gpus=1)
    code, _, errors = dlrover("divide", "--endpoint", etcd.endpoint, *names, "--budget", 8, "--apply")
    assert (code, "do not compete for the same" in errors) == (2, True)
    assert [plan_of(client, keys) for keys in competitors] == [None, None]


def test_drain_asks_one_worker_to_leave(dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys) -> None:
    assert dlrover("drain", "--endpoint", etcd.endpoint, job.run_id, "w-b")[0] == 0
    entry = client.get(f"{job.drains}w-b")
    assert entry is not None
    assert decode(DrainRecord, entry.value, entry.key).worker_id == "w-b"
    code, _, errors = dlrover("drain", "--endpoint", etcd.endpoint, job.run_id, "w-z")
    assert (code, "w-a, w-b, w-c" in errors) == (2, True)


def test_drain_has_a_worker_replaced_where_a_controller_starts_another_one(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    drain = ("drain", "--endpoint", etcd.endpoint, job.run_id, "w-b", "--replace")
    client.delete(job.controller)
    code, _, errors = dlrover(*drain)
    assert (code, "no controller" in errors, client.get(f"{job.drains}w-b")) == (2, True, None)
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    code, output, _ = dlrover(*drain)
    assert (code, "when another worker is ready" in output) == (0, True)
    entry = client.get(f"{job.drains}w-b")
    assert entry is not None
    assert decode(DrainRecord, entry.value, entry.key).once_replaced
    assert "w-b" in dlrover("status", "--endpoint", etcd.endpoint, job.run_id)[1]


def test_a_worker_that_leaves_at_once_is_not_told_to_wait_for_another_one(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    drain = ("drain", "--endpoint", etcd.endpoint, job.run_id, "w-b")
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    assert dlrover(*drain)[0] == 0
    code, _, errors = dlrover(*drain, "--replace")
    assert (code, "asked to leave at once" in errors) == (2, True)
    entry = client.get(f"{job.drains}w-b")
    assert entry is not None
    assert not decode(DrainRecord, entry.value, entry.key).once_replaced


def test_drain_refuses_to_stop_the_job(dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys) -> None:
    client.put(job.round, encode(RoundRecord(5, ["w-b"], "", "shrink", True)))
    code, _, errors = dlrover("drain", "--endpoint", etcd.endpoint, job.run_id, "w-b")
    assert (code, "the only worker" in errors) == (2, True)
    assert client.get(f"{job.drains}w-b") is None


def test_drain_refuses_the_last_one_that_stays(dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys) -> None:
    assert dlrover("drain", "--endpoint", etcd.endpoint, job.run_id, "w-b")[0] == 0
    code, _, errors = dlrover("drain", "--endpoint", etcd.endpoint, job.run_id, "w-a")
    assert (code, "the only worker" in errors) == (2, True)


def test_a_job_that_nobody_looks_after_is_marked_as_cancelled(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    code, _, errors = dlrover("cancel", "--timeout", "0.3", "--endpoint", etcd.endpoint, job.run_id)
    assert (code, "were asked to leave and have not: w-a, w-b, w-c" in errors) == (2, True)
    assert client.count(job.drains) == 3
    client.delete_prefix(job.workers)
    code, output, errors = dlrover("cancel", "--endpoint", etcd.endpoint, job.run_id)
    assert (code, errors) == (0, "")
    assert "cancelled, all its nodes have ended" in output
    entry = client.get(job.job)
    assert entry is not None
    record = decode(JobRecord, entry.value, entry.key)
    assert (record.phase, record.message) == ("failed", "cancelled by `dlrover cancel`")
    assert client.get(job.plan) is None
    assert client.get_prefix(job.drains)[1] == []
    assert "had ended already" in dlrover("cancel", "--endpoint", etcd.endpoint, job.run_id)[1]


def test_a_controller_that_does_not_end_a_cancelled_job_is_named(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    nodes = NodesRecord("local", "mark", num_started=3)
    client.put(job.nodes, encode(nodes))
    with contextlib.closing(client.lease(5)) as lease:
        client.put(job.controller, encode(ControllerRecord("h", 1, "local")), lease)
        code, _, errors = dlrover("cancel", "--timeout", "0.3", "--endpoint", etcd.endpoint, job.run_id)
    assert code == 2
    assert "its controller has not ended within 0.3 s" in errors
    entry = client.get(job.nodes)
    assert entry is not None
    asked = dataclasses.replace(nodes, stop="cancelled by `dlrover cancel`")
    assert decode(NodesRecord, entry.value, entry.key) == asked


@pytest.mark.parametrize(("target", "is_run"), [("local", False), ("slurm", True)])
def test_a_job_whose_etcd_does_not_answer_is_not_said_to_have_ended(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, target: str, is_run: bool
) -> None:
    def no_answer(*_: object) -> None:
        raise EtcdUnavailableError("no answer")

    monkeypatch.setattr(job_view, "connect", no_answer)
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    JobPlace("job", "h:1").write(folder, target, "mark")
    with (folder / ".lock").open("a") as lock:
        if is_run:
            fcntl.flock(lock, fcntl.LOCK_EX)
        code, output, errors = dlrover("cancel", "job")
    assert (code, output) == (2, "")
    assert "the etcd of job 'job' at h:1 does not answer" in errors
    assert ("looks after the job" in errors) == is_run


def test_an_etcd_that_cannot_be_started_leaves_no_folder(dlrover: RunCli) -> None:
    # An address for documentation, which no host has.
    code, _, errors = dlrover("run", "--target", "slurm", "--etcd-host", "192.0.2.1", "--rdzv-id", "job", "script.py")
    assert (code, "Traceback" in errors) == (2, False)
    assert not Path("runs/job").exists()


def test_a_job_whose_etcd_was_on_another_host_is_not_gone_on_with_here(dlrover: RunCli) -> None:
    folder = Path("runs/job")
    (folder / "etcd").mkdir(parents=True)
    JobPlace("job", "192.0.2.1:2379").write(folder, "slurm", "mark")
    code, _, errors = dlrover("run", "--target", "slurm", "--rdzv-id", "job", "script.py")
    assert code == 2
    assert "its etcd on 192.0.2.1, and its nodes look for it there: go on with the job on that host" in errors
    assert (folder / "etcd").exists()


def test_a_job_may_start_in_the_moment_in_which_somebody_asks_whether_it_runs(dlrover: RunCli) -> None:
    Path("runs/job").mkdir(parents=True)
    with Path("runs/job/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.2, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with cli._run_folder(Path("runs/job"), "job", None, "local") as folder:
            assert folder == Path("runs/job").resolve()


@pytest.mark.timeout(30)
def test_output_is_followed_to_the_end_of_a_job_that_has_failed_before_its_first_round(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, keys: Keys
) -> None:
    Path(f"runs/{keys.run_id}/logs").mkdir(parents=True)
    following = ("logs", "-f", "--endpoint", etcd.endpoint, keys.run_id)
    client.put(keys.plan, encode(PlanRecord(1, "initial", "start", True)))  # all that a controller leaves
    assert dlrover(*following) == (0, "", "")
    client.put(keys.job, encode(JobRecord("failed", True, 1, 3, "0")))
    assert dlrover(*following) == (0, "", "")


@pytest.mark.parametrize(("num_times", "patience_s", "code"), [(3, 60.0, 0), (1000, 0.6, 2)])
def test_output_that_cannot_be_read_is_followed_on_for_a_while(
    dlrover: RunCli,
    client: EtcdClient,
    etcd: EmbeddedEtcd,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    num_times: int,
    patience_s: float,
    code: int,
) -> None:
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0")))
    for node in ("node1", "node2"):
        Path(f"runs/{keys.run_id}/logs/{node}").mkdir(parents=True)
        Path(f"runs/{keys.run_id}/logs/{node}/stdout.log").touch()
    left = [OSError(errno.ESTALE, "Stale file handle")] * num_times
    new_lines = LogFile.new_lines

    def read(file: LogFile, whole: bool) -> Iterator[str]:
        if "node1" in str(file.file) and left:
            raise left.pop()
        if not left:
            for node in ("node1", "node2"):
                Path(f"runs/{keys.run_id}/logs/{node}/stdout.log").write_text(f"{node} has come\n")
            client.put(keys.job, encode(JobRecord("failed", True, 1, 3, "0")))
        return new_lines(file, whole)

    monkeypatch.setattr(LogFile, "new_lines", read)
    monkeypatch.setattr(cli, "_OUTPUT_S", patience_s)
    found, output, errors = dlrover("logs", "-f", "--endpoint", etcd.endpoint, "--key-prefix", keys.prefix, keys.run_id)
    assert found == code, errors
    assert errors.count("output cannot be read now ([Errno 116] Stale file handle); trying again for") == 1
    if code:
        assert errors.endswith("s: [Errno 116] Stale file handle\n")
    else:
        assert sorted(output.splitlines()) == ["[node1] node1 has come", "[node2] node2 has come"]


def test_output_that_another_machine_has_is_said_to_be_there_or_read_where_it_is_shared(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys, tmp_path: Path
) -> None:
    asking = ("logs", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix, job.run_id)
    assert "folder 'runs/" in dlrover(*asking)[2]
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm", {}, str(tmp_path / "theirs"))))
    code, _, errors = dlrover(*asking)
    assert code == 2
    assert f"its `dlrover run` on host-7 writes to {tmp_path}/theirs/logs, unless it was given a --log-dir" in errors
    (tmp_path / "theirs/logs/node1").mkdir(parents=True)
    (tmp_path / "theirs/logs/node1/stdout.log").write_text("one\n")
    assert dlrover(*asking) == (0, "[node1] one\n", "")
    assert "--endpoint" in dlrover("logs", "unknown", "--endpoint", "127.0.0.1:1")[2]


def test_jobs_on_slurm_do_not_share_a_folder_of_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = cli._parser().parse_args(["run", "--target", "slurm", "--log-dir", str(tmp_path), "script.py"])
    spec = NodeSpec("script.py", (), "h:1", "job", "/dlrover", 1, 1)
    target = cli._target(options, spec, tmp_path / "default", threading.Event())
    assert isinstance(target, SlurmTarget)
    assert target._log_dir == tmp_path / "job"
    assert target._options == SlurmOptions()
    folder = tmp_path / "job/node1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("one\n")
    assert cli.main(["logs", "--log-dir", str(tmp_path), "job"]) == 0
    assert capsys.readouterr().out == "[node1] one\n"


def test_the_output_of_all_nodes_is_shown_with_their_names(dlrover: RunCli) -> None:
    for node, text in {"node2": "two\n", "node10": "ten\nrows\n"}.items():
        Path(f"runs/job/logs/{node}").mkdir(parents=True)
        Path(f"runs/job/logs/{node}/stdout.log").write_text(text)
    assert dlrover("logs", "job") == (0, "[node2] two\n[node10] ten\n[node10] rows\n", "")
    # Nobody runs it and its etcd is not known, so nothing more will come.
    assert dlrover("logs", "--follow", "job") == (0, "", "")


def test_run_refuses_a_job_that_others_have_started(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    code, _, errors = dlrover("run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "--workers", "1:2", str(script))
    assert (code, "is training already" in errors) == (2, True)


@pytest.mark.parametrize("option", ["--endpoint", "--rdzv-id"])
def test_run_refuses_an_empty_value(dlrover: RunCli, option: str) -> None:
    code, _, errors = dlrover("run", option, "", "script.py")
    assert code == 2
    assert f"argument {option}: its value is empty, as of a variable that is not set" in errors
    assert not Path("runs").exists()


def test_status_refuses_an_empty_endpoint(dlrover: RunCli) -> None:
    code, _, errors = dlrover("status", "--endpoint", "", "job")
    assert (code, "argument --endpoint: its value is empty" in errors) == (2, True)


def test_run_refuses_a_user_without_an_endpoint(dlrover: RunCli) -> None:
    Path("password").write_text("secret")
    code, _, errors = dlrover("run", "--user", "me", "--password-file", "password", "script.py")
    assert code == 2
    assert "--user, --password-file: only with --endpoint" in errors


def test_run_refuses_more_workers_than_a_machine_can_bear(dlrover: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    code, _, errors = dlrover("run", "--workers", "100000:200000", "script.py")
    assert code == 2
    assert "this machine has 8 cores, which is enough for 32 workers at most" in errors


def test_run_caps_the_most_workers_of_a_machine(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    _, output, errors = dlrover("run", "--endpoint", etcd.endpoint, "--rdzv-id", job.run_id, "--workers", "1:9999", "script.py")
    limit = max(16, 4 * len(os.sched_getaffinity(0)))
    assert f"at most {limit} workers, not 9999" in output
    assert "is training already" in errors


def test_a_file_that_cannot_be_written_gets_one_line(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys, tmp_path: Path) -> None:
    code, _, errors = dlrover("report", "--endpoint", etcd.endpoint, job.run_id, "--output", str(tmp_path))
    assert code == 2
    assert errors.startswith("dlrover: ")


def test_escape_sequences_of_others_reach_no_terminal(
    dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, job: Keys
) -> None:
    client.put(f"{job.events}9-other", encode(EventRecord("round", 1.0, "\x1b]52;c;cm0gLXJm\x07 nice \x1b[2J")))
    code, text, _ = dlrover("status", "--endpoint", etcd.endpoint, job.run_id)
    assert code == 0
    assert "\\x1b]52;c;cm0gLXJm\\x07 nice \\x1b[2J" in text
    assert "\x1b" not in text


def test_status_shows_the_job_for_people_and_for_programs(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    code, text, _ = dlrover("status", "--endpoint", etcd.endpoint, job.run_id)
    assert code == 0
    for part in (
        "training, 1 to 3 workers",
        "round 4 (grow): w-a joined",
        "plan: 2 workers, by planner: 2 is best",
        "joining: host:102 builds model and data, for 0 s",
        "host:101",
    ):
        assert part in text
    code, text, _ = dlrover("status", "--json", "--endpoint", etcd.endpoint, job.run_id)
    status = json.loads(text)
    assert (status["phase"], status["round"]["number"]) == ("training", 4)
    assert [(w["worker_id"], w["rank"], w["state"]) for w in status["workers"]] == [
        ("w-b", 0, "active"),
        ("w-a", 1, "active"),
        ("w-c", None, "standby"),
    ]


def test_the_report_of_a_job_comes_from_its_folder_when_its_etcd_is_gone(dlrover: RunCli) -> None:
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    JobPlace("job", "127.0.0.1:1").write(folder)
    event = EventRecord("round", 1.0, "", {"number": 1, "members": ["w"], "kind": "start", "planned": True, "reason": "start"})
    (folder / "events.jsonl").write_bytes(encode(event) + b'\n{"half')
    code, output, errors = dlrover("report", "job")
    assert code == 0, errors
    assert "rounds            1" in output
    assert (folder / "report.html").exists()
    assert dlrover("report", "job", "--output", "other.html")[0] == 0
    assert Path("other.html").exists()


def test_list_shows_the_jobs_of_a_folder_or_of_an_etcd(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    assert dlrover("list") == (0, "no jobs in folder runs\n", "")
    Path("runs/old").mkdir(parents=True)
    JobPlace("old", "127.0.0.1:1").write(Path("runs/old"))
    Path("runs/odd").mkdir()
    Path("runs/odd/job.json").write_text("[]")
    assert list_jobs(None, None, Path("runs")) == [JobSummary("odd", "unreadable"), JobSummary("old", "ended", "local")]
    assert (job.run_id, "training") in [(j.run_id, j.state) for j in list_jobs(etcd.endpoint, None, Path("runs"))]
    assert job.run_id in dlrover("list", "--endpoint", etcd.endpoint)[1]


def test_list_says_where_a_job_runs_how_large_it_is_and_who_looks_after_it(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.nodes, encode(NodesRecord("slurm", "mark")))
    for number, state in enumerate(("started", "asked", "ended")):
        client.put(f"{job.each_node}node{number}", encode(NodeRecord(state)))  # type: ignore[arg-type]
    for name, endpoint in ((job.run_id, etcd.endpoint), ("gone", etcd.endpoint), ("silent", "127.0.0.1:1")):
        Path(f"runs/{name}").mkdir(parents=True)
        JobPlace(name, endpoint, job.prefix).write(Path(f"runs/{name}"), "slurm", "mark")
    # Of none of them is a `dlrover run` left here, and yet nodes of the first train.
    listed = {line.split()[0]: " ".join(line.split()[1:]) for line in dlrover("list")[1].splitlines()}
    assert listed == {
        "JOB": "STATE TARGET WORKERS NODES CONTROLLER",
        job.run_id: "training slurm 2 2 none",
        "gone": "ended slurm - - none",
        "silent": "unknown: its etcd at 127.0.0.1:1 does not answer slurm - - none",
    }
    workers = client.get_prefix(job.workers)[1]
    for entry in workers:
        client.delete(entry.key)
    assert f"{job.run_id} " in dlrover("list")[1].partition("stopped")[0]
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm")))
    assert "process 123 on host-7" in dlrover("list", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix)[1]
    client.put(job.round, b"nonsense")
    client.put(f"{job.prefix}/ odd/key", b"somebody else's")
    states = {each.run_id: each.state for each in list_jobs(etcd.endpoint, job.prefix, Path("runs"))}
    assert (states[job.run_id], states[" odd"]) == ("unreadable", "unreadable")
    client.delete(f"{job.prefix}/ odd/key")


def test_status_says_that_nobody_looks_after_nodes_that_live(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.nodes, encode(NodesRecord("slurm", "mark")))
    asking = ("status", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix, job.run_id)
    assert "controller: none; nodes on slurm train on, the same `dlrover run` goes on with them" in dlrover(*asking)[1]
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm")))
    assert "none; nodes" not in dlrover(*asking)[1]


def test_events_are_copied_once_each_and_kept_in_order(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("of an earlier attempt\n")
    with Mirror(client, keys.events) as mirror:
        log = EventLog(mirror, file)
        copied = []
        for number in range(20):
            client.put(f"{keys.events}{number:020d}-x", encode(EventRecord("note", float(number), str(number))))
            copied += log.new()
        client.put(f"{keys.events}{5:020d}-y", encode(EventRecord("late", 5.5, "5.5")))
        client.put(f"{keys.events}{6:020d}-y", b"not an event")
        log.complete(client)
    assert [e.at for e in read_event_file(file)] == sorted([*map(float, range(20)), 5.5])


def test_arguments_after_the_script_are_not_ours() -> None:
    options = cli._parser().parse_args(["run", "--workers", "2", "train.py", "--workers", "9", "--", "--help", "-v"])
    assert options.workers == (2, 2)
    assert options.script_args == ["--workers", "9", "--", "--help", "-v"]


class Told:
    """A log that has news once."""

    def __init__(self, *events: EventRecord) -> None:
        self.events = [*events]

    def new(self) -> list[EventRecord]:
        news, self.events = self.events, []
        return news


def test_that_nothing_changes_is_said_once_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    def decision(current: int, chosen: int) -> EventRecord:
        text = f"{current} to {chosen}"
        return EventRecord("decision", 0.0, text, {"current": {"num_workers": current}, "chosen": {"num_workers": chosen}})

    made = [decision(1, 1), decision(1, 1), decision(1, 2), decision(2, 2), decision(2, 2), decision(1, 1)]
    cli._Announcer(Told(*made))()  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [f"[decision] {text}" for text in ("1 to 1", "1 to 2", "2 to 2", "1 to 1")]
