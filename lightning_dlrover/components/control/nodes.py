"""The controller's view of a job's nodes: their output, the causes of their failures, their records, and what is observed.

`examine` determines why a node failed. `ControllerTenure` is the right to act, `NodeRegistry` keeps the nodes in memory and in
etcd, and `Observer` brings the registry up to date.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lightning_dlrover.codec import RecordError
from lightning_dlrover.components.control.reconcile import (
    ControllerView,
    FailurePolicy,
    Limits,
    Node,
    nodes_of_agents,
    num_refusals,
    refusals,
)
from lightning_dlrover.components.targets.target import (
    CANNOT_START,
    App,
    AppStatus,
    LogFile,
    NodeSize,
    Target,
    TargetError,
    read_tail,
)
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import Delete, EtcdError, KeyValue, absent, modified
from lightning_dlrover.rdzv.job.events import Event, record_of
from lightning_dlrover.rdzv.job.journal import Journal, Tenure, holder_text, readable
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    ControllerRecord,
    EndNotice,
    Keys,
    NodeRecord,
    NodesRecord,
    decode,
)
from lightning_dlrover.rdzv.membership.rounds import Decoder, JobView
from lightning_dlrover.spares import Spares

START = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"(?:\[(?:rank|default)?\d+\]:? ?)+")

_FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lightning_dlrover/|/lib/python3|^<frozen |^<string>$")
_LOOPS = re.compile(r"/(?:lightning/(?:pytorch|fabric)|pytorch_lightning|lightning_fabric)/")
_OWN_ERROR = re.compile(r"lightning_dlrover\.(?:\w+\.)*(?P<error>\w+: .+)", re.S)
_SIGNAL = re.compile(r"torch\.distributed\.elastic\.multiprocessing\.api\.SignalException: .* got signal: (?P<number>\d+)")
_MAX_REPEATED = 120
"""Characters of an error's message when it is shown again."""

_MAX_LINES = 5000
"""Lines after which a traceback without an end is shown as it is."""

Identity = tuple[str, ...]


def place_of(traceback: Sequence[str]) -> str:
    """Return the innermost frame of the script, as file, line and function; empty if it had only called Lightning there."""
    last_start = max((i for i, line in enumerate(traceback) if line.startswith(START)), default=0)
    for frame in reversed([match for line in traceback[last_start:] if (match := _FRAME.match(line))]):
        if not _LIBRARY.search(frame["file"]):
            return f"{frame['file']}:{frame['line']} ({frame['function']})"
        if _LOOPS.search(frame["file"]):
            return ""
    return ""


class ShownTracebacks:
    """The tracebacks of one job that were shown, by type of the error and its two innermost frames.

    Outer frames differ: a worker reports an error where Lightning catches it, and prints it at its end.
    """

    def __init__(self) -> None:
        self._shown: set[Identity] = set()

    def add(self, traceback: Sequence[str]) -> bool:
        """Note one traceback, from its first line to that of the error. Return whether it was not shown before."""
        identity = _identity(traceback)
        is_new = identity not in self._shown
        self._shown.add(identity)
        return is_new

    def __contains__(self, text: str) -> bool:
        """Whether the last traceback in a text was shown."""
        lines = text.splitlines()
        start = max((i for i, line in enumerate(lines) if line.startswith(START)), default=None)
        if start is None:
            return False
        end = next((i for i in range(start + 1, len(lines)) if _ends(lines[i])), len(lines) - 1)
        error, *frames = _identity(lines[start : end + 1])
        # A report may begin at the innermost frame.
        return any(shown[0] == error and [*shown[1:]][-len(frames) :] == frames for shown in self._shown)


class _Filter:
    """Lines of one file. Lines of a traceback are held back until it is complete."""

    def __init__(self) -> None:
        self._held: list[str] = []  # lines of an incomplete traceback

    def shown(self, lines: Iterable[str], is_complete: bool) -> Iterator[str]:
        """Yield the lines to show of new ones; with `is_complete`, no others follow."""
        for line in lines:
            plain = RANK_PREFIX.sub("", line, count=1)
            is_start = plain.startswith(START)
            if is_start:
                yield from self._released()
            if not is_start and not self._held:
                yield line
                continue
            self._held.append(line)
            if not is_start and _ends(plain):
                yield from self._shown_of(self._released(), line, plain)
            elif len(self._held) > _MAX_LINES:
                yield from self._released()
        if is_complete:
            yield from self._released()

    def _released(self) -> list[str]:
        held, self._held = self._held, []
        return held

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        """Yield the lines to show of a traceback. Its last line is `line`, and `plain` without the rank."""
        raise NotImplementedError


