"""The process group of a job's current round, formed and re-formed inside one worker process.

`World` is the public interface: it enters and leaves a job, and carries the groups from one round to the next.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover._version import __version__
from lightning_dlrover.rdzv.desync import (
    Begun,
    CollectiveCall,
    CollectiveMonitor,
    MismatchError,
    OutsideOfLoops,
    PlaceInProgram,
    compare_with,
    shown,
)
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.health import when_there_is_room
from lightning_dlrover.rdzv.etcd.types import EtcdError, EtcdUnavailableError
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.failures import (
    DrainOnSigterm,
    Failures,
    Growth,
    JobStanding,
    Reports,
    end_with_agent,
    is_group_failure,
)
from lightning_dlrover.rdzv.group.forming import FailureDetector, Forming, PeerMonitor, Reachability
from lightning_dlrover.rdzv.group.loop import Stateful, Step, steps
from lightning_dlrover.rdzv.job.events import Event, StateKept
from lightning_dlrover.rdzv.job.records import RoundRecord, WorkerState
from lightning_dlrover.rdzv.membership.member import (
    CannotMeetError,
    EvictedError,
    Formation,
    LeftOutError,
    Member,
    MembershipError,
    TooLateError,
    VoidRoundError,
    WorldError,
    run_blocking,
)
from lightning_dlrover.rdzv.membership.membership import JobClosedError, Membership
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.rdzv.membership.worker_records import SharedRecords
from lightning_dlrover.rdzv.transport import torch_names, transfer, waits
from lightning_dlrover.rdzv.transport.data_unpickler import accept_only_data
from lightning_dlrover.rdzv.transport.process_groups import (
    CLOSE_S,
    DeviceWait,
    RoundSockets,
    StoreServer,
    own_address,
    prepare_environment,
    protect_forks,
    slow_to_connect,
    traits_of,
    use_interface_of,
    with_gloo,
)
from lightning_dlrover.rdzv.transport.torch_names import HashStore
from lightning_dlrover.rdzv.transport.transfer import HostStateCache, Packed
from lightning_dlrover.rdzv.transport.waits import RoundGroups, raise_limit


class _Unavailable:
    """A part of `World` that a worker without a job lacks. Reading it raises a `WorldError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __get__(self, world: LoneWorld | None, owner: type[LoneWorld]) -> NoReturn:
        raise WorldError(
            f"this worker runs outside a job and has no {self._what}: "
            "start the script with torchrun --rdzv-backend=etcd-v3, or with dlrover run"
        )


class LoneWorld:
    """A `World` of a single worker, which no other worker can join: a script that was started by hand, without etcd.

    It has all methods of `World`. Those that need other workers or the job's records raise a `WorldError`.
    """

    config = _Unavailable("configuration")
    membership = view = records = standing = _Unavailable("records of a job")
    admit = switch = recover = connect = _Unavailable("other workers to form a round with")

    worker_id = "alone"
    left_state: HostStateCache | None = None
    notice: float | None = None
    owned_sockets: Sequence[tuple[int, int]] = ()
    num_begun = 0
    broken = False
    is_voting = False

    def __init__(self) -> None:
        self.backend = "gloo"
        self.is_asynchronous = False
        self.num_fits = 0
        self.place: PlaceInProgram = OutsideOfLoops()  # place of the training loop that runs
        self.wishes: list[int] = []
        self.formation: Formation | None = None
        self.has_finished = False

    def __enter__(self) -> LoneWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave()

    def steps(self, num_steps: int, *, first_step: int = 0, check_interval_s: float = 0.1, **state: Stateful) -> Iterator[Step]:
        """See `World.steps`."""
        yield from steps(self, num_steps, first_step, state, check_interval_s)

    def start(self) -> Formation:
        """Form a group of one worker, so that the user's collectives work as usual."""
        round_ = RoundRecord(1, [self.worker_id], "start with 1 worker", "start", planned=True)
        dist.init_process_group(self.backend, store=HashStore(), rank=0, world_size=1)
        self.formation = Formation(round_, {self.worker_id: b""}, 0)
        return self.formation

    def leave(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # A lone worker has no peer that it could lose, and no record of its job.
    def guard(self, replica: DistributedDataParallel) -> None: ...
    def wait_for_device(self, device: torch.device) -> None: ...
    def listen_for_sigterm(self) -> None: ...
    def resign(self) -> None: ...
    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None: ...
    def keep_for_successors(self, step: int, packed: Packed) -> None: ...
    def event(self, event: Event, text: str) -> None: ...
    def report_error(self, error: BaseException) -> None: ...

    def finish(self, num_steps: int, fit: int = 1) -> None:
        self.has_finished = True

    def is_stop(self, number: int) -> bool:
        return False

    def broken_error(self) -> WorldError:
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        return False

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        return False

    def compared(self, call: Callable[[], CollectiveCall]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def alone(self, reason: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_reach(self, place: str, timeout_s: float | None = None) -> bool:
        return True

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        self.wishes = list(wishes)  # without peers the minimum is the worker's own number

    def agreed(self) -> tuple[int | None, int]:
        return None, 1


log = logging.getLogger(__name__)

T = TypeVar("T")

NEWS_S = 3.0  # log why a worker is waiting after this many seconds
WAIT_PROBE_S = 0.05  # seconds between two probes of workers during a wait
FULL_PAUSE_S = 0.2  # seconds between two attempts to write a record while etcd's database is full


class ProcessBackend:
    """Implementation of `MemberBackend` that blocks the worker's thread.

    Args:
        reach: finds members that do not respond.
        form, destroy: bring the round's process groups up, and tear them down.
    """

    def __init__(
        self,
        config: WorldConfig,
        membership: Membership,
        reach: Reachability,
        reports: Reports,
        form: Callable[[RoundRecord, bytes], Formation],
        destroy: Callable[[], None],
    ) -> None:
        self._config = config
        self._membership = membership
        self._reach = reach
        self._reports = reports
        self._form = form
        self._destroy = destroy

    @property
    def worker_id(self) -> str:
        return self._membership.worker_id

    @property
    def view(self) -> WorkerView:
        return self._membership.view

    async def until(
        self, found: Callable[[WorkerView], T | None], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> T:
        membership = self._membership
        news_at = time.monotonic() + NEWS_S
        detector = FailureDetector(membership, probe, WAIT_PROBE_S).pause()

        def tick() -> None:
            nonlocal news_at
            if time.monotonic() > news_at:
                news_at = float("inf")
                self._reports.wait(what)
            detector.look()

        try:
            limit_s = timeout_s or self._config.wait_timeout_s
            return membership.wait_for(found, limit_s, what, tick, membership.is_being_staffed)
        except TimeoutError as error:
            raise TooLateError(str(error)) from error

    async def write(
        self, state: WorkerState, number: int, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        # While etcd is unavailable a change of membership waits.
        deadline = time.monotonic() + self._config.wait_timeout_s
        while True:
            try:
                self._membership.own.update(state, number, fingerprint, unreachable)
                return
            except EtcdUnavailableError as error:
                if time.monotonic() > deadline:
                    raise WorldError(f"worker {self.worker_id} could not publish that it is {state}: {error}") from error
                time.sleep(FULL_PAUSE_S)  # a full etcd refuses writes at once

    async def evict_dead(self, workers: Sequence[str]) -> None:
        FailureDetector(self._membership, workers, WAIT_PROBE_S).look()

    async def out_of_reach(self, workers: Sequence[str]) -> list[str]:
        return self._reach.silent(workers)

    async def form(self, target: RoundRecord, hello: bytes) -> Formation:
        try:
            formation = self._form(target, hello)
        except EvictedError:
            raise
        except (VoidRoundError, CannotMeetError, RuntimeError) as error:
            log.info("run %s: round %d did not form: %s", self._config.run_id, target.number, error or type(error).__doc__)
            raise
        self._membership.has_reached(target.members)
        return formation

    async def destroy(self) -> None:
        self._destroy()


LEAVE_S = 5.0  # seconds for an abort that follows a shutdown, before the process ends
VOTES_TO_DROP = 3  # votes of a round after which its loop has made steps, and holds nothing of the round before any more


def always_meet(hellos: Mapping[str, bytes]) -> bool:
    """Let workers of a program without places continue together, whatever their hellos are."""
    return True


class World:
    """This worker's process groups, one round after the other.

    Most training loops need only `World.steps` (docs/guide/plain_pytorch.md). Loops that want more control enter the job with
    `start` or `admit`, vote between steps with `propose` and `agreed`, change the round with `switch` or `recover`, and end
    with `finish` and `leave`. Every worker enters a round with a `hello` of a few bytes. It receives those of all others before
    the process group exists, which is enough to determine which worker is ahead.

    Args:
        config: the job and this worker's place in it.
        backend: backend of the process groups, `gloo` or `cpu:gloo,cuda:nccl`; `nccl` is short for the latter. Votes and the
            state of joiners travel through groups of gloo in any case.
        device: device on which this worker computes. With it, NCCL connects before a round needs it, and a worker that is lost
            before that blocks no other. None: the only GPU that is visible, if there is only one.
        can_meet: returns whether workers with these hellos can continue together; the result must be the same on all of them.
            If they cannot, the joiners wait for another round.

    Raises:
        ValueError: nothing is known of the backend, or a variable in the environment would end the survivors of a loss.

    Example:
        Under ``python train.py`` the world has a single worker; the same loop is elastic under ``torchrun``.

        >>> import torch
        >>> from lightning_dlrover.rdzv import World
        >>> model = torch.nn.Linear(1, 1)
        >>> with World.from_environment() as world:
        ...     for step in world.steps(3, model=model):
        ...         with step:
        ...             print(f"step {step.number} on worker {step.rank} of {step.size}")
        step 0 on worker 0 of 1
        step 1 on worker 0 of 1
        step 2 on worker 0 of 1
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str = "gloo",
        device: torch.device | None = None,
        can_meet: Callable[[Mapping[str, bytes]], bool] = always_meet,
    ) -> None:
        torch_names.check()
        _drop_default_group()
        raise_limit()
        accept_only_data()
        self.config = config
        self.backend = backend = with_gloo(backend)
        self.is_asynchronous = traits_of(backend).is_asynchronous
        if self.is_asynchronous:
            prepare_environment(os.environ)
        protect_forks()
        self._client = EtcdClient(config.etcd)
        self._client.check()
        address = own_address(config.etcd.endpoints)
        use_interface_of(address)
        server = StoreServer(address, config.form_timeout_s)
        self.num_fits = 0  # calls of `fit` that the script has made so far
        self.place: PlaceInProgram = OutsideOfLoops()  # place of the training loop that runs
        self.wishes: list[int] = []  # minimum over all members of each wish in this round's newest vote
        self._left_state = HostStateCache(Path(config.left_state_folder)) if config.left_state_folder else None
        self._ballot: list[int] | None = None  # None: no vote is in progress
        self._vote: Begun | None = None  # the vote with this ballot; None if this worker is alone in the round
        self._num_votes = 0  # votes in this round
        self._monitor: CollectiveMonitor | None = None  # the round's monitor; None if this worker is alone in the round
        self._watched: list[RoundSockets] = []  # still empty when the membership reads its first view
        served = dataclasses.replace(config, address=address, port=server.port)
        self.membership = when_there_is_room(
            lambda: Membership(self._client, served, self._on_view, lambda: self._peer_monitor.probe()), config.wait_timeout_s
        )
        self._groups = RoundGroups()
        reach = Reachability(self.membership)
        self._reports = Reports(self.membership, config.run_id, self)
        self._member = Member(ProcessBackend(config, self.membership, reach, self._reports, self._bring_up, self._tear_down))
        self._sockets = RoundSockets(self._member, server, config.collective_timeout_s)
        self._device_wait = DeviceWait(config.collective_timeout_s, self._sockets.sever_current)
        self._peer_monitor = PeerMonitor(self.membership, self._member, self._sockets)
        self._forming = Forming(
            *(config, backend, device or _only_device(backend), can_meet, self.membership, self._member),
            *(self._sockets, self._groups, reach, self),
        )
        self._sigterm = DrainOnSigterm(self.membership, config.wait_timeout_s, config.agent_pid)
        self._final_notice: float | None = None  # None until this worker has received SIGTERM
        self._all_leave = False  # whether all members have agreed to leave the current group
        self._watched.append(self._sockets)
        self._failures = Failures(self._sockets, self._current_monitor)
        self._growth = Growth(self.membership, config.run_id)
        self.standing = JobStanding(self.membership, config.run_id, config.wait_timeout_s, self)
        # Abortable groups are aborted. Votes and the state always travel through gloo.
        waits.end_waits_with(weakref.WeakMethod(self._round_of_waits), all_waits=not self.is_asynchronous)
        compare_with(weakref.WeakMethod(self._current_monitor))

    @staticmethod
    def from_environment(backend: str = "gloo", device: torch.device | None = None) -> AnyWorld:
        """Return the world of the job that started this process.

        `torchrun --rdzv-backend=etcd-v3` and `dlrover run` start workers of a job. A script started as `python train.py` gets a
        world of a single worker, which no other worker can join.

        Raises:
            WorldError: another launcher has started several workers.
            EtcdError: the job's etcd cannot be reached.
        """
        config = WorldConfig.from_environment(os.environ, __version__)
        if config is not None:
            end_with_agent(config.agent_pid)
            return World(config, backend, device)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise WorldError(
                f"this worker is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), started without the rendezvous backend "
                "etcd-v3, so they cannot find each other; start the script with torchrun --rdzv-backend=etcd-v3, or with python"
            )
        return LoneWorld()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.report_error(error)
        if self.standing.is_recorded:
            self.leave()
        else:
            # It waits for etcd. The script's code after the loop comes first, as it may save the result.
            atexit.register(self.leave)

    def steps(self, num_steps: int, *, first_step: int = 0, check_interval_s: float = 0.1, **state: Stateful) -> Iterator[Step]:
        """Enter the job and yield its steps, across all rounds.

            for step in world.steps(1000, model=model, optimizer=optimizer):
                with step:
                    ...  # collectives first, then the update

        Workers join and leave between two steps, and joiners receive the state. When a collective fails because a worker was
        lost, the block is left and the others attempt the step again. A worker that is drained, or whose job is over already,
        ends here with SystemExit.

        Args:
            num_steps: steps of the whole job.
            first_step: steps made before, as recorded in the loaded checkpoint. Among workers that start together, the first
                in rank order decides, and its state is copied to all.
            check_interval_s: approximate seconds between votes on whether to change the round.
            state: everything that a step changes, as objects with `state_dict` and `load_state_dict`.

        Raises:
            WorldError: too few workers came, or no round could be formed in time.
            MembershipError: this worker cannot take part: it has another model or release, or was declared dead.
        """
        self.listen_for_sigterm()
        try:
            yield from steps(self, num_steps, first_step, state, check_interval_s)
        except LeftOutError as left_out:
            log.info("worker %s leaves: %s", self.worker_id, left_out)
            raise SystemExit(left_out.exit_code) from left_out
        except JobClosedError as error:
            # The job ended before this worker was started or restarted, so the worker has not failed.
            log.warning("%s", error)
            raise SystemExit(0) from error

    @property
    def worker_id(self) -> str:
        return self.membership.worker_id

    @property
    def view(self) -> WorkerView:
        """This worker's newest view of the job. It may lag behind etcd."""
        return self.membership.view

    @property
    def notice(self) -> float | None:
        """Time at which this worker's node will be taken away, in seconds since the epoch; None: nobody has announced it.

        After SIGTERM alone it is the time at which an agent kills its workers by default. From SIGTERM on it stays the same.
        """
        if self._final_notice is None and self._sigterm.deadline is not None:
            self._final_notice = self.view.taken_at.get(self.worker_id, self._sigterm.deadline)
        return self._final_notice or self.view.taken_at.get(self.worker_id)

    @property
    def records(self) -> SharedRecords:
        """The records that all workers of the job share."""
        return self.membership.shared

    @property
    def formation(self) -> Formation | None:
        """The round that this worker formed last."""
        return self._member.formation

    def start(self) -> Formation | None:
        """Enter the job and return its first round, or None if others already train and this worker joins them later.

        Raises:
            JobClosedError, MembershipError: the job cannot be joined.
            WorldError: too few workers came.
        """
        state = when_there_is_room(self.membership.register, self.config.wait_timeout_s)
        return run_blocking(self._member.start(state))

    def admit(self, hello: bytes, fingerprint: str) -> Formation:
        """Wait at the training loop's entrance until a round admits this worker.

        Args:
            hello: bytes for the other members; empty until this worker has received the job's state.
            fingerprint: fingerprint of this worker's model, see `model_fingerprint`.

        Raises:
            LeftOutError: the job ended, or this worker was drained, before a round needed it.
            MembershipError: the job trains another model.
        """
        self.standing.check_joiner(fingerprint)
        return run_blocking(self._member.admit(hello, fingerprint))

    def switch(self, number: int, hello: bytes) -> Formation:
        """Leave the current group and form round `number` (or a newer one that replaced it).

        Raises:
            LeftOutError: the round continues without this worker.
        """
        self._all_leave = True
        try:
            return run_blocking(self._member.switch(number, hello))
        finally:
            self._all_leave = False

    def recover(self, hello: bytes) -> Formation:
        """Form the next round with the survivors after a collective of the current one failed.

        An empty `hello` means that this worker has not received the state yet. It may have to wait for admission again.

        Raises:
            EvictedError: the others continue without this worker.
            WorldError: no round could be formed in time, or collectives fail again and again at the same place.
        """
        assert self.formation is not None
        if hello:
            self._failures.count_attempt(hello)
        formation = run_blocking(self._member.regroup(hello))
        with contextlib.suppress(EtcdError, MembershipError):  # training matters more than the job's record
            self.standing.announce_as_first()
        return formation

    def guard(self, replica: DistributedDataParallel) -> None:
        """Make the passes of a model that was wrapped for the current round always end with the round.

        Without this they end in all cases but one: a worker is lost after it has sent part of a message. A model with a
        communication hook is left unchanged.
        """
        if self.formation is not None and self.formation.size > 1 and not self.is_asynchronous:
            waits.guard_replica(replica)

    def wait_for_device(self, device: torch.device) -> None:
        """Wait until a device has the results of this worker's collectives, or the round was ended: check `broken` then."""
        self._device_wait.wait(device)

    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None:
        """Record that the job trains, and which model and data joiners must have.

        All workers of the first round call this. Rank 0 writes the record, or its successor if rank 0 dies first.
        """
        self.standing.announce(fingerprint, global_batch_size, data)

    @property
    def has_finished(self) -> bool:
        return self.standing.has_finished

    def finish(self, num_steps: int, fit: int = 1) -> None:
        """Record that all steps are made and every worker has the state of the last one. The job does not change after this.

        Every worker calls this before it continues, so that the first one to exit is not mistaken for a loss.
        """
        self.standing.finish(num_steps, fit)

    @property
    def left_state(self) -> HostStateCache | None:
        """Folder for the job's state while this worker's agent replaces its workers; None if the agent has a single worker."""
        return self._left_state

    def is_stop(self, number: int) -> bool:
        """Whether round `number`, agreed on by all members of the current one, stops all of them."""
        newest = self.membership.view.round
        return newest is not None and (newest.number, newest.kind) == (number, "stop")

    def keep_for_successors(self, step: int, packed: Packed) -> None:
        """Keep the job's state for the next workers of this worker's agent. All members of a round call it before they leave.

        One worker of each agent writes the state. An agent with a single worker keeps none.

        Raises:
            HostStateError: the host's memory has no room for it.
        """
        if self._left_state is None or self.formation is None:
            return
        records = self.membership.workers.of(self.formation.round.members)
        mates = [w for w, record in records.items() if record.agent_id == self.config.agent_id]
        with contextlib.suppress(EtcdError):
            present = self.membership.workers.present(mates)
            mates = [w for w in mates if w in present]
        first = next(iter(mates), self.worker_id)
        if first == self.worker_id:
            num_bytes = self._left_state.write(step, packed)
            text = f"kept the state of step {step} in this host's memory ({num_bytes / 2**20:.1f} MiB)"
            self.event(StateKept(step, num_bytes), text)

    def leave(self) -> None:
        """Leave the process group and remove this worker from the job's records."""
        monitor = self._monitor
        try:
            self._tear_down(is_last=True)
        except Exception as error:  # the record must not outlive the process
            log.warning("worker %s: its groups could not be left: %s", self.worker_id, error)
        if monitor is not None:
            monitor.join(1.0)
        self._groups.join(1.0)
        if not self.standing.is_recorded:
            # Without the record the job would count as not done. All that the script keeps is written by now.
            self.membership.deliver(self.config.wait_timeout_s)
        self.membership.close()
        self._client.close()
        self._forming.join(CLOSE_S + LEAVE_S)  # last, as the others must not wait for it

    def resign(self) -> None:
        """Leave the job at once because this worker is about to end with an error."""
        with contextlib.suppress(EtcdError):
            self.membership.own.leave()
        self._sockets.sever(self._member.number, quietly=True)

    def listen_for_sigterm(self) -> None:
        """Make SIGTERM drain this worker: it hands over and leaves. Does nothing outside the main thread."""
        self._sigterm.listen()

    def event(self, event: Event, text: str) -> None:
        """Queue one line for the job's history; never blocks."""
        self.membership.shared.event(event, text)

    def report_error(self, error: BaseException) -> None:
        """Report to the job and to the agent why this worker is about to fail, and to the user which worker failed first."""
        if not is_group_failure(error) and not isinstance(error, WorldError | MembershipError):
            self._growth.ends_by(error)
        self._reports.error(error)

    @property
    def broken(self) -> bool:
        """Whether the current group was severed because its round has ended for good."""
        return self._sockets.are_severed

    def broken_error(self) -> WorldError:
        """Return the error to raise where a caller finds `broken` set although no collective failed. It is recoverable."""
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        """Whether `error` means that this worker's round is broken, so that `recover` helps, and not a mistake of the user."""
        return self._failures.is_failure(error)

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        """Whether `recover` helps a worker with the job's state: its round is broken, or undone because of `error`.

        A growth is undone for an error in a step soon after workers have joined, and anywhere for an error that follows from a
        mismatch. A worker whose own collective outside of a step did not match the others' would begin it again, alone. So the
        mismatch ends that worker.
        """
        try:
            if self.is_failure(error):
                return True
        except MismatchError as mismatch:
            if not self._growth.undo(mismatch):
                raise
            return True
        if isinstance(error, WorldError | MembershipError) and not isinstance(error, MismatchError):
            return False
        return is_in_step and isinstance(error, Exception) and self._growth.undo(error)

    def compared(self, call: Callable[[], CollectiveCall]) -> contextlib.AbstractContextManager[None]:
        """Compare this worker's next action with that of all others. Collectives within the context count as part of it.

        Entering raises `MismatchError` if another worker does something else. A worker that is alone compares nothing.
        """
        monitor = self._monitor
        return monitor.compared(call()) if monitor is not None else contextlib.nullcontext()

    def alone(self, reason: str) -> contextlib.AbstractContextManager[None]:
        """Refuse collectives within the context by a `LoneCollectiveError`, because the others do not run this code now."""
        return self._monitor.alone(reason) if self._monitor is not None else contextlib.nullcontext()

    @property
    def num_begun(self) -> int:
        """Number of collectives that this worker has begun in its round; 0 if it is alone."""
        return self._monitor.num_begun if self._monitor is not None else 0

    def all_reach(self, place: str, timeout_s: float | None = None) -> bool:
        """Wait until all workers have reached `place`; return False once one of them has passed it by.

        Workers that do not call this pay nothing. Each place needs a name that is unique in the round.

        Args:
            timeout_s: seconds to wait. None: the time limit of one collective.

        Raises:
            RoundEndedError: the round is over. Other workers may have returned True already: `recover` and compare with them.
            WorldError: not all workers came in time.
        """
        if self._monitor is None:
            return True
        return self._monitor.all_reach(place, lambda: self.broken, timeout_s or self.config.collective_timeout_s)

    def _current_monitor(self) -> CollectiveMonitor | None:
        return self._monitor

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        """Start a vote on the round to switch to: a collective of all members that overlaps with the next step.

        Args:
            check_every: steps until this worker wants to vote again; the maximum over all members applies.
            wishes: further numbers, of equal count on all members; the vote stores the minimum of each in `wishes`.
            place: number of the next step; must be equal on all members.
        """
        assert self._ballot is None
        assert self.formation is not None
        self.standing.step_made()
        self._growth.step_begins(place)
        self._sigterm.keep()
        if self._monitor is None and self.formation.size > 1:
            raise self.broken_error()
        round_ = self.membership.view.round
        newest = round_.number if round_ is not None and self._forming.is_prepared(round_) else self.formation.round.number
        self._ballot = [newest, -check_every, *wishes]
        if self._monitor is not None:
            call = CollectiveCall("the vote between two steps", f"step {place}", shown(sys._getframe()))
            self._vote = self._monitor.vote(call, self._ballot)

    @property
    def owned_sockets(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: their copies would hide our death from the peers."""
        return self._sockets.owned

    @property
    def is_voting(self) -> bool:
        return self._ballot is not None

    def agreed(self) -> tuple[int | None, int]:
        """Return the round to switch to, which all members have seen (None: stay), and the steps until the next vote."""
        assert self._ballot is not None
        assert self.formation is not None
        ballot, vote = self._ballot, self._vote
        self._ballot = self._vote = None
        if vote is not None:
            assert self._monitor is not None
            ballot = self._monitor.counted(vote, ballot)
        newest, opposite, *self.wishes = ballot
        self._num_votes += 1
        if self._num_votes == VOTES_TO_DROP:
            self._groups.drop_early()
        return (newest if newest > self.formation.round.number else None), -opposite

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        """Form a group in addition to the round's, with `workers` as its ranks. All of them must call this.

        They are all or some members of the round that this worker formed last, or these and workers that the round left out.
        The group ends with the round: when the round breaks, every pending operation of the group fails.

        Args:
            name: name of the group, unique for each call.

        Raises:
            RoundEndedError: the round has broken, or one of `workers` is gone.
            UnreachableError: they could not connect in time.
        """
        return self._forming.connect(target, name, workers)

    def _bring_up(self, target: RoundRecord, hello: bytes) -> Formation:
        formation, self._monitor = self._forming.bring_up(target, hello, self)
        self._growth.formed(formation)
        return formation

    def _tear_down(self, is_last: bool = False) -> None:
        self._ballot = self._vote = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self.wishes = []  # they belong to a round that is over
        self._failures.mismatch = None
        transfer.travel_in(None)
        self._groups.let_go(is_last, self._sockets.are_severed, self._sockets.severed)
        self._num_votes = 0
        if is_last:
            self._device_wait.close()
            self._forming.abandon()
        self._forming.ended(self._sockets.destroy_group(self._all_leave))
        self._all_leave = False  # if the next round does not form after the switch, it was not agreed on

    def _round_of_waits(self) -> tuple[int, bool]:
        self._failures.raise_mismatch()
        return self._member.number, self._sockets.are_severed_for_good

    def _on_view(self, view: WorkerView) -> None:
        """Sever a group that cannot complete any more collectives, and prepare the next one. Runs in the membership thread."""
        for sockets in self._watched:
            sockets.follow(view, self.membership.own.evicted)
        if not self._watched or self.formation is None or view.round is None or not view.round.planned:
            return
        if view.round.number > self._member.number and self.worker_id in view.round.members:
            self._forming.prepare(view.round)


def _drop_default_group() -> None:
    if dist.is_initialized():
        log.warning(
            "the script has made a default process group of %d workers. A live job forms one for each round, so this one ends "
            "here: leave out torch.distributed.init_process_group",
            dist.get_world_size(),
        )
        dist.destroy_process_group()


def _only_device(backend: str) -> torch.device | None:
    """Return the device of a backend's communicators if only one is possible."""
    if "cuda" in slow_to_connect(backend):
        return torch.device("cuda", 0) if torch.cuda.device_count() == 1 else None
    return torch.device("cpu")


AnyWorld: TypeAlias = World | LoneWorld
"""World of a training loop, of a job or of a script that was started by hand."""
