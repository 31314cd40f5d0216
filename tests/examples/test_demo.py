from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import demo as demo_script
import pytest
from criteo_to_parquet import Layout, write_generated
from demo import Demo, DemoError

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord, WorkerRecord, encode


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watched(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Iterator[Demo]:
    """A demo of a job that is a sleeping process, connected to a real etcd."""
    folder = tmp_path / keys.run_id
    folder.mkdir()
    job = {"run_id": keys.run_id, "endpoint": etcd.endpoint, "prefix": keys.prefix, "pid": sleeper.pid}
    (folder / "job.json").write_text(json.dumps(job))
    demo = Demo(keys.run_id, folder, tmp_path / "log", sleeper)
    demo.connect()
    yield demo
    demo.stop()


def put_round(client: EtcdClient, keys: Keys, number: int, members: list[str]) -> None:
    client.put(keys.round, encode(RoundRecord(number, members, "test", "grow", True)))


def put_worker(client: EtcdClient, keys: Keys, worker_id: str, pid: int) -> None:
    record = WorkerRecord(worker_id, "agent", socket.gethostname(), pid, 0, "127.0.0.1", 1, "active")
    client.put(keys.workers + worker_id, encode(record))


def test_wait_ends_with_the_awaited_value(watched: Demo, client: EtcdClient, keys: Keys) -> None:
    put_round(client, keys, 3, ["a", "b"])
    assert watched.wait("two workers", watched.round_of(2), timeout_s=5).number == 3
    assert watched.wait("a newer round", watched.round_of(2, after=2, without="c"), timeout_s=5).number == 3


@pytest.mark.parametrize("number, members", [(2, ["a", "b"]), (4, ["a"]), (4, ["a", "gone"])])
def test_wait_that_times_out_names_the_awaited_value(
    watched: Demo, client: EtcdClient, keys: Keys, number: int, members: list[str]
) -> None:
    put_round(client, keys, number, members)
    with pytest.raises(DemoError, match="no sign of the replacement within"):
        watched.wait("the replacement", watched.round_of(2, after=2, without="gone"), timeout_s=0.3)


def test_a_wait_ends_when_the_job_ends(watched: Demo) -> None:
    watched.process.kill()
    with pytest.raises(DemoError, match=r"the job ended \(exit code -9\) while waiting for a round"):
        watched.wait("a round", watched.round_of(2), timeout_s=30)


def test_a_corrupt_record_is_reported_with_its_key(watched: Demo, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.round, b"\xff")
    with pytest.raises(DemoError, match=r"while waiting for a round: key .*round"):
        watched.wait("a round", watched.round_of(2), timeout_s=5)


def test_a_process_that_is_not_a_worker_of_the_demo_is_not_killed(
    watched: Demo, client: EtcdClient, keys: Keys, sleeper: subprocess.Popen[bytes]
) -> None:
    put_worker(client, keys, "other", sleeper.pid)
    with pytest.raises(DemoError, match="nothing was killed"):
        watched.kill("other")
    with pytest.raises(DemoError, match="no record"):
        watched.kill("unknown")
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_a_worker_of_the_demo_is_killed(watched: Demo, client: EtcdClient, keys: Keys) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(demo_script.SCRIPT)])
    put_worker(client, keys, "worker", worker.pid)
    watched.kill("worker")
    assert worker.wait(5) == -signal.SIGKILL


def test_stop_ends_the_job_and_may_be_called_twice(watched: Demo) -> None:
    watched.stop()
    assert watched.process.poll() is not None
    watched.stop()


def test_parquet_folder_is_trained_by_the_script_that_reads_streams(tmp_path: Path) -> None:
    write_generated(100, seed=1, output=tmp_path / "folder", layout=Layout())
    assert demo_script.script_for(tmp_path / "folder").name == "train_dlrm.py"
    for data in (None, tmp_path, tmp_path / "nothing"):
        assert demo_script.script_for(data).name == "train_ctr.py"


def test_a_job_that_cannot_train_fails_the_demo_and_shows_why(tmp_path: Path) -> None:
    command = [sys.executable, str(demo_script.SCRIPT.with_name("demo.py"))]
    command += [
        "--data",
        str(tmp_path / "nothing"),
        "--run-dir",
        str(tmp_path / "runs"),
        "--rdzv-id",
        "bad-data",
    ]
    environment = {**os.environ, "PYTHONPATH": str(demo_script.REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 1
    assert "no such file or folder" in done.stderr
    assert "while waiting for" in done.stderr