class TracebackFilter(_Filter):
    """Shows one line for each traceback that was shown before.

    An error that this package raises names the cause and the next move, so it is always shown as one line: its traceback leads
    through our code. The files of the nodes' output keep all tracebacks.
    """

    def __init__(self, shown: ShownTracebacks) -> None:
        super().__init__()
        self._shown = shown

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        traceback = [RANK_PREFIX.sub("", each, count=1) for each in held]
        is_new, own = self._shown.add(traceback), _OWN_ERROR.fullmatch(plain)
        rank, error = line.removesuffix(plain), own["error"] if own is not None else plain
        if is_new and own is None:
            yield from held
        elif is_new:
            at = place_of(traceback)
            yield f"{rank}{error} (at {at})" if at else f"{rank}{error}"
        else:
            error = error if len(error) <= _MAX_REPEATED else error[:_MAX_REPEATED].rstrip() + "..."
            yield f"{rank}{error} ({'its traceback was ' if own is None else ''}shown above)"


class ShownLog:
    """A growing file of output, and the filter of its lines."""

    def __init__(self, file: Path, shown: _Filter) -> None:
        self._log = LogFile(file)
        self._filter = shown
        self.skip = self._log.skip

    def new_lines(self, whole: bool) -> list[str]:
        """Return the lines to show since the last call; with `whole`, the file is complete."""
        return list(self._filter.shown(list(self._log.new_lines(whole)), whole))


class SignalFilter(_Filter):
    """Replaces the traceback of torch's agent after a signal by one line, and passes all others unchanged."""

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        if (found := _SIGNAL.search(plain)) is None:
            yield from held
            return
        with contextlib.suppress(ValueError):
            yield f"this node's agent was ended by {signal.Signals(int(found['number'])).name}"


def _ends(line: str) -> bool:
    """Whether a line after a traceback's first one names the error."""
    return bool(line) and not line[0].isspace()


def _identity(traceback: Sequence[str]) -> Identity:
    frames = [f"{match['file']}:{match['line']}" for line in traceback if (match := _FRAME.match(line))]
    return (traceback[-1].partition(":")[0], *frames[-2:])


_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_AGENT_LINE = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_AGENT_FILE = "torch/distributed/run.py"
_OUR_FILE = "/lightning_dlrover/"
_START_OF_MODULE = re.compile(r'File "(?:<frozen runpy>|.*/runpy\.py)", line \d+, in _run_module_as_main')
_CAUSE = re.compile(r"(?:this machine|Kubernetes|Slurm): (.+)$")
_NO_PACKAGE = re.compile(r"(?:Error while finding module specification for '|No module named '?)lightning_dlrover\b")
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)")

_FATAL = "Fatal Python error:"
_FATAL_LINES = 40

# SIGHUP, SIGINT, SIGKILL, SIGTERM, as Python and as a shell report them. Another process ended this one.
_ENDED_BY_OTHERS = {sign for number in (1, 2, 9, 15) for sign in (-number, 128 + number)}

# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: faults of the process itself. A shell reports them as 128 more.
_FAULTS = {4, 5, 6, 7, 8, 11}


@dataclass(frozen=True)
class PostMortem:
    """Cause of a node's failure."""

    error: str  # one line; empty if another process ended it
    traceback: str  # empty if there is none
    place: str = ""  # innermost frame of the script; empty if the error was raised outside of its code
    cause: str = ""  # the place's reason for ending it, if it was appended to the node's output
    could_not_start: bool = False  # its command never ran


def examine(output: str) -> PostMortem:
    """Determine why the node with this output failed.

    To a scheduler, a killed node and a node with an error in its script look the same. Only the killed one is worth restarting
    without further analysis.
    """
    lines = [RANK_PREFIX.sub("", line, count=1) for line in output.splitlines()]
    cause = found[1] if lines and (found := _CAUSE.search(lines[-1])) else ""
    tracebacks = list(_tracebacks(lines))
    if not tracebacks and (why := _why_not_started(lines, cause)):
        return PostMortem(why, "", cause=cause, could_not_start=True)
    own = next((t for t in tracebacks if not any(_AGENT_FILE in line for line in t)), None)
    codes = [int(code) for code in _EXIT_CODE.findall(output)]
    faults = [code for code in codes if code not in _ENDED_BY_OTHERS]
    if faults and (name := _signal(faults[0])):
        # A warning above is unrelated. A traceback may be, too, or the process received the signal while exiting after it.
        after = f", after {_message(own)}" if own else ""
        text = "\n".join([*(own or []), *_fatal_error(lines)])
        return PostMortem(f"the script was ended by {name}{after}", text, cause=cause)
    if faults:
        error = _message(own) if own else f"the script ended with exit code {faults[0]}{_last_words(lines)}"
        return PostMortem(error, "\n".join(own or []), place_of(own or []), cause)
    if codes:
        return PostMortem("", "", cause=cause)
    # No worker has failed, so the agent itself has: it was killed, received a signal, or could not start a worker.
    signalled = any("SignalException" in _message(t) for t in tracebacks)
    for fault in tracebacks:
        if "SignalException" not in _message(fault) and _has_ended_agent(fault, before_torchrun=not signalled):
            return PostMortem(_message(fault), "\n".join(fault), cause=cause)
    # A script may log the traceback of an error that it handles, long before its node is killed as a whole. Only one that
    # nothing follows, not even the reason of the place, is the end of the node.
    last = tracebacks[-1] if tracebacks and not cause and not signalled else []
    if last and _message(last) == next(line for line in reversed(lines) if line):
        return PostMortem(_message(last), "\n".join(last))
    return PostMortem("", "", cause=cause)


