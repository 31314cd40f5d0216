"""Agents with several workers each. A worker that fails ends its whole group, and the next group resumes from its state."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, WorkerRecord, decode
from lightning_dlrover.rdzv.transport.transfer import ROOT
from tests.e2e.grouped_script import EPOCHS, NUM_STEPS
from tests.e2e.toy_job import Place
from tests.support.torchrun_agent import Agent, StartAgent
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_script
from tests.support.warm_tree import run_program

SCRIPT = Path(__file__).with_name("grouped_script.py")
LOOP = SCRIPT.with_name("tiny_loop.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def options_of(script: Path, folder: Path) -> list[str]:
    """Arguments with which a script takes 60 steps, slow ones from the 25th on, until a file `fast` exists in the folder."""
    if script == SCRIPT:
        return [str(folder)]
    return [f"--steps={NUM_STEPS}", "--slow-from=24", f"--fast={folder / 'fast'}", f"--records={folder / 'trace'}"]


def lines_of(folder: Path, key: str) -> list[dict[str, Any]]:
    trace = folder / "trace"
    written = trace.read_text().splitlines(keepends=True) if trace.exists() else []
    return [line for text in written if text.endswith("\n") and key in (line := json.loads(text))]


@pytest.fixture
def start_group(fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[StartAgent]:
    """Start `torchrun --nproc-per-node=2` with a script."""
    agents: list[Agent] = []

    def start(nnodes: str, script: Path) -> Agent:
        log_path = tmp_path / f"agent{len(agents)}.log"
        arguments = [
            *("-m", "torch.distributed.run"),
            *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"),
            *(f"--nnodes={nnodes}", "--nproc-per-node=2", "--max-restarts=3", str(script), *options_of(script, tmp_path)),
        ]
        agents.append(Agent(WarmProcess(run_program, arguments, ENVIRONMENT, log_path), log_path))
        return agents[-1]

    yield start
    for agent in agents:
        if agent.process.poll() is None:
            agent.kill_with_workers()


@pytest.fixture(scope="module")
def undisturbed(fork_server: None, etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed job of one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "fast").touch()
    place = Place(etcd.endpoint, f"run-{uuid.uuid4().hex[:12]}", "only", str(folder))
    alone = WarmProcess(run_script, [str(SCRIPT), str(folder)], {**ENVIRONMENT, **place.environment}, folder / "log")
    assert alone.wait(120) == 0, (folder / "log").read_text()
    return folder


def at_step(folder: Path, step: int, num_agents: int) -> dict[str, list[dict[str, Any]]]:
    """Newest line of each worker by agent, once the job has reached a step and the workers of all its agents train."""

    def found() -> dict[str, list[dict[str, Any]]] | None:
        newest = {line["pid"]: line for line in lines_of(folder, "step")}
        if max((line["step"] for line in newest.values()), default=0) < step:
            return None
        by_agent: dict[str, list[dict[str, Any]]] = {}
        for line in newest.values():
            by_agent.setdefault(line["agent"], []).append(line)
        return by_agent if [len(group) for group in by_agent.values()] == [2] * num_agents else None

    return eventually(found, f"{num_agents} agents' workers train at step {step}", 90)


def must_equal(folder: Path, undisturbed: Path) -> None:
    """Assert that weights and logged means of epochs equal those of an undisturbed job."""
    weights, expected = (torch.load(each / "weights", weights_only=True) for each in (folder, undisturbed))
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    means = {line["epoch"]: line["mean"] for line in lines_of(undisturbed, "epoch")}
    assert set(means) == set(range(EPOCHS))
    for epoch, mean in means.items():
        found = {line["mean"] for line in lines_of(folder, "epoch") if line["epoch"] == epoch}
        assert sorted(found) == [pytest.approx(mean, rel=1e-3)]


def kept(client: EtcdClient, keys: Keys) -> list[int]:
    events = [decode(EventRecord, kv.value, kv.key) for kv in client.get_prefix(keys.events)[1]]
    return [event.data["global_step"] for event in events if event.kind == "kept"]


def own_folder(pid: int) -> Path:
    """Folder in which a worker's agent keeps the state of workers that leave."""
    folder = Path(psutil.Process(pid).environ()[variables.LEFT_STATE])
    assert folder.is_dir()
    assert folder.parent == ROOT
    return folder


def kill_and_let_go_on(pids: list[int], client: EtcdClient, keys: Keys, folder: Path) -> list[int]:
    """Kill a worker of each group; return the steps whose state was kept. The next groups are fast.

    No state is kept if the last survivor of the groups has handed over to workers of the next ones.
    """
    agents = [psutil.Process(pid).parent() for pid in pids]
    former = {child for agent in agents if agent is not None for child in agent.children()}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # If one agent's survivor leaves earlier than the other's, the job goes on with the latter, which alone keeps the state.
    pids_before = {worker.pid for worker in former}

    def have_others() -> bool:
        return bool(kept(client, keys)) or any(line["pid"] not in pids_before for line in lines_of(folder, "step"))

    eventually(lambda: have_others() and not any(worker.is_running() for worker in former), "the groups end", 60)
    (folder / "fast").touch()
    return kept(client, keys)


