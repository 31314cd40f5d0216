"""When a worker takes part in a snapshot, and which one counts.

All begin a copy of their state at the same place, when a vote says that all are ready. A thread makes the copy and sends it to
the neighbours while training goes on. When the next vote says that everybody has all it should have, the snapshot counts.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.member import Formation, RoundEndedError
from lightning_dlrover.tables.block import Block
from lightning_dlrover.tables.collectives import all_gather
from lightning_dlrover.tables.neighbours import Neighbours, others
from lightning_dlrover.tables.persist import Persister
from lightning_dlrover.tables.placement import plan_to_dict
from lightning_dlrover.tables.sharded import ShardedTables
from lightning_dlrover.tables.snapshot import (
    Part,
    PartWriter,
    SnapshotError,
    part_header,
)
from lightning_dlrover.tables.snapshot_store import (
    ROOT,
    SnapshotStore,
)
from lightning_dlrover.tables.touched import TouchedRows

__all__ = ["SnapshotConfig", "Snapshots"]

log = logging.getLogger(__name__)

MAX_STALL = 0.01
"""Part of the time that copying may take: snapshots are rarer where it would take more."""

NICENESS = 15
"""Of the thread that touches memory and copies to neighbours: training has the cores first. Not while it copies what changes:
the longer that takes, the more rows are kept as they were, which costs more than the copy itself."""


@dataclass(frozen=True)
class SnapshotConfig:
    """When snapshots are taken and how many copies there are.

    Attributes:
        interval_s: least seconds between two of them; 0 switches them off.
        replicas: workers that keep a copy of another one's part, on other hosts if there are any. With 0 a worker's part
            is lost with its host.
        max_bytes: of shared memory that one worker may take; None: half of what is free at the start.
        memory: folder whose files are in the host's memory.
        disk: folder that all hosts see, for copies that outlast the hosts: written by a process beside each worker.
        disk_interval_s: least seconds between two snapshots that are copied there.
    """

    interval_s: float = 60.0
    replicas: int = 1
    max_bytes: int | None = None
    memory: Path = ROOT
    disk: Path | None = None
    disk_interval_s: float = 600.0

    def __post_init__(self) -> None:
        if self.interval_s < 0:
            raise ValueError(f"snapshot interval_s is {self.interval_s}, it must not be below 0")
        if self.replicas not in (0, 1, 2):
            raise ValueError(f"snapshot replicas is {self.replicas}, it must be 0, 1 or 2")


class Snapshots:
    """Takes this worker's part of every snapshot, sends it to the neighbours and keeps theirs."""

    def __init__(self, world: World, store: SnapshotStore, config: SnapshotConfig) -> None:
        self._world = world
        self.store = store
        self._config = config
        self._work: Future[int] | None = None  # becomes the number of the snapshot that it has completed here
        self._formation: Formation | None = None
        self._neighbours = Neighbours(store, None, [], [])
        self._num_groups = 0  # that were connected in this round
        self._stopping = threading.Event()  # of the round: its thread is to give up
        self._lock = threading.Lock()  # held while shared memory is written: by the thread of a round that lasts only
        self._number = 0  # of snapshots taken in this round, from 1; 0: room for them was made
        self._counted = 0  # the newest of them that everybody has
        self._name: tuple[int, int] | None = None  # of the newest one taken
        self._keep: tuple[int, int] | None = None  # of the newest one that counts
        self._touched: TouchedRows | None = None  # since each of the two slots of this worker's own parts was written
        self._changed: list[torch.Tensor | None] = []  # rows of each block in the newest part not as in its base; None: all
        self._base: tuple[int, int] | None = None
        self._persister = Persister()
        self._is_for_disk = False  # the newest one taken
        self._number_for_disk = 0  # the newest one that was given to be copied there; 0: of an earlier round
        self._on_disk_at = time.monotonic()
        self._taken_at = 0.0
        self._stall_s = 0.0

    def readable(self) -> list[Part]:
        return self.store.parts()

    def clear_memory(self) -> None:
        """No worker of the job is left on this host."""
        self.stop()
        self.store.close()
        self.store.clear_memory()

    def rolled_back_to(self, name: tuple[int, int]) -> None:
        self._keep = name

    def forget(self, fit: int) -> None:
        """A later `fit` of the script begins: no snapshot of an earlier one counts any more."""
        self.stop()
        self._persister.close(timeout_s=0.0)
        self.store.begin_fit(fit)
        self._keep = self._name = self._base = None

    def enter(self, formation: Formation, tables: ShardedTables) -> None:
        """A new round, whose first snapshot is due at once: the older ones' parts may leave with their workers."""
        self.stop()
        is_again = self._formation is not None and self._formation.round.number == formation.round.number
        self._num_groups = self._num_groups + 1 if is_again else 1
        self._formation = formation
        if self._touched is not None:
            self._touched.close()
        self._touched = tables.track()
        self._number = self._counted = self._number_for_disk = 0
        self._taken_at = float("-inf")
        self._stopping = threading.Event()
        hosts = all_gather(formation, socket.gethostname())
        keepers = others(formation.rank, hosts, self._config.replicas)
        owners = [r for r in range(formation.size) if formation.rank in others(r, hosts, self._config.replicas)]
        group = None
        if formation.size > 1 and self._config.replicas:
            # Of another name where the first round began with a rollback: the former group's addresses are still there.
            group = self._world.connect(formation.round, f"snapshots/{self._num_groups}", formation.round.members)
        self._neighbours = Neighbours(self.store, group, keepers, owners)
        held = sum(-(-b.values.nbytes // 64) * 64 for b in tables.blocks())
        self._work = self._begin(self.make_room, tables, held)

    def _begin(self, run: Callable[..., int], *args: Any) -> Future[int]:
        """In a thread of its own, which is left behind when the round ends: gloo may wait long for what will never come."""
        result: Future[int] = Future()

        def work() -> None:
            try:
                result.set_result(run(*args))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="dlrover-snapshot", daemon=True).start()
        return result

    def stop(self) -> None:
        """Let the thread give up; what it has not completed does not count, and it writes nothing any more."""
        with self._lock:
            self._stopping.set()
        self._work = None
        self._neighbours = self._neighbours.disconnected()

    def wishes(self) -> list[int]:
        done = self._done()
        is_due = (
            done == self._counted == self._number
            and time.monotonic() - self._taken_at >= max(self._config.interval_s, self._stall_s / MAX_STALL)
            and not self._stopping.is_set()
            and not self._would_overwrite_what_is_written_to_disk
        )
        is_for_disk = self._config.disk is not None and time.monotonic() - self._on_disk_at >= self._config.disk_interval_s
        return [done, int(is_due), int(is_for_disk)]

    @property
    def _would_overwrite_what_is_written_to_disk(self) -> bool:
        """The next snapshot but one takes the room of that which is being copied there. A disk that hangs is not waited for."""
        is_late = time.monotonic() - self._on_disk_at > self._config.disk_interval_s
        return self._number > self._number_for_disk and self._persister.is_busy and not is_late

    def _done(self) -> int:
        """The newest snapshot of which this worker has all it should have."""
        if self._work is None:
            return self._number
        if not self._work.done():
            return self._number - 1
        if (error := self._work.exception()) is not None:
            if not self._stopping.is_set():
                self._stopping.set()
                log.warning("worker %s takes no more snapshots in this round: %s", self._world.worker_id, error)
            return self._number - 1
        return self._number

    def voted(
        self,
        everybody_has: int,
        all_are_ready: bool,
        for_disk: bool,
        batch: int,
        tables: ShardedTables,
        pack_state: Callable[[], bytes],
    ) -> bool:
        assert self._formation is not None
        if everybody_has > self._counted:
            self._counted = everybody_has
            self._keep = self._name
            self._counts()
        if not all_are_ready:
            return False
        self._is_for_disk = for_disk
        started = time.perf_counter()
        self._number += 1
        self._taken_at = time.monotonic()
        try:
            writer, blocks = self._take(batch, tables, pack_state)
        except (SnapshotError, OSError) as error:  # somebody may clean up in shared memory at any moment
            self._work = Future()
            self._work.set_exception(error)  # see `_done`
            return False
        self._work = self._begin(self._complete, self._number, writer, blocks, self._touched, self._neighbours, self._stopping)
        if self._number > 2:  # the first two touch their memory for the first time
            self._stall_s = time.perf_counter() - started
        return True

    def _counts(self) -> None:
        """Everybody has all it should have of the newest snapshot."""
        assert self._formation is not None
        members = self._formation.round.members
        if self._counted == 1:
            waiting = self._world.membership.view.in_state("standby", "ready")  # they have touched memory for their parts
            self.store.drop_others([*members, *waiting], [members[r] for r in self._neighbours.owners])
            if self._formation.rank == 0:
                taken = self.store.num_bytes
                self._world.event(
                    "snapshot",
                    f"round {self._formation.round.number}: the first snapshot is complete; rank 0 keeps {taken >> 20} MiB",
                    {"round": self._formation.round.number, "bytes_rank_0": taken, "replicas": len(self._neighbours.keepers)},
                )
        if self._is_for_disk and self._keep is not None and (paths := self.store.on_disk(self._keep)) is not None:
            self._on_disk_at = time.monotonic()
            self._number_for_disk = self._number
            self._persister.persist(*paths)

    def _take(self, batch: int, tables: ShardedTables, pack_state: Callable[[], bytes]) -> tuple[PartWriter, list[Block]]:
        """Begin this worker's part; what training cannot change unseen is left for `_complete` to copy, and returned."""
        assert self._formation is not None
        assert self._touched is not None
        assert tables.plan is not None
        blocks, state = tables.blocks(), pack_state()
        round_ = self._formation.round
        header = part_header(
            batch, round_.number, round_.members, self._world.worker_id, plan_to_dict(tables.plan), blocks, len(state)
        )
        self._name = header.name
        writer = self.store.begin(header, self._keep)
        is_based = writer.base is not None
        self._changed = [self._touched.since(writer.slot, block) if is_based else None for block in blocks]
        self._base = writer.base
        writer.put([block for block in blocks if not self._touched.is_tracked(block)], state)
        self._touched.begin_copy()
        self._touched.mark(writer.slot)
        return writer, blocks

    # --- in the thread -------------------------------------------------------------------------------------------------

    def _complete(
        self,
        number: int,
        writer: PartWriter,
        blocks: Sequence[Block],
        touched: TouchedRows,
        neighbours: Neighbours,
        stopping: threading.Event,
    ) -> int:
        """Copy the shards, as they were when the part was begun, while training goes on; let the neighbours have the copy."""
        going_on = partial(self._while_it_lasts, stopping)
        for block, rows in zip(blocks, self._changed, strict=True):
            if touched.is_tracked(block):
                writer.put([block], changed=partial(_as_given, rows), each=going_on)
        for block, rows, values in touched.end_copy():
            with going_on():
                writer.put_rows(block, rows, values)
        with going_on():
            part = writer.commit()
        _give_way()
        neighbours.replicate(part, self._changed, self._base, self._keep, stopping, going_on)
        return number

    @contextmanager
    def _while_it_lasts(self, stopping: threading.Event) -> Iterator[None]:
        """Around all that a thread writes into shared memory: once its round has ended, the next one writes there."""
        with self._lock:
            if stopping.is_set():
                raise RoundEndedError("the round ended")
            yield

    def make_room(self, tables: ShardedTables, num_bytes: int) -> int:
        """Touch the memory of this worker's own parts: at the first two snapshots that would be most of the time they take."""
        _give_way()
        names = tables.parameter_names()
        dense = sum(p.nbytes for name, p in tables.module.named_parameters() if name not in names)
        with suppress(SnapshotError):  # the snapshot itself will say so
            self.store.reserve(self._world.worker_id, num_bytes + 4 * dense + (1 << 20))
        return 0

    def close(self, has_finished: Callable[[], bool]) -> None:
        self.stop()
        self.store.close()
        if has_finished():
            self._persister.close(timeout_s=0.0)  # nobody will read what it copies
            self.store.clear()
            return
        self._persister.close()
        if has_finished():  # the others, who have cleaned up, while this worker's part was copied to disk
            self.store.clear()


def _give_way() -> None:
    """Let the thread that calls this have a core only where training leaves one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _as_given(rows: torch.Tensor | None, block: Block) -> torch.Tensor | None:
    return rows