def _why_not_started(lines: Sequence[str], cause: str) -> str:
    """Return why a node's command never ran; empty if it did."""
    if cause.startswith(CANNOT_START):
        return cause
    last = next((line for line in reversed(lines) if line and not _CAUSE.match(line)), "")
    return f"its Python has no package lightning_dlrover: {last}" if _NO_PACKAGE.search(last) else ""


def _has_ended_agent(traceback: list[str], before_torchrun: bool) -> bool:
    """Whether the agent's process has ended with this error: one that was handled has no such outer frames."""
    if any(_AGENT_FILE in line for line in traceback):
        return True
    return before_torchrun and any(_START_OF_MODULE.search(x) for x in traceback) and any(_OUR_FILE in x for x in traceback)


def _signal(code: int) -> str:
    """Return the name of the signal behind an exit code of Python or a shell; empty for any other exit code."""
    number = -code if code < 0 else code - 128
    if code >= 0 and number not in _FAULTS:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fatal_error(lines: list[str]) -> list[str]:
    """Return the report of Python's faulthandler on the last fatal signal."""
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_FATAL)), len(lines))
    return list(itertools.takewhile(lambda line: not _AGENT_LINE.match(line), lines[start : start + _FATAL_LINES]))


def _last_words(lines: list[str]) -> str:
    """Return the script's last line of output before its agent reported the failure."""
    end = next((i for i, line in enumerate(lines) if _AGENT_LINE.match(line) and "failed (exitcode" in line), 0)
    last = next((line for line in reversed(lines[:end]) if line.strip() and not _AGENT_LINE.match(line)), "")
    return f": {last}" if last else ""


def _tracebacks(lines: list[str]) -> Iterator[list[str]]:
    """Yield tracebacks with their chained exceptions, in the order of output."""
    start = 0
    while start < len(lines):
        if not lines[start].startswith(START):
            start += 1
            continue
        end = start + 1
        while end < len(lines):
            line = lines[end]
            if _AGENT_LINE.match(line) or line.startswith(START):
                break
            if line == "":
                if end + 1 < len(lines) and lines[end + 1] in _CHAINED:
                    end += 4  # skips the chaining sentence, an empty line, and the next traceback's first line
                    continue
                break
            end += 1
        yield lines[start : min(end, len(lines))]
        start = end


def _message(traceback: list[str]) -> str:
    """Return the line of the last exception."""
    last_start = max((i for i, line in enumerate(traceback) if line.startswith(START)), default=0)
    return next((line for line in traceback[last_start + 1 :] if line and not line.startswith(" ")), "")


log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


class ControllerTenure(Tenure[ControllerRecord]):
    """The right to act for one job, held by a lease on the job's `controller` key.

    The key's create revision fences every write, so a controller with an expired lease cannot change anything.

    Raises:
        ControllerBusyError: another controller holds the key.
        EtcdError: the holder is unknown.
    """

    def __init__(self, client: EtcdClient, keys: Keys, record: ControllerRecord) -> None:
        self._keys = keys
        super().__init__(Journal(client, keys), keys.controller, lambda: record, self._is_taken, LEASE_TTL_S)

    def write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if this controller still acts and, with `revision`, if the record has not changed since.

        Raises:
            EtcdError: the record was not written, or that is unknown.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._journal.fenced_write({key: record}, [self.is_ours, *unchanged]):
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def delete(self, key: str) -> None:
        """Delete a key if this controller still acts and etcd answers."""
        with contextlib.suppress(EtcdError):  # the next controller repeats it
            self._client.txn([self.is_ours], [Delete(key)])

    def add_event(self, event: Event, text: str) -> bool:
        """Append to the job's history if this controller still acts."""
        return self._journal.append(record_of(event, text[:2000]), "controller", [self.is_ours])

    def publish_nodes(self, apps: Mapping[str, str], held_up: str, spares: Spares | None) -> bool:
        """Update the controller's record. Return whether it has changed."""
        spare, spare_bytes = (spares.state, spares.memory_bytes) if spares is not None else ("", 0)
        record = replace(self.record, apps=dict(apps), held_up=held_up[:2000], spare=spare, spare_bytes=spare_bytes)
        if record == self.record:
            return False
        try:
            self.publish(record)
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)
            return False
        return True

    def _is_taken(self, holder: ControllerRecord | None) -> ControllerBusyError:
        who = holder_text(holder, "another controller")
        return ControllerBusyError(
            f"job {self._keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
            f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
        )


