"""`dlrover logs`."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.components.targets.target import LogFile
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import ControllerRecord, JobRecord, Keys, PlanRecord, encode
from tests.support.run_cli import RunCli


@pytest.mark.timeout(30)
def test_output_is_followed_to_the_end_of_a_job_that_never_formed_a_round(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, keys: Keys
) -> None:
    Path(f"runs/{keys.run_id}/logs").mkdir(parents=True)
    following = ("logs", "-f", "--endpoint", etcd.endpoint, keys.run_id)
    client.put(keys.plan, encode(PlanRecord(1, "initial", "start", True)))  # the only record that a controller leaves
    assert dlrover(*following) == (0, "", "")
    client.put(keys.job, encode(JobRecord("failed", True, 1, 3, "0")))
    assert dlrover(*following) == (0, "", "")


def test_end_of_an_agent_by_a_signal_is_one_line(dlrover: RunCli) -> None:
    folder = Path("runs/job/logs/node1")
    folder.mkdir(parents=True)
    name = "torch.distributed.elastic.multiprocessing.api.SignalException"
    frame = '  File "torch/distributed/run.py", line 1028, in main'
    error = f"Traceback (most recent call last):\n{frame}\n"
    text = f"step 1\n{error}{name}: Process 22335 got signal: 15\n{error}ValueError: the script's own\n"
    (folder / "stderr.log").write_text(text)
    output = dlrover.output("logs", "job")
    assert output.splitlines() == [
        "[node1] step 1",
        "[node1] this node's agent was ended by SIGTERM",
        *(f"[node1] {line}" for line in f"{error}ValueError: the script's own".splitlines()),
    ]


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
    monkeypatch.setattr("lightning_dlrover.cli.show._OUTPUT_S", patience_s)
    found, output, errors = dlrover("logs", "-f", "--endpoint", etcd.endpoint, "--key-prefix", keys.prefix, keys.run_id)
    assert found == code, errors
    assert errors.count("output cannot be read now ([Errno 116] Stale file handle); trying again for") == 1
    if code:
        assert errors.endswith("s: [Errno 116] Stale file handle\n")
    else:
        assert sorted(output.splitlines()) == ["[node1] node1 has come", "[node2] node2 has come"]


def test_output_on_another_machine_is_named_or_read_from_a_shared_folder(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys, tmp_path: Path
) -> None:
    asking = ("logs", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix, job.run_id)
    errors = dlrover(*asking)[2]
    assert "folder 'runs/" in errors
    assert "torchrun keeps the output of a job without `dlrover run`" in errors
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm", {}, str(tmp_path / "theirs"))))
    errors = dlrover.refused(*asking)
    assert f"its `dlrover run` on host-7 writes to {tmp_path}/theirs/logs, unless it was given a --log-dir" in errors
    assert "torchrun" not in errors
    (tmp_path / "theirs/logs/node1").mkdir(parents=True)
    (tmp_path / "theirs/logs/node1/stdout.log").write_text("one\n")
    assert dlrover(*asking) == (0, "[node1] one\n", "")
    assert "--endpoint" in dlrover("logs", "unknown", "--endpoint", "127.0.0.1:1")[2]


def test_the_output_of_all_nodes_is_shown_with_their_names(dlrover: RunCli) -> None:
    for node, text in {"node2": "two\n", "node10": "ten\nrows\n"}.items():
        Path(f"runs/job/logs/{node}").mkdir(parents=True)
        Path(f"runs/job/logs/{node}/stdout.log").write_text(text)
    assert dlrover("logs", "job") == (0, "[node2] two\n[node10] ten\n[node10] rows\n", "")
    # The job does not run and its etcd is unknown, so no more output can come.
    assert dlrover("logs", "--follow", "job") == (0, "", "")
