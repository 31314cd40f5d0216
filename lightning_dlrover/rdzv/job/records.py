"""The job's records in etcd: frozen dataclasses, their keys and their JSON form.

Records are data only. The modules of `rdzv/membership` decide which process may write which record. Values read from etcd are
untrusted input: `decode` either returns a valid record or raises `RecordError` naming the key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from lightning_dlrover.codec import RecordError, from_fields, to_json
from lightning_dlrover.rdzv.job.sizes import WorldSizes

FORMAT_VERSION = 1  # format number in every record; readers refuse any other number
MAX_RECORD_BYTES = 1 << 20

MAX_UNREACHABLE = 64
"""Maximum number of unreachable workers in one worker's record: enough to separate two sides, and only a few kilobytes."""

MAX_SETTING = 1024
"""Maximum number of loader workers or threads that a plan may set for one worker. A larger number is certainly a mistake."""

MAX_MEMORY_MB = 2**26  # maximum MiB that a plan may request for one node (64 TiB)
DEFAULT_PREFIX = "/dlrover"

HISTORY_TTL_S = 7 * 24 * 3600.0  # seconds that a job's records outlast its last process


class _Key:
    """A key of a job, or a folder of keys, by its path below the job's root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: Keys, owner: type[Keys]) -> str:
        return f"{keys.prefix.rstrip('/')}/{keys.run_id}/{self._path}"


@dataclass(frozen=True)
class Keys:
    """Every key of one job."""

    run_id: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not self.run_id or "/" in self.run_id or self.run_id != self.run_id.strip():
            raise ValueError(
                f"run id {self.run_id!r} cannot be used: it names a folder of keys in etcd, so it must not be empty, "
                "hold a '/' or start or end with a space; choose another --rdzv-id"
            )

    root = _Key("")
    live = _Key("live/")  # coordinators and controllers watch these keys; the job's other keys change too often for that
    shared = _Key("live/shared/")  # every worker watches these: a change costs it the same in any job
    job = _Key("live/shared/job")
    round = _Key("live/shared/round")
    notice = _Key("live/shared/notice")
    plan = _Key("live/shared/plan")
    coordinator = _Key("live/shared/convener")  # election key, the fence of rounds and notices; its first name stays in etcd
    controller = _Key("live/shared/controller")
    nodes = _Key("live/shared/nodes")
    checkpoint_request = _Key("live/shared/checkpoint_request")
    stacks_request = _Key("live/shared/stacks_request")
    searches = _Key("live/shared/searches/")
    checkpoint = _Key("live/checkpoint")
    workers = _Key("live/workers/")
    addresses = _Key("live/addresses/")  # one key per worker, which outlives its lease
    drains = _Key("live/drains/")
    agents = _Key("live/agents/")
    agents_left = _Key("live/agents_left/")  # one key per agent that has signed off and was not lost, bound to a short lease
    for_agents = _Key("live/agent_")  # common prefix of the three keys that every elastic agent watches
    agent_round = _Key("live/agent_round")
    agent_coordinator = _Key("live/agent_convener")  # election key: the fence for every write of an agent round or notice
    agent_notice = _Key("live/agent_notice")
    each_node = _Key("nodes/")  # one key per node that a controller has requested; read by controllers only
    events = _Key("events/")
    profiles = _Key("profiles/")
    stacks = _Key("stacks/")  # one key per worker, with its newest stack traces
    snapshot = _Key("snapshot")  # only displayed
    progress = _Key("progress")  # only displayed
    places = _Key("places")  # read by joiners only
    notified = _Key("notified")  # the event up to which notifications were sent; read by controllers only
    windows = _Key("windows/")  # one key per window of a stream, by stream, fit and epoch
    store = _Key("store/")  # keys of the c10d store that the elastic agents share, one sub-folder per agent round


def worker_name_of(host: str) -> str:
    """Return the beginning of the ids of all workers on a host; other hosts with long names may share it."""
    return f"{host[:24]}-"


WorkerState = Literal["starting", "standby", "ready", "active", "reforming"]


@dataclass(frozen=True)
class AgentRecord:
    """One elastic agent (one node). Key `agents/{agent_id}`, bound to the agent's lease."""

    agent_id: str
    host: str
    pid: int
    num_workers: int  # workers this agent starts
    # running: it has entered round `round_number`, and its workers run or are about to. finished: all its workers succeeded.
    state: Literal["waiting", "running", "finished"]
    labels: dict[str, str] = field(default_factory=dict)
    round_number: int = 0  # agent round it takes part in; waiting: it joins only a later round
    address: str = ""  # address of this host for other nodes
    port: int = 0  # running: free port for the workers' MASTER_PORT if this agent is node rank 0
    since: float = 0.0  # start of this state, seconds since the epoch; only displayed, never compared
    min_nodes: int = 0  # waiting: minimum number of nodes; without them it gives up after `join_timeout_s`
    join_timeout_s: float = 0.0
    spare: str = ""  # state of the process that its workers are forked from, see `Spares.state`; empty: it keeps none
    spare_bytes: int = 0  # memory of that process


