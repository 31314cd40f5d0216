"""Exit codes and last words of `dlrover run`, once a job has begun. Its nodes are entries in a list of Slurm's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import ControllerRecord, Keys, NodeRecord, decode, encode
from tests.support.run_cli import RunCli
from tests.support.slurm_commands import SlurmCommands
from tests.support.waiting import eventually

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    commands = SlurmCommands(folder)
    commands.keep_jobs()
    return commands


@pytest.fixture
def run(dlrover: RunCli, slurm: SlurmCommands, client: EtcdClient, etcd: EmbeddedEtcd, keys: Keys) -> Run:
    def run(meanwhile: Callable[[], None]) -> tuple[int, str]:
        """Run a job; call `meanwhile` in a thread once a node was taken on. Return exit code and errors."""

        def is_taken_on() -> bool:
            record = client.get(keys.each_node + "node1")
            return record is not None and decode(NodeRecord, record.value, record.key).state == "started"

        def act() -> None:
            eventually(is_taken_on, "a node to be taken on", 30)
            meanwhile()

        acting = threading.Thread(target=act)
        acting.start()
        names = ("--endpoint", etcd.endpoint, "--key-prefix", keys.prefix, "--rdzv-id", keys.run_id)
        code, _, errors = dlrover("run", "--target", "slurm", "--poll-interval", "0.2", "--workers", "1:1", *names, "script.py")
        acting.join()
        return code, errors

    return run


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_interrupted_job_leaves_nothing(run: Run, slurm: SlurmCommands, keys: Keys) -> None:
    code, errors = run(interrupt)
    assert code == 128 + signal.SIGTERM
    assert f"job {keys.run_id} was ended by SIGTERM; nothing it started is left" in errors
    assert len(slurm.calls("scancel")) == 1


def test_second_signal_names_the_nodes_that_may_be_left(run: Run, slurm: SlurmCommands, keys: Keys) -> None:
    slurm.set("scancel", "exit 0")  # Slurm takes its time

    def interrupt_twice() -> None:
        interrupt()
        eventually(lambda: slurm.calls("scancel"), "the node to be cancelled", 30)
        interrupt()

    code, errors = run(interrupt_twice)
    assert code == 128 + signal.SIGTERM
    assert f"was ended by SIGTERM; node1 may still run: `dlrover cancel {keys.run_id}` ends them" in errors
    assert "nothing it started" not in errors


def test_job_that_another_controller_has_taken_over_is_lost(run: Run, client: EtcdClient, keys: Keys) -> None:
    successor = ControllerRecord("host-7", 123, "slurm", {}, "")

    def take_over() -> None:
        found = client.get(keys.controller)
        assert found is not None
        client.leases.revoke(found.lease_id)
        client.put(keys.controller, encode(successor))

    code, errors = run(take_over)
    assert code == 3
    assert f"job {keys.run_id} was lost: job {keys.run_id!r} is already run by process 123 on host-7\n" in errors
    assert "node1 may still run" in errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error"), "failed: [Errno 5] Input/output error\n"),
        (EtcdUnavailableError("no etcd answers"), "failed: no etcd answers\n"),
        (ValueError("bug"), "ValueError: bug\n"),
    ],
)
def test_error_after_the_beginning_is_no_refusal(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    steps = iter([None, error])
    step = Controller.step

    def fail(self: Controller) -> object:
        if (problem := next(steps)) is not None:
            raise problem
        return step(self)

    monkeypatch.setattr(Controller, "step", fail)
    code, errors = run(lambda: None)
    assert code == 1
    assert said in errors
    assert ("Traceback" in errors) == isinstance(error, ValueError)
