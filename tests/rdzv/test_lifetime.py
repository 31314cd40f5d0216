"""Records that a job leaves in etcd: its history alone, and that for a limited lifetime."""

from __future__ import annotations

import signal
import time

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, Put
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, Keys
from tests.support.torchrun_agent import StartAgent
from tests.support.waiting import eventually

FINISHED = {"live/shared/job", "live/shared/round", "live/shared/notice", "events/"}
"""Keys of a live job that has finished."""

LIVE = """
import time
from lightning_dlrover.rdzv import World

class Nothing:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

with World.from_environment() as world:
    for step in world.steps(STEPS, nothing=Nothing()):
        with step:
            print("STEP", step.number, step.size, flush=True)
            time.sleep(0.02)
"""

PLAIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


def left(client: EtcdClient, keys: Keys) -> set[str]:
    """Names of the keys that a job has left. Several events count as one."""
    names = (entry.key.removeprefix(keys.root) for entry in client.get_prefix(keys.root)[1])
    return {"events/" if name.startswith("events/") else name for name in names}


def assert_bounded(client: EtcdClient, keys: Keys, ttl_s: float) -> None:
    """Assert that all keys have one lease of the requested length, which no process refreshes any more."""
    from lightning_dlrover.rdzv.etcd.connection import etcdrpc

    (lease_id,) = {entry.lease_id for entry in client.get_prefix(keys.root)[1]}
    lease = client.caller.call("look at a lease", "Lease", "LeaseTimeToLive", etcdrpc.LeaseTimeToLiveRequest(ID=lease_id))
    assert lease.grantedTTL == ttl_s
    assert ttl_s * 2 / 3 - 60 < lease.TTL


@pytest.mark.parametrize(
    "script, conf, kept",
    [
        (LIVE.replace("STEPS", "30"), "live=1,history_ttl=3600", FINISHED),
        (PLAIN, "last_call_timeout=0.5", {"live/agent_round"}),  # closed, so late nodes are refused
    ],
)
def test_a_job_that_has_finished_leaves_its_history_which_ends_by_itself(
    script: str, conf: str, kept: set[str], start_agent: StartAgent, client: EtcdClient, keys: Keys
) -> None:
    agents = [start_agent(script, nnodes="1:2", conf=conf) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output
    assert left(client, keys) == kept
    assert_bounded(client, keys, 3600 if "history_ttl" in conf else HISTORY_TTL_S)
    late = start_agent(script, nnodes="1:2", conf=conf)
    assert late.wait() == 1
    assert "for a new job use another --rdzv-id" in late.output


def test_job_with_all_processes_killed_leaves_nothing_behind(start_agent: StartAgent, client: EtcdClient, keys: Keys) -> None:
    agents = [start_agent(LIVE.replace("STEPS", "100000"), nnodes="1:2", conf="live=1,lease_ttl=2") for _ in range(2)]
    eventually(lambda: any(" 2" in line for line in agents[0].lines("STEP")), "both train")
    for agent in agents:
        agent.kill_with_workers()
    eventually(
        lambda: not any(f"live/{kind}" in key for key in left(client, keys) for kind in ("workers", "agents")), "leases end"
    )
    assert_bounded(client, keys, HISTORY_TTL_S)
    # The job had not ended: started again under its name, it resumes.
    assert start_agent(LIVE.replace("STEPS", "10"), nnodes="1:2", conf="live=1").wait() == 0
    assert left(client, keys) == FINISHED


def test_a_job_that_is_stopped_by_hand_leaves_nothing_that_stays(
    start_agent: StartAgent, client: EtcdClient, keys: Keys
) -> None:
    agent = start_agent(LIVE.replace("STEPS", "100000"), nnodes="1:2", conf="live=1")
    eventually(lambda: agent.lines("STEP"), "it trains")
    agent.process.send_signal(signal.SIGINT)
    assert agent.wait() != 0
    eventually(lambda: not any("live/workers" in key or "live/agents" in key for key in left(client, keys)), "leases end")
    assert_bounded(client, keys, HISTORY_TTL_S)


# --- the lease --------------------------------------------------------------------------------------------------------------


def test_keys_of_several_clients_end_with_the_last_client(etcd: EmbeddedEtcd, keys: Keys) -> None:
    first, second = EtcdClient(EtcdConfig(etcd.endpoint)), EtcdClient(EtcdConfig(etcd.endpoint))
    with EtcdClient(EtcdConfig(etcd.endpoint)) as observer:
        for client in (first, second):
            client.share_lifetime(keys.root, 3)
        first.put(keys.job, b"1")
        second.txn([], [Put(keys.round, b"2")])
        own = second.lease(60)
        second.put(keys.plan, b"3", own)
        second.put(Keys("another").job, b"4")
        first.close()
        time.sleep(3.8)  # longer than the lifetime: the second job keeps the lease alive
        assert len(observer.get_prefix(keys.root)[1]) == 3
        assert len({entry.lease_id for entry in observer.get_prefix(keys.root)[1]}) == 2
        assert observer.get(Keys("another").job).lease_id == 0  # type: ignore[union-attr]
        second.close()
        eventually(lambda: len(observer.get_prefix(keys.root)[1]) == 1, "the common lease ends", 15)
        observer.delete_prefix(Keys("another").root)


def test_a_lifetime_that_has_ended_begins_anew_with_the_next_write(client: EtcdClient, keys: Keys) -> None:
    client.share_lifetime(keys.root, 60)
    client.put(keys.job, b"1")
    client.leases.revoke(client.get(keys.job).lease_id)  # type: ignore[union-attr]
    client.put(keys.job, b"2")
    found = client.get(keys.job)
    assert found is not None
    assert (found.value, found.lease_id != 0) == (b"2", True)
