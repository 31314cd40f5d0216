"""Prepared data, and lanes that are opened before a change of the world."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.data import Shard, stream
from lightning_dlrover.data.source import DataError
from lightning_dlrover.live import fit_parts
from lightning_dlrover.live.fit_parts import LanePrefetcher, PreparedData
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.group.world import World
from tests.support.loaders import indices, over, workers_of
from tests.support.waiting import eventually

FORK: Any = multiprocessing.get_context("fork")


class Host:
    """Workers of one host, each of which leaves files: `begun` and `passed` with its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._workers: dict[str, Any] = {}

    def start(self, name: str, while_preparing: str = "", job: str = "job", calls: int = 1) -> None:
        """Start a worker that prepares data and lives on.

        Args:
            while_preparing: "waits" for the file `continue`, "fails", "forks" a process that outlives it.
        """
        self._workers[name] = FORK.Process(target=self._work, args=(name, while_preparing, job, calls))
        self._workers[name].start()

    def _work(self, name: str, while_preparing: str, job: str, calls: int) -> None:
        def prepare() -> None:
            (self.folder / f"begun-{name}").touch()
            if while_preparing == "waits":
                self.wait_for("continue")
            elif while_preparing == "fails":
                raise ValueError("no data")
            elif while_preparing == "forks" and (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            elif while_preparing == "forks":
                (self.folder / "child").write_text(str(child))

        prepared = PreparedData(job, self.folder)
        for _ in range(calls):
            prepared.once_on_this_host("rows", prepare)
        (self.folder / f"passed-{name}").touch()
        time.sleep(60)

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} of {os.listdir(self.folder)}"
            time.sleep(0.01)

    def kill(self, name: str) -> None:
        self._workers[name].kill()
        self._workers[name].join()

    def has_ended(self, name: str) -> None:
        self._workers[name].join(30)
        assert self._workers[name].exitcode is not None

    def files(self, kind: str) -> set[str]:
        return {path.name.removeprefix(f"{kind}-") for path in self.folder.glob(f"{kind}-*")}

    def end(self) -> None:
        for name in self._workers:
            self.kill(name)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


def test_other_workers_of_the_host_wait_for_the_one_that_prepares_and_joiners_skip_it(host: Host) -> None:
    host.start("one", "waits")
    host.wait_for("begun-one")
    for name in ("two", "three"):
        host.start(name)
    time.sleep(0.3)
    assert host.files("passed") == set()
    (host.folder / "continue").touch()
    host.wait_for("passed-one", "passed-two", "passed-three")
    host.kill("one")
    host.start("joiner")
    host.wait_for("passed-joiner")
    assert host.files("begun") == {"one"}


@pytest.mark.parametrize("end", ["waits", "fails"])
def test_next_worker_prepares_when_the_first_one_is_killed_in_it_or_fails(end: str, host: Host) -> None:
    host.start("one", end)
    host.wait_for("begun-one")
    host.start("two")
    if end == "waits":
        host.kill("one")
    else:
        host.has_ended("one")
    host.wait_for("passed-two")
    assert host.files("begun") == {"one", "two"}


def test_data_is_prepared_again_once_all_workers_have_ended_though_a_process_that_one_has_forked_lives(host: Host) -> None:
    host.start("one", "forks")
    host.wait_for("passed-one")
    host.kill("one")
    host.start("two")
    host.wait_for("passed-two")
    os.kill(int((host.folder / "child").read_text()), signal.SIGKILL)
    assert host.files("begun") == {"one", "two"}


def test_each_job_and_each_call_of_a_script_prepares_its_own_data(host: Host) -> None:
    host.start("one")
    host.wait_for("passed-one")
    host.start("second_call", calls=2)
    host.start("other_job", job="other")
    host.wait_for("passed-second_call", "passed-other_job")
    assert host.files("begun") == {"one", "second_call", "other_job"}


def test_data_is_prepared_without_a_lock_where_none_can_be_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    PreparedData("job", tmp_path / "missing").once_on_this_host("rows", lambda: calls.append(1))
    assert calls == [1]
    assert "rows runs on each worker of this host, because no lock can be taken" in caplog.text


def test_waiting_worker_names_the_process_that_prepares(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"FIRST_REPORT_S": 0.0, "LIMIT_S": 0.3}.items():
        monkeypatch.setattr(fit_parts, name, value)
    host.start("one", "waits")
    host.wait_for("begun-one")
    with pytest.raises(RuntimeError, match=rf"rows of process {host._workers['one'].pid} on this host has not ended"):
        PreparedData("job", host.folder).once_on_this_host("rows", lambda: None)
    assert f"waiting for process {host._workers['one'].pid} on this host, which runs rows" in caplog.text


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
    return over(DataLoader(data, batch_size=40, num_workers=loader_workers, persistent_workers=loader_workers > 0), 40)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_are_the_same_with_lanes_ahead(log: Path, loader_workers: int) -> None:
    with_ahead, plain = make_loader(log, loader_workers), make_loader(log, loader_workers)
    for place, following in pairwise([(0, 2), (0, 3), (2, 3), (0, 1)]):
        for loader in (with_ahead, plain):
            loader.reshard(*place)
        with_ahead.expect_place(*following)
        for _ in range(6):
            assert indices(next(with_ahead)) == indices(next(plain))


def test_member_has_opened_its_lanes_before_it_changes_its_place(log: Path) -> None:
    loader = make_loader(log)
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


def test_joiner_has_opened_its_lanes_before_it_gets_the_state(log: Path) -> None:
    def read_by_loader() -> list[str]:
        pids = {worker.pid for worker in workers_of(loader)}
        return [line for line in log.read_text().splitlines() if int(line.split()[0]) in pids]

    loader, member = make_loader(log), make_loader(log)
    loader.workers.warm_up()
    loader.open_lanes(epoch=3, cursor=7, seed=11, global_rank=1, world_size=2)
    assert (loader.epoch, loader.cursor, loader.global_rank, loader.world_size) == (0, 0, 0, 1)
    eventually(lambda: len(log.read_text().splitlines()) == 4, "both loader workers read two lanes")
    member.order.take_seed(11)
    member.set_epoch(3)
    member.cursor = 9
    member.reshard(1, 2)
    expected = [indices(next(member)) for _ in range(4)]
    before = read_by_loader()
    loader.load_state(replace(member.state(), cursor=9))
    loader.reshard(1, 2)
    assert [indices(next(loader)) for _ in range(4)] == expected
    assert read_by_loader() == before


def test_read_ahead_that_never_ends_is_an_error_that_names_the_source(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_parts, "CLOSE_S", 0.2)
    go_on = threading.Event()

    class Hanging(ElasticLoader):
        def open_lanes(self, *_: int) -> None:
            go_on.wait(60)

    data = stream(Logged(log))
    loader = Hanging(DataLoader(data, batch_size=40, num_workers=1), 40, training=True)
    batches = cast(TrainLoaders, SimpleNamespace(all=[loader]))
    try:
        with (
            pytest.raises(DataError, match=r"reading ahead for 0 s and does not answer.*Logged"),
            LanePrefetcher(cast(World, None), batches, FitPosition(None)).while_waiting(),
        ):
            pass
    finally:
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "dlrover-lanes":
                thread.join(60)
