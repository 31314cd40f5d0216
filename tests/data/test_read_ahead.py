"""Blocks that a thread loads before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from stream_schedules import Numbered
from torch.utils.data import DataLoader, RandomSampler
from waiting import eventually

from lightning_dlrover.data import Shard, Stream, read_ahead, stream
from lightning_dlrover.data.dataset import Positions
from lightning_dlrover.data.lane_plan import Layout
from lightning_dlrover.data.read_ahead import ReadAhead

ROWS, BATCH = 40_000, 100
LAYOUT = Layout(BATCH, slots=4, cycle=2, block_rows=500)


class Watched(Numbered):
    """Notes what is read: first row and thread. Reading fails from row `broken` on, and waits until `may_read`."""

    def __init__(self, broken: int = ROWS) -> None:
        super().__init__([ROWS], chunk_rows=100)
        self.calls: list[tuple[int, str]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self._broken = broken

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        self.calls.append((row, threading.current_thread().name))
        for batch in super().read(shard, row):
            assert self.may_read.wait(10)
            if row <= self._broken < row + batch.num_rows:
                raise OSError(f"row {self._broken} is broken")
            row += batch.num_rows
            yield batch


def positions(batch: int, layout: Layout = LAYOUT) -> Positions:
    return Positions(0, layout, ((batch * BATCH, (batch + 1) * BATCH),))


def read(data: Stream, batch: int) -> list[int]:
    return [row["number"] for row in data.__getitems__(positions(batch))]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dlrover-read-ahead"]


def ended() -> bool:
    return not threads()


def test_lanes_of_the_next_batches_are_opened_on_a_thread() -> None:
    source = Watched()
    read(stream(source), 0)
    eventually(ended, "the thread to end")
    assert len(source.calls) == LAYOUT.num_lanes  # though the first batch needs half of them
    assert {name for _, name in source.calls} == {"dlrover-read-ahead"}


def test_an_expected_batch_is_read_before_it_is_asked_for() -> None:
    source = Watched()
    data = stream(source)
    data.expect(positions(7))
    eventually(ended, "the thread to end")
    source.may_read.clear()  # nothing more can be read
    assert read(data, 7) == [row for _, row in (data.plan(0, LAYOUT).row_at(7 * BATCH + i) for i in range(BATCH))]


def test_rows_are_those_of_a_source_that_is_not_read_ahead() -> None:
    ahead, behind = Watched(), Watched()
    behind.reads_ahead = False
    one, other = stream(ahead, shuffle_rows=4000), stream(behind, shuffle_rows=4000)
    for batch in [*range(60), *range(12, 30), *range(200, 230), 399, 398]:
        assert read(one, batch) == read(other, batch)
    assert not any(name == "dlrover-read-ahead" for _, name in behind.calls)


def test_a_block_that_cannot_be_read_fails_the_batch_that_needs_it() -> None:
    whole = stream(Watched())
    good = next(batch for batch in range(400) if max(read(whole, batch)) < ROWS - 1 and batch > 40)
    source = Watched(broken=read(whole, good)[-1] + 600)  # in a lane's next block
    data = stream(source)
    bad = next(batch for batch in range(good, 400) if source._broken in read(whole, batch))
    data.expect(positions(good))
    for batch in range(good, bad - 10):
        read(data, batch)
        eventually(ended, "the thread to end")  # it fails to read ahead meanwhile
    with pytest.raises(OSError, match=f"row {source._broken} is broken"):
        [read(data, batch) for batch in range(bad - 10, bad + 1)]


def test_blocks_before_a_jump_are_not_read_any_more() -> None:
    source = Watched()
    data = stream(source)
    source.may_read.clear()
    data.expect(positions(0))
    eventually(lambda: source.calls, "the first lane to be opened")
    data.expect(positions(300))
    source.may_read.set()
    read(data, 300)
    eventually(ended, "the thread to end")
    assert len(source.calls) == 1 + LAYOUT.num_lanes


def test_a_sampler_of_the_users_own_reads_nothing_ahead() -> None:
    source = Watched()
    loader = DataLoader(stream(source), batch_size=None, sampler=RandomSampler(range(ROWS), num_samples=5))
    assert len(list(loader)) == 5
    eventually(ended, "the thread to end")
    assert len(source.calls) <= 5


def test_loader_workers_read_nothing_on_threads() -> None:
    data = stream(Numbered([ROWS], chunk_rows=100), transform=lambda row: len(threads()))
    assert not any(any(batch) for batch in DataLoader(data, batch_size=BATCH, num_workers=1))


def test_fork_waits_until_the_block_is_loaded() -> None:
    source = Watched()
    data = stream(source)
    source.may_read.clear()
    data.expect(positions(0))
    eventually(lambda: source.calls, "the first lane to be opened")
    threading.Timer(0.3, source.may_read.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if source.may_read.is_set() and read(data, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(data, 1)


def test_fork_gives_a_read_that_does_not_end_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(read_ahead, "FORK_S", 0.1)
    may_load = threading.Event()
    ahead = ReadAhead(lambda lane, number: may_load.wait(10))
    ahead.ask((0, 0))
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "forked while a thread has read data" in caplog.text
    may_load.set()
    assert ahead.take((0, 0))


def test_forks_while_rows_are_read_ahead_hang_no_child() -> None:
    data = stream(Numbered([ROWS], chunk_rows=100), shuffle_rows=2000)
    for batch in range(100):
        read(data, batch)
        child = os.fork()
        if child == 0:
            os._exit(0 if read(data, batch) else 1)
        assert os.waitpid(child, 0)[1] == 0
