"""Detect workers that call different collectives, and end them with an error that names both places in the script.

Torch's `TORCH_DISTRIBUTED_DEBUG=DETAIL` is the nearest equivalent. `CollectiveMonitor` explains the three checks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from lightning_dlrover.host import current_frames
from lightning_dlrover.rdzv.membership.member import RoundEndedError, WorldError
from lightning_dlrover.rdzv.transport import torch_names, waits
from lightning_dlrover.rdzv.transport.torch_names import Store
from lightning_dlrover.rdzv.transport.waits import Reduction, Tree


@dataclass(frozen=True)
class CollectiveCounts:
    """Collectives that a worker has begun in a round."""

    compared: int  # votes and comparisons begun in their separate group
    begun: int  # collectives begun in the round's group


@dataclass(frozen=True)
class DesyncReport:
    """Observed activity of a worker that makes no progress."""

    counts: CollectiveCounts
    text: str
    waits_for: str = ""  # collective begun last in the round's group, if it is known


def may_progress(one: DesyncReport, other: DesyncReport) -> bool:
    """Whether two workers may be in the same program; if not, neither of them ever ends.

    Workers of one program begin the same collectives in the same order. Their counts, whenever they are read, therefore belong
    to one sequence. Two entries of a growing sequence cannot be ahead of each other, and equal entries have one meaning.
    """
    ahead = one.counts.compared - other.counts.compared, one.counts.begun - other.counts.begun
    if ahead[1] == 0 and one.waits_for and other.waits_for and one.waits_for != other.waits_for:
        return False
    return ahead[0] * ahead[1] >= 0


def difference(texts: Sequence[tuple[int, str]], counts: Sequence[CollectiveCounts] = ()) -> str:
    """Return the text of a `MismatchError`, which names the place of each rank.

    Args:
        texts: rank and activity of all known workers.
        counts: counts of the same workers, if they differ.
    """
    by_text: dict[str, list[int]] = {}
    for i, (rank, text) in enumerate(texts):
        extra = f" [{counts[i].begun} collectives begun in this round]" if counts else ""
        by_text.setdefault(text + extra, []).append(rank)
    lines = [f"  {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {text}" for text, ranks in by_text.items()]
    return "\n".join(
        [
            "collective mismatch: workers called different collectives and cannot make progress:",
            *lines,
            "All workers must run the same collectives in the same order. Look for one of these calls, or for a step, a log "
            "with sync_dist or a checkpoint before it, that depends on the rank or on a worker's own data. If its size is that "
            "of a worker's samples, DLRoverStrategy(shares='equal') keeps the workers' shares of a batch equal",
        ]
    )


def ranges(ranks: Sequence[int]) -> str:
    """Format ranks as ranges: 0, 2-5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


