"""Real processes through TorchX's local scheduler."""

from __future__ import annotations

import ast
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torchx.specs import AppDef, Role

from lightning_dlrover.components import elastic
from lightning_dlrover.components.control.post_mortem import examine
from lightning_dlrover.components.targets.local import LocalRunner, LocalTarget
from lightning_dlrover.components.targets.machine import MemoryGroups, NoMemoryGroupsError
from lightning_dlrover.components.targets.target import NodeSize, NodeSpec, NotTakenError
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.waiting import eventually

MakeTarget = Callable[..., LocalTarget]

STUBBORN = """
import os, signal, subprocess, sys, time
if os.environ["DLROVER_NODE"] != "node3":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"pids {os.getpid()} {helper.pid} {os.getppid()}", flush=True)
while True:
    time.sleep(1)
"""
"""A worker that SIGTERM does not end, except that of the third node."""


def is_alive(pid: int) -> bool:
    try:
        return str(psutil.Process(pid).status()) != "zombie"
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def make_target(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[MakeTarget]:
    made: list[LocalTarget] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def make(source: str, *arguments: str, **options: object) -> LocalTarget:
        script = tmp_path / "script.py"
        script.write_text(source)
        spec = NodeSpec(str(script), arguments, etcd.endpoint, run_id, "/dlrover", 1, 2, environment={"LEVEL": "5$ ${app_id}"})
        made.append(LocalTarget(spec, tmp_path / "logs", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for target in made:
        target.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def output(target: LocalTarget, handle: str) -> str:
    return "".join(file.read_text() for file in target.logs(handle))


def pids(target: LocalTarget, handle: str) -> list[int]:
    eventually(lambda: "pids" in output(target, handle), "the worker to start", 60)
    line = next(line for line in output(target, handle).splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


@pytest.mark.usefixtures("warm_nodes")
def test_node_runs_the_script_with_its_arguments_and_variables(make_target: MakeTarget) -> None:
    target = make_target(
        "import os, sys; print(sys.argv[1:], os.environ['LEVEL'])", "--lr", "0.1", "--", "-x", "a b", "${app_id}", "a$$b"
    )
    handle = target.start("node1")
    eventually(lambda: target.status(handle) not in ("pending", "running"), "the node to end", 60)
    assert target.status(handle) == "succeeded"
    assert "['--lr', '0.1', '--', '-x', 'a b', '${app_id}', 'a$$b'] 5$ ${app_id}" in output(target, handle)


@pytest.mark.usefixtures("warm_nodes")
def test_a_failing_script_makes_a_failed_node(make_target: MakeTarget) -> None:
    target = make_target("raise ValueError('bad')")
    handle = target.start("node1")
    eventually(lambda: target.status(handle) not in ("pending", "running"), "the node to end", 60)
    assert target.status(handle) == "failed"
    assert "ValueError: bad" in output(target, handle)


def replace_agent(monkeypatch: pytest.MonkeyPatch, folder: Path, shell: str) -> None:
    """Let nodes run a few lines of shell, where a test is about processes and not about agents."""
    agent = folder / "agent"
    agent.write_text(f"#!/bin/bash\n{shell}\n")
    agent.chmod(0o755)
    monkeypatch.setattr(elastic, "_python", lambda image: str(agent))


def test_no_folder_of_a_failed_or_cancelled_node_holds_a_file_that_names_a_success(
    make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_agent(monkeypatch, tmp_path, "[ -e first ] && exec sleep 60; touch first; exit 3")
    monkeypatch.chdir(tmp_path)
    target = make_target("")
    failed = target.start("node1")
    eventually(lambda: target.status(failed) == "failed", "the node to fail", 60)
    target.cancel([target.start("node2")])
    target.close()
    assert len(list((tmp_path / "logs").glob("*/node*"))) == 2
    assert list((tmp_path / "logs").rglob("SUCCESS")) == []


@pytest.mark.parametrize("code, status", [(0, "succeeded"), (3, "failed")])
def test_node_outlives_the_files_torchx_cannot_write(
    make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: str
) -> None:
    """A full disk leaves an agent's error file empty, and no room for TorchX's own."""
    end = tmp_path / "end"
    replace_agent(monkeypatch, tmp_path, f"until [ -e {end} ]; do sleep 0.01; done\nexit {code}")
    target = make_target("")
    handle = target.start("node1")
    [log, *_] = target.logs(handle)
    log.with_name("error.json").touch()
    (log.parents[2] / "SUCCESS").mkdir()
    assert target.status(handle) == "running"
    end.touch()
    eventually(lambda: target.status(handle) not in ("pending", "running"), "the node to end", 60)
    assert target.status(handle) == status
    target.cancel([handle])


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_target_leaves_the_handlers_of_signals_as_they_are(make_target: MakeTarget, handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    make_target("")
    assert signal.getsignal(signal.SIGINT) is handler


def test_more_than_a_hundred_nodes_may_run(tmp_path: Path) -> None:
    runner = LocalRunner(tmp_path)
    try:
        app = AppDef("node", [Role("worker", image=str(tmp_path), entrypoint="/bin/sleep", args=["600"])])
        handles = [runner.submit(app) for _ in range(101)]
        assert runner.status(handles[0]) == runner.status(handles[100]) == "running"
    finally:
        runner.close()


@pytest.mark.usefixtures("warm_nodes")
def test_nodes_end_with_all_their_processes_and_no_others(make_target: MakeTarget) -> None:
    target = make_target(STUBBORN, grace_s=1.0)
    handles = [target.start(f"node{number}") for number in (1, 2, 3)]
    first, second, third = (pids(target, handle) for handle in handles)

    def lose_agent(number: int) -> None:
        _, _, agent = (first, second, third)[number]
        psutil.Process(agent).kill()
        eventually(lambda: target.status(handles[number]) == "failed", "the node to fail", 60)

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as unrelated:
        try:
            lose_agent(2)
            eventually(lambda: not is_alive(third[0]), "the end of the worker, which was asked to", 60)
            assert all(is_alive(pid) for pid in [*first, *second, unrelated.pid])
            target.cancel([handles[0]])
            assert not any(is_alive(pid) for pid in first)
            assert all(is_alive(pid) for pid in [*second, unrelated.pid])
            assert target.status(handles[0]) not in ("pending", "running")
            lose_agent(1)
            assert all(is_alive(pid) for pid in second[:2])
            target.close()
            assert not any(is_alive(pid) for pid in second)
            assert is_alive(unrelated.pid)
        finally:
            unrelated.kill()


def test_in_a_hurry_there_is_no_grace(make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_agent(monkeypatch, tmp_path, f"exec {sys.executable} {tmp_path}/script.py")
    hurry = threading.Event()
    target = make_target(STUBBORN, grace_s=3600.0, hurry=hurry)
    handle = target.start("node1")
    started = pids(target, handle)[:2]
    threading.Timer(0.2, hurry.set).start()
    target.cancel([handle])
    assert not any(is_alive(pid) for pid in started)


def test_a_node_ends_with_the_process_that_started_it(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STUBBORN)
    source = f"""
import time
from pathlib import Path
from lightning_dlrover.components.targets.local import LocalTarget
from lightning_dlrover.components.targets.target import NodeSpec
target = LocalTarget(NodeSpec({str(script)!r}, (), {etcd.endpoint!r}, {run_id!r}, "/dlrover", 1, 1), Path({str(tmp_path)!r}))
handle = target.start("node3")
while not any("pids" in file.read_text() for file in target.logs(handle)):
    time.sleep(0.05)
print("".join(file.read_text() for file in target.logs(handle)), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        line = next(line for line in controller.stdout if line.startswith("pids"))
        worker, helper, agent = (int(word) for word in line.split()[1:])
        controller.kill()
    try:
        eventually(lambda: not is_alive(agent) and not is_alive(worker), "the agent and its worker to end", 60)
    finally:
        psutil.Process(helper).kill()  # the script's own child, in its own session, which the target must not end


CONFINED = """
import os, subprocess, sys, time
look = "import os; print([sorted(os.sched_getaffinity(0)), *map(os.environ.get, ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'))])"
exec(look)
subprocess.run([sys.executable, "-c", look])
print("pids", os.getpid(), os.getppid(), flush=True)
time.sleep(600)
"""


def share(target: LocalTarget, handle: str) -> tuple[list[int], str | None, str]:
    """Cores, devices and threads of a node that runs `CONFINED`: those of its worker, which its children and agent share."""
    _, agent = pids(target, handle)
    own, of_child = (ast.literal_eval(line) for line in output(target, handle).splitlines() if line.startswith("["))
    assert own == of_child
    assert {*own[0]} == os.sched_getaffinity(agent)
    return own[0], own[1], own[2]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def two_cores() -> Iterator[tuple[int, int]]:
    """Reduce this process to two cores for the test."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    one, other, *_ = sorted(before)
    os.sched_setaffinity(0, {one, other})
    yield one, other
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("warm_nodes")
def test_each_node_keeps_its_own_cores_and_gpus_until_it_is_gone(
    two_cores: tuple[int, int], make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, other = two_cores
    target, size = make_target(CONFINED, gpus=1), NodeSize(1)
    first, second, third = (target.start(f"node{number}", size) for number in (1, 2, 3))
    assert share(target, first) == ([one], "GPU-a", "1")
    assert share(target, second) == ([other], "GPU-b", "1")
    assert share(target, third) == ([one], "GPU-c", "1")
    assert warnings_in(caplog) == [f"too few cores are free for node3: it shares core {one} with other nodes until some are"]
    with pytest.raises(NotTakenError, match="node4 needs 1 GPUs, and 0 of 3 are free; node1, node2, node3 have the others"):
        target.start("node4", size)

    worker, agent = pids(target, second)
    psutil.Process(worker).suspend()  # a suspended worker does not end on request
    psutil.Process(agent).kill()
    eventually(lambda: target.status(second) == "failed", "the node to fail", 60)
    with pytest.raises(NotTakenError, match="0 of 3 are free"):
        target.start("node5", size)
    assert {os.sched_getaffinity(pid).pop() for pid in pids(target, third)} == {one}
    psutil.Process(worker).resume()
    eventually(lambda: not is_alive(worker), "the worker to end", 60)
    assert [app.node for app in target.apps()] == ["node1", "node3"]
    # The third node no longer needs to share.
    threads = [int(thread) for pid in pids(target, third) for thread in os.listdir(f"/proc/{pid}/task")]
    assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(other,)}
    assert {os.sched_getaffinity(pid).pop() for pid in pids(target, first)} == {one}
    assert os.sched_getaffinity(0) == {one, other}


GREEDY = """
import sys, time
held = bytearray(int(sys.argv[1]) << 20)
print("pids 0", flush=True)
time.sleep(600)
"""


def test_node_above_its_memory_is_ended_with_the_reason(make_target: MakeTarget, caplog: pytest.LogCaptureFixture) -> None:
    try:
        MemoryGroups().close()
    except NoMemoryGroupsError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    target = make_target(GREEDY, "900")
    small, large = target.start("node1", NodeSize(0, 700)), target.start("node2", NodeSize(0, 2000))
    target._agents[large].kill()
    eventually(lambda: target.status(small) == "failed", "the node to fail", 60)
    assert target.ran_out_of_memory(small)
    found = examine(output(target, small))
    assert (found.error, found.cause) == ("", "out of memory (limit 700 MiB)")
    assert target.status(large) == "failed"
    assert not target.ran_out_of_memory(large)
    assert "out of memory" not in output(target, large)
    target.close()
    assert warnings_in(caplog) == []  # no warning, for example about a control group that remains
