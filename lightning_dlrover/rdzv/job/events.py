"""The events of a job's history by kind: the fields of each, and their form in `EventRecord.data`.

Workers of a newer release may write unknown kinds, and unknown fields of known kinds. Both are kept unchanged in etcd and in
the run folder; a reader receives an `UnknownEvent`, or the known fields.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from lightning_dlrover.codec import RecordError, from_fields
from lightning_dlrover.rdzv.job.records import EventRecord


@dataclass(frozen=True)
class Event:
    """One line of the history, without its time and its message. A field that is None is not written."""

    KIND: ClassVar[str]

    @property
    def data(self) -> dict[str, Any]:
        """The fields as `EventRecord.data` holds them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


E = TypeVar("E", bound=Event)

# --- rounds and workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundFormed(Event):
    KIND = "round"
    number: int
    members: list[str]  # none in large rounds: a line of each change would hold a thousand names
    kind: str  # RoundRecord.kind
    planned: bool = False
    reason: str = ""
    cause: dict[str, list[str]] = field(default_factory=dict)  # see `rounds.cause`
    decided_s: float = 0.0  # seconds from the last change of the records to the write of the round
    num_members: int = 0


@dataclass(frozen=True)
class WorkerLost(Event):
    KIND = "loss"
    worker_id: str
    round: int = 0  # newest round with the worker
    evidence: str = ""
    decided_s: float = 0.0


@dataclass(frozen=True)
class TrainingStalled(Event):
    """The job's pause between two steps for a change of the workers."""

    KIND = "stall"
    round: int
    seconds: float
    kind: str = ""  # RoundRecord.kind
    workers_before: int = 0
    workers_after: int = 0


@dataclass(frozen=True)
class WorkerFailed(Event):
    KIND = "error"
    worker_id: str
    rank: int = 0
    traceback: str = ""
    at: float = 0.0  # time on the worker's clock


@dataclass(frozen=True)
class GrowthFailed(Event):
    """A step has failed soon after workers had joined, so the job continues without them."""

    KIND = "undo"
    num_workers: int
    former: int
    worker_id: str
    error: str = ""


@dataclass(frozen=True)
class RecordIgnored(Event):
    KIND = "error"
    key: str


@dataclass(frozen=True)
class JobFailed(Event):
    KIND = "error"


@dataclass(frozen=True)
class StateClosed(Event):
    """The state cannot be handed over to joiners any more."""

    KIND = "unjoinable"
    reason: str


# --- plans and nodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeRequested(Event):
    """A plan made by hand."""

    KIND = "scale"
    num_workers: int
    source: str
    loader_workers: int | None = None
    intra_op_threads: int | None = None
    prefetch_factor: int | None = None
    node_cpus: int | None = None
    node_memory_mb: int | None = None


@dataclass(frozen=True)
class SizeGiven(Event):
    """The pool of the job has given it another number of workers."""

    KIND = "size"
    pool: str
    policy: str
    workers_before: int
    workers_after: int
    samples_per_s_before: float = 0.0  # predicted, or measured; 0: unknown
    samples_per_s_after: float = 0.0
    low_per_s: float = 0.0  # interval of `samples_per_s_after`
    high_per_s: float = 0.0
    cost_s: float = 0.0  # expected pause of the job
    others: dict[str, list[int]] = field(default_factory=dict)  # other jobs that change with it: before, after


@dataclass(frozen=True)
class PoolJobChanged(Event):
    """A line of a pool's own history, which is kept where its brain sends notifications."""

    KIND = "pool_job"
    job: str
    change: str  # started, grown, shrunk, refused, finished, failed, stopped, lost
    workers_before: int = 0
    workers_after: int = 0


@dataclass(frozen=True)
class SettingsApplied(Event):
    KIND = "settings"
    loader_workers: list[int]  # one per loader
    prefetch_factor: list[int]
    intra_op_threads: int
    before: dict[str, Any]
    seconds: float
    refused: str


@dataclass(frozen=True)
class NodesHeldUp(Event):
    KIND = "nodes"


@dataclass(frozen=True)
class NodeNoticed(Event):
    """A worker's node will be taken away."""

    KIND = "notice"
    worker_id: str
    source: str
    taken_at: float  # seconds since the epoch; 0: unknown


