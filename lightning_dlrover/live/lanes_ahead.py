"""Open the lanes of a stream that a worker will read in the next round, while the workers still agree on that round.

Otherwise the first step after a change waits until files are opened and blocks are decoded. A member that changes its rank lets
its loader workers open the lanes together with the batches that they prepare meanwhile. A joiner's loader workers have nothing
else to do, but it does not know where the others are: rank 0 writes that once for each round with joiners.

Nothing depends on any of this. Lanes that were opened in vain are closed again when others need their room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from lightning_dlrover.data.source import DataError
from lightning_dlrover.live.ports import Batches, Job, Round
from lightning_dlrover.rdzv.job.records import PlacesRecord, RoundRecord

__all__ = ["LanePrefetcher"]

log = logging.getLogger(__name__)

P = ParamSpec("P")

LOOK_S = 0.05
"""Seconds between two looks of a joiner for a round that admits it."""

PLACES_S = 2.0
"""Seconds for which a joiner asks for the others' places after such a round has appeared. A job of map-style data has none."""

CLOSE_S = 360.0
"""Seconds for which a read that has begun may go on once the round is there: longer than a failing store is asked for."""


class LanePrefetcher:
    """One worker's preparation for the round that follows."""

    def __init__(self, job: Job, round_: Round, batches: Batches) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._seen = 0  # number of the newest round that was prepared for

    def look(self) -> None:
        """Prepare for a planned round that has appeared. Call between two batches."""
        formation, newest = self._round.formation, self._job.view.round
        if formation is None or newest is None or newest.number <= max(self._seen, formation.round.number):
            return
        self._seen = newest.number
        loaders = self._batches.all
        if not newest.planned or not any(loader.reads_lanes for loader in loaders):
            return
        if self._job.worker_id in newest.members:
            for loader in loaders:
                loader.expect_place(newest.members.index(self._job.worker_id), len(newest.members))
        if formation.rank == 0 and not {*newest.members} <= {*formation.round.members}:
            places = [[loader.epoch, loader.cursor, loader.order.seed] for loader in loaders]
            self._job.records.put_places(PlacesRecord(newest.number, places))

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Prepare for the round that admits this worker, in a thread, while the block waits for it.

        Raises:
            DataError: a read does not end.
        """
        if not any(loader.reads_lanes for loader in self._batches.all):
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._open_when_admitted, args=(is_over,), name="dlrover-lanes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(CLOSE_S)  # it uses the loaders
            if thread.is_alive():
                reading = (loader.dataset.source for loader in self._batches.all if loader.reads_lanes)
                raise DataError(
                    f"a loader worker has been reading ahead for {CLOSE_S:.0f} s and does not answer, so this worker cannot "
                    f"train: look for a file or a store that hangs in {', '.join(repr(source)[:120] for source in reading)}"
                )

    def _open_when_admitted(self, is_over: threading.Event) -> None:
        self._attempt(self._read_a_row)
        done = 0
        while not is_over.wait(LOOK_S):
            newest = self._job.view.round
            if newest is not None and newest.number != done and self._job.worker_id in newest.members:
                done = newest.number
                self._attempt(self._open, newest, is_over)

    def _attempt(self, run: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except Exception as error:  # the main thread meets it again where it can be reported
            log.debug("lanes could not be opened ahead: %s", error)

    def _read_a_row(self) -> None:
        """Let each loader worker read something. The first time takes it several times as long."""
        for loader in self._batches.all:
            if loader.reads_lanes:
                loader.open_lanes(loader.epoch, 0, loader.order.seed, 0, loader.global_batch_size)

    def _places(self, newest: RoundRecord, is_over: threading.Event) -> PlacesRecord | None:
        deadline = time.monotonic() + PLACES_S
        while newest.kind != "start" and time.monotonic() < deadline:
            record = self._job.records.places()
            if record is not None and record.round == newest.number:
                return record
            if is_over.wait(LOOK_S):
                return None
        return None

    def _open(self, newest: RoundRecord, is_over: threading.Event) -> None:
        record = self._places(newest, is_over)
        place = newest.members.index(self._job.worker_id), len(newest.members)
        for loader, (epoch, cursor, seed) in zip(self._batches.all, record.places if record else (), strict=False):
            if loader.reads_lanes:
                loader.open_lanes(epoch, cursor, seed, *place)