@dataclass(frozen=True)
class AgentRound:
    """The current rendezvous of the elastic agents. Key `agent_round`.

    The agents' coordinator writes it, fenced on its election key. Any agent may close it by compare-and-swap. Its workers start
    once a notice confirms it."""

    number: int
    agents: list[str]  # agent ids; the index is the node rank
    state: Literal["complete", "closed"]  # closed: no further round will be formed under this run id
    written_by: str = ""  # id of the writing agent
    reason: str = ""  # one readable sentence
    created_at: float = 0.0


@dataclass(frozen=True)
class AgentNotice:
    """Summary of all elastic agents in a few numbers. Key `agent_notice`, written by the agents' coordinator, fenced on its
    election key. The counts hold while that coordinator is in office; the confirmation holds forever."""

    term: int  # create revision of the writer's election key
    confirmed_round: int = 0  # newest agent round that all its members have entered together
    master_address: str = ""  # host of the confirmed round's node rank 0, for the workers' MASTER_ADDR and MASTER_PORT
    master_port: int = 0
    round_number: int = 0  # agent round that the counts refer to
    num_agents: int = 0
    num_inside: int = 0  # members of the round that are alive and take part in it
    num_unfinished: int = 0  # members inside the round that have not finished
    num_waiting: int = 0  # agents that wait for the next round
    num_members_waiting: int = 0  # waiting agents that are members of the round
    signed_off: list[str] = field(default_factory=list)  # members of the round that have signed off and left for good
    num_lost: int = 0  # members of the round that are gone without signing off
    live: bool = False  # JobRecord.live
    over: str = ""  # reason why no agent can join any more


@dataclass(frozen=True)
class WorkerRecord:
    """One training process. Key `workers/{worker_id}`, bound to the worker's own lease; only the worker writes it.

    starting: waits for the first round. standby: builds model and data while others train. ready: waits at the training
    loop's entrance. active: member of round `round_number`. reforming: its collectives of `round_number` failed.
    """

    worker_id: str
    agent_id: str
    host: str
    pid: int
    local_rank: int
    address: str  # address at which other workers reach `port`
    port: int  # port of this worker's TCPStore, used when it is rank 0; refuses connections once the process is dead
    state: WorkerState
    round_number: int = 0
    fingerprint: str = ""  # digest of the model's parameter names and shapes; empty until the model is built
    version: str = ""  # release of lightning_dlrover
    since: float = 0.0  # start of this state, seconds since the epoch; only displayed, never compared
    # Workers that this one could not reach, at most MAX_UNREACHABLE. After round `round_number` did not form: other members of
    # it. While this worker is `ready`: members of the current round.
    unreachable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AddressRecord:
    """Where a worker's process is reached. Key `addresses/{worker_id}`, bound to no lease of the worker.

    A worker with an expired lease may be alive, cut off from etcd. Its address stays until the worker leaves, its process is
    found dead, or a round continues without it.
    """

    worker_id: str
    agent_id: str
    host: str
    address: str
    port: int  # see `WorkerRecord.port`


@dataclass(frozen=True)
class RoundRecord:
    """The current round. Key `round`, written only by the coordinator, fenced on its election key."""

    number: int
    members: list[str]  # worker ids; the index is the global rank
    reason: str  # one readable sentence
    kind: Literal["start", "grow", "shrink", "replace", "loss", "retry", "undo", "stop"]  # undo: without its newest joiners
    planned: bool  # False: the step in flight cannot complete, and members abandon it at once
    store_address: str = ""  # address of rank 0's TCPStore
    store_port: int = 0
    convener: str = ""
    created_at: float = 0.0  # seconds since the epoch; only displayed, never compared
    apart_attempts: int = 0  # consecutive earlier rounds that did not form because members could not reach each other
    hosts: list[int] = field(default_factory=list)  # each member's host as a number, from 0 in the order of ranks