MAX_ENDED = 64
"""Maximum number of ended nodes to remember; the oldest go first. Recurring errors are counted among them."""

SAME_FAILURE_S = 30.0
"""Seconds within which nodes that fail share one cause: the first one's."""


@dataclass
class NodeEntry:
    """State of one node."""

    handle: str | None  # None: refused, or not known yet whether the scheduler accepted it
    started_at: float
    asked_at: float  # seconds since the epoch
    size: NodeSize
    status: AppStatus = "pending"
    agent_seen: bool = False
    workers: tuple[str, ...] = ()  # ids of its registered workers
    num_members: int = 0  # those of its workers that are members of the current round
    round_number: int = 0  # newest round that was seen with it as a member; 0: none
    members: frozenset[str] = frozenset()  # nodes of that round
    running_since: float | None = None
    worker_seen_at: float | None = None
    member_seen_at: float | None = None
    trained_s: float = 0.0  # seconds as a member
    checkpoint_step: int = 0  # step of the job's newest checkpoint at the node's end
    ended_at: float | None = None
    missing_since: float | None = None  # start of its absence from the scheduler's list
    cancel_at: float = 0.0  # time of the next cancellation request
    post_mortem: PostMortem | None = None
    has_left: bool = False  # others trained on without its workers
    stopped_job: bool = False
    left_too_few: bool = False
    after_training: bool = False
    warned: bool = False
    cancelled: bool = False
    cancel_failures: int = 0  # consecutive cancellation requests that the scheduler has refused
    refusals_in_a_row: int = 1  # refused nodes: refusals in a row, this one included
    refusal_kind: str = ""  # refused nodes: text that all refusals for this reason share
    is_released: bool = False  # its scheduler may have forgotten it
    all_shown: bool = False
    notice: EndNotice | None = None  # the scheduler will end it, and a worker of it is a member
    whole_at: float | None = None  # last time at which all of its agents were registered; None: it has one, or they never were
    lacks_memory: bool = False  # killed for lack of memory; the plan does not account for it yet
    is_enlarged: bool = False  # killed for lack of memory; the plan accounts for it
    was_adopted: bool = False  # taken over from an earlier controller, which has already shown its output
    saved: NodeRecord | None = None  # record in etcd

    @property
    def is_refused(self) -> bool:
        """Whether the scheduler has certainly not accepted it."""
        return self.handle is None and self.status == "failed" and self.post_mortem is not None and bool(self.post_mortem.error)

    @property
    def is_living(self) -> bool:
        """Whether it counts towards the plan. A cancelled node is only expected to end."""
        return self.status in ("pending", "running") and not self.cancelled

    @property
    def is_member(self) -> bool:
        return self.num_members > 0

    @property
    def has_ended(self) -> bool:
        return self.status not in ("pending", "running")

    def record(self, now: float) -> NodeRecord:
        """Return the record that etcd should hold."""
        living = NodeRecord(
            "started" if self.handle else "asked",
            self.handle or "",
            self.asked_at,
            cancelled=self.cancelled,
            had_worker=self.worker_seen_at is not None,
            cpus=self.size.cpus,
            memory_mb=self.size.memory_mb,
        )
        if not self.has_ended:
            return living
        ended_at = self.saved.ended_at if self.saved and self.saved.ended_at else time.time() - (now - (self.ended_at or now))
        found = self.post_mortem or PostMortem("", "")
        return replace(
            living,
            state="ended",
            ended_at=ended_at,
            outcome=self.status,  # type: ignore[arg-type]
            error=found.error[:2000],
            place=found.place[:500],
            stopped_job=self.stopped_job,
            left_too_few=self.left_too_few,
            after_training=self.after_training,
            trained_s=round(self.trained_s, 1),
            checkpoint_step=self.checkpoint_step,
        )

    def node(self, name: str, now: float, forgiven_at: float) -> Node:
        """Return the facts for decisions. Failures up to `forgiven_at` are forgiven."""

        def since_s(at: float | None) -> float:
            return now - at if at is not None else 0.0

        found = self.post_mortem or PostMortem("", "")
        return Node(
            name=name,
            status="cancelled" if self.cancelled else self.status,
            workerless_s=since_s(self.worker_seen_at),
            idle_s=now - (self.member_seen_at or self.started_at),
            age_s=since_s(self.running_since),
            asked_s=now - self.started_at,
            ended_s=since_s(self.ended_at),
            agentless_s=since_s(self.whole_at),
            refused=self.is_refused,
            forgiven=self.ended_at is not None and self.ended_at <= forgiven_at,
            error=found.error,
            could_not_start=found.could_not_start,
            place=found.place,
            is_accepted=bool(self.handle),
            **{name: getattr(self, name) for name in _UNCHANGED},
        )


