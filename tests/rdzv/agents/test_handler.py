"""The `etcd-v3` backend under stock torchrun, with real processes."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faulty_etcd import EtcdProxy
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from lightning_dlrover import variables
from lightning_dlrover._version import __version__
from lightning_dlrover.rdzv.agents.rendezvous import EtcdRendezvousHandler, create_backend
from lightning_dlrover.rdzv.etcd import health
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import Caller
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.folders import name_of_job, remove_snapshots, short, users_folder
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    AgentRound,
    ControllerRecord,
    JobRecord,
    Keys,
    NodesRecord,
    WorkerRecord,
    decode,
    encode,
    worker_name_of,
)
from lightning_dlrover.rdzv.transport import transfer
from tests.rdzv.present import present
from tests.support.elastic_agents import ElasticAgents, Node
from tests.support.full_etcd import fill, full, make_room, small_etcd
from tests.support.torchrun_agent import Agent, StartAgent
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_code

MakeHandler = Callable[..., EtcdRendezvousHandler]

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"DONE {dist.get_rank()}/{total.item():g}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def _started(agent: Agent, line: str) -> None:
    eventually(lambda: line in agent.output, f"{line!r} was printed", 60)


# -- plain scripts: TorchElastic's contract


def test_a_plain_script_runs_on_two_nodes_and_leaves_one_record(
    start_agent: StartAgent, client: EtcdClient, keys: Keys
) -> None:
    agents = [start_agent(SUM, nnodes="2") for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output + agents[1].output
    assert sorted(line for agent in agents for line in agent.lines("DONE")) == ["DONE 0/2", "DONE 1/2"]
    _, left = client.get_prefix(keys.root)
    assert [kv.key for kv in left] == [keys.agent_round]


def test_a_wrong_endpoint_ends_torchrun_with_an_error_that_names_it(start_agent: StartAgent) -> None:
    agent = start_agent("", endpoint="127.0.0.1:1", conf="etcd_timeout=1")
    assert agent.wait(60) != 0
    assert "no etcd v3 answered at 127.0.0.1:1 within 1 s" in agent.output


def test_a_finished_run_cannot_be_joined_again(start_agent: StartAgent, keys: Keys) -> None:
    assert start_agent("").wait() == 0
    again = start_agent("print('STARTED')")
    assert again.wait() == 1
    assert not again.lines("STARTED")
    assert "Traceback" not in again.output
    [line] = [line for line in again.output.splitlines() if keys.run_id in line]
    assert line.endswith("for a new job use another --rdzv-id")


def test_spare_node_of_a_successful_run_ends_with_0(
    start_agent: StartAgent, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    script = f"import os, time\nprint('STARTED', flush=True)\nwhile not os.path.exists({str(end)!r}): time.sleep(0.05)"
    running = start_agent(script)
    _started(running, "STARTED")
    spare = start_agent(script)
    eventually(lambda: len(client.get_prefix(keys.agents)[1]) == 2, "the spare has registered")
    end.touch()
    assert running.wait() == 0, running.output
    assert spare.wait() == 0, spare.output
    assert not spare.lines("STARTED")
    assert "Traceback" not in spare.output
    assert "was finished by other nodes before this one was needed" in spare.output


def test_a_failed_run_can_be_started_again(start_agent: StartAgent) -> None:
    assert start_agent("raise SystemExit(3)").wait() != 0
    assert start_agent("").wait() == 0


def test_an_agent_ended_by_a_signal_is_gone_at_once(start_agent: StartAgent, client: EtcdClient, keys: Keys) -> None:
    agent = start_agent("import time; print('STARTED', flush=True); time.sleep(60)", conf="lease_ttl=60")
    _started(agent, "STARTED")
    assert len(client.get_prefix(keys.agents)[1]) == 1
    agent.process.send_signal(signal.SIGTERM)
    agent.wait(40)
    assert client.get_prefix(keys.agents)[1] == []


def test_worker_inherits_the_address_of_the_jobs_state(
    start_agent: StartAgent, etcd: EmbeddedEtcd, keys: Keys, tmp_path: Any
) -> None:
    (tmp_path / "pw").write_text("hush\n")
    agent = start_agent(
        "import os\nfor k, v in sorted(os.environ.items()):\n    print(f'ENV {k}={v}') if k[:8] == 'DLROVER_' else 0",
        nnodes="1:3",
        conf="last_call_timeout=0,lease_ttl=7,wait_timeout=90,etcd_timeout=6",
        env={"DLROVER_USER": "left from an outer job"},
    )
    assert agent.wait() == 0, agent.output
    told = dict(line.removeprefix("ENV ").split("=", 1) for line in agent.lines("ENV"))
    assert told.pop("DLROVER_AGENT_ID")
    assert told.pop("DLROVER_AGENT_PID") == str(agent.process.pid)
    for name in ("DLROVER_HISTORY", "DLROVER_SHARED_DATA"):  # set by the tests themselves, and by who runs them
        told.pop(name, None)
    assert told == {
        "DLROVER_ENDPOINT": etcd.endpoint,
        "DLROVER_PREFIX": "/dlrover",
        "DLROVER_RUN_ID": keys.run_id,
        "DLROVER_MIN_NODES": "1",
        "DLROVER_MAX_NODES": "3",
        "DLROVER_HISTORY_TTL_S": "604800",
        "DLROVER_LEASE_TTL_S": "7",
        "DLROVER_WAIT_TIMEOUT_S": "90",
        "DLROVER_FORM_TIMEOUT_S": "120",
        "DLROVER_START_TIMEOUT_S": "60",
        "DLROVER_REGROUP_TIMEOUT_S": "120",
        "DLROVER_COLLECTIVE_TIMEOUT_S": "1800",
        "DLROVER_ETCD_TIMEOUT_S": "6",
    }


# -- live jobs

LIVE = """
import os, sys, time
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.etcd.types import Put, absent
from lightning_dlrover.rdzv.job.records import JobRecord, Keys, WorkerRecord, encode
keys = Keys(os.environ["DLROVER_RUN_ID"], os.environ["DLROVER_PREFIX"])
agent, rank, world = os.environ["DLROVER_AGENT_ID"], os.environ["RANK"], os.environ["WORLD_SIZE"]
client = EtcdClient(EtcdConfig(os.environ["DLROVER_ENDPOINT"]))
client.txn([absent(keys.job)], [Put(keys.job, encode(JobRecord("training", True, 1, 4, "test")))])
worker = f"{agent}-{os.getpid()}"
record = WorkerRecord(worker, agent, "host", os.getpid(), int(os.environ["LOCAL_RANK"]), "127.0.0.1", 1, "ready")
lease = client.lease(60).keep_alive()
client.put(keys.workers + worker, encode(record), lease)
print(f"STARTED {rank}/{world} {os.getpid()}", flush=True)
while client.get(keys.root + f"end/{rank}") is None:
    time.sleep(0.05)
