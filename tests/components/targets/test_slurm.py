"""The Slurm target against commands controlled by the test: they answer, refuse, fail, hang or return garbage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dlrover.components.control.post_mortem import examine
from lightning_dlrover.components.targets.slurm import SlurmFeatures, SlurmOptions, SlurmTarget
from lightning_dlrover.components.targets.target import App, NodeSize, NodeSpec, NotTakenError, TargetError
from lightning_dlrover.rdzv.job.records import EndNotice
from tests.support.slurm_commands import SlurmCommands
from tests.support.waiting import eventually

MARK = "0123456789"
PLAIN = SlurmOptions()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return SlurmCommands(folder)


MakeTarget = Callable[..., SlurmTarget]


@pytest.fixture
def make_target(commands: SlurmCommands, tmp_path: Path) -> MakeTarget:
    def make(options: SlurmOptions = PLAIN, command_s: float = 5.0, poll_s: float = 0.0, **spec: object) -> SlurmTarget:
        values = {"script": "/s/train.py", "script_args": (), "endpoint": "h:1", "run_id": "run", "prefix": "/dlrover"}
        node_spec = NodeSpec(**{**values, "min_workers": 1, "max_workers": 2, **spec})  # type: ignore[arg-type]
        target = SlurmTarget(node_spec, options, tmp_path / "logs", poll_s=poll_s, command_s=command_s)
        target.open(MARK)
        return target

    return make


@pytest.fixture
def target(make_target: MakeTarget) -> SlurmTarget:
    return make_target()


def leave_exit_code(folder: Path, text: str = "0\n") -> None:
    """Write the exit code of node1's agent."""
    (folder / "logs/node1").mkdir(parents=True, exist_ok=True)
    (folder / "logs/node1/exit_code").write_text(text)


def row(job: int, state: str, node: str = "node1") -> str:
    return f"{job} {state} run.{node}.{MARK}"


