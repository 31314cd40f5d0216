"""Keep what each worker has added to an epoch's values on all other workers, so that a loss takes none of it away.

With each update a worker sends its part of the epoch's values, as it is after that update's training step, to all others. The
message is sent before the gradients and has arrived before the weights change. So any worker that has made an update holds the
parts of all workers as of that update, no matter which of them are lost next. Manual optimization decides by itself when
weights change: there the message follows each batch, and arrives during the next one.

After a loss the survivors compare their newest `Table`, by what they publish on entering the round. The first worker in rank
order inherits the lost workers' parts. Parts are named, and a worker adds each of them once, however often a round breaks.

Before a planned change only the workers that leave send their part once more, as it is at that boundary: what they have logged
since the update would be lost. All workers do so if their tables are not those of the newest update and epoch.

While no worker has such values, nothing is sent: each vote asks for them. The first values of all, of 0.1 s at most, are then
lost with their worker. A fit, and each round, begins with messages.

A message has a fixed number of bytes and follows the sender's `Layout`, so that it costs one small collective. Workers exchange
layouts only if these differ. States of torchmetrics objects that grow or are large are left out; see `ValuesLost`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlrover.live.epoch_metrics import Partial, add_partial, adopt, metric_parts, with_own_states
from lightning_dlrover.live.logged_values import description
from lightning_dlrover.live.ports import Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.job.events import ValuesLost
from lightning_dlrover.rdzv.live.member import Formation

__all__ = ["KeptValues", "Layout", "Table", "Version", "row_bytes", "values_in"]

log = logging.getLogger(__name__)

MAX_STATE_BYTES = 64 << 10
"""Maximum bytes of all states of torchmetrics objects in a message."""

FIRST_BYTES = 1024
"""Bytes of a message until a worker needs more."""

HEAD_BYTES = 16
"""Bytes at the start of a message: digest of its layout, and the bytes that it needs."""

Version = tuple[int, ...]
"""Order of tables: updates, whether the epoch's logged values are computed, round, and 1 after the exchange before a change."""

Name = tuple[str, int]
"""Name of a part: its worker, and the updates after which it was taken."""


@dataclass(frozen=True)
class Layout:
    """What the bytes of a worker's message stand for.

    Attributes:
        logged: key and type of each logged value.
        states: path of each torchmetrics object, with name, shape and type of its states.
        left_out: paths of those whose states are not kept.
        described: entries of `logged` as `logged_values.description` returns them.
    """

    logged: tuple[tuple[str, str], ...] = ()
    states: tuple[tuple[str, tuple[tuple[str, tuple[int, ...], str], ...]], ...] = ()
    left_out: tuple[str, ...] = ()
    described: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> int:
        text = repr((self.logged, self.states, self.left_out))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def num_ints(self) -> int:
        return HEAD_BYTES // 8 + len(self.logged) + len(self.states)


def row_bytes(layout: Layout, digest: int, logged: Sequence[Any], metrics: Sequence[Any], device: torch.device) -> Tensor:
    """Return a worker's part of an epoch's values as bytes, without waiting for the device.

    Args:
        logged: Lightning's entries, as in the layout.
        metrics: torchmetrics objects, as in the layout.
    """
    parts = []
    if logged:
        values = [metric.value for metric in logged]
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        weights = [metric.cumulated_batch_size if metric.meta.is_mean_reduction else nothing for metric in logged]
        weights = [each if isinstance(each, Tensor) else torch.full_like(nothing, each) for each in weights]
        parts += [torch.stack([value.double() for value in values]), torch.stack(weights).double()]
    for metric, (_, states) in zip(metrics, layout.states, strict=True):
        parts += [getattr(metric, name) for name, _, _ in states]
    parts = [part.detach().to(device).reshape(-1).contiguous().view(torch.uint8) for part in parts]
    num_bytes = 8 * layout.num_ints + sum(part.numel() for part in parts)
    numbers = [digest, num_bytes, *(int(not each.has_reset) for each in logged), *(each._update_count for each in metrics)]
    head = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    if device.type != "cpu":
        head = head.pin_memory().to(device, non_blocking=True)
    return torch.cat([head, *parts])