_UNCHANGED = {each.name for each in fields(Node)} & {each.name for each in fields(NodeEntry)} - {"status"}
"""Fields that `Node` copies from a `NodeEntry`, such as `workers`."""


class NodeRegistry:
    """Nodes of one job: `entries` in memory, oldest first, and a record of each in etcd for the next controller.

    A node's name is written before its request to the scheduler, and its cancellation before the call that cancels it.
    """

    def __init__(self, client: EtcdClient, keys: Keys, tenure: ControllerTenure, target: Target, limits: Limits) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._tenure = tenure
        self._target = target
        self._limits = limits
        self.entries: dict[str, NodeEntry] = {}
        self.nodes: NodesRecord | None = None
        self.is_ending = False
        self._num_taken = 0  # highest number in the name of a recorded node
        self._has_given_up_etcd = False  # while ending: each request to an unreachable etcd takes seconds

    def adopt(self, view: Callable[[], JobView]) -> None:
        """Take over the records of earlier controllers.

        Raises:
            ValueError: their nodes run on another kind of target, and may still be alive.
        """
        written = self._journal.get(NodesRecord, self._keys.nodes)
        nodes = written.record
        _, entries = self._client.get_prefix(self._keys.each_node)
        records = {entry.key.removeprefix(self._keys.each_node): entry for entry in entries}
        self._num_taken = _highest_number(records)
        found = {name: record for name, entry in records.items() if (record := self._decoded(entry)) is not None}
        living = [name for name, record in found.items() if record.state != "ended"]
        outlived = nodes is not None and nodes.target != "local"
        if nodes is None or (nodes.target != self._target.name and not (living and outlived)):
            # A node registered without a record predates such records. Its name is taken.
            names = nodes_of_agents(view()).values()
            newest = max(self._num_taken, _highest_number(names), nodes.num_started if nodes else 0)
            mark = self.nodes.mark if self.nodes else uuid.uuid4().hex[:10]
            nodes = NodesRecord(self._target.name, mark, newest, nodes.stop if nodes else "")
            self._tenure.write(self._keys.nodes, nodes, written.revision)
        if nodes.target != self._target.name:
            has_gained_volcano = self._target.name == f"{nodes.target}/volcano"
            there = nodes.target.partition("/")[0] + " --plain-jobs" * has_gained_volcano
            raise ValueError(
                f"job {self._keys.run_id!r} has nodes on {nodes.target} ({', '.join(living)}); continue it there "
                f"(--target {there}, and what else it was started with), or end it with `dlrover cancel {self._keys.run_id}`"
            )
        self.nodes = self._with_limits(nodes)
        self._target.open(self.nodes.mark)
        now = time.monotonic()
        for name, record in found.items():
            if name in self.entries:
                self.entries[name].saved = record
            elif self._target.outlives_controller:
                self.entries[name] = _restored(record, self._checked_handle(name, record), now)
            else:  # it has ended with the controller that started it
                self._tenure.delete(self._keys.each_node + name)

    def ask(self, size: NodeSize) -> tuple[str, NodeEntry]:
        """Record a new node, under a name that no other node has had.

        Raises:
            EtcdError: the record was not written, or that is unknown.
            RecordError: the existing record of the nodes is unreadable.
        """
        found = self._journal.get(NodesRecord, self._keys.nodes)
        nodes = found.record or self.nodes  # the job's keys may have been deleted
        assert nodes is not None
        number = max(nodes.num_started, self._num_taken) + 1
        record = NodeRecord("asked", asked_at=time.time(), cpus=size.cpus, memory_mb=size.memory_mb)
        name = f"node{number}"
        written = replace(nodes, num_started=number)
        key, own_key = self._keys.nodes, self._keys.each_node + name
        guard = [self._tenure.is_ours, modified(key) == found.revision, absent(own_key)]
        if not self._journal.fenced_write({key: written, own_key: record}, guard):
            raise EtcdError(f"{key!r} was changed by another writer")
        self.nodes = written
        self.entries[name] = NodeEntry(None, time.monotonic(), record.asked_at, size, saved=record)
        return name, self.entries[name]

    def save(self) -> None:
        """Bring etcd up to date. The next step repeats failed writes."""
        if self._has_given_up_etcd:
            return
        now = time.monotonic()
        try:
            for name, entry in self.entries.items():
                record = entry.record(now)
                if record != entry.saved:
                    self._tenure.write(self._keys.each_node + name, record)
                    entry.saved = record
        except EtcdError as error:
            log.info("run %s: the outcome of the nodes is written later: %s", self._keys.run_id, error)
            self._has_given_up_etcd = self.is_ending
            return
        ended = sorted((e.ended_at or now, name) for name, e in self.entries.items() if e.has_ended and e.all_shown)
        for _, name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.forget(name)

    def release_ended(self) -> None:
        """Have the scheduler forget nodes whose end etcd holds, because ended ones may count against a quota."""
        for entry in self.entries.values():
            is_written = entry.saved is not None and entry.saved.state == "ended" and entry.all_shown
            is_needed = entry.lacks_memory and not entry.is_enlarged
            if is_written and entry.handle is not None and not entry.is_released and not is_needed:
                entry.is_released = self._target.release(entry.handle)

    def forget(self, name: str) -> None:
        """Remove a node from memory and from etcd."""
        self._tenure.delete(self._keys.each_node + name)
        del self.entries[name]

    def failure_text(self) -> str:
        """Return the traceback of the first node in the newest group of failures, else why it was ended; empty if unknown."""
        faults = [(entry.ended_at or 0.0, entry.post_mortem) for entry in self.entries.values()]
        known = [(ended_at, found) for ended_at, found in faults if found is not None and (found.error or found.cause)]
        if not known:
            return ""
        last = max(ended_at for ended_at, _ in known)
        _, first = min((f for f in known if f[0] >= last - SAME_FAILURE_S), key=lambda f: f[0])
        return first.traceback or first.error or first.cause

    def _with_limits(self, nodes: NodesRecord) -> NodesRecord:
        """Record the limits of node sizes unless the record has them already. Return the record."""
        low, high = self._limits.min_size, self._limits.max_size
        limits = {"min_cpus": low.cpus, "max_cpus": high.cpus, "min_memory_mb": low.memory_mb, "max_memory_mb": high.memory_mb}
        if replace(nodes, **limits) != nodes:  # type: ignore[arg-type]
            # `dlrover cancel` may have written since.
            found = self._journal.get(NodesRecord, self._keys.nodes)
            nodes = replace(found.record or nodes, **limits)  # type: ignore[arg-type]
            self._tenure.write(self._keys.nodes, nodes, found.revision)
        return nodes

    def _checked_handle(self, name: str, record: NodeRecord) -> str | None:
        """Return the handle in a node's record if it can belong to this node. Any writer to etcd could change it."""
        if not record.handle or self._target.owns(name, record.handle):
            return record.handle or None
        log.error(
            "run %s: ignored %r, the handle in %s: it names no node of this job on %s. Another program may have written the "
            "record; the node itself is looked up by its name",
            *(self._keys.run_id, record.handle[:100], self._keys.each_node + name, self._target.name),
        )
        return None

    def _decoded(self, entry: KeyValue) -> NodeRecord | None:
        name = entry.key.removeprefix(self._keys.each_node)
        if not re.fullmatch(r"node\d{1,18}", name):
            log.error("run %s: ignored a record: %r names no node, such as node1", self._keys.run_id, entry.key)
            return None
        try:
            return decode(NodeRecord, entry.value, entry.key)
        except RecordError as error:
            log.error("run %s: ignored a record: %s", self._keys.run_id, error)
            return None


