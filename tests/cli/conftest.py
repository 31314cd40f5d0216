"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, Keys, PlanRecord, RoundRecord, WorkerRecord, encode
from lightning_dlrover.tuning.history import JobHistory
from tests.support.history_rows import decision, entry, window
from tests.support.run_cli import RunCli


@pytest.fixture
def dlrover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run a command in an empty folder; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DLROVER_")]:
        monkeypatch.delenv(name)
    Path("script.py").write_text("print('never run')\n")
    return RunCli(capsys)


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


@pytest.fixture
def at(etcd: EmbeddedEtcd, job: Keys) -> tuple[str, ...]:
    """Arguments of commands about that job."""
    return "--endpoint", etcd.endpoint, job.run_id


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a history with two jobs of one name and one of another."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'history.sqlite'}"
    with JobHistory(url) as written:
        written.record(entry("ctr@1", at=1000.0), [window(950.0), window(960.0, 2, 0.06)], [decision(1)])
        written.record(entry("ctr@2", at=2000.0), [window(1950.0), window(1960.0, 2, 0.05)], [decision(1)])
        written.record(entry("other@1", at=1500.0), [window(1450.0)])
    return url
