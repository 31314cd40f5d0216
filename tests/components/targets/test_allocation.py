"""Allocation of one machine's cores and devices to nodes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lightning_dlrover.components.targets.machine import Allocation, NothingFreeError, Share

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@pytest.mark.parametrize("seed", range(50))
def test_nodes_share_cores_only_when_all_are_taken_and_devices_never(seed: int) -> None:
    chance = random.Random(seed)
    cores = chance.sample(range(64), chance.randint(1, 12))
    allocation = Allocation(cores, GPUS)
    shares: dict[str, Share] = {}
    for number in range(60):
        if shares and chance.random() < 0.4:
            leaver = chance.choice(sorted(shares))
            allocation.give_back(leaver)
            del shares[leaver]
            shared = {each for each in shares if allocation.shared_cores(each)}
            moved = allocation.spread()
            assert moved.keys() <= shared
            assert all(each.devices == shares[node].devices for node, each in moved.items())
            shares.update(moved)
            if sum(len(each.cores) for each in shares.values()) <= len(cores):
                assert not any(allocation.shared_cores(each) for each in shares)
            continue
        node, num_cores, num_devices = f"node{number}", chance.randint(0, 5), chance.randint(0, 3)
        free_devices = len(GPUS) - sum(len(share.devices) for share in shares.values())
        use = Counter(core for share in shares.values() for core in share.cores)
        if num_devices > free_devices:
            with pytest.raises(NothingFreeError, match=f"{free_devices} of {len(GPUS)} are free"):
                allocation.take(node, num_cores, num_devices)
            continue
        share = shares[node] = allocation.take(node, num_cores, num_devices)
        assert len(share.cores) == min(num_cores, len(cores))
        assert {*share.cores} <= {*cores}
        assert len(share.devices) == num_devices
        given = [device for each in shares.values() for device in each.devices]
        assert len(given) == len({*given})
        # No core that was left out has fewer users.
        assert all(use[mine] <= use[other] for mine in share.cores for other in {*cores} - {*share.cores})
        assert allocation.shared_cores(node) == tuple(core for core in share.cores if use[core])


def test_cores_and_devices_are_given_in_order_and_come_back() -> None:
    allocation = Allocation([5, 2, 3, 4], GPUS)
    assert allocation.take("node1", 2, 1) == Share((2, 3), ("GPU-a",))
    assert allocation.take("node2", 2, 2) == Share((4, 5), ("GPU-b", "GPU-c"))
    allocation.give_back("node1")
    allocation.give_back("node1")
    assert allocation.take("node3", 1, 1) == Share((2,), ("GPU-a",))
    assert allocation.take("node4", 2) == Share((2, 3))
    assert allocation.shared_cores("node4") == (2,)
    assert allocation.shared_cores("node3") == (2,)
    assert allocation.shared_cores("node2") == ()


def test_owner_of_the_devices_is_named() -> None:
    allocation = Allocation([0], GPUS[:2])
    allocation.take("node1", num_devices=2)
    with pytest.raises(NothingFreeError, match="node2 needs 1 GPUs, and 0 of 2 are free; node1 has the others"):
        allocation.take("node2", num_devices=1)
    assert allocation.take("node2", 1) == Share((0,))  # a refusal takes no cores


def test_only_a_node_that_shares_a_core_moves_to_a_freed_one() -> None:
    allocation = Allocation([0, 1])
    for node in ("node1", "node2", "node3"):
        allocation.take(node, 1)
    assert allocation.shared_cores("node3") == (0,)
    assert allocation.spread() == {}
    allocation.give_back("node2")
    assert allocation.spread() == {"node3": Share((1,))}
    assert allocation.spread() == {}
    assert allocation.shared_cores("node1") == ()


def test_a_node_has_one_share() -> None:
    allocation = Allocation([0, 1])
    allocation.take("node1", 1)
    with pytest.raises(ValueError, match="node1"):
        allocation.take("node1", 1)