def test_next_group_goes_on_at_the_step_reached(
    start_group: StartAgent, undisturbed: Path, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    agent = start_group("1", SCRIPT)
    (group,) = at_step(tmp_path, 25, 1).values()
    killed, neighbour = group
    mine = own_folder(killed["pid"])
    steps = kill_and_let_go_on([killed["pid"]], client, keys, tmp_path)
    assert agent.wait(120) == 0, agent.output
    lines = lines_of(tmp_path, "step")
    first = [line["step"] for line in lines if line["pid"] == neighbour["pid"]]
    second = [line["step"] for line in lines if line["pid"] not in (killed["pid"], neighbour["pid"])]
    assert kept(client, keys) == steps == [first[-1]], agent.output
    assert sorted(second) == [step for step in range(first[-1] + 1, NUM_STEPS + 1) for _ in range(2)]
    must_equal(tmp_path, undisturbed)
    assert not mine.exists()


@pytest.mark.parametrize("script", [LOOP, pytest.param(SCRIPT, marks=pytest.mark.on_demand)], ids=["loop", "lightning"])
def test_both_agents_groups_go_on_at_the_step_reached(
    start_group: StartAgent, client: EtcdClient, keys: Keys, tmp_path: Path, request: pytest.FixtureRequest, script: Path
) -> None:
    agents = [start_group("1:2", script) for _ in range(2)]
    groups = list(at_step(tmp_path, 25, 2).values())
    killed = [group[0]["pid"] for group in groups]
    mine = [own_folder(pid) for pid in killed]
    steps = kill_and_let_go_on(killed, client, keys, tmp_path)
    for agent in agents:
        assert agent.wait(150) == 0, agent.output
    lines = lines_of(tmp_path, "step")
    former = {line["pid"] for group in groups for line in group}
    last = max(line["step"] for line in lines if line["pid"] in former)
    assert kept(client, keys) == steps in ([], [last], [last, last]), agents[0].output + agents[1].output
    later = sorted({line["step"] for line in lines if line["pid"] not in former})
    assert later == list(range(last + 1 if steps else min(later), NUM_STEPS + 1))
    assert later[0] <= last + 1
    if script == LOOP:
        assert all(line["state"][0] == line["step"] for line in lines)
    else:
        must_equal(tmp_path, request.getfixturevalue("undisturbed"))
    assert not any(folder.exists() for folder in mine)


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_group_without_the_state_waits_for_the_agent_that_keeps_it(
    start_group: StartAgent, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    agents = [start_group("1:2", LOOP) for _ in range(2)]
    groups = [[line["pid"] for line in group] for group in at_step(tmp_path, 25, 2).values()]
    folders, parents = zip(*[(own_folder(pid), psutil.Process(pid).parent()) for pid, _ in groups], strict=True)
    for pid, _ in groups:
        os.kill(pid, signal.SIGKILL)

    suspended: list[psutil.Process] = []

    def that_keeps() -> psutil.Process | None:
        for folder, group, parent in zip(folders, groups, parents, strict=True):
            if all(map(has_ended, group)):
                if (folder / "state").exists():
                    return parent
                if not suspended:  # else its next workers might take over from the other group's survivor
                    suspended.append(parent)
                    parent.suspend()
        return None

    keeper = eventually(that_keeps, "a group ends whose agent keeps the state", 60, 0.002)
    keeper.suspend()  # its next workers come late
    for parent in suspended:
        parent.resume()
    (other,) = (n for n in range(2) if parents[n] != keeper)
    eventually(lambda: all(map(has_ended, groups[other])), "the other group ends", 60)
    (folders[other] / "state").unlink(missing_ok=True)
    (tmp_path / "fast").touch()
    former = {pid for group in groups for pid in group}

    def have_come() -> bool:
        workers = [decode(WorkerRecord, kv.value, kv.key) for kv in client.get_prefix(keys.workers)[1]]
        return len([worker for worker in workers if worker.pid not in former]) == 2

    eventually(have_come, "the other agent's next workers come", 60)
    time.sleep(1.0)
    keeper.resume()
    for agent in agents:
        assert agent.wait(150) == 0, agent.output
    lines = lines_of(tmp_path, "step")
    last = max(line["step"] for line in lines if line["pid"] in former)
    assert sorted({line["step"] for line in lines if line["pid"] not in former}) == list(range(last + 1, NUM_STEPS + 1))
    assert all(line["state"][0] == line["step"] for line in lines)