@dataclass(frozen=True)
class Notice:
    """What a worker needs of the others' records. Key `notice`, written by the coordinator, fenced on its election key.

    So only one worker of a job follows all records, and a change costs the others one small notice.
    """

    term: int  # create revision of the writer's election key
    round_number: int = 0  # round that the notice refers to
    is_past_start: bool = False  # True if a worker is past the start: it trains, or builds its model to join or start later
    given_up: list[str] = field(default_factory=list)  # some members that report the round as not formed or broken
    keepers: list[str] = field(default_factory=list)  # some of these that have the job's state and were not asked to leave
    lost: list[str] = field(default_factory=list)  # members that are gone
    leavers: list[str] = field(default_factory=list)  # workers outside of the round that hand their tables over to it
    drains: list[str] = field(default_factory=list)  # workers that were asked to leave
    replacements: list[str] = field(default_factory=list)  # workers that leave once another worker can replace them
    lacks_workers: bool = False  # True if the present workers cannot form a further round
    # Workers on nodes that will be taken away, and when, in seconds since the epoch. Without those of an unknown time.
    taken_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at in self.taken_at.values():
            _check_time(at)


@dataclass(frozen=True)
class JobRecord:
    """Properties that all workers must agree on. Key `job`; created once, and rank 0 advances `phase`."""

    phase: Literal["starting", "training", "finished", "failed"]
    live: bool  # True once workers that can be re-formed in process have registered
    min_workers: int
    max_workers: int
    version: str  # release of lightning_dlrover
    workers_per_node: int = 1  # workers that come and go together, with their node
    sizes: list[int] = field(default_factory=list)  # numbers of workers that may be requested, ascending; empty: any
    fingerprint: str = ""  # fingerprint of the model
    data: str = ""  # fingerprint of the comparable part of the training data
    global_batch_size: int = 0  # samples per step; 0 until the first round has determined it
    start_workers: int = 0  # workers at the start, or a pool job's MIN: a DataLoader's global batch is batch_size times this
    lane_workers: int = 0  # number of workers that stream rows are laid out for: the job's maximum at its start
    runs: list[dict[str, Any]] = field(default_factory=list)  # kind and name of each logger's run, see `live/state.py`
    started_from: str = ""  # newest checkpoint that the user has chosen by `ckpt_path`
    created_at: float = 0.0
    message: str = ""  # reason for the failure
    unjoinable: str = ""  # reason why the state cannot be handed over to joiners; empty if it can
    has_stepped: bool = False  # True once a step was made
    # World sizes at which a step failed that fewer workers completed, and why. No round grows to one of them.
    failed_sizes: dict[str, str] = field(default_factory=dict)
    # A script may train several times. `phase` describes the first time, the only one that workers can join.
    fits_begun: int = 0  # number of the newest `fit`; 0: none after the first
    fits_finished: int = 0

    @property
    def sizes_not_tried(self) -> frozenset[int]:
        """World sizes that no round grows to."""
        return frozenset(int(size) for size in self.failed_sizes if size.isdecimal())

    @property
    def sizes_not_planned(self) -> frozenset[int]:
        """The numbers of workers within the limits that no plan should have: those not tried, and those without whole nodes."""
        each = self.workers_per_node
        return self.sizes_not_tried | {n for n in range(self.min_workers, self.max_workers + 1) if n % each and each > 1}

    @property
    def world_sizes(self) -> WorldSizes:
        """The numbers of workers that may be requested."""
        return WorldSizes(tuple(self.sizes), self.workers_per_node)

    def most_workers(self, now: int) -> int:
        """Return up to how many workers a job of `now` workers may grow, if any size in between must be possible."""
        most = min([self.max_workers, *(size - 1 for size in self.sizes_not_tried if size > now)])
        return self.world_sizes.at_most(most) if self.sizes else most

    def trying_again(self, sizes: Collection[str]) -> JobRecord:
        """Return the record without failures of these numbers of workers."""
        return replace(self, failed_sizes={size: why for size, why in self.failed_sizes.items() if size not in sizes})

    @property
    def unfinished_fit(self) -> int:
        """Number of the later `fit` that is running, or was running when all its workers were lost; 0 if there is none."""
        return self.fits_begun if self.phase == "finished" and self.fits_begun > self.fits_finished else 0

    @property
    def closed(self) -> str:
        """The reason why no worker can join, in words; empty if workers can."""
        if self.unfinished_fit:
            return (
                f"fit number {self.unfinished_fit} of the script runs. Workers join the first one only, because nothing hands "
                "over what the script has made since"
            )
        return self.unjoinable

    @property
    def is_over(self) -> bool:
        """Whether the job will form no further round."""
        return self.phase == "failed" or (self.phase == "finished" and not self.unfinished_fit)