@dataclass(frozen=True)
class NodeResized(Event):
    """A running node has another size, waits for it, or could not get it."""

    KIND = "node_size"
    node: str
    act: str  # resized, waits, refused
    cpus: int  # that it has now
    memory_mb: int
    wanted_cpus: int
    wanted_memory_mb: int
    seconds: float = 0.0  # since the request


@dataclass(frozen=True)
class PlannerEvent(Event):
    """Figures of `tuning/`, as its own dataclasses write and read them."""

    document: dict[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        return self.document


@dataclass(frozen=True)
class WindowMeasured(PlannerEvent):
    """A `StepProfile`."""

    KIND = "profile"


@dataclass(frozen=True)
class DecisionMade(PlannerEvent):
    """A `Decision`."""

    KIND = "decision"


@dataclass(frozen=True)
class OutcomeJudged(PlannerEvent):
    """An `Outcome`."""

    KIND = "outcome"


# --- findings of the watchdog -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HangFound(Event):
    KIND = "hang"
    request: int  # number of the request for stacks
    asked_by: str
    reason: str
    workers: list[dict[str, Any]]  # fields of each StacksRecord; `stack` is the index of its stack
    missing: list[str]  # workers without an answer
    stacks: list[str]


@dataclass(frozen=True)
class StragglerFound(Event):
    KIND = "straggler"
    worker_id: str
    act: str
    why: str
    round: int
    step: int
    saved_s: float
    cost_s: float
    # See `tuning.stragglers.Straggler`.
    global_rank: int
    part: str
    own_s: float
    others_s: float
    ratio: float
    lost_s: float
    step_time_s: float
    num_steps: int


@dataclass(frozen=True)
class SharesChanged(Event):
    """A slow worker gets fewer samples of each batch from now on, or as many as the others again."""

    KIND = "shares"
    round: int
    step: int
    samples: list[int]  # of a global batch, by rank; none: equal shares


@dataclass(frozen=True)
class MemoryShort(Event):
    """A worker is about to run out of memory."""

    KIND = "memory"
    worker_id: str
    round: int
    step: int
    # See `tuning.memory.Remedy` and `MemoryForecast`.
    act: str
    reason: str
    num_workers: int
    node_memory_bytes: int
    level_bytes: int
    grown_bytes: int
    limit_bytes: int
    bytes_per_step: float
    steps_left: float
    earliest_steps_left: float
    step_time_s: float


@dataclass(frozen=True)
class NodeMemoryShort(Event):
    """A node was killed because it ran out of memory."""

    KIND = "memory"
    act: str
    node: str
    node_memory_mb: int


# --- state --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateKept(Event):
    """The state was left in a host's memory."""

    KIND = "kept"
    global_step: int
    bytes: int


@dataclass(frozen=True)
class FitResumed(Event):
    KIND = "resume"
    global_step: int


@dataclass(frozen=True)
class StateRolledBack(Event):
    KIND = "rollback"
    round: int
    batch: int
    batches: int  # batches to do again


@dataclass(frozen=True)
class ValuesLost(Event):
    """Values of a training epoch lack the contributions of lost workers."""

    KIND = "values"
    round: int
    epoch: int
    workers: list[str]
    names: list[str]  # torchmetrics objects, by their paths in the module; none: all values of the workers' last batch


@dataclass(frozen=True)
class ReplicaDrifted(Event):
    """A tensor that should be equal on all workers was not."""

    KIND = "drift"
    batch: int  # global batches before the vote that found it
    name: str
    rank: int  # worker with the largest difference to rank 0
    repaired: bool


@dataclass(frozen=True)
class FitFinished(Event):
    KIND = "finished"
    global_step: int


@dataclass(frozen=True)
class StreamOpened(Event):
    """A training loader of a `fit` that reads a stream, and what determines its rows and their order. Written once per fit."""

    KIND = "stream"
    fit: int
    number: int  # index of the training loader
    source: str  # the expression that makes it, if that is short, else its type
    folder: str  # working folder of the script, which relative paths are in
    num_shards: int
    num_rows: int
    digest: str  # hash of the shards' names and rows
    own_batches: int  # global batches of one pass over the rows
    epoch_batches: int  # global batches of the Trainer's epoch
    cycles: bool  # whether the rows begin again within the Trainer's epoch
    epoch: int  # epoch of the fit's beginning
    batches_before: int  # global batches before that epoch
    steps_before: int  # optimizer updates before that epoch
    accumulate: int  # global batches of an optimizer update; 0: they vary
    # The layout of rows, see `data.lane_plan.Layout`.
    batch_size: int
    slots: int
    cycle: int
    block_rows: int
    seed: int | None = None  # seed of epoch 0; None: rows are not shuffled
    # First row of each shard and the row after the last, of a source with a changing set of rows.
    ranges: dict[str, list[int]] | None = None
    grows: bool | None = None  # True: these are the rows of one epoch, and each has a record of its own


@dataclass(frozen=True)
class RowsSkipped(Event):
    """Rows that a worker's batches of a stream skip. Several workers, and each epoch, may find the same rows."""

    KIND = "skipped"
    fit: int
    number: int  # index of the training loader
    shard: int  # index of the file or partition
    file: str  # its name on this worker's host
    ranges: list[list[int]]  # first row and the row after the last; none: further rows were not recorded
    reason: str  # reason of the first ones


@dataclass(frozen=True)
class IterableOpened(Event):
    """A training loader of a `fit` that reads an `IterableDataset`. Written once per fit."""

    KIND = "iterable"
    fit: int
    number: int  # number of the training loader, from 0
    dataset: str  # its class
    is_stateful: bool  # whether it has a state that joiners get
    max_catch_up_s: float  # seconds that a joiner has to catch up with the others' reading


@dataclass(frozen=True)
class TablesMoved(Event):
    KIND = "reshard"
    round: int
    values_moved: int
    values: int
    seconds: float


@dataclass(frozen=True)
class SnapshotCompleted(Event):
    """A snapshot is complete: the first one of a round, or one after others that have failed."""

    KIND = "snapshot"
    round: int
    bytes_rank_0: int
    replicas: int


@dataclass(frozen=True)
class SnapshotFailed(Event):
    """A worker could not take its part of a snapshot, or keep the copy of another's."""

    KIND = "snapshot"
    round: int
    worker_id: str
    problem: str


@dataclass(frozen=True)
class SnapshotLost(Event):
    KIND = "snapshot"
    round: int
    batch: int
    lost: list[str]  # workers with parts that no worker has


# --- encoding -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnknownEvent(PlannerEvent):
    """An event of a kind that this release does not know."""

    kind: str


_TYPES: dict[str, list[type[Event]]] = {}
for _known in (*Event.__subclasses__(), *PlannerEvent.__subclasses__()):
    if _known not in (PlannerEvent, UnknownEvent):
        _TYPES.setdefault(_known.KIND, []).append(_known)
_TYPES["sequence"] = _TYPES[IterableOpened.KIND]  # the kind's name in histories of earlier commits


def record_of(event: Event, text: str, at: float | None = None) -> EventRecord:
    """Return the record of an event.

    Args:
        text: the message, one sentence.
        at: seconds since the epoch; None: now.
    """
    kind = event.kind if isinstance(event, UnknownEvent) else event.KIND
    return EventRecord(kind, time.time() if at is None else at, text, event.data)


def content_of(record: EventRecord) -> Event:
    """Return the event that a record holds; an `UnknownEvent` if its kind is unknown.

    Raises:
        RecordError: a field is missing, or has another type.
    """
    types = _TYPES.get(record.kind)
    if types is None:
        return UnknownEvent(record.data, record.kind)
    if issubclass(types[0], PlannerEvent):
        return types[0](record.data)
    # Several events may share a kind. The first one with all its required fields present is used.
    meant = next((known for known in types if _required(known) <= record.data.keys()), types[0])
    fields = {f.name: record.data[f.name] for f in dataclasses.fields(meant) if f.name in record.data}
    return from_fields(meant, fields, f"an event of kind {record.kind!r}")


def events_of(records: Iterable[EventRecord], event_type: type[E]) -> Iterator[tuple[EventRecord, E]]:
    """Yield the events of one type with their records. Unreadable ones are skipped."""
    kinds = {kind for kind, types in _TYPES.items() if any(issubclass(known, event_type) for known in types)}
    for record in records:
        if record.kind in _TYPES and record.kind not in kinds:
            continue
        try:
            event = content_of(record)
        except RecordError:
            continue
        if isinstance(event, event_type):
            yield record, event


def _required(event_type: type[Event]) -> set[str]:
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(event_type) if f.default is missing and f.default_factory is missing}
