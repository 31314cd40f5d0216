"""Carry any training loop from one round to the next.

`steps` is all that a loop of plain PyTorch needs; `World.steps` calls it. Its two parts also serve other loops, such as
Lightning's in `lightning_dlrover/live/training.py`. `Pace` chooses the steps between which the workers vote on their round.
`handover` decides, after a round has formed, which worker sends the job's state and which ones receive it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_dlrover.rdzv.job.events import FitResumed, TrainingStalled
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.process_groups import checked_updates
from lightning_dlrover.rdzv.transport.transfer import BufferCopies, HostStateError, newest, resume
from lightning_dlrover.spares import note_first_step

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.job.events import Event
    from lightning_dlrover.rdzv.membership.member import WorldError
    from lightning_dlrover.rdzv.transport.transfer import HostStateCache, Packed


log = logging.getLogger(__name__)


class Stateful(Protocol):
    """A model, optimizer, scheduler, or any other object with state that a joiner needs."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class LoopWorld(Protocol):
    """A `World` or `LoneWorld`, as a training loop uses it. `world.py` describes the methods."""

    @property
    def worker_id(self) -> str: ...
    @property
    def formation(self) -> Formation | None: ...
    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def left_state(self) -> HostStateCache | None: ...
    @property
    def broken(self) -> bool: ...
    @property
    def is_voting(self) -> bool: ...
    @property
    def has_finished(self) -> bool: ...

    def start(self) -> Formation | None: ...
    def admit(self, hello: bytes, fingerprint: str) -> Formation: ...
    def switch(self, number: int, hello: bytes) -> Formation: ...
    def recover(self, hello: bytes) -> Formation: ...
    def announce(self, fingerprint: str) -> None: ...
    def finish(self, num_steps: int) -> None: ...
    def propose(self, check_every: int, wishes: Sequence[int], place: int) -> None: ...
    def agreed(self) -> tuple[int | None, int]: ...
    def is_stop(self, number: int) -> bool: ...
    def keep_for_successors(self, step: int, packed: Packed) -> None: ...
    def event(self, event: Event, text: str) -> None: ...
    def broken_error(self) -> WorldError: ...
    def is_failure(self, error: BaseException) -> bool: ...
    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool: ...
    def wait_for_device(self, device: torch.device) -> None: ...


# --- when to switch -----------------------------------------------------------------------------------------------------------


class Pace:
    """Track one worker's steps: when the workers vote on a switch, and how long a change holds them up.

    A step's `place` is a number that all workers share and that grows by one per step.

    Args:
        check_interval_s: approximate seconds between votes. A vote overlaps with a step, so it costs little.
        wishes: called for each vote; returns numbers. `World.wishes` then holds the minimum of each over all workers.
    """

    def __init__(self, world: LoopWorld, check_interval_s: float, wishes: Callable[[], Sequence[int]] = tuple) -> None:
        self._world = world
        self._wishes = wishes
        self._check_interval_s = check_interval_s
        self.step_time_s = 0.0  # recent seconds per step; 0 while unknown
        self.stalled_s = 0.0  # seconds without a step in all changes so far
        self.steps_in_round = 0  # steps that this worker has ended in the round
        self._has_stepped = False  # whether this worker has made a step
        self._step_end = 0.0
        self._was_held_up = False  # whether the current step includes a change of the world
        self._held_up_since: tuple[float, int] | None = None  # end of the last step before a change, and workers then
        self._next_vote = 0

    def step_ended(self) -> None:
        """Call between two steps, before anything else that takes time."""
        now = time.perf_counter()
        if not self._has_stepped:
            self._has_stepped = True
            note_first_step()
        self.steps_in_round += 1
        if self._step_end and not self._was_held_up:
            took = now - self._step_end
            self.step_time_s = took if not self.step_time_s else 0.8 * self.step_time_s + 0.2 * took
        self._was_held_up = False
        self._step_end = now

    def round_to_switch_to(self, place: int) -> int | None:
        """Between two steps, return the round that all workers switch to here, or None to continue. Equal on all workers.

        Raises:
            WorldError: the current round has ended; `recover`.
        """
        if self._world.broken:
            raise self._world.broken_error()
        if self._world.is_voting:
            number, check_every = self._world.agreed()
            self._next_vote = place + check_every
            return number
        if place >= self._next_vote:
            votes_apart = round(self._check_interval_s / self.step_time_s) if self.step_time_s else 1
            self._world.propose(min(1000, max(1, votes_apart)), self._wishes(), place)
        return None

    @property
    def is_held_up(self) -> bool:
        return self._held_up_since is not None

    def held_up(self) -> None:
        """Note that the world is about to change: no step is made until `went_on`."""
        if self._held_up_since is None:
            formation = self._world.formation
            self._held_up_since = (self._step_end, formation.size if formation is not None else 1)

    def went_on(self, place: int) -> None:
        """Note that a new round is ready for the step at `place`, which is equal on all its workers."""
        self._next_vote = place
        self.steps_in_round = 0
        self._was_held_up = True
        if self._held_up_since is None:
            return
        since, workers = self._held_up_since
        self._held_up_since = None
        formation = self._world.formation
        seconds = time.perf_counter() - since if since else 0.0
        self.stalled_s += seconds
        if formation is not None and formation.rank == 0 and since:
            round_ = formation.round
            stalled = TrainingStalled(round_.number, seconds, round_.kind, workers, formation.size)
            self._world.event(stalled, f"round {round_.number}: {seconds:.3f} s between steps")


