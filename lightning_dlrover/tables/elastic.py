"""Sharded tables in a job whose workers change: handed over when a change is planned, taken from a snapshot when it is not.

What lives in a worker's memory is either whole: with that of all other members of one round it makes up all tables. Or it is
not, after a step or an exchange that broke off, and then nothing of it is used again: everybody goes back to the newest
snapshot of which every part is left. `ElasticTables.whole_in` says which.

A snapshot is agreed on by the vote that workers take between steps anyway (`World.wishes`): when all of them are ready for one,
all begin a copy of their state at the same place. A thread makes it while training goes on: rows that are trained meanwhile are
kept as they were before. It sends the copy to the neighbours. When the next vote says that everybody has all it should have,
the snapshot counts, and the room of the one before it may be used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dlrover.observe.resources import available_bytes
from lightning_dlrover.rdzv.group import transfer, waits
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import (
    Formation,
    RoundEndedError,
    UnreachableError,
)
from lightning_dlrover.tables.arena import warm
from lightning_dlrover.tables.exchange import (
    CHUNK_BYTES,
    ExchangeStats,
    exchange,
)
from lightning_dlrover.tables.layout import (
    Move,
    Shard,
    plan_moves,
)
from lightning_dlrover.tables.persist import Persister
from lightning_dlrover.tables.placement import (
    Plan,
    TablePlan,
    layout_of,
    plan_from_dict,
    plan_to_dict,
    replan,
)
from lightning_dlrover.tables.sharded import (
    Block,
    ShardedTables,
    TouchedRows,
)
from lightning_dlrover.tables.snapshot import (
    ROOT,
    Part,
    PartHeader,
    PartWriter,
    SnapshotError,
    SnapshotStore,
    changes_of,
    holders_of,
    newest_complete,
    newest_name,
    part_header,
    put_changes,
    size_of_changes,
)

__all__ = ["ElasticTables", "SnapshotConfig"]

log = logging.getLogger(__name__)

MAX_STALL = 0.01
"""Part of the time that copying may take: snapshots are rarer where it would take more."""

KEPT_S = 86400.0
"""For so long snapshots of a job that was killed as a whole wait for it to be started again."""

PLANNED = ("grow", "shrink", "replace")
"""Kinds of rounds that are agreed on while training goes on."""

SWAP_S = 300.0
"""For a message to or from a neighbour: gloo does not notice that a peer is gone in the middle of one."""

NICENESS = 15
"""Of the thread that touches memory and copies to neighbours: training has the cores first. Not while it copies what changes:
the longer that takes, the more rows are kept as they were, which costs more than the copy itself."""

EVERYTHING, CHANGES, NOTHING = range(3)
"""What a neighbour wants of a part."""

PAUSE_S = 0.004
"""Between two messages to a neighbour: training has the wire first."""

Group = dist.ProcessGroup | dist.ProcessGroupGloo

WrapDense = Callable[[nn.Module, list[str]], nn.Module]


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


@dataclass
class Restored:
    """What a snapshot gave beside the tables.

    Attributes:
        state: of this worker, packed; of another one where this worker has none.
        is_own: whether it is this worker's, so that what it has logged so far counts here.
        of_lost: packed states of owners that are no members any more, on the one worker that reads their part.
        batch: where the snapshot was taken.
    """

    state: bytes
    is_own: bool
    of_lost: list[bytes] = field(default_factory=list)
    batch: int = 0


class ElasticTables:
    """One worker's tables in a live job.

    Args:
        tables: of the model.
        world: the job.
        wrap_dense: makes the module data-parallel but for the parameters named, for the current round.
    """

    def __init__(self, tables: ShardedTables, world: World, config: SnapshotConfig, wrap_dense: WrapDense) -> None:
        self.tables = tables
        self.whole_in = 0
        self.last_exchange = ExchangeStats()
        self._world = world
        self._config = config
        self._wrap_dense = wrap_dense
        self._snapshots: _Snapshots | None = None
        self._is_warm = world.config.max_workers == 1  # there will be no change
        self._foreseen = 0  # the newest round
        if config.interval_s:
            try:
                job = f"{world.config.prefix}/{world.config.run_id}"
                record = world.membership.view.job
                if record is None:
                    raise SnapshotError("the job's record cannot be read")
                life = str(record.created_at)
                store = SnapshotStore(job, world.worker_id, config.max_bytes, config.disk, config.memory, life)
                store.sweep(KEPT_S)  # whatever this job's own history is worth: the others' may be worth more
                self._snapshots = _Snapshots(world, store, config)
            except SnapshotError as error:
                log.warning("run %s: no snapshots: %s", world.config.run_id, error)

    @property
    def _me(self) -> str:
        return self._world.worker_id

    # --- one round to the next -----------------------------------------------------------------------------------------

    def start(self, formation: Formation, seed: int) -> nn.Module:
        """Build new tables with all members of the job's first round."""
        members = formation.round.members
        if self.tables.is_built:
            self.tables.reset()  # a former round of joiners alone came to nothing
        module = self.tables.build(self.tables.first_plan(members), members, self._wrap_dense)
        self.tables.initialise(_all_gather(formation, seed)[0])  # tables that all hold whole must be alike
        self._is_whole(formation)
        return module

    def reshard(self, formation: Formation, standing: Sequence[str]) -> nn.Module:
        """Bring the tables from the workers of the former round, all of which take part, to those of this one.

        Args:
            standing: members that were in the former round.

        Raises:
            WorldError, RuntimeError: one of them is gone; nothing in memory is whole any more.
        """
        started = time.perf_counter()
        members = formation.round.members
        old_plan = self._plan_of(formation, standing)
        self.whole_in = 0
        if self._snapshots is not None:
            self._snapshots.stop()  # what is still being copied can never count, and would take the wire
        new_plan = replan(old_plan, members)
        union = _union(members, old_plan)
        group = self._world.connect(formation.round, "reshard", union) if len(union) > 1 else None
        old = self.tables.blocks() if self.tables.is_built else []
        module = self.tables.build(new_plan, members, self._wrap_dense)
        moves = plan_moves(layout_of(old_plan), layout_of(new_plan))
        self.last_exchange = exchange(group, union, self._me, moves, old, self.tables.blocks(), self.tables.release)
        _meet(group)  # nobody closes a connection that another one still reads from
        self.tables.drop_former()
        self._tell(formation, moves, time.perf_counter() - started)
        self._is_whole(formation)
        return module

    def _tell(self, formation: Formation, moves: Sequence[Move], seconds: float) -> None:
        if formation.rank != 0:
            return
        moved = sum(m.region.num_values for m in moves if m.source != m.target)
        all_values = sum(table.rows * table.cols for table in (self.tables.plan or {}).values())
        self._world.event(
            "reshard",
            f"round {formation.round.number}: {moved / max(1, all_values):.0%} of the tables' values moved, in {seconds:.2f} s",
            {"round": formation.round.number, "values_moved": moved, "values": all_values, "seconds": seconds},
        )

    def hand_over(self, target: RoundRecord) -> None:
        """Give this worker's shards to the members of a planned round that goes on without it."""
        if not self.whole_in or self.tables.plan is None or not target.members:
            return
        plan = self.tables.plan
        if self._me in _union(target.members, plan):  # else it holds no table
            taken_by = self._give_away(target, plan)
            if taken_by is None:
                return
            target = taken_by
        workers = self._world.membership.view.workers
        hosts = {workers[name].host for name in target.members if name in workers}
        if self._snapshots is not None and socket.gethostname() not in hosts:
            self._snapshots.clear_memory()

    def _give_away(self, target: RoundRecord, plan: Plan) -> RoundRecord | None:
        """Send this worker's shards to the members of a round, or of one that replaces it: that round; None if it failed."""
        while True:
            union = _union(target.members, plan)
            try:
                group = self._world.connect(target, "reshard", union)
            except (RoundEndedError, UnreachableError) as error:
                newest = self._world.membership.view.round
                if newest is None or newest.number == target.number or not newest.members:
                    log.warning("worker %s leaves without having handed over its tables: %s", self._me, error)
                    return None
                target = newest
                continue
            break
        moves = plan_moves(layout_of(plan), layout_of(replan(plan, target.members)))
        try:
            exchange(group, union, self._me, moves, self.tables.blocks(), [])
            _meet(group)
        except RuntimeError as error:
            log.warning("worker %s leaves; handing over its tables failed: %s", self._me, str(error).splitlines()[0])
            return None
        return target

    def roll_back(self, formation: Formation, batch: int = 0) -> tuple[nn.Module, Restored] | None:
        """Bring the tables of the newest complete snapshot to the workers of this round; None if there is none.

        Args:
            batch: where this worker stands with what it has loaded itself; an older snapshot is left alone.

        Raises:
            RuntimeError: a member is gone.
        """
        members = formation.round.members
        batch = max(_all_gather(formation, batch))
        parts = self._snapshots.readable() if self._snapshots is not None else []
        found = _all_gather(
            formation,
            [(p.is_in_memory, p.header.round, p.header.batch, p.header.owner, list(p.header.members)) for p in parts],
        )
        said = dict(zip(members, found, strict=True))
        held = {worker: [_named(*part) for _, *part in theirs] for worker, theirs in said.items()}
        in_memory = {worker: [_named(*part) for is_there, *part in theirs if is_there] for worker, theirs in said.items()}
        name, holders = newest_name(held), newest_complete(held)
        if name is None:
            self._tell_lost(formation, held)
        if name is None or holders is None or name[1] < batch:
            return None
        holders |= holders_of(name, in_memory)  # nothing is read from disk without need
        self.broken()  # a vote that failed breaks nothing, but from here on rows change that may still be being copied
        reader = _readers(holders, members)
        mine = {p.header.owner: p for p in reversed(parts) if p.header.name == name and reader[p.header.owner] == self._me}
        first = min(members.index(reader[owner]) for owner in reader)
        plan_data = plan_to_dict(plan_from_dict(next(iter(mine.values())).header.plan)) if formation.rank == first else None
        old_plan = plan_from_dict(next(p for p in _all_gather(formation, plan_data) if p is not None))
        read_plan = {
            table: replace(plan, shards=tuple(Shard(reader[s.owner], s.region) for s in plan.shards))
            for table, plan in old_plan.items()
        }
        new_plan = replan(read_plan, members)
        module = self.tables.build(new_plan, members, self._wrap_dense)
        moves = plan_moves(layout_of(read_plan), layout_of(new_plan))
        blocks = [block for part in mine.values() for block in part.blocks()]
        group = dist.group.WORLD
        self.last_exchange = exchange(group, members, self._me, moves, blocks, self.tables.blocks())
        self.tables.drop_former()
        restored = self._states(formation, mine, reader, name[1])
        assert self._snapshots is not None
        self._snapshots.rolled_back_to(name)
        self._is_whole(formation)
        return module, restored

    def _tell_lost(self, formation: Formation, held: Mapping[str, Sequence[PartHeader]]) -> None:
        """Which parts of the newest snapshot that was found, none of which is complete, nobody has any more."""
        found = [header for headers in held.values() for header in headers]
        if not found or formation.rank != 0:
            return
        newest = max(found, key=lambda header: header.name)
        lost = sorted(set(newest.members) - {header.owner for header in found if header.name == newest.name})
        text = f"the snapshot of batch {newest.batch} cannot be used: nobody has the parts of {', '.join(lost)} any more"
        log.warning("run %s: %s", self._world.config.run_id, text)
        self._world.event("snapshot", text, {"round": formation.round.number, "batch": newest.batch, "lost": lost})

    def _states(self, formation: Formation, mine: Mapping[str, Part], reader: Mapping[str, str], batch: int) -> Restored:
        """Every member's own packed state; members that have none take that of the first that has."""
        members = formation.round.members
        states = {owner: bytes(part.state().numpy().tobytes()) for owner, part in mine.items()}
        own = states.get(self._me)
        lacking = [w for w in members if reader.get(w) != w]
        giver = next((w for w in members if reader.get(w) == w), reader[next(iter(reader))])
        if own is None and self._me == giver:
            own = next(iter(states.values()))
        for worker in (w for w in lacking if w != giver):
            if self._me == giver:
                transfer.send(own, members.index(worker))
            elif self._me == worker:
                own = transfer.receive(members.index(giver))
        assert own is not None
        return Restored(own, self._me in states, [state for owner, state in states.items() if owner not in members], batch)

    def _plan_of(self, formation: Formation, standing: Sequence[str]) -> dict[str, TablePlan]:
        """The plan of those who stand, also on a joiner."""
        members = formation.round.members
        if len(standing) < len(members):
            giver = standing[0]
            for worker in (w for w in members if w not in standing):
                if self._me == giver:
                    assert self.tables.plan is not None
                    transfer.send(plan_to_dict(self.tables.plan), formation.rank_of(worker))
                elif self._me == worker:
                    return plan_from_dict(transfer.receive(formation.rank_of(giver)))
        assert self.tables.plan is not None
        return self.tables.plan

    def _is_whole(self, formation: Formation) -> None:
        self.whole_in = formation.round.number
        if not self._is_warm:
            self._is_warm = True
            held = sum(block.values.nbytes for block in self.tables.blocks())
            if self.tables.device.type == "cpu" and held < available_bytes() // 2:
                # As much as the first change may need beside what there is.
                threading.Thread(target=warm, args=(held,), name="dlrover-warm", daemon=True).start()
        if self._snapshots is not None:
            self._snapshots.enter(formation, self.tables)

    def make_ready(self) -> None:
        """On a joiner, before it is admitted: touch the memory that its shards are going to take."""
        round_ = self._world.membership.view.round
        workers = (len(round_.members) if round_ is not None else 0) + 1
        self.tables.reserve(workers)
        self._is_warm = True
        if self._snapshots is not None:
            self._snapshots.make_room(self.tables, self.tables.num_bytes // workers)

    def _foresee(self) -> None:
        """Once a change is planned: touch the memory that it takes, while the others agree on it and training goes on."""
        formation, target = self._world.formation, self._world.membership.view.round
        if formation is None or target is None or target.number <= max(self._foreseen, formation.round.number):
            return
        self._foreseen = target.number
        if target.kind in PLANNED and self._me in target.members and self.tables.plan is not None:
            touch = self.tables.foresee(replan(self.tables.plan, target.members), self._me)
            threading.Thread(target=touch, name="dlrover-foresee", daemon=True).start()

    # --- snapshots -------------------------------------------------------------------------------------------------------

    def wishes(self) -> list[int]:
        """What this worker says in each vote: the newest snapshot of which it has all it should have, whether it is ready for
        another one, and whether that should be copied to disk."""
        self._foresee()
        return self._snapshots.wishes() if self._snapshots is not None else [0, 0, 0]

    def voted(self, batch: int, pack_state: Callable[[], bytes]) -> bool:
        """Between two steps, after a vote: take a snapshot if all are ready. Returns whether one was taken.

        Args:
            batch: global batches handed out.
            pack_state: all but the tables.
        """
        wishes, self._world.wishes = self._world.wishes, []
        if self._snapshots is None or len(wishes) != 3:
            return False
        return self._snapshots.voted(wishes[0], bool(wishes[1]), bool(wishes[2]), batch, self.tables, pack_state)

    def broken(self) -> None:
        """A step or exchange has failed: what is in memory is not whole any more, and copies under way stop."""
        self.whole_in = 0
        if self._snapshots is not None:
            self._snapshots.stop()

    @property
    def store(self) -> SnapshotStore | None:
        """Where this worker's snapshots are; None without them."""
        return self._snapshots.store if self._snapshots is not None else None

    def close(self, has_finished: Callable[[], bool]) -> None:
        """End this worker's part, and the whole job's snapshots if it has finished, which is asked as late as it matters."""
        if self._snapshots is not None:
            self._snapshots.close(has_finished)
        self.tables.close()


class _Snapshots:
    """Takes this worker's part of every snapshot, sends it to the neighbours and keeps theirs."""

    def __init__(self, world: World, store: SnapshotStore, config: SnapshotConfig) -> None:
        self._world = world
        self.store = store
        self._config = config
        self._work: Future[int] | None = None  # becomes the number of the snapshot that it has completed here
        self._formation: Formation | None = None
        self._group: Group | None = None
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
        self._neighbours: list[int] = []  # ranks that keep a copy of this worker's part
        self._owners: list[int] = []  # ranks of whose parts this worker keeps a copy

    def readable(self) -> list[Part]:
        return self.store.parts()

    def clear_memory(self) -> None:
        """No worker of the job is left on this host."""
        self.stop()
        self.store.close()
        self.store.clear_memory()

    def rolled_back_to(self, name: tuple[int, int]) -> None:
        self._keep = name

    def enter(self, formation: Formation, tables: ShardedTables) -> None:
        """A new round, whose first snapshot is due at once: the older ones' parts may leave with their workers."""
        self.stop()
        is_again = self._formation is not None and self._formation.round.number == formation.round.number
        self._num_groups = self._num_groups + 1 if is_again else 1
        self._formation = formation
        self._touched = tables.track()
        self._number = self._counted = self._number_for_disk = 0
        self._taken_at = float("-inf")
        self._stopping = threading.Event()
        ranks = _all_gather(formation, socket.gethostname())
        self._neighbours = _others(formation.rank, ranks, self._config.replicas)
        self._owners = [r for r in range(formation.size) if formation.rank in _others(r, ranks, self._config.replicas)]
        self._group = None
        if formation.size > 1 and self._config.replicas:
            # Of another name where the first round began with a rollback: the former group's addresses are still there.
            self._group = self._world.connect(formation.round, f"snapshots/{self._num_groups}", formation.round.members)
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
        self._group = None

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
        self._work = self._begin(self._complete, self._number, writer, blocks, self._touched, self._group, self._stopping)
        if self._number > 2:  # the first two touch their memory for the first time
            self._stall_s = time.perf_counter() - started
        return True

    def _counts(self) -> None:
        """Everybody has all it should have of the newest snapshot."""
        assert self._formation is not None
        members = self._formation.round.members
        if self._counted == 1:
            waiting = self._world.membership.view.in_state("standby", "ready")  # they have touched memory for their parts
            self.store.drop_others([*members, *waiting], [members[r] for r in self._owners])
            if self._formation.rank == 0:
                taken = self.store.num_bytes
                self._world.event(
                    "snapshot",
                    f"round {self._formation.round.number}: the first snapshot is complete; rank 0 keeps {taken >> 20} MiB",
                    {"round": self._formation.round.number, "bytes_rank_0": taken, "replicas": len(self._neighbours)},
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
        group: Group | None,
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
        return self._replicate(number, part, group, stopping) if group is not None else number

    @contextmanager
    def _while_it_lasts(self, stopping: threading.Event) -> Iterator[None]:
        """Around all that a thread writes into shared memory: once its round has ended, the next one writes there."""
        with self._lock:
            if stopping.is_set():
                raise RoundEndedError("the round ended")
            yield

    def _replicate(self, number: int, part: Part, group: Group, stopping: threading.Event) -> int:
        """Send a part to the neighbours while theirs are received; all in step, so that no two wait for each other."""
        counts = [-1 if rows is None else len(rows) for rows in self._changed]
        said = json.dumps({"header": part.header.encode().decode(), "base": self._base, "counts": counts}).encode()
        incoming = self._introduce(group, torch.frombuffer(bytearray(said), dtype=torch.uint8), stopping)
        answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self._neighbours}
        _swap(group, {rank: torch.tensor([each.wants], dtype=torch.uint8) for rank, each in incoming.items()}, answers)
        wanted = {rank: int(answer) for rank, answer in answers.items()}
        changes = changes_of(part, self._changed) if CHANGES in wanted.values() else None
        outgoing = {rank: changes if want == CHANGES else part.values for rank, want in wanted.items() if want != NOTHING}
        by_wire = {rank: each.values for rank, each in incoming.items() if each.wants != NOTHING}
        sizes = [len(values) for values in (*outgoing.values(), *by_wire.values()) if values is not None]
        for start in range(0, max(sizes, default=0), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            mine = {rank: values[start:end] for rank, values in outgoing.items() if values is not None}
            _swap(group, mine, {rank: values[start:end] for rank, values in by_wire.items()})
            if stopping.wait(PAUSE_S):
                raise RoundEndedError("the round ended")
        for each in incoming.values():
            each.copy_from_host(partial(self._while_it_lasts, stopping))
        with self._while_it_lasts(stopping):
            for each in incoming.values():
                each.finish()
        return number

    def _introduce(self, group: Group, said: torch.Tensor, stopping: threading.Event) -> dict[int, _Incoming]:
        """Tell the neighbours what is to come, and learn from others what they send."""
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in self._owners}
        _swap(group, dict.fromkeys(self._neighbours, torch.tensor([len(said)])), lengths)
        texts = {rank: torch.empty(int(length.item()), dtype=torch.uint8) for rank, length in lengths.items()}
        _swap(group, dict.fromkeys(self._neighbours, said), texts)
        incoming = {}
        for rank, text in texts.items():
            try:
                found = json.loads(text.numpy().tobytes())
                header, base, counts = PartHeader.decode(found["header"].encode()), found["base"], found["counts"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SnapshotError(f"rank {rank} sends what is no part of a snapshot: {error}") from error
            with self._while_it_lasts(stopping):
                incoming[rank] = _Incoming(self.store, self._keep, header, tuple(base) if base else None, counts)
        return incoming

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


class _Incoming:
    """A part of another worker that comes: all of it, or what has changed since one that is here, by wire or through memory.

    Attributes:
        wants: of its owner: EVERYTHING, CHANGES, or NOTHING where this worker finds the part in their host's memory.
        values: for what comes by wire.
    """

    def __init__(
        self,
        store: SnapshotStore,
        keep: tuple[int, int] | None,
        header: PartHeader,
        base: tuple[int, int] | None,
        counts: Sequence[int],
    ) -> None:
        self._counts = counts
        self._writer: PartWriter | None = None
        self._problem: SnapshotError | None = None
        self.values = torch.empty(0, dtype=torch.uint8)
        try:
            self._writer = store.begin(header, keep)
        except SnapshotError as error:
            self._problem = error  # its owner is told to send nothing, so that it is not kept waiting
        self._original = store.part_of(header.owner, header.name)
        if self._writer is None or self._original is not None:
            self.wants = NOTHING
        elif base is not None and self._writer.base == base:
            self.wants = CHANGES
            self.values = torch.empty(size_of_changes(header, counts), dtype=torch.uint8)
        else:
            self.wants = EVERYTHING
            self.values = self._writer.values

    def copy_from_host(self, going_on: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the copy of a part that is in this host's memory, if it is."""
        if self._writer is None or self._original is None:
            return
        there, here = self._writer.values, self._original.values
        for start in range(0, len(there), CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, len(there) - start)
            with going_on():
                # Not a tensor's copy, which would wake the threads that train.
                ctypes.memmove(there.data_ptr() + start, here.data_ptr() + start, num_bytes)

    def finish(self) -> None:
        """All of it has come."""
        if self._problem is not None:
            raise self._problem
        assert self._writer is not None
        if self.wants == CHANGES:
            put_changes(self._writer, self._counts, self.values)
        self._writer.commit()


# --- small decisions ----------------------------------------------------------------------------------------------------------


def _give_way() -> None:
    """Let the thread that calls this have a core only where training leaves one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _as_given(rows: torch.Tensor | None, block: Block) -> torch.Tensor | None:
    return rows


def _meet(group: Any) -> None:
    if group is not None:
        waits.wait_for(group.allreduce([torch.zeros(1)]))


def _swap(group: Any, mine: Mapping[int, torch.Tensor], theirs: Mapping[int, torch.Tensor]) -> None:
    """Send to and receive from several ranks at once."""
    work = [group.recv([values], rank, 0) for rank, values in theirs.items() if len(values)]
    work += [group.send([values], rank, 0) for rank, values in mine.items() if len(values)]
    for each in work:
        each.wait(timedelta(seconds=SWAP_S))


def _union(members: Sequence[str], plan: Plan) -> list[str]:
    """All that take part in an exchange: the new members in rank order, then who only gives."""
    owners = {shard.owner for table in plan.values() for shard in table.shards}
    return [*members, *sorted(owners - set(members))]


def _others(rank: int, hosts: Sequence[str], count: int) -> list[int]:
    """Ranks that keep copies of a worker's part: on as many other hosts as there are, then on its own, no worker for too many.

    The first worker of a host has its copies with the first one of the next host, the second with the second, and so on.
    """
    size = len(hosts)
    ring = [(rank + step) % size for step in range(1, size)]
    place = sum(host == hosts[rank] for host in hosts[:rank])  # among the workers of its host
    turns: dict[int, int] = {}  # of a rank: how often its host is passed over before
    for host in set(hosts) - {hosts[rank]}:
        there = [r for r, each in enumerate(hosts) if each == host]
        turns |= {r: (i - place) % len(there) for i, r in enumerate(there)}
    first = {hosts[r]: i for i, r in reversed(list(enumerate(ring)))}
    return sorted(ring, key=lambda r: (hosts[r] == hosts[rank], turns.get(r, 0), first[hosts[r]], ring.index(r)))[:count]


def _named(round_: int, batch: int, owner: str, members: Sequence[str]) -> PartHeader:
    return PartHeader(batch, round_, tuple(members), owner, {}, (), 0, 0)


def _readers(holders: Mapping[str, Sequence[str]], members: Sequence[str]) -> dict[str, str]:
    """Who reads each part: its owner where it is there, else whoever reads the least."""
    load = dict.fromkeys(members, 0)
    reader: dict[str, str] = {}
    for owner in sorted(holders, key=lambda o: (o not in holders[o], o)):
        reader[owner] = owner if owner in holders[owner] else min(holders[owner], key=lambda w: (load[w], members.index(w)))
        load[reader[owner]] += 1
    return reader


def _all_gather(formation: Formation, obj: Any) -> list[Any]:
    """Plain data of all members, by rank."""
    if formation.size == 1:
        return [obj]
    return [json.loads(text) for text in transfer.all_gather(json.dumps(obj))]