client.close()
print("DONE", flush=True)
"""


def test_nodes_of_a_live_job_come_and_go_without_restarts(start_agent: StartAgent, client: EtcdClient, keys: Keys) -> None:
    first = start_agent(LIVE, nnodes="1:3", nproc=2)
    _started(first, "STARTED 1/2")
    second = start_agent(LIVE, nnodes="1:3")
    _started(second, "STARTED 2/3")  # ranks are correct when a node joins
    third = start_agent(LIVE, nnodes="1:3")
    _started(third, "STARTED 3/4")
    for rank in range(2):
        client.put(keys.root + f"end/{rank}", b"")
    assert first.wait(15) == 0, first.output  # its end neither waits for the others nor restarts them
    client.put(keys.root + "end/3", b"")
    assert third.wait(15) == 0, third.output
    client.put(keys.root + "end/2", b"")
    assert second.wait(15) == 0, second.output
    assert [len(agent.lines("STARTED")) for agent in (first, second, third)] == [2, 1, 1]


def test_garbage_in_records_of_a_running_job_does_not_end_its_agents(
    start_agent: StartAgent, client: EtcdClient, keys: Keys
) -> None:
    agent = start_agent(LIVE, nnodes="1:2")
    _started(agent, "STARTED 0/1")
    for place in ("workers/stranger", "shared/round", "shared/plan", "agents/stranger", "agent_round", "shared/job"):
        client.put(keys.live + place, b"{]")
        if place in ("agents/stranger", "agent_round", "shared/job"):
            told = re.compile(f"ignored a record: .*{keys.live}{place}")
            eventually(lambda told=told: told.search(agent.output), f"the agent has seen {place}", 10)  # type: ignore[misc]
    client.put(keys.root + "end/0", b"")
    assert agent.wait(15) == 0, agent.output
    assert agent.lines("DONE")


def test_first_agents_of_a_live_job_exit_without_waiting(start_agent: StartAgent, client: EtcdClient, keys: Keys) -> None:
    agents = [start_agent(LIVE, nnodes="2") for _ in range(2)]
    for agent in agents:
        eventually(lambda agent=agent: agent.lines("STARTED"), "both started", 60)  # type: ignore[misc]
    first, second = sorted(agents, key=lambda agent: agent.lines("STARTED")[0])
    client.put(keys.root + "end/0", b"")
    assert first.wait(15) == 0, first.output
    client.put(keys.root + "end/1", b"")
    assert second.wait(15) == 0, second.output


def test_killed_live_worker_is_replaced_without_touching_others(
    start_agent: StartAgent, client: EtcdClient, keys: Keys
) -> None:
    first = start_agent(LIVE, nnodes="1:2")
    _started(first, "STARTED 0/1")
    second = start_agent(LIVE, nnodes="1:2", max_restarts=1)
    _started(second, "STARTED 1/2")
    pid = int(second.lines("STARTED")[0].split()[-1])
    dead = next(kv.key for kv in client.get_prefix(keys.workers)[1] if f"-{pid}" in kv.key)
    os.kill(pid, signal.SIGKILL)
    # Well before its lease of 60 s expires.
    eventually(lambda: client.get(dead) is None, "the dead worker's record is gone", 10)
    eventually(lambda: len(second.lines("STARTED")) == 2, "a new worker has started", 60)
    assert len(first.lines("STARTED")) == 1
    for rank in range(2):
        client.put(keys.root + f"end/{rank}", b"")
    assert [first.wait(15), second.wait(15)] == [0, 0]


def test_late_node_starts_beside_workers_that_still_import(start_agent: StartAgent, tmp_path: Any) -> None:
    enough = tmp_path / "enough"
    script = f"import os, time\nprint('STARTED', flush=True)\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.05)"
    first = start_agent(script, nnodes="1:2", conf="live=1,last_call_timeout=60")
    _started(first, "STARTED")
    second = start_agent(script, nnodes="1:2", conf="live=1,last_call_timeout=60")
    _started(second, "STARTED")
    enough.touch()
    assert [first.wait(), second.wait()] == [0, 0], first.output + second.output
    assert [len(agent.lines("STARTED")) for agent in (first, second)] == [1, 1]


# -- the handler alone


def test_a_node_beyond_the_maximum_is_turned_away_with_a_reason(make_handler: MakeHandler) -> None:
    inside = make_handler(1, 1)
    inside.next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match="maximum of 1 nodes"):
        make_handler(1, 1, join_timeout="0.3").next_rendezvous()
    assert inside.num_nodes_waiting() == 0


def test_dropped_handler_ends_its_threads(etcd: EmbeddedEtcd, run_id: str) -> None:
    before = set(threading.enumerate())
    params = RendezvousParameters("etcd-v3", etcd.endpoint, run_id, 1, 1, last_call_timeout="0")
    handler = create_backend()(params)
    store = handler.next_rendezvous().store
    assert set(threading.enumerate()) - before
    del handler
    gc.collect()
    eventually(lambda: not set(threading.enumerate()) - before, "all of its threads have ended", 15)
    store.set("key", "value")  # a process group may use this key
    assert store.get("key") == b"value"
    store.close()  # type: ignore[attr-defined]


def test_too_few_nodes_end_in_a_timeout_with_their_number(make_handler: MakeHandler) -> None:
    with pytest.raises(RendezvousTimeoutError, match="only 1 of at least 2"):
        make_handler(2, 2, join_timeout="0.3").next_rendezvous()


def test_node_waits_while_a_controller_is_there(make_handler: MakeHandler, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.controller, encode(ControllerRecord("host", 1, "local")))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_handler(2, 2, join_timeout="0.3").next_rendezvous)
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        client.delete(keys.controller)
        with pytest.raises(RendezvousTimeoutError, match=r"only 1 of at least 2.*join_timeout=SECONDS"):
            waiting.result(10)


@pytest.mark.parametrize("end", ["none", "drained", "failed", "cancelled"])
def test_agent_of_a_job_that_is_over_removes_what_its_killed_worker_left(
    make_handler: MakeHandler, client: EtcdClient, keys: Keys, end: str
) -> None:
    job = JobRecord("training", True, 1, 1, __version__)
    client.put(keys.job, encode(job))
    agent = make_handler(1, 1)
    agent.next_rendezvous()
    left = users_folder() / f"{short(name_of_job(keys))}-life"
    left.mkdir(mode=0o700, parents=True)
    users_folder().chmod(0o700)
    try:
        if end == "failed":
            client.put(keys.job, encode(dataclasses.replace(job, phase="failed")))
        if end in ("drained", "cancelled"):
            client.put(keys.nodes, encode(NodesRecord("local", "", stop="cancelled by a user" if end == "cancelled" else "")))
        agent.shutdown()
        assert left.exists() == (end in ("none", "drained"))
    finally:
        remove_snapshots(keys)


def test_every_round_has_its_own_store_and_port(make_handler: MakeHandler, client: EtcdClient, keys: Keys) -> None:
    handler = make_handler()
    ports = set()
    for number in range(1, 5):
        info = handler.next_rendezvous()
        assert not info.store.check(["k"])
        info.store.set("k", str(number))
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info is not None
        ports.add(info.bootstrap_store_info.master_port)
        assert client.get(f"{keys.store}{number - 2}/key/k") is None
    assert len(ports) == 4
    assert not handler.use_agent_store
    handler.shutdown()
    assert client.get_prefix(keys.store)[1] == []


def test_agent_that_registers_while_the_last_one_tidies_up_keeps_what_it_has_written(
    make_handler: MakeHandler, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = make_handler()
    handler.next_rendezvous().store.set("k", "1")
    call = Caller.call

    def late_call(caller: Caller, what: str, *arguments: Any, **options: Any) -> Any:
        if f"{keys.store!r}" in what and ("delete" in what or "transaction" in what):
            monkeypatch.undo()
            client.put(f"{keys.agents}late", encode(AgentRecord("late", "h", 1, 1, "waiting")))
            client.put(f"{keys.store}1/key/torchelastic%2Fassigned_ranks%2F0", b"1")
        return call(caller, what, *arguments, **options)

    monkeypatch.setattr(Caller, "call", late_call)
    handler.shutdown()
    assert Caller.call is call  # it did tidy up
    assert [entry.value for entry in client.get_prefix(keys.store)[1] if "assigned_ranks" in entry.key] == [b"1"]
    assert client.get(keys.agent_round) is not None


def test_ranks_of_a_round_are_distinct_and_all_agree_on_the_master(make_handler: MakeHandler) -> None:
    handlers = [make_handler(3, 3) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    assert len({(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}) == 1


def test_an_agent_taken_for_dead_registers_again(make_handler: MakeHandler, client: EtcdClient, keys: Keys) -> None:
    handler = make_handler()
    handler.next_rendezvous()
    assert handler._own.lease is not None
    client.leases.revoke(handler._own.lease.id)

    def is_back() -> bool:
        handler.num_nodes_waiting()
        return len(client.get_prefix(keys.agents)[1]) == 1 and not handler._own.lease.lost.is_set()  # type: ignore[union-attr]

    eventually(is_back, "the agent is registered again", 10)


def test_closed_run_admits_no_agent_and_wakes_waiting_ones(make_handler: MakeHandler) -> None:
    waiting, other = make_handler(2, 2), make_handler(2, 2)
    assert not other.is_closed()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(waiting.next_rendezvous)
        other.set_closed()
        with pytest.raises(RendezvousClosedError, match="another --rdzv-id"):
            result.result(10)
    assert other.is_closed()
    with pytest.raises(RendezvousClosedError):
        other.next_rendezvous()


@pytest.mark.parametrize(("phase", "text"), [("finished", "has finished"), ("failed", "has failed .*bad luck")])
def test_a_job_that_is_over_cannot_be_joined(
    phase: str, text: str, make_handler: MakeHandler, client: EtcdClient, keys: Keys
) -> None:
    job = JobRecord(phase, True, 1, 1, "test", message="bad luck")  # type: ignore[arg-type]
    client.put(keys.job, encode(job))
    with pytest.raises(RendezvousClosedError, match=text):
        make_handler().next_rendezvous()


@pytest.mark.parametrize("name", ["job", "agent_round"])
def test_a_corrupt_record_is_named_with_its_run_and_key(
    name: str, make_handler: MakeHandler, client: EtcdClient, keys: Keys
) -> None:
    key = getattr(keys, name)
    client.put(key, b"not a record")
    with pytest.raises(RendezvousStateError, match=f"{keys.run_id}.*{key}"):
        make_handler().next_rendezvous()


def test_only_the_agents_own_dead_workers_are_deleted(make_handler: MakeHandler, client: EtcdClient, keys: Keys) -> None:
    handler = make_handler()
    handler.next_rendezvous()
    own = decode(AgentRecord, client.get_prefix(keys.agents)[1][0].value, "").agent_id
    here = worker_name_of(socket.gethostname())
    for worker, agent in ((f"{here}mine", own), (f"{here}foreign", "another-agent")):
        record = WorkerRecord(worker, agent, "host", 1, 0, "127.0.0.1", 1, "ready")
        client.put(keys.workers + worker, encode(record))
    handler.next_rendezvous()
    assert [kv.key for kv in client.get_prefix(keys.workers)[1]] == [f"{keys.workers}{here}foreign"]


def test_agent_of_several_workers_has_a_folder_in_memory_until_it_ends(
    make_handler: MakeHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = '{"role": "default", "rank": 0, "local_world_size": %d}'
    monkeypatch.setenv(variables.LEFT_STATE, "/of/an/outer/job")
    single = make_handler()
    single.next_rendezvous().store.set("torchelastic/role_info/0", role % 1)
    assert variables.LEFT_STATE not in os.environ
    single.shutdown()
    # Leave a state as a killed agent would.
    orphan = transfer.ROOT / f"{transfer.PREFIX}of-nobody"
    orphan.mkdir()
    (orphan / ".owner").touch()
    handler = make_handler(key_prefix="/several")
    handler.next_rendezvous().store.set("torchelastic/role_info/0", role % 2)
    folder = Path(os.environ[variables.LEFT_STATE])
    assert folder.parent == transfer.ROOT
    assert folder.is_dir()
    assert not orphan.exists()
    (folder / "state").touch()
    handler.shutdown()
    assert not folder.exists()


def test_record_of_an_agent_shows_its_activity(
    make_handler: MakeHandler, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_NODE", "node-7")
    info = make_handler(nproc="3").next_rendezvous()
    (entry,) = client.get_prefix(keys.agents)[1]
    record = decode(AgentRecord, entry.value, entry.key)
    assert (record.state, record.round_number, record.num_workers) == ("running", 1, 3)
    assert record.labels == {"node": "node-7"}
    assert entry.lease_id
    # The values that the agent writes into its store take precedence over the configuration.
    info.store.set("torchelastic/role_info/0", '{"role": "default", "rank": 0, "local_world_size": 2}')
    (entry,) = client.get_prefix(keys.agents)[1]
    assert decode(AgentRecord, entry.value, entry.key).num_workers == 2
    assert decode(AgentRound, present(client.get(keys.agent_round)).value, "").agents == [record.agent_id]


# -- the coordinator dies


# An agent without workers that dies right after the write named by its arguments.
DOOMED = """
import os, signal, sys, threading
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import Put
from lightning_dlrover.rdzv.agents.rendezvous import create_backend
endpoint, run_id, key, content = sys.argv[1:]
txn = EtcdClient.txn
def deadly_txn(self, compare, success, failure=()):
    result = txn(self, compare, success, failure)
    for op in success:
        if isinstance(op, Put) and op.key.endswith(key) and content.encode() in op.value and result.succeeded:
            os.kill(os.getpid(), signal.SIGKILL)
    return result
