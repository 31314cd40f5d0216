"""Mistakes of users that only real processes show: exit code, message, and no process or file left behind."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import ControllerRecord, JobRecord, Keys, encode
from tests.support.dlrover_process import REPOSITORY, Dlrover

SECONDS = 30.0
"""Seconds within which an immediate error must appear on a busy machine."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that must never be started."""
    file = tmp_path / "script.py"
    file.write_text("from pathlib import Path\nPath(__file__).with_suffix('.started').touch()\n")
    return file


def refused(dlrover: Dlrover, *arguments: object, **env: str) -> str:
    """Return the message of a command that is refused as a user's mistake."""
    [error] = all_refused(dlrover, [arguments], **env)
    return error


def all_refused(dlrover: Dlrover, commands: Sequence[Sequence[object]], **env: str) -> list[str]:
    """Run commands side by side, all of which are refused as a user's mistake; return their messages."""
    with ThreadPoolExecutor(len(commands)) as pool:
        ended = list(pool.map(lambda arguments: dlrover(*arguments, timeout_s=SECONDS, **env), commands))
    for done in ended:
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    dlrover.assert_all_ended()
    assert not list(dlrover.folder.glob("*.started"))
    assert not list(dlrover.folder.glob("runs/*"))
    return [done.stderr for done in ended]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--workers", "3:1", "script.py"), "such as 1:3"),
        (("nowhere.py",), "does not exist"),
        (("broken.py",), "broken.py' is not valid Python: invalid syntax"),
    ],
)
def test_errors_visible_at_the_start_are_refused_at_the_start(
    dlrover: Dlrover, script: Path, arguments: tuple[str, ...], message: str
) -> None:
    (dlrover.folder / "broken.py").write_text("def f(:\n")
    assert message in refused(dlrover, "run", *arguments)


def test_endpoint_without_an_etcd_is_named(dlrover: Dlrover, script: Path) -> None:
    """A port is closed, or something else listens there. The commands run side by side, as each waits for some seconds."""
    greetings = (b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
    with contextlib.ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        in_environment = f"127.0.0.1:{closed.getsockname()[1]}"
        others = [f"127.0.0.1:{stack.enter_context(something_else(greeting))}" for greeting in greetings]
        commands = [("run", "--rdzv-id", f"job{n}", "--endpoint", each, script) for n, each in enumerate(others)]
        first, *rest = all_refused(dlrover, [("run", script), *commands], DLROVER_ENDPOINT=in_environment)
    assert f"no etcd v3 answered at {in_environment}" in first
    assert "check that etcd runs" in first
    for endpoint, error in zip(others, rest, strict=True):
        assert endpoint in error
        assert "etcd v3" in error


@contextlib.contextmanager
def something_else(greeting: bytes) -> Iterator[int]:
    """Port of a server that greets like this, then keeps its callers waiting."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            kept = []
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                connection.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", ["shared/job", "shared/round", "agent_round", "agents/x"])
def test_garbage_under_the_name_of_a_job_refuses_it_and_is_left_alone(
    dlrover: Dlrover, script: Path, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, name: str
) -> None:
    client.put(keys.live + name, b"\xffgarbage")
    assert repr(keys.live + name) in refused(dlrover, "run", "--endpoint", etcd.endpoint, "--rdzv-id", keys.run_id, script)
    entry = client.get(keys.live + name)
    assert entry is not None
    assert entry.value == b"\xffgarbage"


def test_status_shows_readable_records_and_names_unreadable_ones(
    dlrover: Dlrover, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys
) -> None:
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0")))
    client.put(keys.workers + "x", b"{")
    done = dlrover("status", "--endpoint", etcd.endpoint, keys.run_id)
    assert done.returncode == 0
    # Without a worker or an agent the job does not train, whatever its record contains.
    assert f"job {keys.run_id}: stopped, 1 to 3 workers" in done.stdout
    assert repr(keys.workers + "x") in done.stderr
    assert "Traceback" not in done.stderr


def test_second_controller_is_refused_with_the_firsts_name(
    dlrover: Dlrover, script: Path, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys
) -> None:
    client.put(keys.controller, encode(ControllerRecord("elsewhere", 4711, "local")))
    error = refused(dlrover, "run", "--endpoint", etcd.endpoint, "--rdzv-id", keys.run_id, script)
    assert "already run by process 4711 on elsewhere" in error


def test_broken_rows_end_the_example_and_are_not_read_again(dlrover: Dlrover, tmp_path: Path) -> None:
    data = tmp_path / "rows.tsv"
    data.write_text("\t".join(["1"] + ["0"] * 39) + "\nthis is no row\n")
    done = dlrover("run", "--workers", "1:2", REPOSITORY / "examples" / "train_ctr.py", "--data", data, timeout_s=120)
    assert done.returncode == 1
    assert "line 2" in done.stdout
    assert f"{data}" in done.stdout
    assert "[node2]" not in done.stdout
    dlrover.assert_all_ended()


def test_a_reader_that_closes_the_pipe_is_no_error(
    dlrover: Dlrover, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys
) -> None:
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0")))
    command = f"{sys.executable} -m lightning_dlrover.cli status --endpoint {etcd.endpoint} {keys.run_id} | true"
    assert dlrover.process(["bash", "-c", command]).stderr == ""


# --- optional dependencies ----------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(dlrover: Dlrover, code: str, timeout_s: float = 60.0) -> CompletedProcess[str]:
    return dlrover.process([sys.executable, "-c", code], timeout_s)


def test_the_package_itself_needs_nothing_heavy(dlrover: Dlrover) -> None:
    names = {"torch", "lightning", "numpy", "grpc", "torchx", "torchrec"}
    clock = "import time; t = time.process_time(); import lightning_dlrover; print(time.process_time() - t)"
    done = python(dlrover, WITHOUT.format(names=names) + clock)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


def test_controllers_need_neither_torch_nor_lightning(dlrover: Dlrover) -> None:
    code = WITHOUT.format(names={"torch", "lightning", "torchrec"}) + (
        "import lightning_dlrover.components.control.controller, lightning_dlrover.components.targets.local\n"
        "import lightning_dlrover.report.page\n"
    )
    done = python(dlrover, code)
    assert done.returncode == 0, done.stderr


def test_script_trains_without_etcd_torchx_and_torchrec_and_gets_a_recommendation(dlrover: Dlrover) -> None:
    script = Path(__file__).with_name("tiny_script.py")
    arguments = [script.name, "--steps", "150", "--step-s", "0.01", "--window-s", "0.2"]
    run = f"import runpy\nsys.argv = {arguments}\nrunpy.run_path({str(script)!r}, None, '__main__')\n"
    code = WITHOUT.format(names={"torchx", "torchrec", "fbgemm_gpu"}) + run
    done = python(dlrover, code, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert "trained for 150 steps" in done.stdout
    assert "DLRover: " in done.stdout + done.stderr
    assert "`dlrover run` resizes a job while it trains" in done.stdout + done.stderr
    dlrover.assert_all_ended()