def test_node_is_submitted_with_the_requested_options(make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    options = SlurmOptions(partition="p", account="a", qos="q", time="10", gres="gpu:1", extra=("--exclusive",))
    target = make_target(options, script_args=("--lr", "0.1", "a b", "${HOME}", "it's"))
    assert target.start("node1", NodeSize(3, 2048)) == "17/node1"
    [call] = commands.calls("sbatch")
    for name in ("partition=p", "account=a", "qos=q", "time=10", "mem=2048M", "gres=gpu:1", "cpus-per-task=3", "no-requeue"):
        assert f" --{name} " in call
    assert "--open-mode=append" in call  # a restarted node keeps its first output
    assert f"--job-name=run.node1.{MARK} " in call
    assert "--signal=B:USR1@120" in call
    script = tmp_path / "logs/node1/batch.sh"
    assert call.endswith(f"--exclusive {script}")
    text = script.read_text()
    assert "export DLROVER_NODE=node1\n" in text
    # torchrun turns two $ into one.
    assert text.rstrip().endswith("/s/train.py --lr 0.1 'a b' '$${HOME}' 'it'\"'\"'s'")


CONFIG = """\
Configuration data as of 2026-11-28T12:00:00
SlurmctldHost[0]        = head
SlurmctldParameters     = idle_on_node_suspend,enable_expedited_requeue
SLURM_VERSION           = 25.11.4
"""


@pytest.mark.parametrize(
    ("client", "config", "expedites"),
    [
        ("slurm 25.11.0", CONFIG, True),
        ("slurm 26.05.5", CONFIG, True),
        ("slurm 26.05.5", CONFIG.replace("25.11.4", "26.05.0-0rc1"), True),
        ("slurm 25.05.9", CONFIG, False),  # sbatch does not know the option
        ("slurm 25.11.0", CONFIG.replace("25.11.4", "25.05.1"), False),
        ("slurm 25.11.0", CONFIG.replace("enable_expedited_requeue", "enable_async_reply"), False),
        ("slurm 25.11.0", "", False),
        ("", CONFIG, False),
    ],
)
def test_requeue_is_expedited_where_both_sides_of_slurm_do_it(client: str, config: str, expedites: bool) -> None:
    assert SlurmFeatures.of(client, config).expedites is expedites
    asked = SlurmOptions().arguments(NodeSize(), expedites)
    assert ("--requeue=expedite" in asked, "--no-requeue" in asked) == (expedites, not expedites)


def use_newer_slurm(commands: SlurmCommands, release: str = "25.11.4") -> None:
    """Let `scontrol` answer as a newer release does, which the tests' machines do not have."""
    config = CONFIG.replace("25.11.4", release)
    commands.set("scontrol", f"case $1 in --version) echo slurm {release} ;; show) cat <<'END'\n{config}END\n;; esac")


def test_release_of_slurm_is_read_once(make_target: MakeTarget, commands: SlurmCommands) -> None:
    use_newer_slurm(commands)
    target = make_target()
    target.start("node1")
    target.start("node2")
    assert [" --requeue=expedite " in call for call in commands.calls("sbatch")] == [True, True]
    assert commands.calls("scontrol") == ["scontrol --version", "scontrol show config"]


def test_older_slurm_is_not_asked_for_its_configuration(make_target: MakeTarget, commands: SlurmCommands) -> None:
    commands.set("scontrol", "echo slurm 22.05.8")
    make_target().start("node1")
    assert commands.calls("scontrol") == ["scontrol --version"]
    [call] = commands.calls("sbatch")
    assert " --no-requeue " in call


def test_site_that_refuses_requeued_jobs_gets_plain_ones(make_target: MakeTarget, commands: SlurmCommands) -> None:
    use_newer_slurm(commands)
    refuse = "case $* in *expedite*) echo 'sbatch: error: --requeue is not allowed here' >&2; exit 1 ;; esac"
    commands.set("sbatch", f"{refuse}\necho 17")
    target = make_target()
    assert target.start("node1") == "17/node1"
    assert target.start("node2") == "17/node2"
    assert [" --no-requeue " in call for call in commands.calls("sbatch")] == [False, True, True]


def test_node_of_a_failed_host_comes_back_under_its_name(make_target: MakeTarget, commands: SlurmCommands) -> None:
    use_newer_slurm(commands)
    target = make_target()
    handle = target.start("node1")
    seen = []
    for state in ("RUNNING", "EXPEDITING", "PENDING", "CONFIGURING", "RUNNING", "PENDING"):
        commands.queue(row(17, state))
        seen.append(target.status(handle))
    assert seen == ["running", "pending", "pending", "pending", "running", "failed"]  # the last one was requeued plainly


def test_node_with_an_error_of_its_own_is_not_awaited(make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    use_newer_slurm(commands)
    target = make_target()
    handle = target.start("node1")
    commands.queue(row(17, "RUNNING"))
    assert target.status(handle) == "running"
    commands.queue(row(17, "REQUEUE_HOLD"))
    assert target.status(handle) == "failed"
    assert not (tmp_path / "logs/node1/stderr.log").exists(), "Slurm's requeue is not the cause"
    assert target.release(handle)
    assert commands.calls("scancel") == ["scancel -- 17"], "Slurm would hold it forever"


def test_node_that_fails_last_leaves_no_held_job(make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    use_newer_slurm(commands)
    target = make_target()
    handle = target.start("node1")
    leave_exit_code(tmp_path, "1\n")
    commands.queue(row(17, "COMPLETING"))
    assert target.status(handle) == "failed"
    assert not target.release(handle)
    commands.set("squeue", f"echo '{row(17, 'COMPLETING')}'; sed -i s/COMPLETING/REQUEUE_HOLD/ $0")
    target.close()
    assert commands.calls("scancel") == ["scancel -- 17"]


def test_node_of_several_workers_is_one_task_with_all_their_gpus(
    make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    commands.set("sbatch", "echo 17")
    target = make_target(SlurmOptions(gpus="8"), workers_per_node=8, min_workers=8, max_workers=16)
    target.start("node1", NodeSize(64, 131072))
    [call] = commands.calls("sbatch")
    for argument in ("--nodes=1", "--ntasks=1", "--gpus=8", "--cpus-per-task=64", "--mem=131072M"):
        assert f" {argument} " in call
    text = (tmp_path / "logs/node1/batch.sh").read_text()
    assert "export DLROVER_WORKERS_PER_NODE=8\n" in text
    assert "export OMP_NUM_THREADS=8\n" in text  # the cores of the node are shared
    assert "-m lightning_dlrover.components.node --agents=8 " in text
    assert "--nnodes=8:16 --nproc-per-node=1" in text  # of agents, each with one worker


def test_no_notice_is_asked_for_if_none_is_wanted(make_target: MakeTarget, commands: SlurmCommands) -> None:
    make_target(SlurmOptions(notice_s=0)).start("node1")
    assert "--signal" not in commands.calls("sbatch")[0]


def test_job_number_is_read_after_a_sites_own_output(make_target: MakeTarget, commands: SlurmCommands) -> None:
    commands.set("sbatch", "echo 'Welcome! Your project has 3 hours left.'; echo '4711;cluster2'")
    assert make_target().start("node1") == "4711/node1"


@pytest.mark.parametrize(
    ("shell", "error", "message"),
    [
        ("echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", NotTakenError, "invalid partition specified"),
        ("exit 3", NotTakenError, "ended with 3: it printed nothing"),
        ("echo 'a filter of this site refuses it'; exit 1", NotTakenError, "ended with 1: a filter of this site refuses it"),
        (
            "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
            NotTakenError,
            "could not reach Slurm 3 times",
        ),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", TargetError, "Socket timed out"),
        ("echo hello", TargetError, "printed no job number, but 'hello'"),
        ("exit 0", TargetError, "printed no job number"),
    ],
)
def test_error_of_sbatch_decides_whether_the_node_may_still_come(
    make_target: MakeTarget, commands: SlurmCommands, shell: str, error: type[TargetError], message: str
) -> None:
    commands.set("sbatch", shell)
    with pytest.raises(TargetError, match=re.escape(message)) as raised:
        make_target().start("node1")
    assert raised.type is error


def test_a_submission_that_did_not_reach_slurm_is_repeated(
    make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path
) -> None:
    busy = f"[ -e {tmp_path}/tried ] && echo 18 && exit; touch {tmp_path}/tried; echo 'connect failure' >&2; exit 1"
    commands.set("sbatch", busy)
    assert make_target().start("node1") == "18/node1"
    assert len(commands.calls("sbatch")) == 2


@pytest.mark.parametrize("command", ["sbatch", "squeue", "scancel"])
def test_hanging_command_is_ended_with_its_children(
    make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path, command: str
) -> None:
    commands.set(command, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    target = make_target(command_s=0.5)
    began = time.monotonic()
    calls: dict[str, Callable[[], object]] = {
        "sbatch": lambda: target.start("n"),
        "squeue": target.apps,
        "scancel": lambda: target.cancel(["1/n"]),
    }
    with pytest.raises(TargetError, match=f"{command} has not answered within 0.5 s"):
        calls[command]()
    assert time.monotonic() - began < 5.0
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    eventually(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "the end of the command's child", 5.0)


def test_jobs_with_similar_names_are_not_listed(make_target: MakeTarget, commands: SlurmCommands) -> None:
    others = ["3 RUNNING run.node3.other", "4 PENDING my job", f"5 PENDING run2.node1.{MARK}", "6 PENDING "]
    commands.queue(*others, row(1, "RUNNING"), row(2, "COMPLETED", "node2"))
    assert list(make_target().apps()) == [App("node1", "1/node1", True), App("node2", "2/node2", False)]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        *((state, "pending") for state in ("PENDING", "CONFIGURING")),
        *((state, "running") for state in ("RUNNING", "COMPLETING", "SUSPENDED")),
        ("COMPLETED", "succeeded"),
        *((state, "failed") for state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")),
    ],
)
def test_each_state_of_a_job_has_its_meaning(make_target: MakeTarget, commands: SlurmCommands, state: str, status: str) -> None:
    commands.queue(row(1, state))
    assert make_target().status("1/node1") == status


@pytest.mark.parametrize(
    ("state", "printed", "why"),
    [
        ("OUT_OF_MEMORY", "", "OUT_OF_MEMORY"),
        ("PREEMPTED", "", "PREEMPTED"),
        (
            "FAILED",
            "slurmstepd-h0: error: StepId=1.batch exceeded memory limit (117690368 > 104857600), being killed",
            "out of memory: exceeded memory limit (117690368 > 104857600), being killed",
        ),
        (
            "OUT_OF_MEMORY",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the step tasks have been OOM Killed.",
            "OUT_OF_MEMORY, out of memory: oom_kill event in StepId=1.batch. Some of the step tasks have been OOM Killed.",
        ),
        ("FAILED", "ValueError: the script's own", ""),
    ],
)
def test_slurms_reason_for_an_end_follows_the_nodes_output(
    target: SlurmTarget,
    commands: SlurmCommands,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    state: str,
    printed: str,
    why: str,
) -> None:
    handle = target.start("node1")
    log = tmp_path / "logs/node1/stderr.log"
    log.write_text(f"{printed}\n")
    commands.queue(row(17, state))
    for _ in range(2):
        assert target.status(handle) == "failed"
    assert log.read_text() == f"{printed}\n" + (f"Slurm: {why}\n" if why else "")
    assert [r.getMessage() for r in caplog.records] == ([f"run run: node1, job 17, has failed: {why}"] if why else [])
    assert not examine(log.read_text()).error.startswith("Slurm")
    assert target.ran_out_of_memory(handle) == ("MEMORY" in why.upper())


def test_requeued_node_has_failed_but_is_listed_as_living(target: SlurmTarget, commands: SlurmCommands) -> None:
    """It is replaced and ended, because it would return under its old name."""
    commands.queue(row(1, "RUNNING"))
    assert target.status("1/node1") == "running"
    commands.queue(row(1, "PENDING"))
    assert target.status("1/node1") == "failed"
    assert list(target.apps()) == [App("node1", "1/node1", True)]
    commands.queue(row(1, "RUNNING"))
    assert target.status("1/node1") == "failed"


def test_requeued_node_has_run_even_if_never_seen_running(target: SlurmTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    commands.queue(row(1, "PENDING"), row(2, "PENDING"))
    leave_exit_code(tmp_path, "143\n")
    assert [target.status(f"{number}/node{number}") for number in (1, 2)] == ["failed", "pending"]


def test_node_requeued_during_its_cancellation_is_cancelled_again(target: SlurmTarget, commands: SlurmCommands) -> None:
    commands.queue(row(1, "RUNNING"))
    assert target.status("1/node1") == "running"
    target.cancel(["1/node1"])
    commands.queue(row(1, "PENDING"))
    assert target.status("1/node1") == "pending"  # ended nodes are not cancelled again


UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(
    ("scontrol", "exit_code", "status"),
    [
        *((UNKNOWN_JOB, code, status) for code, status in (("0", "succeeded"), ("1", "failed"), (None, "failed"))),
        ("echo 'JobId=1 JobName=run.node1.0123456789 UserId=u JobState=COMPLETED Reason=None'", None, "succeeded"),
        ("echo 'JobId=1 JobName=run.node1.0123456789 UserId=u JobState=RUNNING Reason=None'", None, "running"),
        ("echo 'JobId=1 JobName=of somebody else UserId=u JobState=RUNNING Reason=None'", None, "failed"),
        ("echo 'JobId=1 JobName=run.node2.0123456789 UserId=u JobState=RUNNING Reason=None'", "0", "succeeded"),
        ("echo nonsense", "0", "running"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "0", "running"),
        ("sleep 600", "0", "running"),
    ],
)
def test_a_job_that_squeue_does_not_list_is_looked_up(
    make_target: MakeTarget, commands: SlurmCommands, tmp_path: Path, scontrol: str, exit_code: str | None, status: str
) -> None:
    commands.queue(row(1, "RUNNING"))
    target = make_target(command_s=2.0)
    assert target.status("1/node1") == "running"
    if exit_code is not None:
        leave_exit_code(tmp_path, exit_code)
    commands.queue()
    commands.set("scontrol", scontrol)
    assert target.status("1/node1") == status


def test_node_with_a_recorded_end_is_not_awaited(target: SlurmTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    commands.queue(row(1, "COMPLETING"))
    assert target.status("1/node1") == "running"
    leave_exit_code(tmp_path)
    assert target.status("1/node1") == "succeeded"


def test_leftovers_of_an_earlier_job_do_not_end_a_new_node(
    target: SlurmTarget, commands: SlurmCommands, tmp_path: Path
) -> None:
    leave_exit_code(tmp_path)
    (tmp_path / "logs/node1/notice").touch()
    handle = target.start("node1")
    target.apps()
    assert target.notice(handle) is None
    assert target.status(handle) == "failed"  # Slurm has forgotten it, and it has written no result


@pytest.mark.parametrize("content, taken_at", [("1700000000.5\n", 1700000000.5), ("0.0\n", 0.0), ("", 0.0), ("1e400\n", 0.0)])
def test_notice_of_a_node_is_read_once_for_each_list(
    content: str, taken_at: float, target: SlurmTarget, commands: SlurmCommands, tmp_path: Path
) -> None:
    handle = target.start("node1")
    assert target.notice(handle) is None
    (tmp_path / "logs/node1/notice").write_text(content)
    assert target.notice(handle) is None
    target.apps()
    assert target.notice(handle) == EndNotice("slurm", taken_at)
    assert target.notice(handle) is None


def test_output_of_an_earlier_job_is_not_a_new_nodes(target: SlurmTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    folder = tmp_path / "logs/node1"
    folder.mkdir(parents=True)
    for name in ("stdout", "stderr"):
        (folder / f"{name}.log").write_text(f"Traceback\nslurmstepd: error: Detected 1 oom_kill event in {name}\n")
    handle = target.start("node1")
    assert target.logs(handle) == []
    target.apps()
    assert target.status(handle) == "failed"  # killed with its host: it has printed nothing
    assert not target.ran_out_of_memory(handle)
    assert "in stderr" in (folder / "former-stderr.log").read_text()


def test_unknown_state_of_one_node_freezes_no_other(
    target: SlurmTarget, commands: SlurmCommands, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commands.queue(row(1, "RUNNING"), row(2, "RUNNING", "node2"))
    assert [target.status(handle) for handle in ("1/node1", "2/node2")] == ["running", "running"]
    commands.queue(row(1, "TELEPORTING"), row(2, "NODE_FAIL", "node2"))
    assert [app.is_living for app in target.apps()] == [True, False]
    assert [target.status(handle) for handle in ("1/node1", "2/node2")] == ["running", "failed"]
    assert caplog.text.count("Slurm's state TELEPORTING is unknown: node1 keeps its last state") == 1
    leave_exit_code(tmp_path)
    assert target.status("1/node1") == "succeeded"


def test_slurms_commands_keep_the_users_token(
    make_target: MakeTarget, commands: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    commands.set("sbatch", 'echo "token $SLURM_JWT, job $SLURM_JOB_ID" >&2; exit 1')
    with pytest.raises(NotTakenError, match=r"token token, job$"):
        make_target().start("node1")


def test_a_node_in_its_epilogue_no_longer_lives(target: SlurmTarget, commands: SlurmCommands, tmp_path: Path) -> None:
    commands.queue(row(1, "COMPLETING"))
    assert target.apps() == [App("node1", "1/node1", True)]
    leave_exit_code(tmp_path)
    assert target.apps() == [App("node1", "1/node1", False)]


@pytest.mark.parametrize(
    ("shell", "is_fine"),
    [
        ("exit 0", True),
        ("echo 'scancel: error: Kill job error on job id 1: Invalid job id specified' >&2; exit 1", True),
        ("echo 'scancel: error: Kill job error on job id 1: Job/step already completing or completed' >&2; exit 1", True),
        ("echo 'scancel: error: Kill job error on job id 1: Access/permission denied' >&2; exit 1", False),
        ("exit 1", False),
    ],
)
def test_a_job_that_has_ended_need_not_be_cancelled(
    make_target: MakeTarget, commands: SlurmCommands, shell: str, is_fine: bool
) -> None:
    commands.set("scancel", shell)
    if is_fine:
        commands.queue(row(1, "RUNNING"), row(2, "RUNNING", "node2"))
        target = make_target()
        target.apps()
        target.cancel(["1/node1", "2/node2"])
        assert commands.calls("scancel") == ["scancel -- 1 2"]
    else:
        with pytest.raises(TargetError, match="scancel ended with 1"):
            make_target().cancel(["1/node1"])


def test_job_that_slurm_does_not_list_as_ours_is_cancelled_by_name(target: SlurmTarget, commands: SlurmCommands) -> None:
    commands.queue(row(1, "RUNNING"), "7 RUNNING of-somebody-else")
    target.apps()
    target.cancel(["1/node1", "7/node2"])
    assert commands.calls("scancel") == ["scancel -- 1", f"scancel --jobname=run.node2.{MARK} -- 7"]


def test_users_squeue_settings_do_not_narrow_our_lists(
    make_target: MakeTarget, commands: SlurmCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/conf")
    commands.set("squeue", f'echo "1 RUNNING run.node1.{MARK}"; [ "$SQUEUE_PARTITION$SLURM_JOB_ID$SLURM_CONF" = /conf ]')
    assert len(make_target().apps()) == 1


def test_missing_slurm_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match="sbatch, squeue, scancel, scontrol not found on PATH"):
        SlurmTarget(NodeSpec("s", (), "h:1", "run", "/d", 1, 1), SlurmOptions(), tmp_path)