@dataclass(frozen=True)
class PlanRecord:
    """Desired state of the job. Key `plan`; compare-and-swap by planner, command line or user."""

    num_workers: int
    source: Literal["planner", "user", "initial", "brain"]
    reason: str
    binding: bool  # False: the number of workers is only a recommendation, because no controller can carry it out
    decision_id: int = 0
    created_at: float = 0.0
    # Settings that every worker applies on its own, whether the plan is binding or not. None: the worker keeps its own.
    loader_workers: int | None = None  # loader workers per worker; 0: the worker prepares its batches itself
    intra_op_threads: int | None = None  # threads per worker; 0: one for each of its cores
    prefetch_factor: int | None = None  # batches that each loader worker prepares ahead; 0 without loader workers
    # Resources of a node, within the limits of `NodesRecord`. None: as the job was started. Nodes get them in place where that
    # is possible; elsewhere, smaller nodes are replaced, and larger ones stay.
    node_cpus: int | None = None
    node_memory_mb: int | None = None  # MiB

    def __post_init__(self) -> None:
        highest = dict.fromkeys(("loader_workers", "intra_op_threads", "prefetch_factor", "node_cpus"), MAX_SETTING)
        for name, most in (highest | {"node_memory_mb": MAX_MEMORY_MB}).items():
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} of a PlanRecord is {value}; it must be from 0 to {most}, or be left out")

    @property
    def owner(self) -> Literal["planner", "user", "pool"]:
        """Who decides on the number of workers: the job's own planner, the user who chose it, or the job's pool."""
        if self.source == "brain":  # the name in records since the first release
            return "pool"
        return "user" if self.source == "user" else "planner"

    @property
    def stated_reason(self) -> str:
        """The reason, after whose it is. That of a pool begins with the pool's name already."""
        return self.reason if self.owner == "pool" else f"{self.source}: {self.reason}"


MAX_TIME = 1e11  # latest time of a record, seconds since the epoch: a few thousand years from now


def _check_time(at: float) -> None:
    if not 0.0 <= at <= MAX_TIME:
        raise ValueError(f"taken_at is {at}; it must be from 0 to {MAX_TIME:g} seconds since the epoch")


SAME_TIME_S = 2.0
"""Maximum difference in seconds between two readings of one deadline."""


@dataclass(frozen=True)
class EndNotice:
    """Announcement that a node will be taken away."""

    source: str  # who has announced it, and how, such as "aws spot/instance-action"
    taken_at: float = 0.0  # seconds since the epoch; 0: soon, the time is unknown

    def updates(self, known: EndNotice | None) -> bool:
        """Whether this is news. The first deadline holds until its source changes it, or another source has an earlier one."""
        if known is None or not known.taken_at:
            return known is None or self.taken_at > 0
        if not self.taken_at or abs(self.taken_at - known.taken_at) <= SAME_TIME_S:
            return False
        return self.source == known.source or self.taken_at < known.taken_at

    def __str__(self) -> str:
        at = time.strftime("at %Y-%m-%d %H:%M:%S", time.localtime(self.taken_at)) if self.taken_at else "soon"
        return f"will be taken away {at} ({self.source})"