LIBRARIES = frozenset(
    (
        *("lightning", "lightning_dlrover", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
        *("torch", "torchmetrics", "torchrec", "contextlib", "functools"),
    )
)
"""Top-level packages; their frames are skipped in the search for the user's line."""


@dataclass(frozen=True)
class Place:
    """Place in the program where a collective was called."""

    user: str  # file, line and function of the innermost frame outside of libraries
    caller: str  # function of Lightning or another library that called it on the user's behalf; empty if the user called it
    line: str  # the user's file name and line, without the folder, which may differ between hosts

    def __str__(self) -> str:
        return self.user + (f" (through {self.caller})" if self.caller else "")


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a worker is about to begin, as it is compared with those of the others."""

    kind: str  # kind of action, such as "strategy.reduce"
    details: str = ""  # name, size, type and root, which must be equal on all workers
    place: Place | None = None
    same_line: bool = False  # whether it must be called at the same line on all workers
    any_place: bool = False  # whether `place` serves only the error's text

    @property
    def key(self) -> int:
        """Key of 62 bits, equal for workers that may meet."""
        compared = [self.kind, self.details]
        if self.place is not None and not self.any_place:
            compared += [self.place.caller, self.place.line if self.same_line else ""]
        return int.from_bytes(hashlib.blake2b("\n".join(compared).encode(), digest_size=8).digest(), "big") >> 2

    def __str__(self) -> str:
        return self.kind + (f" of {self.details}" if self.details else "") + (f" at {self.place}" if self.place else "")


def shown(frame: FrameType | None) -> Place:
    """Return the place of a call for error texts only; it is not compared."""
    return Place(place_of(frame).user, "", "")


def place_of(frame: FrameType | None) -> Place:
    """Return the place of a call, given its innermost frame."""
    caller, outermost = "", frame
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package not in LIBRARIES:
            return Place(_line(frame), caller, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        if not caller and package not in ("torch", "lightning_dlrover", "contextlib", "functools"):
            # Python 3.10 has the short name only.
            caller = f"{name}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        outermost, frame = frame, frame.f_back
    return Place(_line(outermost) if outermost is not None else "", caller, "")


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


SIZED = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor")
"""Operations whose first argument has the same size on all workers. Others may use a different size on each worker."""

ROOTS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


def details(name: str, args: Sequence[Any]) -> str:
    """Return the sizes and types that must be equal on all workers, and the root."""
    root = f"{ROOTS[name]} rank {args[-1].rootRank}" if name in ROOTS and args and hasattr(args[-1], "rootRank") else ""
    sized: Any = args[0] if name in SIZED and args else None
    if name == "all_gather" and args:
        sized = args[0][0] if args[0] else None  # NCCL accepts inputs of unequal sizes, but the outputs are equal
    tensors = list(tensors_in([sized]))
    if not tensors:
        return root
    sizes = [str(tensor.numel()) for tensor in tensors]
    size = sizes[0] if len({*sizes}) == 1 else ", ".join(sizes)
    return f"{size} x {str(tensors[0].dtype).removeprefix('torch.')} {root}".rstrip()


def tensors_in(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments of a process group's method."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from tensors_in(arg)


log = logging.getLogger(__name__)

TICK_S = 0.25  # seconds between two readings of a worker's counts
QUIET_S = 0.5  # minimum seconds without a new collective after which a worker publishes its counts and reads those of others
ANSWER_S = 1.5  # seconds to wait for the other workers' places once a mismatch is certain
POLL_S = 0.005  # seconds between two checks for a worker that is awaited at a place
POLL_PER_WORKER_S = 0.0002
"""Longest pause between two such checks, per worker: the store of rank 0 answers 5,000 of them a second at most."""

LOOK_PER_WORKER_S = 0.0005  # seconds, per worker, between two looks of one worker for all others that may have passed a place
NUM_COMPARED = 16  # number of workers in one read of counts; the next read continues with the next workers
LOOKS_PER_S = 64
"""Maximum number of looks of all workers per second. The store of rank 0 serves them all, with up to five requests each."""

NUM_HEADER = 4  # numbers in a vote's header: key and number of begun collectives, each once more with the opposite sign
NUM_RECENT = 8  # number of newest compared collectives to keep for an error message


class MismatchError(WorldError):
    """Workers have met in different collectives. The program is wrong, and a new round cannot repair it."""


class LoneCollectiveError(RuntimeError):
    """A worker has begun a collective where the others take no part in one."""


Begun: TypeAlias = tuple[int, dist.Work | Reduction, torch.Tensor]
"""A comparison that has begun: its number, and its numbers on their way to the minimum over all workers."""


class PlaceInProgram(Protocol):
    """A worker's place in its program, as it changes. Read by any thread."""

    needs_equal_shares: bool
    """Whether the script has called a collective of tensors with several values where it uses its share of a batch."""

    @property
    def uses_share(self) -> bool:
        """Whether the worker is in the loop over training batches: in a step, or in a hook around steps or epochs."""

    @property
    def is_computing(self) -> bool:
        """Whether the worker is inside a training step."""

    def describe(self) -> str:
        """Describe the place for an error message."""


@dataclass
class OutsideOfLoops:
    """The place of a program that has not reported any."""

    is_computing: bool = False
    uses_share: bool = False
    needs_equal_shares: bool = False

    def describe(self) -> str:
        return "between two collectives"


class Program(Protocol):
    """A worker's program, which sets its place for each of its training loops."""

    @property
    def place(self) -> PlaceInProgram: ...


class CollectiveMonitor:
    """Compare the next collectives of a round's workers. Used by the thread that created it, and watched by one of its own.

    gloo and NCCL match collectives only by their order. Workers that run different ones wait for each other, mix up values, or
    are aborted when sizes differ. Three checks turn that into a `MismatchError` on all workers:

    1. Before a collective that Python code begins, the workers compare their `CollectiveCall`, in messages of one size. The
       result for an asynchronous collective is read at the next one, in the next vote, or while the worker makes no progress.
    2. DDP's collectives are not compared, because that would cost time in each step. Instead the `CollectiveCounts` are
       compared while a worker makes no progress, see `may_progress`. A slow worker is never mistaken for one that runs another
       program.
    3. Each comparison includes the number of collectives begun in the round's group, and each vote the number of the step. The
       next vote therefore detects a collective that one worker has skipped.

    The workers agree on the error through the round's store before the group is severed, so that no worker mistakes the others'
    end for a loss.

    Args:
        group: a group of this round's members, for no other use; the round's own one if there is a tree.
        capacity: numbers in the first message of a vote; equal on all workers.
        begun: returns the number of collectives and messages that this worker has begun in the round's group.
        connect: opens a connection to the round's store, without a long wait; None if it cannot be reached.
        program: has this worker's place in its program.
        sever: ends this worker's pending collective; called after all workers have agreed on `mismatch`.
        tree: reduces the numbers in place of the group, if there are many workers. The round's group then connects two workers
            only at their first message.
        control: the group of `transfer`, unless that is the default group.
    """

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        rank: int,
        size: int,
        capacity: int,
        begun: Callable[[], int],
        connect: Callable[[], Store | None],
        program: Program,
        sever: Callable[[], None],
        tree: Tree | None = None,
        control: object = None,
    ) -> None:
        self.mismatch: MismatchError | None = None
        self.connects_late = tree is not None
        self._tree = tree
        self._group: Any = group  # None once the round is over
        self._control = control
        self._rank, self._size = rank, size
        self._length = NUM_HEADER + capacity
        self._all_begun = begun if tree is None else functools.partial(tree.without_messages, begun)
        self._num_messages = 0  # begun operations that are messages between two workers, so their numbers differ
        self._begun_before: int | None = None  # count at the start of an operation that consists of messages
        self._messages_lock = threading.Lock()
        self._connect = connect
        self._program = program
        self._sever = sever
        self._num_compared = 0
        self._unread: list[Begun] = []  # comparisons begun before asynchronous collectives
        self._asynchronous = (0, "", "")  # the newest of these in the round's group: its number, text and kind
        self._recent: dict[int, str] = {}  # texts of the newest compared collectives, by number
        self._depth = 0  # above 0, begun collectives are part of one that was compared
        self._alone = ""  # reason why the others take no part in this worker's collectives now
        self._store: Store | None = None
        self._store_lock = threading.Lock()
        self._published: DesyncReport | None = None
        self._answered = 0
        self._thread = threading.get_ident()
        self._closed = threading.Event()
        self._is_agreed = threading.Event()  # set once the others have acknowledged the mismatch, or have had time to
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._watcher = threading.Thread(target=self._watch, name="dlrover-monitor", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the monitor with its round; the group belongs to its creator."""
        self._closed.set()
        if self._tree is not None:
            self._tree.close()
        # This thread and the watcher must not hold the last reference to a group, see `waits`.
        self._group = self._control = None
        self._unread = []
        self._all_begun = lambda: 0

    def join(self, timeout_s: float) -> None:
        """Wait for the threads: if one returns from torch while the process ends, it aborts the process."""
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout_s)
        if self._tree is not None:
            self._tree.join(timeout_s)

    def await_mismatch(self) -> MismatchError | None:
        """Return the mismatch that ended this round, once the others have it: a worker that ended earlier would seem lost."""
        if self.mismatch is not None:
            self._is_agreed.wait(2 * ANSWER_S)
        return self.mismatch

    @contextlib.contextmanager
    def compared(self, call: CollectiveCall) -> Iterator[None]:
        """Compare `call` with the others' now. Collectives begun within count as part of it.

        Raises:
            MismatchError: other workers are about to do something else.
        """
        self.compare(call)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def alone(self, reason: str) -> Iterator[None]:
        """Refuse collectives within, because the other workers do not run this code now."""
        self._alone = reason
        try:
            yield
        finally:
            self._alone = ""

    def compare(self, call: CollectiveCall) -> None:
        """See `compared`."""
        self._refuse_if_alone(call)
        if self._depth or torch_names.is_in_backward() or threading.get_ident() != self._thread:
            return
        self._await(self._reduce(call, ()))

    def _refuse_if_alone(self, call: CollectiveCall) -> None:
        if self._alone and threading.get_ident() == self._thread:
            raise LoneCollectiveError(f"{call}: {self._alone}")

    def vote(self, call: CollectiveCall, ballot: Sequence[int]) -> Begun:
        """Start the vote for the minimum of all workers' numbers; pass the result to `counted`."""
        return self._reduce(call, ballot[: self._length - NUM_HEADER])

    def counted(self, vote: Begun, ballot: Sequence[int]) -> list[int]:
        """Wait for the vote with this ballot and return its result.

        All workers have as many numbers. Those that had no room in the first message are reduced only now.

        Raises:
            MismatchError: other workers did not vote, or began other collectives before it.
        """
        self._await(vote)
        room = self._length - NUM_HEADER
        result: list[int] = vote[2][NUM_HEADER : NUM_HEADER + len(ballot)].tolist()
        if len(ballot) <= room:
            return result
        rest = torch.tensor(ballot[room:], dtype=torch.int64)
        _wait_for(self._least(rest))
        return result + rest.tolist()

    def before(self, group: object, name: str, args: Sequence[Any]) -> None:
        """Compare a collective that is begun through `torch.distributed`, if all workers take part in it."""
        if self._alone:
            self._refuse_if_alone(CollectiveCall(f"torch.distributed.{name}", details(name, args), place_of(sys._getframe(2))))
        place = self._program.place
        if place.uses_share and not place.needs_equal_shares and threading.get_ident() == self._thread:
            place.needs_equal_shares = any(t.numel() > 1 for t in tensors_in(args)) and not _is_of_a_library(
                sys._getframe(2), (*OWN_COLLECTIVES, "torchmetrics")
            )
        if self._depth or not self._is_of_round(group) or threading.get_ident() != self._thread or torch_names.is_in_backward():
            return
        is_async = getattr(args[-1] if args else None, "asyncOp", False)
        if is_async and _is_of_a_library(sys._getframe(2)):
            return  # all workers begin it in the same way, in the middle of a step or of another comparison
        if self._program.place.is_computing and any(t.device.type != "cpu" for t in tensors_in(args)):
            return  # SyncBatchNorm, for example, would make the host wait for the others in each layer
        call = CollectiveCall(f"torch.distributed.{name}", details(name, args), place_of(sys._getframe(2)))
        if is_async:  # overlaps with computation, so it must not wait for the others
            self._unread.append(self._reduce(call, ()))
            self._asynchronous = (self._begun() + 1, str(call), call.kind)
        else:
            self.compare(call)

    def all_reach(self, place: str, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until all workers have reached `place`; return False once one of them has passed it by.

        If this returns on several workers, they all have the same result.

        Raises:
            RoundEndedError: the round is over; on other workers this may have returned True before.
            WorldError: other workers neither reached the place nor passed it by in time.
        """
        now = CollectiveCounts(self._num_compared, self._begun())
        missing = set(range(self._size)) - {self._rank}
        has_come = is_first = False
        began = time.monotonic()
        next_look, pause_s = began, POLL_S
        while not is_over():
            try:
                if (store := self._reach_store()) is not None:
                    if not has_come:
                        store.set(f"{place}/{self._rank}", "1")
                        is_first = store.compare_set(f"{place}/first", "", str(self._rank)) == str(self._rank).encode()
                        has_come = True
                        # If the answer to this is lost, no worker learns that it was the last: the first one finds all there.
                        if store.add(f"{place}/come", 1) == self._size:
                            _decide(store, place, "all")
                    # One worker looks for those that pass the place by. If each did, a thousand would ask for a thousand.
                    if is_first and time.monotonic() >= next_look:
                        if self._is_passed_by(store, place, missing, now):
                            _decide(store, place, "passed")
                        elif not missing:
                            _decide(store, place, "all")
                        next_look = time.monotonic() + self._size * LOOK_PER_WORKER_S
                    if store.check([f"{place}/outcome"]):
                        return store.get(f"{place}/outcome") == b"all"
            except RuntimeError as error:  # rank 0 is gone, and the round is about to break
                log.debug("rank %d: the store of the round cannot be read: %s", self._rank, error)
                self._forget_store()
            if time.monotonic() > began + timeout_s:
                if has_come and not is_first:
                    missing = self._not_come(place, missing)
                who = f"{'rank' if len(missing) == 1 else 'ranks'} {ranges(sorted(missing))}"
                cause = "see what delays them" if has_come else "the store of the round, on rank 0, could not be reached"
                raise WorldError(
                    f"waited {timeout_s:.0f} s at {place} for {who}, which neither reached it nor called another "
                    f"collective; {cause}"
                )
            self._closed.wait(pause_s)
            pause_s = min(1.2 * pause_s, max(POLL_S, self._size * POLL_PER_WORKER_S))
        raise RoundEndedError(f"the round ended while this worker waited for the others at {place}")

    def _is_passed_by(self, store: Store, place: str, missing: set[int], now: CollectiveCounts) -> bool:
        """Return whether a worker has begun a later collective without having come to `place`. Removes those that have come."""
        seen = self._reports(store, sorted(missing), 0.0)
        for rank in tuple(missing):
            if store.check([f"{place}/{rank}"]):
                missing.discard(rank)
            elif rank in seen and (seen[rank].counts.compared > now.compared or seen[rank].counts.begun > now.begun):
                return True
        return False

    def _not_come(self, place: str, missing: set[int]) -> set[int]:
        with contextlib.suppress(RuntimeError):
            if (store := self._reach_store()) is not None:
                return {rank for rank in missing if not store.check([f"{place}/{rank}"])}
        return missing

    @contextlib.contextmanager
    def one_message(self, group: object, tensors: Sequence[Any]) -> Iterator[None]:
        """Exclude one message to or from another worker, begun within, from this worker's counts."""
        if not self._is_of_round(group) or any(tensor.device.type != "cpu" for tensor in tensors):  # NCCL counts them apart
            yield
            return
        with self._messages_lock:  # a count read in between would be one too high or too low
            yield
            self._num_messages += 1

    @contextlib.contextmanager
    def only_messages(self, group: object) -> Iterator[None]:
        """Exclude all operations begun within from this worker's counts."""
        if not self._is_of_round(group) or threading.get_ident() != self._thread:
            yield
            return
        with self._messages_lock:
            self._begun_before = self._all_begun() - self._num_messages
        try:
            yield
        finally:
            with self._messages_lock:
                self._num_messages = self._all_begun() - self._begun_before
                self._begun_before = None

    @property
    def num_begun(self) -> int:
        """Number of collectives that this worker has begun in the round's group."""
        return self._begun()

    def _is_of_round(self, group: object) -> bool:
        return group is not None and (group is dist.group.WORLD or group is self._control)

    def _begun(self) -> int:
        with self._messages_lock:
            return self._all_begun() - self._num_messages if self._begun_before is None else self._begun_before

    # --- comparing ---------------------------------------------------------------------------------------------------

    def _reduce(self, call: CollectiveCall, ballot: Sequence[int]) -> Begun:
        if (mismatch := self.await_mismatch()) is not None:
            raise mismatch
        key, begun = call.key, self._begun()
        padding = [0] * (self._length - NUM_HEADER - len(ballot))
        numbers = torch.tensor([key, -key, begun, -begun, *ballot, *padding], dtype=torch.int64)
        number = self._num_compared + 1
        self._recent[number] = f"{call}, {self._program.place.describe()}"
        oldest = min([number, *(unread for unread, _, _ in self._unread[:1])])
        for old in [each for each in self._recent if each <= oldest - NUM_RECENT]:
            del self._recent[old]
        self._num_compared = number
        return number, self._least(numbers), numbers

    def _least(self, numbers: torch.Tensor) -> dist.Work | Reduction:
        """Begin to replace numbers by their minimum over all workers."""
        if self._group is None:
            raise WorldError("the round has ended")
        if self._tree is not None:
            return self._tree.least(numbers)
        work: dist.Work = self._group.allreduce([numbers], self._options)
        return work

    def _await(self, newest: Begun) -> None:
        unread, self._unread = self._unread, []
        for number, work, numbers in (*unread, newest):
            _wait_for(work)
            self._check(number, numbers)

    def _check(self, number: int, numbers: torch.Tensor) -> None:
        if not _agree(numbers):
            self._report(number, numbers)
            assert self.mismatch is not None
            raise self.mismatch

    def _report(self, number: int, numbers: torch.Tensor) -> None:
        """Ask all workers for their places at a comparison that has failed, and end the round. Called from any thread."""
        mine = json.dumps([self._recent.get(number, ""), self._begun()])
        texts = {self._rank: mine}
        store = self._reach_store()
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"op/{number}/{self._rank}", mine)
                store.set("asked", str(number))
                texts |= _read_all(store, f"op/{number}", range(self._size), self._closed)
        known = sorted((rank, *json.loads(text)) for rank, text in texts.items())
        pairs = [(rank, text) for rank, text, _ in known] + [
            (rank, "somewhere else; it did not answer") for rank in range(self._size) if rank not in texts
        ]
        counts = [CollectiveCounts(number, begun) for *_, begun in known]
        is_one_call = int(numbers[0]) == -int(numbers[1])
        self._adopt(difference(pairs, counts if is_one_call and len(counts) == len(pairs) else ()))

    def _adopt(self, text: str) -> None:
        """Agree with the others on one text, then end this worker's pending collective. Called from any thread."""
        store = self._reach_store()
        if store is not None:
            with contextlib.suppress(RuntimeError):
                text = store.compare_set("verdict", "", text).decode() or text
        # Set before the acknowledgement: after that the others may end, and this worker must not mistake that for a loss.
        self.mismatch = self.mismatch or MismatchError(text)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"ack/{self._rank}", "1")
                _read_all(store, "ack", range(self._size), self._closed)
        self._is_agreed.set()
        self._sever()

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, since = CollectiveCounts(0, 0), time.monotonic()
        num_looks = 0
        next_look = 0.0
        pause_s = self._size / LOOKS_PER_S
        while not self._closed.wait(TICK_S) and self.mismatch is None:
            now = CollectiveCounts(self._num_compared, self._begun())
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > max(QUIET_S, pause_s) and time.monotonic() >= next_look:
                next_look = time.monotonic() + pause_s
                try:
                    self._look(now, num_looks * NUM_COMPARED)
                    num_looks += 1
                except (RuntimeError, ValueError) as error:  # rank 0 is gone; the round breaks by other means
                    log.debug("rank %d: the store of the round cannot be read: %s", self._rank, error)
                    self._forget_store()
        self._forget_store()

    def _look(self, now: CollectiveCounts, first: int) -> None:
        store = self._reach_store()
        if store is None:
            return
        if store.check(["verdict"]):
            self._adopt(store.get("verdict").decode())
            return
        if store.check(["asked"]) and (number := int(store.get("asked"))) > self._answered:
            self._answered = number
            text = self._recent.get(number) or self._whereabouts(now).text
            store.set(f"op/{number}/{self._rank}", json.dumps([text, now.begun]))
        for number, work, numbers in tuple(self._unread):
            if work.is_completed() and work.is_success() and not _agree(numbers):
                self._report(number, numbers)  # the worker waits for an asynchronous collective, and reads no comparison
                return
        mine = self._whereabouts(now)
        if CollectiveCounts(self._num_compared, self._begun()) != now:
            return  # the worker makes progress again
        if mine != self._published:
            store.set(f"at/{self._rank}", json.dumps([now.compared, now.begun, mine.text, mine.waits_for]))
            self._published = mine
        num_others = self._size - 1
        others = [1 + (first + i) % num_others for i in range(min(NUM_COMPARED, num_others))]
        ranks = [(self._rank + other) % self._size for other in others]
        if all(may_progress(mine, report) for report in self._reports(store, ranks, 0.0).values()):
            return
        seen = {**self._reports(store, ranks, QUIET_S + TICK_S), self._rank: mine}
        self._adopt(difference([(rank, seen[rank].text) for rank in sorted(seen)]))

    def _reports(self, store: Store, ranks: Sequence[int], timeout_s: float) -> dict[int, DesyncReport]:
        """Return the reports that other workers have published. Those of workers that make progress may be stale."""
        if timeout_s:
            texts = _read_all(store, "at", ranks, self._closed, timeout_s)
        else:
            keys = {rank: f"at/{rank}" for rank in ranks}
            if not store.check(list(keys.values())):  # a single request, as a rule
                keys = {rank: key for rank, key in keys.items() if store.check([key])}
            found_texts = store.multi_get(list(keys.values())) if keys else []
            texts = {rank: text.decode() for rank, text in zip(keys, found_texts, strict=True)}
        found = {}
        for rank, text in texts.items():
            compared, begun, activity, waits_for = json.loads(text)
            found[rank] = DesyncReport(CollectiveCounts(compared, begun), activity, waits_for)
        return found

    def _whereabouts(self, now: CollectiveCounts) -> DesyncReport:
        """Return the collective that this worker's thread waits for, according to its stack."""
        frame = current_frames().get(self._thread)
        waits_in, waits_for = _waits_in(frame)
        if waits_in == _COMPARES and (latest := self._recent.get(now.compared)):
            return DesyncReport(now, latest)
        begun, text, kind = self._asynchronous
        if begun == now.begun and not waits_for:
            return DesyncReport(now, f"{text}, {self._program.place.describe()}", kind)
        return DesyncReport(now, f"{waits_in} at {place_of(frame)}, {self._program.place.describe()}", waits_for)

    def _reach_store(self) -> Store | None:
        with self._store_lock:
            if self._store is None and not self._closed.is_set():
                self._store = self._connect()
            return self._store

    def _forget_store(self) -> None:
        with self._store_lock:
            self._store = None