# --- handing over the state ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handover:
    """Transfers of the job's state as pairs of worker ids (from, to), in the order of all workers."""

    behind: list[tuple[str, str]]  # transfers to workers that lack updates
    joining: list[tuple[str, str]]  # later transfers to workers without a state, spread over all senders


def handover(members: Sequence[str], updates: Mapping[str, int | None]) -> Handover:
    """Plan the transfers of the most advanced worker's state, or of the first in rank order if no worker has any.

    Args:
        members: worker ids in rank order.
        updates: optimizer updates that each worker has made; None: it has no state.
    """
    standing = {w: made for w in members if (made := updates[w]) is not None} or {members[0]: 0}
    newest = max(standing.values())
    source = next(w for w in members if standing.get(w) == newest)
    senders = [w for w in members if w in standing]
    joiners = [w for w in members if w not in standing]
    return Handover(
        behind=[(source, w) for w in senders if standing[w] < newest],
        joining=[(senders[i % len(senders)], w) for i, w in enumerate(joiners)],
    )


def updates_made(formation: Formation) -> dict[str, int | None]:
    """Return the updates that each member of a round of plain loops has made, from its hello; None: it has no state.

    Raises:
        RoundEndedError: a hello is not a number; the next round is formed with another store.
    """
    try:
        return {worker: int(hello) if hello else None for worker, hello in formation.hellos.items()}
    except ValueError as error:
        # A round's store accepts writes from any process that reaches its port. The next round has another store.
        raise RoundEndedError(
            f"round {formation.round.number}: a member's number of steps is unreadable ({error}); "
            "another program may write into the round's store"
        ) from error


