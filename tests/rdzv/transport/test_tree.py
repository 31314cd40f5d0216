"""Reductions along a tree, among the ranks of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from lightning_dlrover.rdzv.desync import CollectiveCall, CollectiveMonitor, MismatchError
from lightning_dlrover.rdzv.transport import torch_names
from lightning_dlrover.rdzv.transport.torch_names import HashStore
from lightning_dlrover.rdzv.transport.waits import ARITY, Tree, join_tree

T = TypeVar("T")

TIMEOUT = timedelta(seconds=30)


class Ranks:
    """Groups and trees of several ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        store = HashStore()

        def connect(rank: int) -> tuple[Any, Tree]:
            group = torch_names.gloo(store, rank, size, TIMEOUT, torch_names.gloo_devices(is_late=True))
            join_tree(group, rank, size, TIMEOUT)
            return group, Tree(group, rank, size, TIMEOUT)

        pairs = self.each(connect)
        self.groups, self.trees = [group for group, _ in pairs], [tree for _, tree in pairs]

    def each(self, act: Callable[[int], T]) -> list[T]:
        """Run `act` of each rank in a thread of its own, and return the results in the order of the ranks."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(act, range(self.size), timeout=60))

    def close(self) -> None:
        for tree in self.trees:
            tree.close()
            tree.join(10.0)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("size", [2, 3, ARITY + 1, ARITY + 2, 23])
def test_all_ranks_get_the_minimum_of_each_number_in_every_reduction(size: int) -> None:
    ranks = Ranks(size)
    numbers = [[torch.tensor([random.randint(-9, 9) for _ in range(5)]) for _ in range(4)] for _ in range(size)]
    expected = [torch.stack([numbers[rank][turn] for rank in range(size)]).amin(0).tolist() for turn in range(4)]

    def run(rank: int) -> list[list[int]]:
        mine = numbers[rank]
        begun = [ranks.trees[rank].least(each) for each in mine]
        for reduction in begun:
            reduction.wait()
        return [each.tolist() for each in mine]

    assert ranks.each(run) == [expected] * size
    ranks.close()


def test_collectives_of_the_group_and_reductions_do_not_mix() -> None:
    ranks = Ranks(7)

    def run(rank: int) -> tuple[float, int]:
        total, numbers = torch.ones(1), torch.tensor([rank + 3])
        if rank % 2:
            work = ranks.groups[rank].allreduce([total])
            ranks.trees[rank].least(numbers).wait()
            work.wait(TIMEOUT)
        else:
            reduction = ranks.trees[rank].least(numbers)
            ranks.groups[rank].allreduce([total]).wait(TIMEOUT)
            reduction.wait()
        return total.item(), int(numbers.item())

    assert ranks.each(run) == [(7.0, 3)] * 7
    ranks.close()


def test_messages_of_the_tree_are_not_counted_as_operations_of_the_group() -> None:
    ranks = Ranks(6)

    def begun(rank: int) -> int:
        return ranks.trees[rank].without_messages(lambda: torch_names.num_begun(ranks.groups[rank]))

    def run(rank: int) -> tuple[int, int]:
        before = begun(rank)
        ranks.trees[rank].least(torch.tensor([rank])).wait()
        ranks.groups[rank].allreduce([torch.ones(1)]).wait(TIMEOUT)
        return before, begun(rank)

    assert ranks.each(run) == [(0, 1)] * 6
    ranks.close()


@pytest.mark.parametrize("others", ["the vote between two steps", "all_reduce"])
def test_workers_that_compare_along_the_tree_detect_another_call(others: str) -> None:
    ranks = Ranks(ARITY + 3)
    store = HashStore()

    def run(rank: int) -> str:
        monitor = CollectiveMonitor(
            ranks.groups[rank],
            rank,
            ranks.size,
            8,
            begun=lambda: torch_names.num_begun(ranks.groups[rank]),
            connect=lambda: store,
            program=cast(
                Any,
                SimpleNamespace(place=SimpleNamespace(is_computing=True, uses_share=False, describe=lambda: f"step {rank}")),
            ),
            sever=lambda: None,
            tree=ranks.trees[rank],
        )
        try:
            monitor.compare(CollectiveCall("all_reduce"))
            if rank == 3:
                monitor.compare(CollectiveCall("all_reduce", "4 x float32"))
            else:
                call = CollectiveCall(others, "8 x float32")
                monitor.counted(monitor.vote(call, [1, 2]), [1, 2])
        except MismatchError as error:
            return str(error)
        finally:
            monitor.close()
            monitor.join(10.0)
        return ""

    texts = set(ranks.each(run))
    assert len(texts) == 1  # all workers end with one error
    assert "rank 3: all_reduce of 4 x float32" in texts.pop()


def test_reduction_fails_on_the_parent_of_a_rank_that_is_gone() -> None:
    ranks = Ranks(ARITY + 2)  # rank 1 has a child, the last rank
    gone = ranks.size - 1
    ranks.trees[gone].close()
    ranks.trees[gone].join(10.0)
    ranks.groups[gone] = None

    reduction = ranks.trees[1].least(torch.tensor([1]))
    with pytest.raises(RuntimeError):
        reduction.wait()
    assert reduction.is_completed()
    assert not reduction.is_success()
    ranks.close()