def _wait_for(work: dist.Work | Reduction) -> None:
    if isinstance(work, Reduction):
        work.wait()
    else:
        waits.wait_for(work)


def _read_all(
    store: Store, folder: str, ranks: Sequence[int], closed: threading.Event, timeout_s: float = ANSWER_S
) -> dict[int, str]:
    """Return the texts of ranks below a folder of the store that arrive in time, and before the monitor is closed."""
    texts: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(texts) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank not in texts and store.check([f"{folder}/{rank}"]):
                texts[rank] = store.get(f"{folder}/{rank}").decode()
        closed.wait(POLL_S)
    return texts


def _decide(store: Store, place: str, outcome: str) -> None:
    """Make all workers at a place return the same decision: the first one counts."""
    store.compare_set(f"{place}/outcome", "", outcome)


def _agree(numbers: torch.Tensor) -> bool:
    """Whether all workers have begun a comparison of one call, after equally many collectives."""
    least_key, most_key, fewest, most = (int(n) for n in numbers[:NUM_HEADER])
    return least_key == -most_key and fewest == -most


OWN_COLLECTIVES = ("torchrec", "lightning_dlrover")
BETWEEN = ("torch", "contextlib", "typing_extensions", "warnings")  # packages between a call and torch: wrappers of it


def _is_of_a_library(frame: FrameType | None, packages: Sequence[str] = OWN_COLLECTIVES) -> bool:
    """Whether the code that calls `torch.distributed` belongs to one of these packages."""
    package = ""
    while frame is not None and (package := frame.f_globals.get("__name__", "").partition(".")[0]) in BETWEEN:
        frame = frame.f_back
    return package in packages


