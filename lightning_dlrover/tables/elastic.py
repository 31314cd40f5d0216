"""Sharded tables while a job's workers change: handed over at planned changes, restored from a snapshot at others.

The state in a worker's memory is either whole or broken. It is whole if it makes up all tables together with the state of all
other members of one round, `ElasticTables.whole_in`. It is broken after a failed step or exchange: then none of it is used
again, and all workers return to the newest complete snapshot. Workers agree on snapshots in the vote that they take between
steps anyway (`World.wishes`), see `snapshots.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import SnapshotLost, TablesMoved
from lightning_dlrover.rdzv.job.folders import name_of_job
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError, UnreachableError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.tables.exchange import Block, ExchangeStats, all_gather, exchange, largest, meet, warm
from lightning_dlrover.tables.growing import Packed
from lightning_dlrover.tables.layout import (
    Move,
    Plan,
    Shard,
    TablePlan,
    layout_of,
    plan_from_dict,
    plan_moves,
    plan_to_dict,
    replan,
)
from lightning_dlrover.tables.sharded import ShardedTables
from lightning_dlrover.tables.snapshot_store import Part, PartHeader, SnapshotError, SnapshotStore, holders_of, newest_complete
from lightning_dlrover.tables.snapshots import SnapshotConfig, Snapshots
from lightning_dlrover.tuning.resources import available_bytes

log = logging.getLogger(__name__)

KEPT_S = 86400.0
"""Seconds to keep the snapshots of a job that was killed as a whole, for its restart."""

PLANNED = ("grow", "shrink", "replace")
"""Kinds of rounds that workers agree on while training continues."""

WrapDense = Callable[[nn.Module, list[str]], nn.Module]


@dataclass
class Restored:
    """State from a snapshot, without the tables."""

    state: bytes  # packed state of this worker, or of another one if this worker has none
    is_own: bool  # whether the state is this worker's, so that its logged values count here
    of_lost: list[bytes] = field(default_factory=list)  # packed states of lost owners, on the one worker that reads their part
    batch: int = 0  # of the snapshot


class ElasticTables:
    """One worker's tables in a live job. `wrap_dense` makes the rest of the module data-parallel for the current round."""

    def __init__(self, tables: ShardedTables, world: World, config: SnapshotConfig, wrap_dense: WrapDense) -> None:
        self.tables = tables
        self.whole_in = 0
        self.last_exchange = ExchangeStats()
        self._world = world
        self._config = config
        self._wrap_dense = wrap_dense
        self._snapshots: Snapshots | None = None
        self._is_warm = world.config.max_workers == 1  # such a job never changes
        self._foreseen = 0  # newest round whose memory was touched ahead
        self._fit = world.num_fits + 1  # the `fit` of the present snapshots
        self._first_round = 0  # snapshots of rounds before do not count
        if config.interval_s:
            try:
                job = name_of_job(Keys(world.config.run_id, world.config.prefix))
                record = world.membership.view.job
                if record is None:
                    raise SnapshotError("the job's record cannot be read")
                life = str(record.created_at)
                store = SnapshotStore(job, world.worker_id, config.max_bytes, config.disk, config.memory, life, self._fit)
                store.sweep(KEPT_S)  # a fixed age, because other jobs' snapshots may be worth more than this job's
                self._snapshots = Snapshots(world, store, config)
            except SnapshotError as error:
                log.warning("run %s: no snapshots: %s", world.config.run_id, error)

    @property
    def _me(self) -> str:
        return self._world.worker_id

    def wrap_with(self, wrap_dense: WrapDense) -> None:
        """Make the module data-parallel in another way from the next build on."""
        self._wrap_dense = wrap_dense

    # --- one round to the next -----------------------------------------------------------------------------------------

    def start(self, formation: Formation, seed: int) -> nn.Module:
        """Build new tables with all members of the job's first round."""
        members = formation.round.members
        if self.tables.is_built:
            self.tables.reset()  # a former round with only joiners had failed
        module = self.tables.build(self.tables.first_plan(members), members, self._wrap_dense)
        seed, given = all_gather(formation, [seed, self.tables.given()])[0]  # the first worker's count
        self.tables.initialise(seed, given, dist.group.WORLD if len(members) > 1 else None, members, self._me)
        self._is_whole(formation)
        return module

    def reshard(self, formation: Formation, standing: Sequence[str]) -> nn.Module:
        """Redistribute the tables from the workers of the former round, which all take part, to those of this one.

        Args:
            standing: members that were in the former round.

        Raises:
            WorldError, RuntimeError: a worker is lost, and the state in memory is broken.
        """
        started = time.perf_counter()
        members = formation.round.members
        old_plan = self._plan_of(formation, standing)
        self.whole_in = 0
        if self._snapshots is not None:
            self._snapshots.stop()  # copies under way can never count, and would occupy the network
        new_plan = replan(old_plan, members)
        union = _union(members, old_plan)
        group = self._world.connect(formation.round, "reshard", union) if len(union) > 1 else None
        old = self.tables.blocks() if self.tables.is_built else []
        # A joiner from an earlier, broken round may have counted steps that were undone.
        counters = self._counters(old_plan)
        if self._me not in standing:
            counters = dict.fromkeys(counters, 0)
            self.tables.growing.clear()  # what a joiner had before does not count
        module = self.tables.build(new_plan, members, self._wrap_dense)
        moves = plan_moves(layout_of(old_plan), layout_of(new_plan))
        growing = self.tables.growing
        packed = growing.packed(group, moves, self._me, growing.sources())
        self._exchange(group, union, moves, packed, old, self.tables.blocks(), self.tables.release)
        growing.take(packed, growing.own_in(new_plan, self._me))
        self.tables.set_counters(largest(group, counters))
        meet(group)  # keeps each connection open until its last reader is done
        self.tables.drop_former()
        self._report(formation, moves, time.perf_counter() - started)
        self._is_whole(formation)
        return module

    def _exchange(
        self,
        group: Any,
        workers: Sequence[str],
        moves: Sequence[Move],
        packed: Packed,
        old: Sequence[Block],
        new: Sequence[Block],
        release: Callable[[Tensor], None] = lambda values: None,
    ) -> None:
        """Exchange the rows of fixed tables, and the packed ones of growing tables. Arguments as for `exchange`."""
        sent = [*self.tables.growing.without(moves), *packed.moves]
        self.last_exchange = exchange(group, workers, self._me, sent, [*old, *packed.old], [*new, *packed.new], release)

    def _report(self, formation: Formation, moves: Sequence[Move], seconds: float) -> None:
        if formation.rank != 0:
            return
        moved = sum(m.region.num_values for m in moves if m.source != m.target)
        all_values = sum(table.rows * table.cols for table in (self.tables.plan or {}).values())
        self._world.event(
            TablesMoved(formation.round.number, moved, all_values, seconds),
            f"round {formation.round.number}: {moved / max(1, all_values):.0%} of the tables' values moved, in {seconds:.2f} s",
        )

    def hand_over(self, target: RoundRecord) -> None:
        """Send this worker's shards to the members of a planned round without it."""
        if not self.whole_in or self.tables.plan is None or not target.members:
            return
        plan = self.tables.plan
        if self._me in _union(target.members, plan):  # a worker outside of the union holds no table
            taken_by = self._give_away(target, plan)
            if taken_by is None:
                return
            target = taken_by
        if self._snapshots is None:
            return
        with contextlib.suppress(EtcdError):
            if not set(target.members) & self._world.membership.on_this_host().keys():
                self._snapshots.clear_memory()

    def _give_away(self, target: RoundRecord, plan: Plan) -> RoundRecord | None:
        """Send this worker's shards to the members of a round or of its replacement. Return that round; None: it failed."""
        group = None
        while group is None:
            union = _union(target.members, plan)
            try:
                group = self._world.connect(target, "reshard", union)
            except (RoundEndedError, UnreachableError) as error:
                newest = self._world.membership.view.round
                if newest is None or newest.number == target.number or not newest.members:
                    log.warning("worker %s leaves without having handed over its tables: %s", self._me, error)
                    return None
                target = newest
        moves = plan_moves(layout_of(plan), layout_of(replan(plan, target.members)))
        try:
            growing = self.tables.growing
            packed = growing.packed(group, moves, self._me, growing.sources())
            self._exchange(group, union, moves, packed, self.tables.blocks(), [])
            largest(group, self._counters(plan))
            meet(group)
        except RuntimeError as error:
            log.warning("worker %s leaves; handing over its tables failed: %s", self._me, str(error).splitlines()[0])
            return None
        return target

    def roll_back(self, formation: Formation, batch: int = 0) -> tuple[nn.Module, Restored] | None:
        """Load the tables of the newest complete snapshot on the workers of this round; None if there is none.

        Args:
            batch: this worker's batch in the state that it loaded itself; an older snapshot is ignored.

        Raises:
            RuntimeError: a member is lost.
        """
        self._forget_earlier_fits()
        members = formation.round.members
        batches, first_rounds = zip(*all_gather(formation, [batch, self._first_round]), strict=True)
        batch, self._first_round = max(batches), max(first_rounds)
        parts = self._snapshots.store.parts() if self._snapshots is not None else []
        parts = [part for part in parts if part.header.round >= self._first_round]
        found = all_gather(
            formation, [(p.is_in_memory, p.header.round, p.header.batch, p.header.owner, list(p.header.members)) for p in parts]
        )
        said = dict(zip(members, found, strict=True))
        held = {worker: [_named(*part) for _, *part in theirs] for worker, theirs in said.items()}
        in_memory = {worker: [_named(*part) for is_there, *part in theirs if is_there] for worker, theirs in said.items()}
        name = newest_complete(held)
        if name is None:
            self._report_lost(formation, held)
        if name is None or name[1] < batch:
            return None
        holders = holders_of(name, held) | holders_of(name, in_memory)  # disk is read only where memory has no copy
        self.broken()  # a failed vote breaks nothing, but from here on rows change that may be being copied
        reader = _readers(holders, members)
        mine = {p.header.owner: p for p in reversed(parts) if p.header.name == name and reader[p.header.owner] == self._me}
        first = min(members.index(reader[owner]) for owner in reader)
        plan_data = plan_to_dict(plan_from_dict(next(iter(mine.values())).header.plan)) if formation.rank == first else None
        old_plan = plan_from_dict(next(p for p in all_gather(formation, plan_data) if p is not None))
        read_plan = {
            table: replace(plan, shards=tuple(Shard(reader[s.owner], s.region) for s in plan.shards))
            for table, plan in old_plan.items()
        }
        new_plan = replan(read_plan, members)
        module = self.tables.build(new_plan, members, self._wrap_dense)
        moves = plan_moves(layout_of(read_plan), layout_of(new_plan))
        blocks = [block for part in mine.values() for block in part.blocks()]
        group, growing = dist.group.WORLD, self.tables.growing
        growing.clear()
        sources = growing.sources_in(mine.values(), old_plan)
        packed = growing.packed(group, moves, self._me, sources, stay=False)
        self._exchange(group, members, moves, packed, blocks, self.tables.blocks())
        growing.take(packed, growing.own_in(new_plan, self._me))
        self.tables.drop_former()
        found_here = [part.header.counters for part in mine.values()]
        self.tables.set_counters(_largest_of(each for of_worker in all_gather(formation, found_here) for each in of_worker))
        restored = self._states(formation, mine, reader, name[1])
        assert self._snapshots is not None
        self._snapshots.rolled_back_to(name)
        self._is_whole(formation)
        return module, restored

    def ignore_former_snapshots(self, formation: Formation) -> None:
        """Ignore snapshots of former rounds, because the user returns to a checkpoint before them."""
        self._first_round = formation.round.number

    def _counters(self, plan: Plan) -> dict[str, int]:
        """Return this worker's counters for all tables of the plan, in the same order on all workers."""
        return dict.fromkeys(sorted(plan), 0) | self.tables.counters()

    def _report_lost(self, formation: Formation, held: Mapping[str, Sequence[PartHeader]]) -> None:
        """Report the lost parts of the newest snapshot found, if none is complete."""
        found = [header for headers in held.values() for header in headers]
        if not found or formation.rank != 0:
            return
        newest = max(found, key=lambda header: header.name)
        lost = sorted(set(newest.members) - {header.owner for header in found if header.name == newest.name})
        text = f"the snapshot of batch {newest.batch} cannot be used: no worker holds the parts of {', '.join(lost)}"
        log.warning("run %s: %s", self._world.config.run_id, text)
        self._world.event(SnapshotLost(formation.round.number, newest.batch, lost), text)

    def _states(self, formation: Formation, mine: Mapping[str, Part], reader: Mapping[str, str], batch: int) -> Restored:
        """Return every member's own packed state; members without one take the first member's that has one."""
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
        """Return the plan of the members that stay, also on a joiner."""
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
                # The first change may need as much memory again as is in use.
                threading.Thread(target=warm, args=(held,), name="dlrover-warm", daemon=True).start()
        self._forget_earlier_fits()
        if self._snapshots is not None:
            self._snapshots.enter(formation, self.tables)

    def _forget_earlier_fits(self) -> bool:
        """In a later `fit`, drop the snapshots of earlier ones: each counts batches from 0. Return whether one has begun."""
        if self._snapshots is None or self._world.num_fits <= self._fit:
            return False
        self._fit = self._world.num_fits
        self._snapshots.forget(self._fit)
        return True

    def _follow_fit(self) -> bool:
        """Restart snapshots in a later `fit`, on all workers at the same step; the round may be the same."""
        if not self._forget_earlier_fits():
            return False
        assert self._snapshots is not None
        assert self._world.formation is not None
        self._snapshots.enter(self._world.formation, self.tables)
        return True

    def make_ready(self) -> None:
        """Touch, on a joiner before its admission, the memory for its shards."""
        round_ = self._world.membership.view.round
        workers = (len(round_.members) if round_ is not None else 0) + 1
        self.tables.reserve(workers)
        self._is_warm = True
        if self._snapshots is not None:
            self._snapshots.make_room(self.tables, self.tables.num_bytes // workers)

    def _foresee(self) -> None:
        """Touch the memory for a planned change, while the others agree on it and training continues."""
        formation, target = self._world.formation, self._world.membership.view.round
        if formation is None or target is None or target.number <= max(self._foreseen, formation.round.number):
            return
        self._foreseen = target.number
        if target.kind in PLANNED and self._me in target.members and self.tables.plan is not None:
            touch = self.tables.foresee(replan(self.tables.plan, target.members), self._me)
            threading.Thread(target=touch, name="dlrover-foresee", daemon=True).start()

    # --- snapshots -------------------------------------------------------------------------------------------------------

    def wishes(self) -> list[int]:
        """Return this worker's ballot: newest snapshot held completely, 1 if another can start, 1 if that is due on disk, and a
        number that is equal on workers that see the same members leave, with both signs."""
        self._foresee()
        self._follow_fit()
        return self._snapshots.wishes() if self._snapshots is not None else [0, 0, 0, 0, 0]

    def voted(self, batch: int, pack_state: Callable[[], bytes]) -> bool:
        """Take a snapshot after a vote if all are ready; return whether one was taken. `pack_state` packs the other state."""
        wishes, self._world.wishes = self._world.wishes, []
        self.tables.forget_given()  # the job trains
        if self._follow_fit():
            return False  # the vote began in the earlier fit
        if self._snapshots is None or len(wishes) != 5:
            return False
        held, is_due, is_for_disk, lowest, highest = wishes
        is_same = lowest == -highest
        return self._snapshots.voted(held, bool(is_due), bool(is_for_disk), batch, self.tables, pack_state, is_same)

    def broken(self) -> None:
        """Mark the state in memory as broken after a failed step or exchange, and stop copies under way."""
        self.whole_in = 0
        if self._snapshots is not None:
            self._snapshots.stop()

    @property
    def snapshot_age_s(self) -> float:
        """Seconds since the newest snapshot that counts was taken, or since this worker began without one."""
        return self._snapshots.age_s if self._snapshots is not None else 0.0

    @property
    def store(self) -> SnapshotStore | None:
        """The store of this worker's snapshots; None without them."""
        return self._snapshots.store if self._snapshots is not None else None

    def close(self, has_finished: Callable[[], bool]) -> None:
        """End this worker's part, and all snapshots of a finished job; `has_finished` is called as late as possible."""
        if self._snapshots is not None:
            self._snapshots.close(has_finished)
        self.tables.close()


def _union(members: Sequence[str], plan: Plan) -> list[str]:
    """Return all workers of an exchange: the new members in rank order, then workers that only send."""
    owners = {shard.owner for table in plan.values() for shard in table.shards}
    return [*members, *sorted(owners - set(members))]


def _largest_of(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counters:
        found |= {table: max(number, found.get(table, 0)) for table, number in each.items()}
    return found


def _named(round_: int, batch: int, owner: str, members: Sequence[str]) -> PartHeader:
    return PartHeader(batch, round_, tuple(members), owner, {}, (), 0, 0)


def _readers(holders: Mapping[str, Sequence[str]], members: Sequence[str]) -> dict[str, str]:
    """Return the reader of each part: its owner if present, else the worker that reads the least."""
    load = dict.fromkeys(members, 0)
    reader: dict[str, str] = {}
    for owner in sorted(holders, key=lambda o: (o not in holders[o], o)):
        reader[owner] = owner if owner in holders[owner] else min(holders[owner], key=lambda w: (load[w], members.index(w)))
        load[reader[owner]] += 1
    return reader
