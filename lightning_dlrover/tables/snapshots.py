"""Take snapshots while a job trains, keep copies on other workers, and decide which snapshot counts.

When a vote shows that all workers are ready, all begin a copy of their state at the same step. A thread copies and sends it to
the neighbours while training continues. The snapshot counts when the next vote shows that every worker holds all its parts.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import SnapshotCompleted, SnapshotFailed
from lightning_dlrover.rdzv.job.folders import ROOT
from lightning_dlrover.rdzv.job.records import SnapshotRecord
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError
from lightning_dlrover.tables.exchange import CHUNK_BYTES, Block, all_gather, swap
from lightning_dlrover.tables.layout import plan_to_dict
from lightning_dlrover.tables.persist import Persister
from lightning_dlrover.tables.sharded import ShardedTables, TouchedRows
from lightning_dlrover.tables.snapshot_store import (
    Name,
    Part,
    PartHeader,
    PartWriter,
    SnapshotError,
    SnapshotStore,
    changes_of,
    part_header,
    put_changes,
    size_of_changes,
)

EVERYTHING, CHANGES, NOTHING = range(3)
"""Requests of a neighbour for a part."""

PAUSE_S = 0.004
"""Seconds between two messages to a neighbour: training has priority on the wire."""

Group = dist.ProcessGroup | dist.ProcessGroupGloo

GoingOn = Callable[[], AbstractContextManager[None]]
"""Context around every write of a thread to shared memory. Raises `RoundEndedError` once its round has ended."""


class MissingPartError(SnapshotError):
    """A worker could not take its part of a snapshot, so it has no copy."""


def others(rank: int, hosts: Sequence[str], count: int, leaving: Set[int] = frozenset()) -> list[int]:
    """Return the ranks that keep copies of a worker's part, on other hosts first, then on its own.

    Copies are spread evenly: the first worker of a host has its copies on the first worker of the next host, and so on.

    Args:
        leaving: ranks that will leave, and keep a copy only where too few others are left.
    """
    size = len(hosts)
    ring = [(rank + step) % size for step in range(1, size)]
    place = sum(host == hosts[rank] for host in hosts[:rank])  # position among the workers of its host
    turns: dict[int, int] = {}  # times that a rank's host is passed over before its turn
    for host in set(hosts) - {hosts[rank]}:
        there = [r for r, each in enumerate(hosts) if each == host]
        turns |= {r: (i - place) % len(there) for i, r in enumerate(there)}
    first = {hosts[r]: i for i, r in reversed(list(enumerate(ring)))}
    order = sorted(ring, key=lambda r: (hosts[r] == hosts[rank], turns.get(r, 0), first[hosts[r]], ring.index(r)))
    return sorted(order, key=leaving.__contains__)[:count]


class Neighbours:
    """The workers that exchange copies of their parts with this one in a round.

    A neighbour that has the part of the previous snapshot receives only the changes. One on the same host reads shared memory.

    Args:
        store: destination of the copies.
        group: process group of all members; None: nothing is exchanged.
        keepers: ranks that keep a copy of this worker's part.
        owners: ranks that this worker keeps copies of.
    """

    def __init__(self, store: SnapshotStore, group: Group | None, keepers: Sequence[int], owners: Sequence[int]) -> None:
        self.keepers = list(keepers)
        self.owners = list(owners)
        self._store = store
        self.group = group

    def replicate(
        self,
        part: Part | None,
        changed: Sequence[torch.Tensor | None],
        base: Name | None,
        keep: Name | None,
        stopping: threading.Event,
        going_on: GoingOn,
    ) -> None:
        """Send a part to the neighbours while receiving theirs, all in step, so that no two wait for each other.

        Args:
            part: None if this worker could not take it: the others must not wait for it.
            changed: rows of each block that differ from the base; None: all.
            base: the snapshot that the neighbours may already have.
            keep: the newest snapshot that counts; its parts stay.
            stopping: set when the round has ended.
            going_on: entered while shared memory is written.

        Raises:
            RoundEndedError: the round has ended.
            MissingPartError: a worker whose copies are kept here has no part.
            SnapshotError: there is not enough memory for a copy.
            RuntimeError: the connection is lost, or a neighbour is silent.
        """
        if self.group is None:
            return
        counts = [-1 if rows is None else len(rows) for rows in changed]
        header = part.header.encode().decode() if part is not None else None
        said = json.dumps({"header": header, "base": base, "counts": counts}).encode()
        incoming = self._introduce(torch.frombuffer(bytearray(said), dtype=torch.uint8), keep, going_on)
        answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self.keepers}
        wants = {rank: incoming[rank].wants if rank in incoming else NOTHING for rank in self.owners}
        swap(self.group, {rank: torch.tensor([want], dtype=torch.uint8) for rank, want in wants.items()}, answers)
        wanted = {rank: int(answer) for rank, answer in answers.items()}
        outgoing: dict[int, torch.Tensor | None] = {}
        if part is not None:
            changes = changes_of(part, changed) if CHANGES in wanted.values() else None
            outgoing = {rank: changes if want == CHANGES else part.values for rank, want in wanted.items() if want != NOTHING}
        by_wire = {rank: each.values for rank, each in incoming.items() if each.wants != NOTHING}
        sizes = [len(values) for values in (*outgoing.values(), *by_wire.values()) if values is not None]
        for start in range(0, max(sizes, default=0), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            mine = {rank: values[start:end] for rank, values in outgoing.items() if values is not None}
            swap(self.group, mine, {rank: values[start:end] for rank, values in by_wire.items()})
            if stopping.wait(PAUSE_S):
                raise RoundEndedError("the round ended")
        for each in incoming.values():
            each.copy_from_host(going_on)
        with going_on():
            for each in incoming.values():
                each.finish()
        if missing := sorted(set(self.owners) - incoming.keys()):
            raise MissingPartError(f"rank {missing[0]} could not take its part")

    def _introduce(self, said: torch.Tensor, keep: Name | None, going_on: GoingOn) -> dict[int, _Incoming]:
        """Announce this worker's part to the neighbours, and receive the announcements of others."""
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in self.owners}
        swap(self.group, dict.fromkeys(self.keepers, torch.tensor([len(said)])), lengths)
        texts = {rank: torch.empty(int(length.item()), dtype=torch.uint8) for rank, length in lengths.items()}
        swap(self.group, dict.fromkeys(self.keepers, said), texts)
        incoming = {}
        for rank, text in texts.items():
            try:
                found = json.loads(text.numpy().tobytes())
                if found["header"] is None:
                    continue
                header, base, counts = PartHeader.decode(found["header"].encode()), found["base"], found["counts"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SnapshotError(f"rank {rank} sent something else than a part of a snapshot: {error}") from error
            with going_on():
                incoming[rank] = _Incoming(self._store, keep, header, tuple(base) if base else None, counts)
        return incoming


class _Incoming:
    """Another worker's part on its way here: all of it, or its changes since a local one, by network or shared memory.

    Attributes:
        wants: request to its owner: EVERYTHING, CHANGES, or NOTHING if the part is in this host's memory.
        values: buffer for data from the network.
    """

    def __init__(
        self, store: SnapshotStore, keep: Name | None, header: PartHeader, base: Name | None, counts: Sequence[int]
    ) -> None:
        self._counts = counts
        self._writer: PartWriter | None = None
        self._problem: SnapshotError | None = None
        self.values = torch.empty(0, dtype=torch.uint8)
        try:
            self._writer = store.begin(header, keep)
        except SnapshotError as error:
            self._problem = error  # the owner is asked to send nothing, so that it does not wait
        self._original = store.part_of(header.owner, header.name)
        if self._writer is None or self._original is not None:
            self.wants = NOTHING
        elif base is not None and self._writer.base == base:
            self.wants = CHANGES
            self.values = torch.empty(size_of_changes(header, counts), dtype=torch.uint8)
        else:
            self.wants = EVERYTHING
            self.values = self._writer.values

    def copy_from_host(self, going_on: GoingOn) -> None:
        """Copy a part that is in this host's memory."""
        if self._writer is None or self._original is None:
            return
        there, here = self._writer.values, self._original.values
        for start in range(0, len(there), CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, len(there) - start)
            with going_on():
                # A tensor's copy would wake the threads that train.
                ctypes.memmove(there.data_ptr() + start, here.data_ptr() + start, num_bytes)

    def finish(self) -> None:
        """Complete the part once all of it has arrived."""
        if self._problem is not None:
            raise self._problem
        assert self._writer is not None
        if self.wants == CHANGES:
            put_changes(self._writer, self._counts, self.values)
        self._writer.commit()


log = logging.getLogger(__name__)

MAX_STALL = 0.01
"""Maximum fraction of the time for copying. Snapshots become rarer rather than exceed it."""

NICENESS = 15
"""Niceness of the thread that touches memory and sends copies, because training has priority.

It does not apply to the copy of changing rows: the longer that takes, the more former values must be kept, which costs more
than the copy itself.
"""

RETRY_S, MAX_RETRY_S = 5.0, 300.0
"""Seconds until a failed snapshot is retried: doubled after each further failure, up to a maximum.

A shorter interval replaces the first value, a longer one the second.
"""

LAST_S = 10.0
"""Seconds before the end of a worker's node within which one more snapshot is taken, in case that worker has to stay."""

RECORD_S = 120.0
"""Minimum seconds between two records in etcd of the newest snapshot."""


@dataclass(frozen=True)
class SnapshotConfig:
    """Interval of snapshots and number of copies.

    Attributes:
        interval_s: minimum seconds between two of them; 0 switches them off.
        replicas: workers that keep a copy of another one's part, on other hosts if there are any. With 0 a worker's part is
            lost with its host.
        max_bytes: maximum shared memory for one worker; None: half of the memory that is free at the start.
        memory: folder with its files in the host's memory.
        disk: folder visible to all hosts, for copies that outlive the hosts. A separate process of each worker writes them.
        disk_interval_s: minimum seconds between two snapshots that are copied there.

    Example:
        >>> from lightning_dlrover import DLRoverStrategy
        >>> strategy = DLRoverStrategy(snapshots=SnapshotConfig(interval_s=30, replicas=2))  # survives two losses at once
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
        self._work: Future[int] | None = None  # its result is the number of the snapshot completed here
        self._formation: Formation | None = None
        self._neighbours = Neighbours(store, None, [], [])
        self._hosts: list[str] = []  # of the round's members
        self._leaving: frozenset[int] = frozenset()  # ranks that keep no copies, see `others`
        self._said_leaving: frozenset[int] = frozenset()  # those in this worker's newest ballot
        self._num_groups = 0  # groups connected in this round
        self._stopping = threading.Event()  # makes the round's thread give up
        self._lock = threading.Lock()  # held for each write to shared memory: only the present round's thread writes
        self._number = 0  # snapshots taken in this round, from 1; 0: only room for them was made
        self._held = 0  # newest of them that is complete on this worker
        self._counted = 0  # newest of them that is complete on all workers
        self._num_failures = 0  # consecutive failures of this worker
        self._failure = ""  # reported last
        self._retry_at = float("-inf")
        self._kept_at = time.monotonic()  # when the newest snapshot that counts was taken
        self._recorded_at = float("-inf")
        self._is_reported = False  # True once a snapshot of this round counts
        self._others_are_dropped = False  # True once the round's first snapshot has replaced the parts of former members
        self._name: Name | None = None  # newest snapshot taken
        self._keep: Name | None = None  # newest snapshot that counts
        # Rows trained since each of the two slots of this worker's own parts was written.
        self._touched: TouchedRows | None = None
        # Rows of each block in the newest part that differ from its base; None: all.
        self._changed: list[torch.Tensor | None] = []
        self._base: Name | None = None
        self._persister = Persister()
        self._is_for_disk = False  # whether the newest one taken goes to disk
        self._number_for_disk = 0  # newest one passed to the copy to disk; 0: of an earlier round
        self._on_disk_at = time.monotonic()
        self._taken_at = 0.0
        self._stall_s = 0.0

    def clear_memory(self) -> None:
        """Remove the parts in memory, because the job has no more workers on this host."""
        self.stop()
        self.store.close()
        self.store.clear_memory()

    def rolled_back_to(self, name: Name) -> None:
        self._keep = name

    def forget(self, fit: int) -> None:
        """Begin a later `fit` of the script: snapshots of earlier ones no longer count."""
        self.stop()
        self._persister.close(timeout_s=0.0)
        self.store.begin_fit(fit)
        self._keep = self._name = self._base = None
        self._kept_at = time.monotonic()

    def enter(self, formation: Formation, tables: ShardedTables) -> None:
        """Begin a new round. Its first snapshot is due at once, as older parts may leave with their workers."""
        self.stop()
        is_again = self._formation is not None and self._formation.round.number == formation.round.number
        self._num_groups = self._num_groups + 1 if is_again else 1
        self._formation = formation
        if self._touched is not None:
            self._touched.close()
        self._touched = tables.track()
        self._number = self._held = self._counted = self._number_for_disk = 0
        self._num_failures, self._failure, self._retry_at = 0, "", float("-inf")
        self._others_are_dropped = self._is_reported = False
        self._taken_at = float("-inf")
        self._stopping = threading.Event()
        self._hosts = all_gather(formation, socket.gethostname())
        self._leaving = self._said_leaving = frozenset()
        group = None
        if formation.size > 1 and self._config.replicas:
            # The name changes if the first round began with a rollback, because the former group's addresses still exist.
            group = self._world.connect(formation.round, f"snapshots/{self._num_groups}", formation.round.members)
        self._neighbours = self._chosen_neighbours(group)
        held = sum(-(-b.values.nbytes // 64) * 64 for b in tables.blocks())
        self._work = self._begin(self.make_room, tables, held)

    def _chosen_neighbours(self, group: Group | None) -> Neighbours:
        """Return the neighbours of this worker. All members choose them alike: they have agreed on `_leaving`."""
        assert self._formation is not None
        rank, count = self._formation.rank, self._config.replicas
        keepers = [others(r, self._hosts, count, self._leaving) for r in range(self._formation.size)]
        owners = [r for r, of_other in enumerate(keepers) if rank in of_other]
        return Neighbours(self.store, group, keepers[rank], owners)

    def _begin(self, run: Callable[..., int], *args: Any) -> Future[int]:
        """Run in a new thread, which is abandoned at the round's end: gloo may wait long for lost messages."""
        result: Future[int] = Future()

        def work() -> None:
            try:
                result.set_result(run(*args))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="dlrover-snapshot", daemon=True).start()
        return result

    def stop(self) -> None:
        """Stop the thread: an incomplete snapshot does not count, and nothing more is written."""
        with self._lock:
            self._stopping.set()
        self._work = None
        self._neighbours = Neighbours(self.store, None, self._neighbours.keepers, self._neighbours.owners)

    def wishes(self) -> list[int]:
        is_idle, now = self._is_idle(), time.monotonic()
        # If all workers have ended their work on a snapshot and not all hold it, it failed on one, which waits before a retry.
        interval_s = self._config.interval_s if self._counted == self._number else 0.0
        self._said_leaving = self._leaving_now()
        is_urgent = self._said_leaving != self._leaving or self._is_near_an_end(now)
        is_due = (
            is_idle
            and (now - self._taken_at >= max(interval_s, self._stall_s / MAX_STALL) or is_urgent)
            and now >= self._retry_at
            and not self._stopping.is_set()
            and not self._would_overwrite_what_is_written_to_disk
        )
        is_for_disk = self._config.disk is not None and now - self._on_disk_at >= self._config.disk_interval_s
        digest = hashlib.blake2b(repr(sorted(self._said_leaving)).encode(), digest_size=7).digest()
        said = int.from_bytes(digest, "big")
        return [self._held, int(is_due), int(is_for_disk), said, -said]

    def _leaving_now(self) -> frozenset[int]:
        """Return the ranks of the members that will leave, as far as this worker sees them now."""
        formation = self._formation
        if formation is None or formation.size == 1:
            return frozenset()
        view = self._world.membership.view
        leaving = {*view.taken_at, *view.replacements, *view.drains}
        return frozenset(r for r, worker in enumerate(formation.round.members) if worker in leaving)

    def _is_near_an_end(self, now: float) -> bool:
        """Whether a member's node will be taken away in a moment, and no snapshot was taken since that is so."""
        if not self._said_leaving or self._formation is None:
            return False
        ends = [at for worker, at in self._world.membership.view.taken_at.items() if worker in self._formation.round.members]
        return any(0.0 < (left_s := at - time.time()) <= LAST_S and now - self._taken_at > LAST_S - left_s for at in ends)

    @property
    def age_s(self) -> float:
        """Seconds since the newest snapshot that counts was taken."""
        return time.monotonic() - self._kept_at

    @property
    def _would_overwrite_what_is_written_to_disk(self) -> bool:
        """Whether the next snapshot but one would reuse the memory of one being written to disk. A hung disk is ignored."""
        is_late = time.monotonic() - self._on_disk_at > self._config.disk_interval_s
        return self._number > self._number_for_disk and self._persister.is_busy and not is_late

    def _is_idle(self) -> bool:
        """Return whether this worker's work on the newest snapshot has ended, successfully or not."""
        if self._work is None:
            return True
        if not self._work.done():
            return False
        work, self._work = self._work, None
        error = work.exception()
        if error is None:
            self._held = self._number
            self._num_failures, self._failure = (0, "") if self._number else (self._num_failures, self._failure)
        elif not self._stopping.is_set():
            self._failed(error)
        return True

    def _failed(self, error: BaseException) -> None:
        """Retry later if memory or the state did not allow a snapshot; give up for this round if a connection is lost."""
        me, is_final = self._world.worker_id, not isinstance(error, SnapshotError | OSError)
        longest_s, first_s = max(MAX_RETRY_S, self._config.interval_s), min(RETRY_S, self._config.interval_s)
        wait_s = min(longest_s, first_s * 2 ** min(self._num_failures, 30))
        self._num_failures += 1
        self._retry_at = time.monotonic() + wait_s
        if is_final:
            self._stopping.set()
        problem = str(error) or type(error).__name__
        if isinstance(error, MissingPartError) or problem == self._failure:
            return  # reported by the other worker, or before
        self._failure = problem
        next_move = "none is taken for the rest of this round" if is_final else f"the next try is in {wait_s:.0f} s"
        log.warning("worker %s: a snapshot failed, %s: %s", me, next_move, problem)
        assert self._formation is not None
        event = SnapshotFailed(self._formation.round.number, me, problem)
        self._world.event(event, f"worker {me}: a snapshot failed, {next_move}: {problem}")

    def voted(
        self,
        everybody_has: int,
        all_are_ready: bool,
        for_disk: bool,
        batch: int,
        tables: ShardedTables,
        pack_state: Callable[[], bytes],
        all_see_the_same_leave: bool = True,
    ) -> bool:
        """Take a snapshot if all are ready. Return whether this worker's part has begun."""
        assert self._formation is not None
        if everybody_has > self._counted:
            has_recovered = everybody_has > self._counted + 1
            self._counted = everybody_has
            self._keep, self._kept_at = self._name, self._taken_at
            self._counts(has_recovered)
            return False  # workers were ready to repeat one that failed
        if not all_are_ready:
            return False
        if all_see_the_same_leave and self._said_leaving != self._leaving:
            # Parts that leaving workers kept are copied to others before they leave.
            self._leaving, self._others_are_dropped = self._said_leaving, False
            self._neighbours = self._chosen_neighbours(self._neighbours.group)
        self._is_for_disk = for_disk
        started = time.perf_counter()
        self._number += 1
        self._taken_at = time.monotonic()
        try:
            writer, blocks = self._take(batch, tables, pack_state)
        except (SnapshotError, OSError) as error:  # shared memory may be cleaned up at any moment
            self._work = self._begin(self._decline, error, self._neighbours, self._stopping)  # see `_failed`
            return False
        self._work = self._begin(self._complete, self._number, writer, blocks, self._touched, self._neighbours, self._stopping)
        if self._number > 2:  # the first two touch their memory for the first time
            self._stall_s = time.perf_counter() - started
        return True

    def _counts(self, has_recovered: bool) -> None:
        """Handle the newest snapshot's completion on all workers. `has_recovered`: the one before it failed."""
        assert self._formation is not None
        members = self._formation.round.members
        if not self._others_are_dropped:
            with suppress(EtcdError):  # training continues while etcd is unavailable, and the next snapshot drops them
                here = self._world.membership.on_this_host()
                waiting = [w for w, record in here.items() if record.state in ("standby", "ready")]  # they have touched memory
                self.store.drop_others([*members, *waiting], [members[r] for r in self._neighbours.owners])
                self._others_are_dropped = True
        if self._formation.rank == 0:
            self._report(has_recovered)
        if self._is_for_disk and self._keep is not None and (paths := self.store.on_disk(self._keep)) is not None:
            self._on_disk_at = time.monotonic()
            self._number_for_disk = self._number
            self._persister.persist(*paths)

    def _report(self, has_recovered: bool) -> None:
        """Report, on rank 0, that snapshots count, and the newest one."""
        assert self._formation is not None
        assert self._keep is not None
        number, is_first = self._formation.round.number, not self._is_reported
        if is_first or has_recovered:
            self._is_reported = True
            taken = self.store.num_bytes
            which = "the first snapshot is complete" if is_first else "snapshots are complete again"
            self._world.event(
                SnapshotCompleted(number, taken, len(self._neighbours.keepers)),
                f"round {number}: {which}; rank 0 keeps {taken >> 20} MiB",
            )
        if is_first or has_recovered or time.monotonic() - self._recorded_at >= RECORD_S:
            self._recorded_at = time.monotonic()
            self._world.membership.shared.put_snapshot(
                SnapshotRecord(round=number, batch=self._keep[1], at=time.time() - self.age_s)
            )

    def _take(self, batch: int, tables: ShardedTables, pack_state: Callable[[], bytes]) -> tuple[PartWriter, list[Block]]:
        """Begin this worker's part, and return the blocks; `_complete` copies those with tracked changes."""
        assert self._formation is not None
        assert self._touched is not None
        assert tables.plan is not None
        blocks, state = [*tables.blocks(), *tables.growing.blocks()], pack_state()
        round_ = self._formation.round
        me, plan = self._world.worker_id, plan_to_dict(tables.plan)
        header = part_header(batch, round_.number, round_.members, me, plan, blocks, len(state), tables.counters())
        self._name = header.name
        writer = self.store.begin(header, self._keep)
        is_based = writer.base is not None
        self._changed = [self._touched.since(writer.slot, block) if is_based else None for block in blocks]
        self._base = writer.base
        writer.put([block for block in blocks if not self._touched.is_tracked(block)], state)
        self._touched.begin_copy(blocks)
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
        """Copy the shards, as they were when the part began, while training continues; send the copy to the neighbours."""
        going_on = partial(self._while_it_lasts, stopping)
        try:
            for block, rows in zip(blocks, self._changed, strict=True):
                if touched.is_tracked(block):
                    writer.put_block(block, rows, going_on)
            for block, rows, values in touched.end_copy():
                with going_on():
                    writer.put_rows(block, rows, values)
            with going_on():
                part = writer.commit()
        except (SnapshotError, OSError) as error:
            touched.end_copy()  # keeps no more former values
            self._decline(error, neighbours, stopping)
        _give_way()
        neighbours.replicate(part, self._changed, self._base, self._keep, stopping, going_on)
        return number

    def _decline(self, error: BaseException, neighbours: Neighbours, stopping: threading.Event) -> NoReturn:
        """Receive the others' parts, which may be complete elsewhere, so that they do not wait; then raise `error`."""
        with suppress(SnapshotError):
            neighbours.replicate(None, [], None, self._keep, stopping, partial(self._while_it_lasts, stopping))
        raise error

    @contextmanager
    def _while_it_lasts(self, stopping: threading.Event) -> Iterator[None]:
        """Guard every write to shared memory: after a round's end, only the next round's thread writes there."""
        with self._lock:
            if stopping.is_set():
                raise RoundEndedError("the round ended")
            yield

    def make_room(self, tables: ShardedTables, num_bytes: int) -> int:
        """Touch the memory of this worker's own parts: it would take most of the first two snapshots' time."""
        _give_way()
        names = tables.parameter_names()
        dense = sum(p.nbytes for name, p in tables.module.named_parameters() if name not in names)
        with suppress(SnapshotError):  # reported by the snapshot itself
            self.store.reserve(self._world.worker_id, num_bytes + 4 * dense + (1 << 20))
        return 0

    def close(self, has_finished: Callable[[], bool]) -> None:
        self.stop()
        self.store.close()
        if has_finished():
            self._persister.close(timeout_s=0.0)  # no one will read its copies
            self.store.clear()
            return
        self._persister.close()
        if has_finished():  # others may have cleaned up while this worker's part was copied to disk
            self.store.clear()


def _give_way() -> None:
    """Lower the calling thread's priority, so that it uses a core only where training leaves one idle."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