_COMPARES = "a comparison with the other workers"


def _waits_in(frame: FrameType | None) -> tuple[str, str]:
    """Return a thread's current collective, and its wait if that is for the last one begun in the round's group."""
    is_waiting = False
    while frame is not None:
        code, name, module = frame.f_code, frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if code is CollectiveMonitor.compare.__code__:
            return _COMPARES, ""
        if code is CollectiveMonitor.counted.__code__:
            return "the vote between two steps", ""
        if module == waits.__name__:
            is_waiting = is_waiting or code is waits.wait_in.__code__
            if is_waiting and name == "await_all":
                return "the reduction of gradients", "gradients"
            if is_waiting and code is waits.broadcast_buffers.__code__:
                return "the broadcast of buffers before a forward pass", "buffers"
        elif module.startswith("torch.autograd"):
            return "the backward pass", ""
        elif module == "torch.nn.parallel.distributed":
            return "the forward pass of DistributedDataParallel", ""
        elif module == "torch.distributed.distributed_c10d":
            return f"torch.distributed.{name}", ""
        frame = frame.f_back
    return "outside of collectives", ""


OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",  # newer versions of torch call this one, and the other two "_single"
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}

MESSAGES = ("send", "recv", "recv_anysource")

_find_monitor: Callable[[], Callable[[], CollectiveMonitor | None] | None] = lambda: None  # noqa: E731


