"""One worker applies a plan's settings between two batches of its loaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.settings import (
    SettingsInForce,
)
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


def make_loader() -> ElasticLoader:
    return ElasticLoader(DataLoader(TensorDataset(torch.arange(100)), 1), 1, training=True)


def follow(settings: SettingsInForce, plan: PlanRecord, loader: ElasticLoader, num_batches: int = 10) -> list[SettingsApplied]:
    done = []
    for _ in range(num_batches):
        applied = settings.follow(plan, [loader])
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