def model_fingerprint(*modules: torch.nn.Module) -> str:
    """Return a short digest of all parameter and buffer names, shapes and types: equal for workers that can share state."""
    lines = [
        f"{name} {tuple(value.shape)} {value.dtype}"
        for module in modules
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


# --- a plain loop -------------------------------------------------------------------------------------------------------------


class Step:
    """One attempt at one step. A context manager: the step is made when its block ends without an error.

    Attributes:
        number: number of the step, from 0, and thus of the steps before it. Equal on all workers; attempted again after a loss.
        rank, size: this worker's place in the current round, and how many workers there are.
        round_is_new: True at this worker's first attempt in a round: wrap the model, create sub-groups.
        is_last: set it on all workers to end the loop with this step.
        was_made: valid after the block; False if a worker was lost in it, so that the step must be attempted again.

    Example:
        >>> import torch
        >>> from lightning_dlrover.rdzv import World
        >>> with World.from_environment() as world:
        ...     for step in world.steps(100, model=torch.nn.Linear(1, 1)):
        ...         with step:
        ...             step.is_last = step.number == 1  # for example because the loss is small enough
        ...         if step.was_made:
        ...             print("made step", step.number)
        made step 0
        made step 1
    """

    def __init__(self, number: int, formation: Formation, round_is_new: bool, loop: _Loop) -> None:
        self.number = number
        self.rank = formation.rank
        self.size = formation.size
        self.round_is_new = round_is_new
        self.is_last = False
        self.was_made = False
        self._loop = loop
        self._was_entered = False

    def confirm(self, *results: torch.Tensor) -> None:
        """Make sure that results of collectives are whole before they change the state; leave the block if they are not.

        Over NCCL a collective of a lost worker ends without an error, and with arbitrary values. Updates by PyTorch's own
        optimizers are checked in any case. Over gloo this returns at once.
        """
        for device in {result.device for result in results}:
            self._loop.check(device)

    def __enter__(self) -> Step:
        self._was_entered = True
        self._loop.step_begins(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._loop.is_in_step = False
        if error is None:
            self.was_made = True
            self._loop.made(self)
            return False
        return self._loop.has_broken(error, is_in_step=True)


class _Loop:
    """The state of a plain loop between its steps."""

    def __init__(
        self, world: LoopWorld, num_steps: int, first_step: int, state: Mapping[str, Stateful], check_interval_s: float
    ) -> None:
        self.num_made = first_step
        self._num_steps = num_steps
        self._world = world
        self._state = state
        self._pace = Pace(world, check_interval_s)
        self._has_state = False
        self._is_broken = False
        self.is_in_step = False
        self._yielded_round = 0
        self._devices: set[torch.device] = set()  # those that compute results of collectives
        self._has_copies = False  # whether the buffers were copied before the step
        self._buffers = [BufferCopies(part) for part in state.values() if isinstance(part, torch.nn.Module)]

    def run(self) -> Iterator[Step]:
        with checked_updates(self.check) if self._world.is_asynchronous else contextlib.nullcontext():
            yield from self._steps()

    def check(self, device: torch.device) -> None:
        """Check the round before the results of its collectives are used: they may come from an aborted one."""
        self._devices.add(device)
        if self._world.is_asynchronous and self.is_in_step and self._formation.size > 1:
            self._world.wait_for_device(device)
            if self._world.broken:
                raise self._world.broken_error()

    def _steps(self) -> Iterator[Step]:
        self._enter()
        while True:
            while self.num_made < self._num_steps:
                formation = self._formation
                step = Step(self.num_made, formation, formation.round.number != self._yielded_round, self)
                self._yielded_round = formation.round.number
                yield step
                if not step._was_entered:
                    raise RuntimeError("a step was not made: put its work into `with step:`")
                # Done here and not where the error was caught, because a living traceback would keep the old group alive.
                self._pace.step_ended()
                if self._is_broken or not self._attempt(self._maybe_switch):
                    self._recover()
            if self._finish():
                return

    def step_begins(self, step: Step) -> None:
        self.is_in_step = True
        self._has_copies = step.size > 1  # a worker that is alone has no one to lose
        for copies in self._buffers if self._has_copies else ():
            copies.keep()

    def made(self, step: Step) -> None:
        self.num_made += 1
        if step.is_last:
            self._num_steps = self.num_made

    def has_broken(self, error: BaseException, is_in_step: bool) -> bool:
        if not isinstance(error, Exception):
            self._is_broken = False
        elif self._has_state:
            self._is_broken = self._world.is_recoverable(error, is_in_step)
        else:
            self._is_broken = self._world.is_failure(error)
        if self._is_broken:
            log.info("worker %s: a collective failed: %s", self._world.worker_id, str(error).splitlines()[:1])
            for copies in self._buffers if is_in_step and self._has_copies else ():
                copies.restore()
        return self._is_broken

    @property
    def _formation(self) -> Formation:
        assert self._world.formation is not None
        return self._world.formation

    @property
    def _hello(self) -> bytes:
        """Return this worker's hello for a round: its updates made, empty while it has no state."""
        return str(self.num_made).encode() if self._has_state else b""

    def _attempt(self, run: Callable[[], object]) -> bool:
        """Run `run`; return False if one of its collectives failed."""
        self._is_broken = False
        try:
            run()
        except Exception as error:
            if not self.has_broken(error, is_in_step=False):
                raise
        return not self._is_broken

    def _enter(self) -> None:
        fingerprint = model_fingerprint(*(part for part in self._state.values() if isinstance(part, torch.nn.Module)))
        if self._world.start() is None:
            self._world.admit(b"", fingerprint)
        if not self._attempt(self._settle):
            self._recover()
        self._world.announce(fingerprint)
        self._yielded_round = 0

    def _maybe_switch(self) -> None:
        if self.num_made >= self._num_steps:
            return
        number = self._pace.round_to_switch_to(self.num_made)
        if number is not None:
            self._pace.held_up()
            if self._world.is_stop(number):
                self._keep_for_successors()
            self._world.switch(number, self._hello)
            self._settle()

    def _keep_for_successors(self) -> None:
        try:
            self._world.keep_for_successors(self.num_made, transfer.pack(self._dump()))
        except (HostStateError, transfer.TransferError) as error:
            log.error("the next group of workers cannot continue from step %d: %s", self.num_made, error)

    def _recover(self) -> None:
        self._pace.held_up()
        while True:
            self._world.recover(self._hello)
            if self._attempt(self._settle):
                self._is_broken = False
                return

    def _settle(self) -> None:
        """Bring all workers of a new round to the most advanced worker's state."""
        formation, me = self._formation, self._world.worker_id
        updates = updates_made(formation)
        if all(made is None for made in updates.values()):
            self._resume_left_state()
        plan = handover(formation.round.members, updates)
        for sender, receiver in (*plan.behind, *plan.joining):
            if me == sender:
                transfer.send(self._dump(), formation.rank_of(receiver))
            elif me == receiver:
                self._load(transfer.receive(formation.rank_of(sender)))
        self._has_state = True
        self._pace.went_on(self.num_made + 1)

    def _resume_left_state(self) -> None:
        """Load the state left by a former group of workers into rank 0, if it is ahead. All others then receive it."""
        rank, left = self._formation.rank, self._world.left_state
        found = self._gathered((left.step() if left is not None else None, self.num_made))
        step, source = newest([step for step, _ in found])
        if step <= found[0][1]:
            return
        if resume(left, source, rank, [0], self._load, self._gathered, self._world.is_failure) and rank == 0:
            self._world.event(FitResumed(step), f"continued from the state of step {step} in a host's memory")

    def _gathered(self, mine: Any) -> list[Any]:
        return transfer.all_gather(mine) if self._formation.size > 1 else [mine]

    def _dump(self) -> dict[str, Any]:
        return {
            "num_made": self.num_made,
            "num_steps": self._num_steps,
            "state": {name: part.state_dict() for name, part in self._state.items()},
        }

    def _load(self, received: dict[str, Any]) -> None:
        for name, part in self._state.items():
            part.load_state_dict(received["state"][name])
        self.num_made, self._num_steps = received["num_made"], received["num_steps"]

    def _finish(self) -> bool:
        """End the job once all workers have made all steps; return False if another round was needed first."""
        if self._formation.size > 1 and not self._attempt(self._end_together) and not self._world.has_finished:
            self._recover()
            return False
        self._world.finish(self.num_made)
        return True

    def _end_together(self) -> None:
        if self._world.is_asynchronous:
            for device in self._devices:  # another worker's last collective may need this one's device until here
                self._world.wait_for_device(device)
        transfer.barrier()


def steps(
    world: LoopWorld, num_steps: int, first_step: int, state: Mapping[str, Stateful], check_interval_s: float
) -> Iterator[Step]:
    """See `World.steps`."""
    return _Loop(world, num_steps, first_step, state, check_interval_s).run()