@dataclass(frozen=True)
class DrainRecord:
    """Request that one worker leaves. Key `drains/{worker_id}`; written by anyone, deleted with the worker."""

    worker_id: str
    reason: str
    once_replaced: bool = False  # True: leave only when a replacement, which the controller starts, can take the place
    failed_round: int = 0  # round in which this worker made a step fail: the next one excludes it; 0: none
    # Notices: the node of the worker will be taken away.
    source: str = ""  # who has announced it, such as "aws spot/instance-action"; empty: the node stays
    taken_at: float = 0.0  # seconds since the epoch; 0: unknown

    def __post_init__(self) -> None:
        _check_time(self.taken_at)

    @property
    def notice(self) -> EndNotice | None:
        """The notice that this request follows; None if there is none."""
        return EndNotice(self.source, self.taken_at) if self.source else None


@dataclass(frozen=True)
class CheckpointRequest:
    """Request that all workers save a checkpoint together. Key `checkpoint_request`; only the newest one counts."""

    number: int
    reason: str


@dataclass(frozen=True)
class StacksRequest:
    """Request for stack traces of every worker. Key `stacks_request`; compare-and-swap by a worker that makes no progress, or
    by the command line. Only the newest one counts."""

    number: int
    asked_by: str
    reason: str
    at: float  # seconds since the epoch; only displayed, never compared


@dataclass(frozen=True)
class StacksRecord:
    """Stack traces of a worker. Key `stacks/{worker_id}`, bound to its lease."""

    worker_id: str
    request: int  # number of the request that this record answers
    global_rank: int
    host: str
    pid: int
    phase: Literal["setup", "step", "parts", "between", "validation", "checkpoint", "resize", "debugger"]
    since_s: float  # seconds without progress
    in_collective: bool  # True if it waits for other workers
    place: str  # FILE:LINE in FUNCTION, the innermost of the user's code
    stacks: str  # stack traces of its threads, the main thread first


@dataclass(frozen=True)
class ControllerRecord:
    """The process that adds and drains nodes. Key `controller`, bound to its lease, so that at most one is active."""

    host: str
    pid: int
    target: str  # local, slurm, kubernetes
    apps: dict[str, str] = field(default_factory=dict)  # node name -> TorchX app handle
    run_dir: str = ""
    held_up: str = ""  # readable reason why planned nodes are not added
    resizes: dict[str, str] = field(default_factory=dict)  # by node: readable state of its change of size in place
    spare: str = ""  # state of the process that nodes on this machine are forked from; empty: it keeps none
    spare_bytes: int = 0  # memory of that process


@dataclass(frozen=True)
class NodesRecord:
    """Facts about the job's nodes that outlast each controller. Key `nodes`; compare-and-swap, and a controller's write is
    also fenced on its key."""

    target: str  # scheduler of the nodes: local, slurm, kubernetes/NAMESPACE, kubernetes/NAMESPACE/volcano
    mark: str  # unique mark of this job in the names of its nodes at the scheduler
    num_started: int = 0  # nodes started so far; they are named by number, and no name is used twice
    stop: str = ""  # reason why all nodes must end, and the job with them; never withdrawn
    # Limits of a plan's resources for each node. 0: the scheduler decides, and no plan can change the resource.
    min_cpus: int = 0
    max_cpus: int = 0
    min_memory_mb: int = 0
    max_memory_mb: int = 0
    in_place: bool = False  # True: running nodes get another size without a new process


@dataclass(frozen=True)
class NodeRecord:
    """One node that a controller has requested. Key `nodes/{node}`, fenced on the controller's key. The record is written
    before the request to the scheduler, so a reader of `asked` must check whether the scheduler has the node."""

    state: Literal["asked", "started", "ended"]
    handle: str = ""  # the target's handle of the node
    asked_at: float = 0.0  # seconds since the epoch
    ended_at: float = 0.0
    cancelled: bool = False  # the controller wants it to end
    outcome: Literal["", "succeeded", "failed", "cancelled", "gone"] = ""
    error: str = ""  # failed: error raised by the script; empty if the node was killed
    place: str = ""  # innermost frame of the script in that error's traceback; empty if it was raised outside of its code
    stopped_job: bool = False  # True if the round's last member was gone with this node
    left_too_few: bool = False  # True if the members without this node were fewer than the job's minimum
    after_training: bool = False  # True if the script failed in its code after `fit`
    had_worker: bool = False  # its training process was registered once; if it has none now, it is about to end, or hangs
    cpus: int = 0  # cores that the node has; 0: the scheduler's default
    memory_mb: int = 0
    # A change of size in place, written before its request. asked: the request is sent, or about to be. waiting: the scheduler
    # has no room for it now. Only one of cores and memory differs from the above.
    resize: Literal["", "asked", "waiting"] = ""
    wanted_cpus: int = 0
    wanted_memory_mb: int = 0
    # Values that it could not get in place. A smaller node is replaced, a larger one stays, until the plan asks for others.
    refused_cpus: int = 0
    refused_memory_mb: int = 0
    trained_s: float = 0.0  # ended: seconds as a member of rounds, as observed by its last controller
    checkpoint_step: int = 0  # ended: step of the job's newest checkpoint at that time; 0: there was none