def compare_with(monitor: weakref.WeakMethod[Callable[[], CollectiveMonitor | None]]) -> None:
    """Compare all later collectives on the default group, whichever code calls them.

    Args:
        monitor: returns the round's monitor, or None while there is none.
    """
    global _find_monitor
    _find_monitor = monitor
    _install_hooks()


def _current() -> CollectiveMonitor | None:
    find = _find_monitor()
    return find() if find is not None else None


@functools.cache
def _install_hooks() -> None:
    kind: Any = dist.ProcessGroup
    for method, name in OPERATIONS.items():
        if (original := getattr(kind, method, None)) is not None:
            setattr(kind, method, _compared_first(original, name))
    for method in MESSAGES:
        setattr(kind, method, _as_message(getattr(kind, method)))
    kind.monitored_barrier = _as_messages(kind.monitored_barrier)


def _compared_first(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (monitor := _current()) is not None:
            monitor.before(self, name, args)
        work = original(self, *args, **kwargs)
        if monitor is not None and not waits.guards_all() and {tensor.device.type for tensor in tensors_in(args)} == {"cpu"}:
            waits.is_of_host(work)
        return work

    return begin


def _as_message(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        monitor = _current()
        with monitor.one_message(self, tensors) if monitor is not None else contextlib.nullcontext():
            if monitor is not None and monitor.connects_late and self is dist.group.WORLD:
                return waits.begin(lambda: original(self, tensors, *args, **kwargs))
            return original(self, tensors, *args, **kwargs)

    return begin


def _as_messages(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a monitored barrier, in which rank 0 exchanges messages with each other rank. It is not compared, because its caller
    sets the timeout."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        monitor = _current()
        with monitor.only_messages(self) if monitor is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return run
