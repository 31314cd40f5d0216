"""Lanes that are opened before a change of the world: the same batches, and no wait for files after it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.data import Shard, stream
from lightning_dlrover.data.source import DataError
from lightning_dlrover.live import fit_parts
from lightning_dlrover.live.fit_parts import LanePrefetcher
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.ports import Batches, Job, Round
from tests.support.waiting import eventually

NUM_ROWS = 4000


class Logged:
    """Numbers whose readings are written to a file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def shards(self) -> list[Shard]:
        return [Shard("numbers", NUM_ROWS)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {row}\n")
        yield from range(row, shard.rows)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path / "log"


def make_loader(log: Path, loader_workers: int = 2) -> ElasticLoader:
    data = stream(Logged(log), shuffle_rows=NUM_ROWS)
    users = DataLoader(data, batch_size=40, num_workers=loader_workers, persistent_workers=loader_workers > 0)
    return ElasticLoader(users, 40, training=True)


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch.tolist()
    return found


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_are_the_same_with_lanes_ahead(log: Path, loader_workers: int) -> None:
    with_ahead, plain = make_loader(log, loader_workers), make_loader(log, loader_workers)
    for loader in (with_ahead, plain):
        iter(loader)
        loader.reshard(0, 2)
    places = [(0, 3), (2, 3), (0, 1)]
    for place in places:
        with_ahead.expect_place(*place)
        for _ in range(6):
            assert numbers(next(with_ahead)) == numbers(next(plain))
        for loader in (with_ahead, plain):
            loader.reshard(*place)
    with_ahead.close()
    plain.close()


def test_member_has_opened_its_lanes_before_it_changes_its_place(log: Path) -> None:
    loader = make_loader(log)
    iter(loader)
    loader.reshard(0, 2)
    next(loader)
    loader.expect_place(1, 2)
    next(loader)
    eventually(lambda: len(log.read_text().splitlines()) == 8, "both loader workers open the other lanes at once")
    expected = len(log.read_text().splitlines())
    loader.reshard(1, 2)
    for _ in range(6):
        next(loader)
    assert len(log.read_text().splitlines()) == expected
    loader.close()


def test_joiner_has_opened_its_lanes_before_it_gets_the_state(log: Path) -> None:
    loader, member = make_loader(log), make_loader(log)
    for each in (loader, member):
        iter(each)
    loader.workers.warm_up()
    loader.open_lanes(epoch=3, cursor=7, seed=11, global_rank=1, world_size=2)
    assert (loader.epoch, loader.cursor, loader.global_rank, loader.world_size) == (0, 0, 0, 1)
    eventually(lambda: len(log.read_text().splitlines()) == 4, "both loader workers read two lanes")
    member.order.take_seed(11)
    member.set_epoch(3)
    member.cursor = 9
    member.reshard(1, 2)
    expected = [numbers(next(member)) for _ in range(4)]
    before = [line for line in log.read_text().splitlines() if int(line.split()[0]) in pids_of(loader)]
    loader.load_state(replace(member.state(), cursor=9))
    loader.reshard(1, 2)
    assert [numbers(next(loader)) for _ in range(4)] == expected
    after = [line for line in log.read_text().splitlines() if int(line.split()[0]) in pids_of(loader)]
    assert after == before
    loader.close()
    member.close()


def pids_of(loader: ElasticLoader) -> set[int]:
    running: Any = loader.workers._feed.loader._iterator
    return {worker.pid for worker in running._workers}


def test_read_ahead_that_never_ends_is_an_error_that_names_the_source(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_parts, "CLOSE_S", 0.2)
    go_on = threading.Event()

    class Hanging(ElasticLoader):
        def open_lanes(self, *_: int) -> None:
            go_on.wait(60)

    data = stream(Logged(log))
    loader = Hanging(DataLoader(data, batch_size=40, num_workers=1), 40, training=True)
    batches = cast(Batches, SimpleNamespace(all=[loader]))
    try:
        with (
            pytest.raises(DataError, match=r"reading ahead for 0 s and does not answer.*Logged"),
            LanePrefetcher(cast(Job, None), cast(Round, None), batches).while_waiting(),
        ):
            pass
    finally:
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "dlrover-lanes":
                thread.join(60)