@dataclass(frozen=True)
class CheckpointRecord:
    """Newest checkpoint on disk, used when no living worker has the state. Key `checkpoint`."""

    path: str
    global_step: int


@dataclass(frozen=True)
class ProgressRecord:
    """Progress of the job, for display. Key `progress`, written by rank 0 every few seconds, bound to its lease."""

    step: int  # optimizer steps so far, as Lightning counts them
    epoch: int  # first epoch: 0
    batch: int  # batches of this epoch so far
    num_workers: int
    samples_per_s: float  # all workers together
    max_epochs: int | None = None  # None: unlimited
    num_batches: int | None = None  # batches of an epoch; None: unknown
    seconds_left: float | None = None  # until the end of training at this rate, without validation; None: unknown
    loss: str = ""  # loss of rank 0's share of the newest batch, text because of `nan`; empty: the script returns none
    at: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class SearchRecord:
    """Result of a search that the first workers ran before training, for joiners. Key `searches/{number}`."""

    results: str  # the Trainer's own results as JSON


@dataclass(frozen=True)
class WindowRecord:
    """The rows of a stream in one epoch, where the source does not fix them. Key `windows/{stream}/{fit}/{epoch}`; created by
    the first worker that needs it. Without rows, the stream has ended."""

    epoch: int
    ranges: dict[str, list[int]]  # first row of each shard, and the row after the last
    created_at: float = 0.0


@dataclass(frozen=True)
class PlacesRecord:
    """Where the training loaders will soon be, for joiners. Key `places`; rank 0 writes it before a round that has some."""

    round: int  # number of that round
    places: list[list[int]]  # loaders: epoch, batches of it handed out, seed of its order


@dataclass(frozen=True)
class SnapshotRecord:
    """A snapshot of sharded tables that counts, one of the newest. Key `snapshot`; only displayed."""

    round: int
    batch: int
    at: float  # seconds since the epoch, by the clock of rank 0


@dataclass(frozen=True)
class EventRecord:
    """One line of the bounded job history. Key `events/{time_ns:020d}-{writer}`."""

    kind: str  # round, stall, loss, decision, scale, checkpoint, error, ...
    at: float  # seconds since the epoch
    text: str
    data: dict[str, Any] = field(default_factory=dict)


T = TypeVar("T")


def encode(record: Any) -> bytes:
    """Encode a record with its format version as JSON.

    Raises:
        ValueError: the record is larger than etcd's limit for one value.
    """
    payload = to_json(record, v=FORMAT_VERSION)
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a {type(record).__name__} of {len(payload)} bytes exceeds {MAX_RECORD_BYTES} bytes")
    return payload


def decode(record_type: type[T], raw: bytes, key: str) -> T:
    """Decode the record in `raw`.

    Raises:
        RecordError: `raw` is not JSON in UTF-8, has another format version, or `from_fields` refuses it.
    """
    try:
        document = json.loads(raw.decode())
        if b"\\u" in raw:
            json.dumps(document, ensure_ascii=False).encode()  # an unpaired surrogate can neither be a key nor be printed
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"key {key!r} holds {len(raw)} bytes that are not a {record_type.__name__}; "
            "another program may use the same prefix: choose another key_prefix in --rdzv-conf, or delete the key"
        ) from error
    if not isinstance(document, dict):
        raise RecordError(f"key {key!r} holds JSON of type {type(document).__name__}, not a {record_type.__name__}")
    version = document.pop("v", None)
    if version != FORMAT_VERSION:
        raise RecordError(
            f"key {key!r} has format version {version!r}, this program writes {FORMAT_VERSION}: "
            "all workers of a job must run the same release of lightning-dlrover"
        )
    return from_fields(record_type, document, f"key {key!r}")