def values_in(row: Tensor, layout: Layout) -> Partial:
    """Return the part of an epoch's values that a `row_bytes` holds."""
    row, place = row.cpu(), 0

    def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal place
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        place += num_bytes
        return row[place - num_bytes : place].clone().view(dtype).reshape(tuple(shape))

    numbers = take([layout.num_ints], torch.int64).tolist()[HEAD_BYTES // 8 :]
    has_value, counts = numbers[: len(layout.logged)], numbers[len(layout.logged) :]
    values, weights = (take([len(layout.logged)], torch.float64) for _ in range(2))
    logged = {
        key: (value.to(getattr(torch, dtype)), int(weight))
        for (key, dtype), value, weight, is_set in zip(layout.logged, values, weights.tolist(), has_value, strict=True)
        if is_set
    }
    states = {}
    for (path, of_metric), count in zip(layout.states, counts, strict=True):
        found = {name: take(shape, getattr(torch, dtype)) for name, shape, dtype in of_metric}
        if count:
            states[path] = (count, found)
    described = {key: layout.described[key] for key in logged if key in layout.described}
    return {"logged": logged, "states": states, "left_out": list(layout.left_out), "described": described}


@dataclass(frozen=True)
class Table:
    """All workers' parts of an epoch's values after an update.

    Attributes:
        parts: by worker; more than one for a worker that has inherited some.
    """

    version: Version = (0, 0, 0, 0)
    parts: dict[str, list[tuple[Name, Partial]]] = field(default_factory=dict)

    def inherited(self, members: Sequence[str], heir: str, number: int) -> Table:
        """Return the table of the next round, in which one worker has the parts of those that are gone."""
        gone = [part for worker, parts in self.parts.items() if worker not in members for part in parts]
        parts = {worker: list(self.parts.get(worker, [])) for worker in members}
        parts[heir] += gone
        updates, is_computed, _, _ = self.version
        return Table((updates, is_computed, number, 0), parts)


@dataclass
class _Message:
    """One exchange of parts on its way, or arrived."""

    updates: int  # label of the table that it becomes
    members: list[str]
    rows: Tensor
    work: Any
    layouts: dict[int, Layout]

    def table(self, round_number: int) -> Table:
        parts = {}
        for worker, row in zip(self.members, self.rows.cpu(), strict=True):
            digest = int(row[:8].clone().view(torch.int64))
            parts[worker] = [((worker, self.updates), values_in(row, self.layouts[digest]))]
        return Table((self.updates, 0, round_number, 0), parts)


class KeptValues:
    """One worker's copy of the job's parts of an epoch's values. Models with sharded tables have snapshots instead."""

    def __init__(self, job: Job, round_: Round, trainer: TrainerPort, position: FitPosition) -> None:
        self._job = job
        self._round = round_
        self._trainer = trainer
        self._position = position
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget the values of a former `fit`."""
        self.are_needed = True  # whether any worker has values
        self._table: Table | _Message = Table()  # of the newest update that counts
        self._begun: _Message | None = None
        self._arrived: _Message | None = None  # of the update that is being made
        self._layout, self._digest = Layout(), Layout().digest
        self._agreed: dict[int, Layout] = {}  # those exchanged in this round
        self._capacity = FIRST_BYTES
        self._seen: set[str] = set()  # paths of torchmetrics objects that training updates
        self._has: set[Name] = set()  # parts of lost workers that this worker's values include, or will
        self._pending: list[tuple[Partial, dict[str, int]]] = []  # parts to add, with the update counts at that time
        self._metrics: list[tuple[str, Any]] | None = None  # torchmetrics objects of the module; None: not looked for yet

    @property
    def version(self) -> Version:
        """Version of this worker's newest table, for the hello of a round."""
        return self._settled().version

    @property
    def _is_on(self) -> bool:
        position = self._position
        return position.has_entered and position.size > 1 and self._trainer.elastic_tables is None

    # --- with each update ----------------------------------------------------------------------------------------------------

    def begin(self, updates: int) -> None:
        """Send this worker's part, as it is after `updates` updates. All workers call this at the same place of a step."""
        if self._is_on and self.are_needed:
            self._begun = self._sent(updates)

    def finish(self) -> None:
        """Wait for the other workers' parts. The device has the results of all collectives begun before."""
        if self._begun is None:
            return
        message, self._begun = self._begun, None
        while True:
            message.work.wait()
            heads = message.rows[:, :HEAD_BYTES].contiguous().view(torch.int64).tolist()
            if (largest := max(num_bytes for _, num_bytes in heads)) > self._capacity:
                self._capacity = 2 * largest
                message = self._sent(message.updates)
                continue
            digests = {digest for digest, _ in heads}
            if len(digests) > 1 and not digests <= self._agreed.keys():
                said = transfer.all_gather(vars(self._layout))
                self._agreed |= {layout.digest: layout for layout in (Layout(**each) for each in said)}
            message.layouts = {**self._agreed, self._digest: self._layout}
            self._arrived = message
            return

    def counts(self) -> None:
        """Note that the update of the newest message counts."""
        formation = self._round.formation
        if self._arrived is not None:
            self._table, self._arrived = self._arrived, None
        elif not self.are_needed and formation is not None:
            version = self._position.updates, 0, formation.round.number, 0
            self._table = Table(version, {worker: [] for worker in formation.round.members})

    def _sent(self, updates: int) -> _Message:
        formation = self._round.formation
        assert formation is not None
        row = self._own_row()
        if len(row) > self._capacity:
            row = row[:HEAD_BYTES]
        rows = row.new_empty(formation.size, self._capacity)
        row = torch.cat([row, row.new_zeros(self._capacity - len(row))])
        # Asynchronous, so that it overlaps with the backward pass, and is not compared with the others' collectives.
        work = dist.all_gather(list(rows.unbind(0)), row, async_op=True)
        return _Message(updates, list(formation.round.members), rows, work, {})

    def _own_row(self) -> Tensor:
        results = self._results
        logged = [(key, metric) for key, metric in results.items() if metric.is_tensor and metric.meta.on_epoch]
        metrics, states, left_out, room = [], [], [], MAX_STATE_BYTES
        for path, metric in self._with_states():
            if metric._update_count:
                self._seen.add(path)
            elif path not in self._seen:
                continue
            found = {name: getattr(metric, name) for name in metric._defaults}
            num_bytes = sum(each.nbytes if isinstance(each, Tensor) else room + 1 for each in found.values())
            if num_bytes > room:
                left_out += [path] if metric._update_count else []
                continue
            room -= num_bytes
            metrics.append(metric)
            states.append((path, tuple((name, tuple(each.shape), _name_of(each.dtype)) for name, each in found.items())))
        types = tuple((key, _name_of(metric.value.dtype)) for key, metric in logged)
        layout = Layout(types, tuple(states), tuple(left_out))
        if layout != self._layout:
            described = {key: description(metric) for key, metric in logged}
            self._layout, self._digest = replace(layout, described=described), layout.digest
        device = self._trainer.device
        return row_bytes(self._layout, self._digest, [metric for _, metric in logged], metrics, device)

    @property
    def has_values(self) -> bool:
        """Whether this worker has values that others have to keep."""
        if any(metric.is_tensor and metric.meta.on_epoch for metric in self._results.values()):
            return True
        return any(metric._update_count for _, metric in self._with_states())

    # --- when the epoch ends -------------------------------------------------------------------------------------------------

    def logged_are_computed(self) -> None:
        """Note that the epoch's logged values are computed: a worker that is lost from here on takes nothing of them away."""
        table = self._settled()
        updates, _, *rest = table.version
        self._table = Table((updates, 1, *rest), table.parts)

    # --- when the round changes ----------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether this worker holds all workers' parts of the epoch's values as of the newest update."""
        if self._trainer.elastic_tables is not None:
            return False
        of_epoch = isinstance(self._table, _Message) or not self._table.version[1]
        return of_epoch and self._updates == self._position.updates

    @property
    def _updates(self) -> int:
        return self._table.updates if isinstance(self._table, _Message) else self._table.version[0]

    def exchanged(self, formation: Formation, parts: Mapping[str, Partial]) -> None:
        """Take the parts that members of a round have sent to all before a planned change: all that leave, or all at all.

        Args:
            parts: by worker. Those of the others are in all workers' tables, which are current.
        """
        updates, members = self._position.updates, formation.round.members
        held = self._settled().parts if len(parts) < len(members) else {}
        named = {w: [((w, updates), parts[w])] if w in parts else held.get(w, []) for w in members}
        self._table = Table((updates, 0, formation.round.number, 1), named)

    def settle(self, formation: Formation, standing: Mapping[str, Position]) -> None:
        """Bring all members of a new round to one table, in which lost workers' parts belong to another worker."""
        self._begun = self._arrived = None
        self._agreed, self.are_needed = {}, True
        members, me = formation.round.members, self._job.worker_id
        if self._trainer.elastic_tables is not None:
            return
        if not standing:
            self._table = Table((self._position.updates, 0, 0, 0), {w: [] for w in members})
            return
        versions = {w: p.values for w, p in standing.items()}
        newest = max(versions.values())
        source = next(w for w in members if versions.get(w) == newest)
        behind = [w for w in members if versions.get(w) != newest]
        table = self._settled()
        if me == source:
            for worker in behind:
                transfer.send((table.version, table.parts), formation.rank_of(worker))
        elif me in behind:
            version, parts = transfer.receive(formation.rank_of(source))
            table = Table(tuple(version), {w: [(tuple(name), part) for name, part in of_w] for w, of_w in parts.items()})
        heir = next(w for w in members if w in standing)
        self._table = table.inherited(members, heir, formation.round.number)
        if me != heir:
            return
        counted = max(p.updates for p in standing.values())
        gone = sorted(w for w in table.parts if w not in members)
        if table.version[0] < counted and gone:
            self._mark(formation, gone, [])
        is_computed = bool(table.version[1])
        own = {path: count for _, part in table.parts.get(me, []) for path, (count, _) in part["states"].items()}
        for name, part in self._table.parts[me]:
            if name[0] == me or name in self._has:
                continue
            self._has.add(name)
            if left_out := part.get("left_out"):
                self._mark(formation, [name[0]], left_out)
            kept = {} if is_computed else part["logged"]
            states = {path: found for path, found in part["states"].items() if not (is_computed and path not in own)}
            self._pending.append(({**part, "logged": kept, "states": states}, own))

    def _settled(self) -> Table:
        if isinstance(self._table, _Message):
            formation = self._round.formation
            self._table = self._table.table(formation.round.number if formation is not None else 0)
        return self._table

    def merge(self) -> bool:
        """Add inherited parts to this worker's own where no repeated step goes back. Return whether there were any.

        Metrics that were reset since the parts were taken are left alone.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return False
        results, module, trainer = self._results, self._trainer.module, self._trainer.lightning
        for part, counts in pending:
            for key in part["logged"]:
                if key not in results and key in part.get("described", {}):
                    adopt(trainer, results, key, part["described"][key])
            now = dict(self._with_states())
            states = {
                path: found
                for path, found in part["states"].items()
                if path in now and now[path]._update_count >= counts.get(path, 0)
            }
            add_partial(results, module, {"logged": part["logged"], "states": states})
        return True

    def _mark(self, formation: Formation, workers: list[str], names: Sequence[str]) -> None:
        epoch, number = self._trainer.current_epoch, formation.round.number
        who = ", ".join(workers)
        what = f"{', '.join(names)} (its state grows or is large)" if names else "all values of its last batch"
        text = f"epoch {epoch}: the values lack what {who}, which was lost, had added to them: {what}"
        log.warning("%s", text)
        self._job.event(ValuesLost(number, epoch, workers, list(names)), text)

    def _with_states(self) -> Iterator[tuple[str, Any]]:
        if self._metrics is None:
            self._metrics = metric_parts(self._trainer.module)
        return ((path, metric) for path, metric in with_own_states(self._metrics) if metric._defaults)

    @property
    def _results(self) -> Any:
        return self._trainer.results


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
