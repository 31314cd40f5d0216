"""One worker applies a plan's settings between two batches of its loaders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dlrover.data import stream
from lightning_dlrover.data.source import Shard
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.train_loaders import SettingsInForce
from lightning_dlrover.rdzv.job.events import SettingsApplied
from lightning_dlrover.rdzv.job.records import PlanRecord

PLAN = PlanRecord(1, "planner", "a test says so", binding=False, loader_workers=1, prefetch_factor=2)
CORES = 2.0


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tens:
    """Source of ten rows."""

    def shards(self) -> Sequence[Shard]:
        return [Shard("tens", 10)]

    def read(self, shard: Shard, row: int) -> Iterator[int]:
        return iter(range(row, 10))


def make_loader() -> ElasticLoader:
    return ElasticLoader(DataLoader(TensorDataset(torch.arange(100)), 1), 1, training=True)


def follow(settings: SettingsInForce, plan: PlanRecord, loader: ElasticLoader, num_batches: int = 10) -> list[SettingsApplied]:
    done = []
    for _ in range(num_batches):
        applied = settings.follow(plan, [loader], may_add_workers=True)
        done += [applied[0]] if applied is not None else []
        next(loader)
    return done


def test_rebuilt_loaders_follow_the_plan() -> None:
    """Lightning recreates loaders with `reload_dataloaders_every_n_epochs`."""
    settings = SettingsInForce(CORES)
    first, second = make_loader(), make_loader()
    try:
        assert len(follow(settings, PLAN, first)) == 1
        assert len(follow(settings, PLAN, second)) == 1
        assert (first.num_workers, second.num_workers) == (1, 1)
        assert follow(settings, PLAN, second) == []
    finally:
        first.close()
        second.close()


class Bank(Dataset[int]):
    """Samples that training writes."""

    def __init__(self) -> None:
        self.values = [0] * 40

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]


def test_planner_gives_no_loader_workers_to_a_dataset_that_training_may_write_to() -> None:
    bank, settings = Bank(), SettingsInForce(CORES)
    loader = ElasticLoader(DataLoader(bank, 1), 1, training=True)
    fetched = []
    for step in range(20):
        settings.follow(PLAN, [loader], may_add_workers=False)
        bank.values[step] = step
        fetched.append(int(next(loader)))
    assert fetched == [*range(20)]


@pytest.mark.parametrize(
    ("loader", "source", "allowed", "expected"),
    [
        ({"dataset": Bank()}, "planner", False, 0),
        ({"dataset": Bank()}, "planner", True, 1),
        ({"dataset": Bank()}, "brain", False, 0),
        ({"dataset": Bank()}, "user", False, 1),
        ({"dataset": Bank(), "num_workers": 2}, "planner", False, 1),
        ({"dataset": stream(Tens())}, "planner", False, 1),
    ],
)
def test_first_loader_workers_need_a_permission(loader: dict[str, Any], source: Any, allowed: bool, expected: int) -> None:
    settings, made = SettingsInForce(CORES), ElasticLoader(DataLoader(batch_size=1, **loader), 1, training=True)
    try:
        for _ in range(8):
            settings.follow(replace(PLAN, source=source), [made], may_add_workers=allowed)
            next(made)
        assert made.num_workers == expected
    finally:
        made.close()


def test_change_of_threads_is_not_charged_with_an_earlier_change() -> None:
    settings, loader = SettingsInForce(CORES), make_loader()
    try:
        next(loader)
        (loaders,) = follow(settings, PLAN, loader)
        assert loaders.seconds > 0
        more_threads = PlanRecord(1, "planner", "", binding=False, loader_workers=1, prefetch_factor=2, intra_op_threads=2)
        (threads,) = follow(settings, more_threads, loader)
        assert threads.intra_op_threads == 2
        assert threads.seconds == 0
    finally:
        loader.close()