def _restored(record: NodeRecord, handle: str | None, now: float) -> NodeEntry:
    """Return the entry of an earlier controller's node. Its idle time starts again at zero."""
    size = NodeSize(record.cpus, record.memory_mb)
    entry = NodeEntry(handle, now, record.asked_at, size, cancelled=record.cancelled, was_adopted=True, saved=record)
    entry.ended_at = now if record.cancelled else None
    entry.worker_seen_at = now if record.had_worker else None
    if record.state == "ended":
        entry.status = record.outcome or "gone"
        entry.ended_at = now - max(0.0, time.time() - record.ended_at)
        entry.post_mortem = PostMortem(record.error, "", place=record.place) if record.outcome == "failed" else None
        entry.stopped_job, entry.left_too_few, entry.all_shown = record.stopped_job, record.left_too_few, True
        entry.after_training = record.after_training
        entry.trained_s, entry.checkpoint_step = record.trained_s, record.checkpoint_step
    return entry


def _highest_number(names: Iterable[str]) -> int:
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"node(\d{1,18})", name))), default=0)


MAX_REFUSED = 8
"""Maximum number of refused nodes to remember; the oldest go first. A full quota must not push out other failures."""


@dataclass
class _Streak:
    """Consecutive failures of nodes without a new round between them."""

    count: int = 0
    failed_at: float = 0.0
    round_number: int = 0  # newest round that had started

    def add(self, now: float) -> None:
        self.count, self.failed_at = self.count + 1, now