EtcdClient.txn = deadly_txn
conf = {"last_call_timeout": "60", "lease_ttl": "2"}
create_backend()(RendezvousParameters("etcd-v3", endpoint, run_id, 2, 3, **conf)).next_rendezvous()
threading.Event().wait()
"""

AT_A_ROUND = ("agent_round", '"number":1')
AT_ITS_CONFIRMATION = ("agent_notice", '"confirmed_round":1')
WHILE_NODES_WAIT = ("agent_notice", '"num_waiting":2')


StartDoomed = Callable[[tuple[str, str]], WarmProcess]


@pytest.fixture
def doomed(
    fork_server: None, etcd: EmbeddedEtcd, run_id: str, client: EtcdClient, keys: Keys, tmp_path: Path
) -> Iterator[StartDoomed]:
    """Start an agent that coordinates until it dies."""
    started: list[WarmProcess] = []

    def start(when: tuple[str, str]) -> WarmProcess:
        arguments = [DOOMED, etcd.endpoint, run_id, *when]
        started.append(WarmProcess(run_code, arguments, os.environ, tmp_path / "doomed.log"))
        eventually(lambda: client.get(keys.agent_coordinator), "the doomed agent coordinates", 60)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("when", [AT_A_ROUND, WHILE_NODES_WAIT], ids=lambda when: when[0])
def test_killed_coordinator_is_replaced_and_the_others_form_a_round(
    when: tuple[str, str], doomed: StartDoomed, make_handler: MakeHandler
) -> None:
    coordinator = doomed(when)
    handlers = [make_handler(2, 3, lease_ttl="2", join_timeout="60") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(handlers[0].next_rendezvous)]
        if when == WHILE_NODES_WAIT:  # a third node would fill the round at once
            assert coordinator.wait(60) == -signal.SIGKILL
        joining.append(pool.submit(handlers[1].next_rendezvous))
        infos = [each.result(90) for each in joining]
    assert coordinator.wait(60) == -signal.SIGKILL
    assert sorted(info.rank for info in infos) == [0, 1]
    assert [info.world_size for info in infos] == [2, 2]
    stores = [info.bootstrap_store_info for info in infos]
    assert all(stores)
    assert len({(store.master_addr, store.master_port) for store in stores if store}) == 1


@pytest.mark.parametrize("num_cut", [1, 2])
def test_nodes_cut_off_for_less_than_two_leases_restart_no_workers(
    make_handler: MakeHandler, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, num_cut: int
) -> None:
    """A further node waits for room, and is never cut off."""
    with EtcdProxy(etcd.endpoint) as first, EtcdProxy(etcd.endpoint) as second, ThreadPoolExecutor(2) as pool:
        proxies = [first, second]
        members = [make_handler(1, 2, server=proxy) for proxy in proxies]
        list(pool.map(lambda handler: handler.next_rendezvous(), members))
        spare = pool.submit(make_handler(1, 2, join_timeout="60").next_rendezvous)
        eventually(lambda: len(client.get_prefix(keys.agents)[1]) == 3, "the spare has registered")
        asked: list[int] = []

        def look() -> bool:
            asked.extend(member.num_nodes_waiting() for member in members)
            return len(client.get_prefix(keys.agents)[1]) == 3

        try:
            for proxy in proxies[:num_cut]:
                proxy.blackhole()
            healed_at = time.monotonic() + 3.4
            while time.monotonic() < healed_at:
                has_all = look()
                time.sleep(0.1)
            assert not has_all, "no lease has ended"
            for proxy in proxies:
                proxy.heal()
            eventually(look, "the members have registered again")
        finally:
            make_handler(1, 2).set_closed()
        with pytest.raises(RendezvousClosedError):
            spare.result(30)
    assert not any(asked)


UNTIL_TWO_TRAIN = "import os, time\nwhile os.environ['WORLD_SIZE'] != '2': time.sleep(0.05)"


def test_ranks_are_assigned_again_when_the_assigning_node_dies(doomed: StartDoomed, agents: ElasticAgents) -> None:
    coordinator = doomed(AT_ITS_CONFIRMATION)
    running = agents.start(Node(UNTIL_TWO_TRAIN, min_nodes=2, max_nodes=3), 2)
    assert coordinator.wait(60) == -signal.SIGKILL  # died as node rank 0 of a round of three
    outcomes = [agent.wait(120) for agent in running]
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED"] * 2, running[0].output + running[1].output
    ranks = sorted((start.world_size, start.rank) for start in agents.starts() if start.world_size == 2)
    assert ranks == [(2, 0), (2, 1)], running[0].output + running[1].output
    assert all("a node was lost while ranks were assigned" in agent.output for agent in running)


def test_running_round_survives_its_coordinator_and_admits_a_late_node(
    make_handler: MakeHandler, client: EtcdClient, keys: Keys
) -> None:
    handlers = [make_handler(2, 3) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
        entry = present(client.get(keys.agent_coordinator))
        coordinator = next(handler for handler in handlers if handler._agent_id.encode() == entry.value)
        other = next(handler for handler in handlers if handler is not coordinator)
        coordinator._client.close()  # ends all its threads without revoking its lease
        late = pool.submit(make_handler(2, 3, join_timeout="60").next_rendezvous)
        eventually(lambda: other.num_nodes_waiting() == 1, "the survivor is told of the late node", 30)
        assert client.get(keys.agent_coordinator) != entry
        assert {other.next_rendezvous().world_size, late.result(30).world_size} == {2}


# -- configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("last_call", "3"),
        ("join_timeout", "soon"),
        ("join_timeout", "0"),
        ("join_timeout", "nan"),
        ("lease_ttl", "-1"),
        ("lease_ttl", "2.5"),
        ("wait_timeout", "10m"),
        ("form_timeout", "inf"),
        ("last_call_timeout", "-1"),
        ("live", "maybe"),
        ("nproc", "0"),
        ("key_prefix", "dlrover"),
        ("password_file", "/no/such/file"),
        ("ca_cert", "/no/such/file"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(key: str, value: str, make_handler: MakeHandler) -> None:
    with pytest.raises(ValueError, match=key):
        make_handler(**{key: value})


def test_a_user_without_a_password_is_refused(make_handler: MakeHandler) -> None:
    with pytest.raises(ValueError, match="both user and password"):
        make_handler(user="me")


def test_an_unreachable_endpoint_is_refused_by_its_name() -> None:
    params = RendezvousParameters("etcd-v3", "127.0.0.1:1", "r", 1, 1, etcd_timeout="0.5")
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        create_backend()(params)


# -- etcd is full, or away for a while


def test_agents_wait_for_room_in_a_full_etcd_when_they_start_and_after_a_failure(
    make_handler: MakeHandler, tmp_path: Path
) -> None:
    with small_etcd(tmp_path) as (server, others), ThreadPoolExecutor() as pool:
        handlers = [make_handler(2, 2, server=server, lease_ttl="10") for _ in range(2)]
        for _ in range(2):
            fill(others)
            joining = [pool.submit(handler.next_rendezvous) for handler in handlers]
            with pytest.raises(TimeoutError):
                joining[0].result(2.0)
            make_room(others)
            assert [each.result(30).world_size for each in joining] == [2, 2]
        for handler in handlers:
            handler.shutdown()


def test_agent_gives_up_a_full_etcd_with_the_next_move(make_handler: MakeHandler, private_etcd: EmbeddedEtcd) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as other, full(other):
        handler = make_handler(server=private_etcd, join_timeout="1")
        with pytest.raises(RendezvousConnectionError, match=r"is full.*etcdctl alarm disarm"):
            handler.next_rendezvous()


def test_agent_whose_workers_failed_waits_for_an_etcd_that_is_away(
    make_handler: MakeHandler, private_etcd: EmbeddedEtcd
) -> None:
    with ThreadPoolExecutor() as pool:
        handler = make_handler(server=private_etcd, etcd_timeout="0.5", last_call_timeout="0.1")
        handler.next_rendezvous()
        private_etcd.kill()
        again = pool.submit(handler.next_rendezvous)
        with pytest.raises(TimeoutError):
            again.result(2.0)
        private_etcd.restart()
        assert again.result(30).world_size == 1


@pytest.mark.parametrize("has_controller", [False, True])
def test_one_agent_of_a_job_without_a_controller_names_the_troubles_of_etcd(
    has_controller: bool,
    make_handler: MakeHandler,
    client: EtcdClient,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(health, "troubles_of", lambda config: "etcd size: 92% -> etcdctl defrag")
    if has_controller:  # `dlrover run` has printed them
        client.put(keys.controller, encode(ControllerRecord("host", 1, "local", {})))
    handlers = [make_handler(2, 2) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        for pair in (handlers[:2], handlers[1:]):  # the first agent, which may be the coordinator, leaves after the first round
            assert [joined.world_size for joined in pool.map(lambda handler: handler.next_rendezvous(), pair)] == [2, 2]
            handlers[0].shutdown()
    assert caplog.text.count("etcd size: 92% -> etcdctl defrag") == (0 if has_controller else 1)
