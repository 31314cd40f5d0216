"""The place of a `dlrover run` in a pool: waiting for it, keeping it, and giving it back."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_dlrover.pool.admission import PoolTicket, TicketError, member_key
from lightning_dlrover.pool.brain import Brain, PoolTimeouts
from lightning_dlrover.pool.budget import Resources
from lightning_dlrover.pool.decisions import Rules
from lightning_dlrover.pool.view import BrainRecord, GrantRecord, MemberRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import AgentRecord, Keys, NodesRecord, PlanRecord, encode
from tests.support.stored import entry_at, stored
from tests.support.waiting import eventually

QUICK = PoolTimeouts(settle_s=0.0, gone_s=0.1)


@pytest.fixture
def pool(run_id: str) -> PoolKeys:
    return PoolKeys(run_id)


@pytest.fixture
def brain(pool: PoolKeys, etcd: EmbeddedEtcd) -> Iterator[Brain]:
    with (
        EtcdClient(EtcdConfig(etcd.endpoint)) as own,
        Brain(own, pool, Rules(Resources(2.0), counts_others=False), timeouts=QUICK) as made,
    ):
        yield made


def ask(workers: tuple[int, int] = (1, 2), **more: object) -> MemberRecord:
    return MemberRecord(socket.gethostname(), os.getpid(), *workers, submitted_at=time.time(), **more)  # type: ignore[arg-type]


def test_granted_place_begins_with_a_plan_of_the_granted_size(
    client: EtcdClient, pool: PoolKeys, keys: Keys, brain: Brain
) -> None:
    with PoolTicket(client, pool, keys, ask()) as place:
        brain.step()
        assert place.wait(5.0) == 2
        plan = stored(client, PlanRecord, keys.plan)
        assert (plan.num_workers, plan.source, plan.binding) == (2, "brain", True)
    assert client.get_prefix(pool.members)[1] == client.get_prefix(pool.grants)[1] == []


def test_wait_ends_with_the_place_in_the_queue_and_who_decides(
    client: EtcdClient, pool: PoolKeys, keys: Keys, brain: Brain
) -> None:
    said: list[str] = []
    other = Keys(f"{keys.run_id}-first")
    with PoolTicket(client, pool, other, ask((2, 2))) as first, PoolTicket(client, pool, keys, ask(), said.append) as second:
        brain.step()
        first.wait(5.0)
        brain.step()
        with pytest.raises(TicketError, match=r"waited 1 s for a place in pool .* and got none: .* number 1 of 1 in the queue"):
            second.wait(1.0)
    assert "it needs 1 core, and the other jobs leave it nothing" in said[-1]


def test_wait_is_told_again_when_the_queue_moves_and_not_when_its_estimate_does(
    client: EtcdClient, pool: PoolKeys, keys: Keys
) -> None:
    said: list[str] = []
    client.put(pool.brain, encode(BrainRecord("host", 7)))
    stop = threading.Event()

    def estimate() -> None:
        for number in range(20):
            reason, place = f"job a leaves in {20 - number} s", 2 if number < 10 else 1
            client.put(pool.grants + keys.run_id, encode(GrantRecord("waiting", 0, reason, place, 2, time.time() + number)))
            stop.wait(0.05)

    with PoolTicket(client, pool, keys, ask(), said.append) as place:
        changing = threading.Thread(target=estimate)
        changing.start()
        with pytest.raises(TicketError, match="and got none"):
            place.wait(1.5)
        changing.join(10.0)
    assert [line.partition("number ")[2][:6] for line in said if "number" in line] == ["2 of 2", "1 of 2"]


def test_wait_without_a_brain_names_the_command_that_is_missing(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    with (
        PoolTicket(client, pool, keys, ask()) as place,
        pytest.raises(TicketError, match=f"start `dlrover pool run --pool {pool.pool} --budget"),
    ):
        place.wait(0.2)


def test_place_that_can_never_be_is_refused_at_once(client: EtcdClient, pool: PoolKeys, keys: Keys, brain: Brain) -> None:
    with PoolTicket(client, pool, keys, ask((3, 4))) as place:
        brain.step()
        with pytest.raises(TicketError, match="its 3 workers need 3 cores, and the whole pool has 2 cores"):
            place.wait(5.0)


def test_name_has_one_place(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    with PoolTicket(client, pool, keys, ask()), pytest.raises(TicketError, match=f"already, by process {os.getpid()} on"):
        PoolTicket(client, pool, keys, ask())


def test_place_is_kept_for_nodes_that_outlive_their_run(client: EtcdClient, pool: PoolKeys, keys: Keys, brain: Brain) -> None:
    with PoolTicket(client, pool, keys, ask()) as place:
        brain.step()
        place.wait(5.0)
        client.put(f"{keys.agents}x", encode(AgentRecord("x", "host", 1, 1, "running")))
    grant = stored(client, GrantRecord, pool.grants + keys.run_id)
    assert grant.num_workers == 2
    client.delete(f"{keys.agents}x")
    client.delete(keys.plan)

    def is_gone() -> bool:
        brain.step()
        return not client.get_prefix(pool.grants)[1]

    eventually(is_gone, "the end of the grant")


def test_place_outlasts_a_killed_run_by_the_given_lease(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    with PoolTicket(client, pool, keys, ask(), ttl_s=4.0):
        entry = entry_at(client, pool.members + keys.run_id)
        assert client.leases.refresh(entry.lease_id, 5.0) == 4


def test_lost_place_is_taken_again(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    member = pool.members + keys.run_id
    with PoolTicket(client, pool, keys, ask()) as place:
        entry = entry_at(client, member)
        client.leases.revoke(entry.lease_id)  # like its expiry in an outage

        def is_back() -> bool:
            place.keep()
            return client.get(member) is not None

        eventually(is_back, "the place", 15.0)


def test_change_of_the_grant_in_the_last_moment_is_followed(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    """A run that reads a grant writes the plan of that grant, or none."""
    grant_key = pool.grants + keys.run_id
    with PoolTicket(client, pool, keys, ask()) as place:
        client.put(grant_key, encode(GrantRecord("granted", 2)))
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(place.wait(10.0)))
        client.put(grant_key, encode(GrantRecord("granted", 1)))
        waiting.start()
        waiting.join(10.0)
        plan = stored(client, PlanRecord, keys.plan)
        assert [plan.num_workers] == found == [1]


def test_job_is_cancelled_while_it_waits_for_its_place(client: EtcdClient, pool: PoolKeys, keys: Keys) -> None:
    nodes = NodesRecord("local", "", stop="cancelled by `dlrover cancel`")
    with PoolTicket(client, pool, keys, ask()) as place:
        assert member_key(client, keys) == pool.members + keys.run_id
        client.put(keys.nodes, encode(nodes))
        with pytest.raises(TicketError, match=f"job '{keys.run_id}' has not begun: cancelled by `dlrover cancel`"):
            place.wait(30.0)
    assert member_key(client, keys) is None