class Observer:
    """Observes one job: through a mirror of its keys and through the target that runs its nodes."""

    def __init__(
        self, keys: Keys, mirror: Mirror, target: Target, registry: NodeRegistry, limits: Limits, policy: FailurePolicy
    ) -> None:
        self._keys = keys
        self._mirror = mirror
        self._target = target
        self._registry = registry
        self._limits = limits
        self._policy = policy
        self._decoder = Decoder(keys, self._report_garbage)
        self._streak = _Streak()
        self._had_member = False
        self._starved_round = 0  # newest round that lost too many members to train
        self._finished_at: float | None = None  # time at which the end of training was first observed
        self._looked_at = time.monotonic()
        self._plan_by_hand = 0  # revision of the newest plan set by a user
        self._forgiven_at = time.monotonic()  # earlier failures do not prevent new nodes
        self._scheduler_away_since: float | None = None

    def view(self) -> JobView:
        """Return the job's state in etcd."""
        return self._decoder.view(self._mirror.snapshot())

    def _report_garbage(self, key: str, error: RecordError) -> None:
        log.error("run %s: ignored a record: %s", self._keys.run_id, error)

    def nodes(self, now: float) -> list[Node]:
        """Return the facts about each node that decisions rest on."""
        return [entry.node(name, now, self._forgiven_at) for name, entry in self._registry.entries.items()]

    def job_view(self, view: JobView) -> ControllerView:
        """Return the facts about the job that decisions rest on, apart from the right to act."""
        now = time.monotonic()
        return replace(
            ControllerView.of(view, self._limits, self.nodes(now)),
            target=self._target.name,
            failures_in_a_row=self._streak.count,
            since_failure_s=now - self._streak.failed_at,
            checkpoint_step=self._checkpoint_step(),
            stop=self._stop_reason(),
        )

    def compare(self) -> Sequence[App] | None:
        """Settle the fate of nodes that the scheduler may have taken on.

        Returns:
            The nodes that the scheduler lists, or None while it does not answer.
        """
        now = time.monotonic()
        try:
            listed = self._target.apps()
        except TargetError as error:
            if self._scheduler_away_since is None:
                self._scheduler_away_since = now
                log.warning("run %s: nodes keep their last states: %s", self._keys.run_id, error)
            return None
        if self._scheduler_away_since is not None:
            log.warning("run %s: %s answers again", self._keys.run_id, self._target.name)
            self._scheduler_away_since = None
        for seen in listed:
            entry = self._registry.entries.get(seen.node)
            if entry is not None and entry.handle is None and not entry.has_ended:
                log.info("run %s: %s has accepted %s", self._keys.run_id, self._target.name, seen.node)
                entry.handle = seen.handle
        for name, entry in self._registry.entries.items():
            if entry.handle is not None or entry.has_ended:
                continue
            entry.missing_since = entry.missing_since if entry.missing_since is not None else now
            if now - entry.missing_since > self._policy.submit_s:
                log.warning("run %s: %s was requested, but the scheduler does not list it", self._keys.run_id, name)
                entry.status, entry.ended_at, entry.all_shown = "failed", now, True
                self._streak.add(now)
        return listed

    def look(self, view: JobView) -> None:
        """Update the registry from the job's state."""
        now = time.monotonic()
        names = nodes_of_agents(view)
        num_agents = Counter(names.values())
        workers: dict[str, list[str]] = {}
        for worker, record in view.workers.items():
            workers.setdefault(names.get(record.agent_id, ""), []).append(worker)
        num_members = Counter(names.get(view.workers[worker].agent_id, "") for worker in view.survivors)
        if self._had_member and not num_members:
            # Failures next to training members do not predict a start without them: they may have held the missing resources.
            self._streak.count = 0
        self._had_member = bool(num_members)
        if self._finished_at is None and view.job is not None and view.job.phase == "finished":
            self._finished_at = now
        since_look_s, self._looked_at = now - self._looked_at, now
        can_train = num_members.total() >= self._limits.min_workers
        for name, entry in self._registry.entries.items():
            entry.trained_s += since_look_s if can_train and entry.is_member and num_members[name] else 0.0
            entry.agent_seen = entry.agent_seen or num_agents[name] > 0
            entry.workers, entry.num_members = tuple(workers.get(name, ())), num_members[name]
            if 1 < self._limits.workers_per_node <= num_agents[name]:
                entry.whole_at = now
            entry.worker_seen_at = now if entry.workers else entry.worker_seen_at
            if not entry.is_member and entry.member_seen_at is not None and self._finished_at is None and num_members:
                entry.has_left = True
            if entry.is_member:
                entry.has_left = False
                entry.member_seen_at = now
                if view.round is not None and entry.round_number != view.round.number:
                    entry.round_number, entry.members = view.round.number, frozenset(num_members)
            if not entry.has_ended and entry.handle:
                status = self._target.status(entry.handle)
                if status == "running" and entry.running_since is None:
                    entry.running_since = now
                if status == entry.status:
                    continue
                ended = status not in ("pending", "running")
                entry.status = "cancelled" if ended and entry.cancelled else status
                if ended and not entry.cancelled:
                    others = Counter({other: number for other, number in num_members.items() if other != name})
                    self._note_end(name, entry, entry.handle, view, now, others)

    def query_scheduler(self) -> None:
        """Ask the scheduler which nodes it will take away and which were killed for lack of memory.

        Slurm's target answers `notice` once for each new list of jobs, so call this only when the answer can be acted on.
        """
        now = time.monotonic()
        for entry in self._registry.entries.values():
            trains = entry.is_member and not entry.cancelled and not entry.has_ended
            entry.notice = self._target.notice(entry.handle) if trains and entry.handle is not None else None
            has_just_failed = entry.status == "failed" and now - (entry.ended_at or now) < SAME_FAILURE_S
            may_lack = has_just_failed and not entry.is_enlarged
            entry.lacks_memory = may_lack and entry.handle is not None and self._target.ran_out_of_memory(entry.handle)

    def note_refusal(self, name: str, problem: str, kind: str, now: float) -> None:
        """Record that the scheduler refused a node, for a reason of this kind. Only the newest refusals are kept."""
        log.debug("run %s: %s could not be started: %s", self._keys.run_id, name, problem)
        entries = self._registry.entries
        # Carried over because the oldest are forgotten: the pause before the next attempt grows with the total.
        earlier = refusals([node for node in self.nodes(now) if node.name != name])
        entry = entries[name]
        entry.refusals_in_a_row, entry.refusal_kind = 1 + num_refusals(earlier), kind
        entry.post_mortem = PostMortem(f"it could not be started: {problem}", "")
        entry.status, entry.ended_at, entry.all_shown = "failed", now, True
        refused = [other for other, each in entries.items() if each.is_refused]
        for other in refused[:-MAX_REFUSED]:
            self._registry.forget(other)

    def note_plan_by_hand(self, view: JobView) -> None:
        """Forgive failures that prevent new nodes once a user requests another plan, because their cause may be fixed."""
        entry = self._mirror.get(self._keys.plan)
        is_by_hand = view.plan is not None and view.plan.owner == "user"
        if entry is not None and is_by_hand and entry.mod_revision > self._plan_by_hand:
            self._plan_by_hand, self._forgiven_at = entry.mod_revision, time.monotonic()

    def _note_end(self, name: str, entry: NodeEntry, handle: str, view: JobView, now: float, others: Counter[str]) -> None:
        """Record that a node has ended and, if it failed, why. `others`: members of the current round on each other node."""
        entry.ended_at, is_last = now, not others
        log.info("run %s: %s has %s", self._keys.run_id, name, entry.status)
        if entry.status != "failed":
            return
        entry.post_mortem = examine("\n".join(_read(file) for file in self._target.logs(handle)))
        if self._target.ran_out_of_memory(handle):
            # Not the script's fault while the next node may have more memory.
            can_grow = entry.size.memory_mb < self._limits.max_size.memory_mb
            entry.post_mortem = replace(entry.post_mortem, error="" if can_grow else "out of memory")
        # Without an error, the node may have been killed in its last step, which the others finished without it.
        has_finished_s = now - self._finished_at if self._finished_at is not None else -1.0
        is_late = has_finished_s >= (0.0 if entry.post_mortem.error else self._policy.settle_s)
        trains_again = view.job is not None and bool(view.job.unfinished_fit) and not entry.post_mortem.error
        was_there = entry.member_seen_at is not None and not entry.has_left
        entry.after_training = is_late and was_there and not trains_again
        entry.stopped_job, entry.checkpoint_step = is_last, self._checkpoint_step()
        round_number = view.round.number if view.round else 0
        # Of the round that it was in: a replacement may have come by chance, and hides that it was needed.
        left = {node: number for node, number in others.items() if node in entry.members or not entry.members}
        own_round = entry.round_number if entry.members else round_number
        if sum(left.values()) < self._limits.min_workers:
            # The first to leave a round too small. Those that fail after it have the same cause, or are its consequence.
            entry.left_too_few = not is_last and own_round != self._starved_round
            self._starved_round = own_round
        # A round formed since the last failure is progress, so the two failures are unrelated. The last member's failure is not
        # related to starts that failed at the same time either; the scheduler may report it before etcd does.
        is_new = round_number != self._streak.round_number or (is_last and entry.is_member)
        self._streak = _Streak(1 if is_new else self._streak.count + 1, now, round_number)

    def newest_checkpoint(self) -> CheckpointRecord | None:
        """Return the job's newest checkpoint; None: none is known."""
        # An unreadable record is reported by workers that resume from it.
        return readable(CheckpointRecord, self._mirror.get(self._keys.checkpoint))

    def _checkpoint_step(self) -> int:
        """Return the step of the job's newest checkpoint; 0: none is known."""
        record = self.newest_checkpoint()
        return record.global_step if record is not None else 0

    def _stop_reason(self) -> str:
        # An unreadable record is reported when it is read for the next write.
        record = readable(NodesRecord, self._mirror.get(self._keys.nodes))
        return record.stop if record is not None else ""


def _read(file: Path) -> str:
    try:
        return read_tail(file)
    except OSError as error:
        log.warning("the last output of a node cannot be read: %s", error)
        return ""
