"""What another user of the machine can reach of a job that `dlrover run` has started with an etcd of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.toy_job import ToySettings
from tests.support.dlrover_process import Dlrover, Run
from tests.support.stranger import STRANGER, Attempts, attempts_of_a_stranger

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

SCRIPT = Path(__file__).with_name("tiny_script.py")


@pytest.fixture
def open_dlrover(fork_server: None) -> Iterator[Dlrover]:
    """Commands in folders that every user may enter, as in /tmp. pytest's own are closed, and would hide what is open."""
    folder = Path(tempfile.mkdtemp(prefix="dlrover-open-", dir="/tmp"))
    folder.chmod(0o755)
    commands = Dlrover(folder, is_warm=True)
    commands.temporary.chmod(0o1777)
    yield commands
    commands.end()
    shutil.rmtree(folder)


def test_no_other_user_reads_or_writes_a_local_job(open_dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = open_dlrover.start("--workers", "2", SCRIPT, "--until", until, "--loader-workers", 1)
    run.wait_for_output(r"\[round\] round 1: 2 workers", timeout_s=90)
    sockets, ports = sockets_of(open_dlrover), ports_of(open_dlrover)
    endpoint = json.loads((run.folder / "job.json").read_text())["endpoint"]
    assert endpoint.removeprefix("unix:") in sockets
    assert any(path.endswith("peer.sock:0") for path in sockets)
    paths = private_paths(open_dlrover, run)
    assert str(Path(endpoint.removeprefix("unix:")).parent / "data") in paths

    found = attempts_of_a_stranger(list(open_dlrover.processes()), sockets, ports, paths)
    assert set(found.sockets.values()) == {"refused"}, found.sockets
    ended = {"ENOENT", "ESRCH"}  # a file or a loader worker, in between
    assert set(found.reads.values()) - ended == {"refused"}, found.reads
    assert set(found.writes.values()) - ended == {"refused"}, found.writes
    assert set(found.secrets_of_processes.values()) - ended == {"refused"}, found.secrets_of_processes
    assert found.command_lines
    assert_ports_are_those_of_workers(found)
    # A user's own commands need no option.
    status = json.loads(open_dlrover("status", "--json", "job").stdout)
    assert (status["phase"], len(status["workers"])) == ("training", 2)
    run.finish(until)  # strange connections to the workers' ports have not disturbed it


def assert_ports_are_those_of_workers(found: Attempts) -> None:
    """Assert that TCP is the data plane's, on loopback alone, and that no etcd answers there."""
    assert found.ports
    assert {place.rpartition(":")[0] for place in found.ports} == {"127.0.0.1"}
    assert not [answer for answer in found.ports.values() if "etcd" in answer]


def sockets_of(dlrover: Dlrover) -> list[str]:
    """Paths of all Unix sockets on which the job's processes listen."""
    found = set()
    for pid in dlrover.processes():
        process = psutil.Process(pid)
        for connection in process.net_connections("unix"):
            path = str(connection.laddr)
            if path and not path.startswith(("@", "\0")):
                found.add(os.path.join(process.cwd(), path))
    return sorted(path for path in found if os.path.exists(path))


def ports_of(dlrover: Dlrover) -> list[tuple[str, int]]:
    found = set()
    for pid in dlrover.processes():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port))
    return sorted(found)


def private_paths(dlrover: Dlrover, run: Run) -> list[str]:
    """Files that the job's processes may write, and all that is in its folders of temporary files and in shared memory.

    Its output is left out: the run folder and the user's own files are as open as the user's umask makes them.
    """
    found = {str(path) for folder in dlrover.temporary.iterdir() for path in (folder, *folder.rglob("*"))}
    users_own = Path(f"/dev/shm/dlrover-{os.getuid()}")
    if users_own.exists():
        found.add(str(users_own))
    for pid in dlrover.processes():
        descriptors: list[Path] = []
        with contextlib.suppress(OSError):  # the process has ended in between
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        for fd in descriptors:
            with contextlib.suppress(OSError):  # it was closed in between
                flags = int((fd.parent.parent / "fdinfo" / fd.name).read_text().split("flags:")[1].split()[0], 8)
                path = Path(os.readlink(fd))
                if flags & os.O_ACCMODE and path.is_file() and not path.is_relative_to(run.folder.parent):
                    found.add(str(path))
        with contextlib.suppress(OSError):
            mapped = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            found |= {parts[5] for parts in mapped if parts[5:] and parts[5].startswith("/dev/shm/")}
    outputs = {str(run.output_file)}
    return sorted(path for path in found - outputs if os.path.exists(path))


def test_the_stranger_reaches_what_is_open(tmp_path: Path) -> None:
    """The search above would notice an open file, socket or process."""
    folder = Path(tempfile.mkdtemp(prefix="dlrover-open-", dir="/tmp"))
    try:
        folder.chmod(0o777)
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o666)
        found = attempts_of_a_stranger([], [], [], [str(folder), str(folder / "file"), "/root"])
    finally:
        shutil.rmtree(folder)
    assert found.reads[str(folder / "file")] == "reached: 1"
    assert found.writes[str(folder)] == found.writes[str(folder / "file")] == "reached: None"
    assert os.stat("/root").st_uid != STRANGER


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


def test_what_a_stranger_writes_into_a_rounds_store_is_never_run(make_job: MakeJob, tmp_path: Path) -> None:
    """The store has no password, so whoever reaches its port may end the job. Nothing in it is code."""
    job = make_job(ToySettings(step_s=0.05, max_epochs=20))
    job.start_all(2)
    job.wait_for_world(2)
    place = job._round
    store: Any = TCPStore(place.store_address, place.store_port, is_master=False, wait_for_workers=False)
    mark = tmp_path / "was_run"
    keys = store.list_keys()
    assert keys
    for key in keys:
        store.set(key, pickle.dumps(Evil(mark)))
    job.start()  # whatever follows, a round of three or the end, comes from what is read in this store
    first = place.number

    def has_changed() -> bool:
        return job.round_number > first or any(worker.exit_code is not None for worker in job.workers)

    job.wait_until(lambda: has_changed() or None, "another round, or the end of a worker")
    assert not mark.exists()
