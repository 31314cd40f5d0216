"""The process group of a job's current round, formed and re-formed inside one worker process.

This is all that a training loop needs to be live-elastic. Most loops need `World.steps` alone (docs/plain_pytorch.md). What it
is made of serves loops that want to decide more themselves: `World.start` or `World.admit`, then `World.propose` and
`World.agreed` between steps, `World.switch` when a new round was agreed, `World.recover` when a collective failed,
`World.finish` and `World.leave` at the end. Every worker says a few bytes of `hello` when it enters a round, and receives those
of all others before the process group exists: enough to tell who is ahead.

The main thread forms and destroys groups. The membership thread only ever calls `_sever`, which makes a collective that the
main thread is blocked in raise at once: gloo has no abort, but its sockets can be shut down from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover._version import __version__
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.config import (
    EtcdConfig,
    parse_endpoints,
)
from lightning_dlrover.rdzv.etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)
from lightning_dlrover.rdzv.group import left_state, waits
from lightning_dlrover.rdzv.group.left_state import LeftState
from lightning_dlrover.rdzv.group.loop import (
    Stateful,
    Step,
    steps,
)
from lightning_dlrover.rdzv.group.meeting import (
    Meeting,
    MismatchError,
    Purpose,
    compare_with,
    shown,
)
from lightning_dlrover.rdzv.group.transfer import Packed
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    HISTORY_TTL_S,
    EventRecord,
    JobRecord,
    RecordError,
    RoundRecord,
    WorkerState,
)
from lightning_dlrover.rdzv.live import rounds
from lightning_dlrover.rdzv.live.admission import (
    JobClosedError,
    MembershipConfig,
)
from lightning_dlrover.rdzv.live.member import (
    CannotMeetError,
    EvictedError,
    Formation,
    LeftOutError,
    Member,
    MembershipError,
    RoundEndedError,
    TooLateError,
    UnreachableError,
    VoidRoundError,
    WorldError,
    run_blocking,
)
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.probe import (
    dead_workers,
    silent_workers,
)
from lightning_dlrover.rdzv.live.rounds import (
    Patience,
    View,
)
from lightning_dlrover.rdzv.timeouts import Timeouts

__all__ = [
    "Formation",
    "LeftOutError",
    "MismatchError",
    "World",
    "WorldConfig",
    "WorldError",
    "end_with_agent",
    "is_group_failure",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


CONNECT_TIMEOUT_S = 0.5
"""How long one attempt to reach the store of a round may take."""

PROBE_INTERVAL_S = 0.3
"""How often a worker sees whether the next rank's process lives."""

OUT_OF_REACH_S = 5.0
"""For how long a worker is given no answer by another, not even a refusal, before it takes itself for cut off from it."""

NEWS_S = 3.0
"""A wait that lasts for so long is told to who reads the worker's output."""

AWAKE_S = 0.5
"""After a group was cut off: all that gloo tells of it has failed by then."""

FULL_PAUSE_S = 0.2
"""Between two attempts to write a record into an etcd that takes none."""
VOTE_ROOM = 32, 8
"""Numbers that a vote may hold: in any round, and for each of its workers."""

MAX_ATTEMPTS = 8
"""Recoveries of one place in the program before its error is taken for the user's own."""


@dataclass(frozen=True)
class WorldConfig:
    """Where the job's records are and who this worker is; read once from the environment that the elastic agent exports."""

    etcd: EtcdConfig
    run_id: str
    prefix: str
    agent_id: str
    local_rank: int
    min_workers: int
    max_workers: int
    version: str
    lease_ttl_s: float = 5.0  # this and the following as in `Timeouts`
    form_timeout_s: float = 120.0
    wait_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    regroup_timeout_s: float = 120.0
    collective_timeout_s: float = 1800.0
    history_ttl_s: float = HISTORY_TTL_S  # the job's records outlast its last worker, agent and controller by so long
    left_state_folder: str = ""  # of this worker's agent, see `left_state`; empty: it has a single worker

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], version: str) -> WorldConfig | None:
        """The configuration exported by the `etcd-v3` rendezvous handler, or None outside of such a job.

        Raises:
            ValueError: a variable is missing or malformed.
        """
        if "DLROVER_RUN_ID" not in environ:
            return None

        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            try:
                return int(text)
            except ValueError as error:
                raise ValueError(f"environment variable {name} is {text!r}, not a whole number") from error

        try:
            endpoints, agent_id = environ["DLROVER_ENDPOINT"], environ["DLROVER_AGENT_ID"]
        except KeyError as error:
            raise ValueError(
                f"environment variable {error} is missing though DLROVER_RUN_ID is set; "
                "both come from torchrun --rdzv-backend=etcd-v3: start the script with it"
            ) from error
        workers_per_node = number("LOCAL_WORLD_SIZE", 1)
        timeouts = dataclasses.asdict(Timeouts.from_environment(environ))
        return cls(
            etcd=EtcdConfig.from_environment(endpoints, environ, timeouts.pop("etcd_timeout_s")),
            run_id=environ["DLROVER_RUN_ID"],
            prefix=environ.get("DLROVER_PREFIX", DEFAULT_PREFIX),
            agent_id=agent_id,
            local_rank=number("LOCAL_RANK", 0),
            min_workers=number("DLROVER_MIN_NODES", 1) * workers_per_node,
            max_workers=number("DLROVER_MAX_NODES", 1) * workers_per_node,
            version=version,
            history_ttl_s=number("DLROVER_HISTORY_TTL_S", round(HISTORY_TTL_S)),
            left_state_folder=environ.get(left_state.VARIABLE, ""),
            **timeouts,
        )


def is_group_failure(error: BaseException) -> bool:
    """Whether `error` was raised by a collective whose peer went away, as opposed to by the user's own code."""
    text = str(error)
    if any(mark in text for mark in _MISTAKES):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in text for mark in _LOSSES)


_LOSSES = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
)
"""Texts of errors that collectives raise when a peer is gone."""

_MISTAKES = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "Duplicate GPU detected")
"""Texts of NCCL's errors that would come again in the next round, such as two workers on one GPU."""


class World:
    """This worker's process groups, one round after the other.

    Args:
        config: the job and this worker's place in it.
        backend: of the process groups, `gloo` or `cpu:gloo,cuda:nccl`; `nccl` stands for the latter.
        can_meet: whether workers with these hellos can go on together; must answer alike on all of them. If not, those who
            were to be admitted wait for another round.

    Raises:
        ValueError: the backend has no gloo for tensors on the CPU.
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str = "gloo",
        can_meet: Callable[[Mapping[str, bytes]], bool] = lambda hellos: True,
    ) -> None:
        self.config = config
        self._can_meet = can_meet
        self.backend = backend = _with_gloo(backend)
        if "nccl" in backend:
            # NCCL's watchdog would end this process when a peer is lost; aborting the group is our watcher's business.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        _protect_forks()
        self._client = EtcdClient(config.etcd)
        self._client.check()
        address = _own_address(config.etcd.endpoints)
        _use_interface_of(address)
        # Every worker holds a store server from the start, so that whoever becomes rank 0 can serve a round at once. The
        # port has a second use: it refuses connections as soon as this process is dead.
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)
        port = listener.getsockname()[1]
        listener_fd = listener.detach()
        self._server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=config.form_timeout_s),
            master_listen_fd=listener_fd,
        )
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []  # (fd, inode) of the group's connections
        self._known_inodes: set[int] = set()  # sockets that were there before the group
        self._listener = (listener_fd, os.stat(listener_fd).st_ino)
        self._severed = False
        self._severed_at = 0.0
        self._groups: list[dist.ProcessGroupGloo] = []  # of the round
        self._are_unused = threading.Event()  # set when nobody has the groups of the round before any more
        self._keeping: list[threading.Thread] = []  # these groups
        self._dropping: list[threading.Thread] = []  # those of the round before that
        self._next_probe = 0.0
        self._next_reach_probe = 0.0
        self._silent_since: float | None = None  # the next rank; of whom nothing else would tell, as when a cable was cut
        self._member = Member(_Means(self))
        self._left_state = LeftState(Path(config.left_state_folder)) if config.left_state_folder else None
        self._attempts: tuple[bytes, int] = (b"", 0)  # hello, and how often a round was left with it
        self._has_finished = False  # as far as this worker has written or read it itself
        self._announcement: tuple[str, int, str] | None = None  # fingerprint, global batch and data, until the job has them
        self.num_fits = 0  # of the script so far
        self._last_failure = ""  # text of the newest error that was taken for a loss
        self._vote: tuple[int, dist.Work, torch.Tensor] | list[int] | None = None
        self._vote_size = 0
        self._meeting: Meeting | None = None  # of the round, unless this worker is alone in it
        self._mismatch: MismatchError | None = None
        self.activity: Callable[[], str] = lambda: "between two collectives"  # of the training loop, for error messages
        self.is_in_step: Callable[[], bool] = lambda: False
        self.wishes: list[int] = []  # the smallest of what all members have wished in the newest vote of this round
        # NCCL's groups can be aborted; votes and the state travel through gloo in any case.
        waits.end_waits_with(weakref.WeakMethod(self._round_of_waits), all_waits="nccl" not in backend)
        compare_with(weakref.WeakMethod(self._current_meeting))
        self.membership = Membership(
            self._client,
            MembershipConfig(
                run_id=config.run_id,
                prefix=config.prefix,
                agent_id=config.agent_id,
                local_rank=config.local_rank,
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                version=config.version,
                address=address,
                port=self._server.port,
                lease_ttl_s=config.lease_ttl_s,
                history_ttl_s=config.history_ttl_s,
                patience=Patience(start_s=config.start_timeout_s, regroup_s=config.regroup_timeout_s),
            ),
            on_view=self._on_view,
            on_tick=self._on_tick,
        )

    @staticmethod
    def from_environment(backend: str = "gloo") -> World:
        """The world of the job that started this process.

        Under `torchrun --rdzv-backend=etcd-v3`, or `dlrover run`, it is the job's; a script started as `python train.py` gets a
        world of its one worker, which nobody can join.

        Raises:
            WorldError: another launcher has started several workers.
            EtcdError: the job's etcd cannot be reached.
        """
        config = WorldConfig.from_environment(os.environ, __version__)
        if config is not None:
            end_with_agent()
            return World(config, backend)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise WorldError(
                f"this worker is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), started without the rendezvous backend "
                "etcd-v3, so they cannot find each other; start the script with torchrun --rdzv-backend=etcd-v3, or with python"
            )
        return _LoneWorld()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.report_error(error)
        self.leave()

    def steps(self, num_steps: int, *, first_step: int = 0, check_interval_s: float = 0.1, **state: Stateful) -> Iterator[Step]:
        """Enter the job and make its steps, in whatever rounds they fall.

            for step in world.steps(1000, model=model, optimizer=optimizer):
                with step:
                    ...  # collectives first, then the update

        Between two steps workers join and leave; those who join get the state. When a collective fails because a worker was
        lost, the block is left and the step attempted again by the others. A worker that was asked to leave, or whose
        job is over already, ends here with SystemExit.

        Args:
            num_steps: of the whole job.
            first_step: steps made before, as a checkpoint that was loaded says. Of workers that start together the first in
                rank order is believed, and its state given to all.
            check_interval_s: about how often the workers agree on whether to change.
            state: whatever a step changes, as objects with `state_dict` and `load_state_dict`.

        Raises:
            WorldError: too few workers came, or no round could be formed in time.
            MembershipError: this worker cannot be part of the job: another model, another release, or taken for dead.
        """
        self.listen_for_sigterm()
        try:
            yield from steps(self, num_steps, first_step, state, check_interval_s)
        except LeftOutError as left_out:
            log.info("worker %s leaves: %s", self.worker_id, left_out)
            raise SystemExit(left_out.exit_code) from left_out
        except JobClosedError as error:
            # A worker that was started again, or late, for a job that has ended meanwhile: nothing is wrong with it.
            log.warning("%s", error)
            raise SystemExit(0) from error

    # --- entering and leaving ----------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self.membership.worker_id

    @property
    def formation(self) -> Formation | None:
        """The round that this worker has formed last."""
        return self._member.formation

    def start(self) -> Formation | None:
        """Enter the job: the first round, or None when others are already training and this worker joins them later.

        Raises:
            JobClosedError, MembershipError: the job cannot be joined.
            WorldError: too few workers came.
        """
        return run_blocking(self._member.start(self.membership.register()))

    def admit(self, hello: bytes, fingerprint: str) -> Formation:
        """Stand ready at the training loop's entrance until a round takes this worker in.

        Args:
            hello: said to the others; empty while this worker was not given the job's state.
            fingerprint: of this worker's model, see `model_fingerprint`.

        Raises:
            LeftOutError: the job ended, or this worker was asked to leave, before a round needed it.
            MembershipError: the job trains another model.
        """
        job = self.membership.view.job
        if job is not None and job.fingerprint and job.fingerprint != fingerprint:
            raise MembershipError(
                f"run {self.config.run_id!r}: this worker's model has other parameter names or shapes than the job's "
                f"(fingerprint {fingerprint}, the job has {job.fingerprint}); start it with the same script and arguments. "
                f"{self.consequence_of_refusal()}"
            )
        if job is not None and job.unjoinable:
            raise MembershipError(
                f"run {self.config.run_id!r}: no worker can join this job, as its state cannot be handed over: "
                f"{job.unjoinable}. The job goes on without this worker"
            )
        return run_blocking(self._member.admit(hello, fingerprint))

    def close_to_joiners(self, reason: str) -> None:
        """Put on record why nobody can join; an empty reason opens the job again. Those who train go on in any case."""
        job = self.membership.view.job
        if job is None or job.unjoinable == reason[:1000]:
            return
        try:
            self.membership.update_job(lambda job: dataclasses.replace(job, unjoinable=reason[:1000]))
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not put on record that nobody can join: %s", self.config.run_id, error)
        if reason:
            self.event("unjoinable", f"no worker can join: {reason}"[:500], {"reason": reason[:1000]})

    def switch(self, number: int, hello: bytes) -> Formation:
        """Leave the current group and form round `number` (or a newer one that replaced it).

        Raises:
            LeftOutError: the round goes on without this worker.
        """
        return run_blocking(self._member.switch(number, hello))

    def recover(self, hello: bytes) -> Formation:
        """Form the next round with those that are left after a collective of the current one failed.

        An empty `hello` says that this worker was not given the state yet; it may then have to wait to be admitted again.

        Raises:
            EvictedError: the others went on without this worker.
            WorldError: no round could be formed in time, or collectives fail again and again at the same place.
        """
        assert self.formation is not None
        if hello:
            self._attempts = (hello, self._attempts[1] + 1 if self._attempts[0] == hello else 1)
            if self._attempts[1] > MAX_ATTEMPTS:
                raise WorldError(
                    f"collectives failed {MAX_ATTEMPTS} times in a row at {hello.decode()}; giving up. "
                    f"The last error was: {self._last_failure or 'unknown'}"
                )
        formation = run_blocking(self._member.recover(hello))
        with contextlib.suppress(EtcdError, MembershipError):  # training matters more than what the job is taken for
            self._announce_as_first()
        return formation

    def guard(self, replica: DistributedDataParallel) -> None:
        """Let the passes of a model that was wrapped for the current round end with the round in any case.

        By themselves they do but for one case: a worker is lost that has sent a part of a message. A model that has a hook for
        communication is left alone.
        """
        if self.formation is not None and self.formation.size > 1 and "nccl" not in self.backend:
            waits.guard_replica(replica)

    def consequence_of_refusal(self) -> str:
        """What becomes of a job that refuses this worker, and the way out if nobody trains it any more."""
        view = self.membership.view
        members = [view.workers[worker] for worker in view.survivors]
        if len(dead_workers(members)) < len(members):  # records outlast their workers by a few seconds
            return "The job goes on without it"
        weights = ""
        with contextlib.suppress(EtcdError, RecordError):  # it cannot be read: the way out is the same without it
            if (record := self.membership.newest_checkpoint()) is not None:
                weights = f"; to keep what was learned, give its fit ckpt_path={record.path!r}"
        return (
            f"All workers of job {self.config.run_id!r} have ended before it was done, and under its name it goes on with the "
            f"model and the data it had. If these were changed on purpose, start a new job under another --rdzv-id{weights}"
        )

    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None:
        """Declare that the job trains, and the model and the data that joiners must have.

        Called by all workers of the first round. Rank 0 writes it, or its successor if it dies first.
        """
        self._announcement = (fingerprint, global_batch_size, data)
        self._announce_as_first()

    def _announce_as_first(self) -> None:
        if self._announcement is None or self.formation is None or self.formation.rank != 0:
            return
        fingerprint, global_batch_size, data = self._announcement

        def announced(job: JobRecord) -> JobRecord:
            if job.phase == "starting":
                return dataclasses.replace(
                    job, phase="training", fingerprint=fingerprint, global_batch_size=global_batch_size, data=data
                )
            # Workers that start a job again after the loss of all may have been given other data.
            # What a finished job trains on later, by the same script, is no concern of those who join.
            return dataclasses.replace(job, data=data) if job.phase == "training" and job.data != data else job

        self.membership.update_job(announced)
        self._announcement = None

    @property
    def has_finished(self) -> bool:
        job = self.membership.view.job
        return self._has_finished or (job is not None and job.phase == "finished")

    def ask_whether_finished(self) -> bool:
        """Return `has_finished` as of now: the view lags behind etcd by the time that a watch takes.

        While etcd is away, the answer is the view's.
        """
        if not self.has_finished:
            with contextlib.suppress(EtcdError, RecordError):
                job = self.membership.newest_job()
                self._has_finished = job is not None and job.phase == "finished"
        return self.has_finished

    def has_finished_fit(self, number: int) -> bool:
        """Whether a worker has reached the end of that `fit` of the script, from 1; others may have begun the next one."""
        job = self.membership.view.job
        return job is not None and job.phase == "finished" and job.fits_finished >= number

    def begin_fit(self, number: int) -> None:
        """The script trains once more: losses are survived again, though nobody joins any more.

        Args:
            number: of this `fit` in the script, from 2.
        """
        try:
            self.membership.update_job(lambda job: dataclasses.replace(job, fits_begun=max(job.fits_begun, number)))
            # A recovery that still saw the end of the former one would take the job for finished.
            self.membership.wait_for(
                lambda view: True if view.job is not None and view.job.fits_begun >= number else None,
                self.config.wait_timeout_s,
                f"etcd to show that fit number {number} has begun",
            )
        except (EtcdError, RecordError, TimeoutError) as error:
            log.warning("run %s: could not record that fit number %d begins: %s", self.config.run_id, number, error)

    def finish(self, num_steps: int, fit: int = 1) -> None:
        """All steps are made and nobody lacks the state of the last one: from here on the job does not change any more.

        Every worker says so before it goes on: the first one to exit must not be taken for lost.
        """
        try:
            self.membership.update_job(
                lambda job: dataclasses.replace(job, phase="finished", fits_finished=max(job.fits_finished, fit))
            )
            self._has_finished = True  # the view may lag behind when this process ends
            if self.formation is not None and self.formation.rank == 0:
                self.event("finished", f"finished after {num_steps} steps", {"global_step": num_steps})
                self.membership.flush()
        except (EtcdError, RecordError) as error:
            # The work is done; an etcd that is away now, or garbage in it, must not turn it into a failure.
            log.warning("run %s: could not mark the job as finished: %s", self.config.run_id, error)

    @property
    def left_state(self) -> LeftState | None:
        """Where this worker's agent keeps the job's state while it replaces its workers; None: it has a single one."""
        return self._left_state

    def is_stop(self, number: int) -> bool:
        """Whether round `number`, which all members of the current one have agreed on, is the end of all of them."""
        newest = self.membership.view.round
        return newest is not None and (newest.number, newest.kind) == (number, "stop")

    def keep_for_successors(self, step: int, packed: Packed) -> None:
        """Keep the job's state for the next workers of this worker's agent. All members of a round call it before they leave.

        One worker of each agent writes; none of an agent that has a single worker.

        Raises:
            LeftStateError: there is no room.
        """
        if self._left_state is None or self.formation is None:
            return
        records = self.membership.view.workers
        members = [w for w in self.formation.round.members if w in records]
        first = next((w for w in members if records[w].agent_id == self.config.agent_id), self.worker_id)
        if first == self.worker_id:
            num_bytes = self._left_state.write(step, packed)
            text = f"kept the state of step {step} in this host's memory ({num_bytes / 2**20:.1f} MiB)"
            self.event("kept", text, {"global_step": step, "bytes": num_bytes})

    def leave(self) -> None:
        """End this worker's part: leave the group and the job's records."""
        meeting = self._meeting
        self._destroy(is_last=True)
        if meeting is not None:
            meeting.join(1.0)
        for thread in self._dropping:
            thread.join(0.5)  # if it does not hang: a thread that comes back from there while the process ends aborts it
        self.membership.close()
        self._client.close()

    def resign(self) -> None:
        """Be no member any more, at once: this worker is about to end with an error."""
        with contextlib.suppress(EtcdError):
            self.membership.leave()
        self._sever(self._member.number, quietly=True)

    def listen_for_sigterm(self) -> None:
        """Let SIGTERM mean that this worker hands over and leaves; in any thread but the main one this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return

        def leave() -> None:
            # While etcd is away training goes on, and a change of membership waits.
            deadline = time.monotonic() + self.config.wait_timeout_s
            while not self.membership.evicted:
                try:
                    self.membership.drain("the worker received SIGTERM")
                    return
                except (EtcdUnavailableError, LeaseLostError) as error:
                    problem: EtcdError = error
                except EtcdError as error:
                    problem, deadline = error, 0.0
                if time.monotonic() > deadline:
                    # Nobody can be told, so nobody would ever let this worker go; the others will notice that it is gone.
                    log.warning("worker %s ends at once, it cannot say that it leaves: %s", self.worker_id, problem)
                    os._exit(128 + signal.SIGTERM)
                time.sleep(0.1)

        def drain(signum: int, frame: Any) -> None:
            # A handler must not wait for etcd: the main thread may hold a lock that the client needs.
            threading.Thread(target=leave, name="dlrover-drain", daemon=True).start()

        signal.signal(signal.SIGTERM, drain)

    # --- what people are told ----------------------------------------------------------------------------------------

    def event(self, kind: str, text: str, data: dict[str, Any]) -> None:
        """Queue one line for the job's history; never blocks."""
        self.membership.event(kind, text, data)

    def report_error(self, error: BaseException) -> None:
        """Tell the job, and this worker's agent, why the worker is about to fail; and its user, who has failed before it."""
        if isinstance(error, WorldError | MembershipError) and (first := self._first_failure()) is not None:
            error.add_note(f"\nThe first to fail was {first.text}\n{first.data.get('traceback', '')}")
        if is_group_failure(error) and (lost := self._lost_members()):
            error.add_note(
                f"\nThis worker failed because the job has lost {', '.join(lost)}, in whose collective it was: "
                "see why that one has ended. Outside of a training loop a loss ends the other workers, too"
            )
        get_error_handler().record_exception(error)
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(EtcdError):
            self.event(
                "error",
                f"worker {self.worker_id}: {type(error).__name__}: {error}"[:500],
                {
                    "worker_id": self.worker_id,
                    "rank": self.formation.rank if self.formation is not None else 0,
                    "traceback": text[-20000:],
                    "at": time.time(),
                },
            )
            self.membership.flush()

    def _lost_members(self) -> list[str]:
        """Members of the round that this worker has formed last whose process is gone."""
        if self.formation is None:
            return []
        members = self.formation.round.members
        with contextlib.suppress(EtcdError):
            self.membership.bury_the_dead(members)
            with contextlib.suppress(TimeoutError, EvictedError):  # buried by whoever was first, so it may take a moment
                self.membership.wait_for(lambda view: set(members) - view.workers.keys() or None, 1.0, "the loss of a worker")
        return [member for member in members if member not in self.membership.view.workers]

    def tell_wait(self, what: str) -> None:
        """Say on this worker's output what it waits for, and since whose failure."""
        waits_for = rounds.waits(self.membership.view).get(self.worker_id) or f"waits for {what}"
        first = self._first_failure()
        log.warning(
            "run %s: worker %s %s%s",
            self.config.run_id,
            self.worker_id,
            waits_for,
            f"; the first to fail was {first.text}" if first is not None else "",
        )

    def _first_failure(self) -> EventRecord | None:
        """What the first of this worker's peers that failed with an error has said."""
        peers = set(self.formation.round.members) - {self.worker_id} if self.formation is not None else set()
        with contextlib.suppress(EtcdError):
            events = self.membership.past_events() if peers else []
            return next((e for e in events if e.kind == "error" and e.data.get("worker_id") in peers), None)
        return None

    # --- while a round lasts -----------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether the current group was cut off because its round has ended for good."""
        return self._severed

    def broken_error(self) -> WorldError:
        """To be raised, and recovered from, where `broken` is found instead of a collective that failed."""
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        """Whether `error` says that this worker's round is broken: to `recover` from, not a mistake of the user's."""
        if isinstance(error, MembershipError | LeftOutError | MismatchError):
            return False
        self._raise_mismatch(error)
        is_loss = is_group_failure(error) or isinstance(error, RoundEndedError)
        # After an abort the default group is gone, and torch raises a ValueError about it.
        is_loss = is_loss or (self.broken and (isinstance(error, RuntimeError) or _has_no_group(error)))
        if is_loss:
            self._last_failure = f"{type(error).__name__}: {error}"[:2000]
        return is_loss

    def compared(self, purpose: Callable[[], Purpose]) -> contextlib.AbstractContextManager[None]:
        """Compare what this worker is about to do with what all others do; collectives within are taken to be part of it.

        Entering raises `MismatchError` if another worker does something else. A worker that is alone compares nothing.
        """
        meeting = self._meeting
        return meeting.compared(purpose()) if meeting is not None else contextlib.nullcontext()

    def all_reach(self, place: str) -> bool:
        """Wait until all workers have come to `place`; False once one of them has gone on without.

        Costs nothing to those who do not come. Each place needs a name of its own in a round.

        Raises:
            RoundEndedError: the round is over. Other workers may have had the answer True before: `recover`, and ask them.
        """
        if self._meeting is None:
            return True
        return self._meeting.all_reach(place, lambda: self.broken, self.config.collective_timeout_s)

    def _current_meeting(self) -> Meeting | None:
        return self._meeting

    def _raise_mismatch(self, error: BaseException | None = None) -> None:
        """Raise what ended the round in place of `error`, which is a consequence of it."""
        if (meeting := self._meeting) is not None:
            self._mismatch = meeting.await_mismatch()
        if self._mismatch is not None and error is not self._mismatch:
            raise self._mismatch from error

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        """Begin to agree on a round to switch to; a collective of all members that overlaps with the next step.

        Args:
            check_every: steps until this worker would like to agree again; the largest of all members' wishes holds.
            wishes: further numbers, as many on all members, to learn the smallest of each; see `wishes`. At most 30, and 8
                more for each member.
            place: number of the next step; must be equal on all members.
        """
        assert self._vote is None
        assert self.formation is not None
        view = self.membership.view
        newest = view.round.number if view.round is not None else 0
        ballot = [newest, -check_every, *wishes]
        self._vote_size = len(ballot)
        if self.formation.size == 1:
            self._vote = ballot
        elif self._meeting is not None:
            purpose = Purpose("the vote between two steps", f"step {place}", shown(sys._getframe()))
            self._vote = self._meeting.vote(purpose, ballot)
        else:
            raise self.broken_error()

    @property
    def owned_sockets(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: copies would hide our death from the others."""
        with self._lock:
            return [self._listener, *self._sockets]

    @property
    def is_voting(self) -> bool:
        return self._vote is not None

    def agreed(self) -> tuple[int | None, int]:
        """The round that all members have seen and shall switch to (None: stay), and the steps until the next vote."""
        assert self._vote is not None
        assert self.formation is not None
        vote, self._vote = self._vote, None
        if isinstance(vote, list):
            ballot = vote
        elif self._meeting is not None:
            ballot = self._meeting.counted(vote, self._vote_size)
        else:
            raise self.broken_error()
        newest, check_every = ballot[0], -ballot[1]
        self.wishes = ballot[2:]
        return (newest if newest > self.formation.round.number else None), check_every

    # --- forming -----------------------------------------------------------------------------------------------------

    def _form(self, target: RoundRecord, hello: bytes) -> Formation:
        rank = target.members.index(self.worker_id)
        with self._lock:
            self._member.number = target.number
            self._known_inodes = set(_inet_sockets().values())
            self._sockets = []
            self._severed = False
            self._member.forming = True
        try:
            deadline = time.monotonic() + self.config.form_timeout_s
            self._next_reach_probe = time.monotonic() + OUT_OF_REACH_S
            # Rank 0 has a connection to its own server, too: one that can be cut off while something waits on it.
            check = functools.partial(self._raise_if_void, target)
            store = self._connect(target, deadline, check)
            rendezvous = PrefixStore(f"round/{target.number}", store)
            rendezvous.set(f"hello/{self.worker_id}", hello.decode())
            hellos = self._await_hellos(target, rendezvous, deadline)
            # Before anyone connects: the others would wait for a member that has gone away again.
            if not self._can_all_meet(target, hellos):
                raise CannotMeetError
            gloo = self._connect_gloo(target, PrefixStore("gloo", rendezvous), deadline, target.members, check)
            self._groups.append(gloo)
            control = None
            if len(target.members) > 1:
                control = self._connect_gloo(target, PrefixStore("meeting", rendezvous), deadline, target.members, check)
                self._groups.append(control)
            with _as_gloo(gloo):
                dist.init_process_group(
                    self.backend,
                    store=PrefixStore("group", rendezvous),
                    rank=rank,
                    world_size=len(target.members),
                    timeout=timedelta(seconds=self.config.collective_timeout_s),
                )
        except BaseException:
            # Others may have formed the round already: they must notice that this worker has not.
            self._sever(target.number, quietly=True)
            raise
        finally:
            with self._lock:
                # Both at once: who cuts the group off in between would find nothing, and not come again.
                self._sockets = [(fd, inode) for fd, inode in _inet_sockets().items() if inode not in self._known_inodes]
                self._member.forming = False
        self._on_view(self.membership.view)  # the round may have ended while its sockets were not known yet
        if control is not None:
            self._meeting = Meeting(
                control,
                rank,
                len(target.members),
                VOTE_ROOM[0] + VOTE_ROOM[1] * len(target.members),
                begun=functools.partial(_num_begun, gloo, "nccl" in self.backend),
                connect=functools.partial(self._connect_briefly, target),
                activity=lambda: self.activity(),
                is_in_step=lambda: self.is_in_step(),
                sever=functools.partial(self._sever, target.number),
            )
        return Formation(target, hellos, rank)

    def _connect_briefly(self, target: RoundRecord) -> Store | None:
        """A further connection to a round's store, which stays when the round is severed; None if there is no answer."""
        with contextlib.suppress(OSError, dist.DistError):
            socket.create_connection((target.store_address, target.store_port), timeout=CONNECT_TIMEOUT_S).close()
            store = TCPStore(
                target.store_address,
                target.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            )
            return PrefixStore(f"round/{target.number}/meeting", store)
        return None

    def _connect(self, target: RoundRecord, deadline: float, check: Callable[[], None]) -> TCPStore:
        while True:
            check()
            # torch's own connect cannot be interrupted, so it is tried only against a port that answers, and not for long:
            # the process may die just then.
            with contextlib.suppress(OSError, dist.DistError):
                socket.create_connection((target.store_address, target.store_port), timeout=1.0).close()
                store = TCPStore(
                    target.store_address,
                    target.store_port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                )
                store.set_timeout(timedelta(seconds=self.config.form_timeout_s))
                return store
            self.membership.bury_the_dead(target.members[:1])
            self._raise_if_out_of_reach(target)
            if time.monotonic() > deadline:
                raise self._too_late(
                    target,
                    f"rank 0 of round {target.number} ({target.members[0]}) does not answer at "
                    f"{target.store_address}:{target.store_port}",
                )
            self._pause(0.02)

    def _can_all_meet(self, target: RoundRecord, hellos: Mapping[str, bytes]) -> bool:
        try:
            return self._can_meet(hellos)
        except ValueError as error:
            # The store of a round takes writes from whoever reaches its port. That of the next round is another one.
            log.warning("run %s: round %d is given up: %s", self.config.run_id, target.number, error)
            return False

    def _await_hellos(self, target: RoundRecord, store: Store, deadline: float) -> dict[str, bytes]:
        missing = list(target.members)
        next_probe = time.monotonic() + 0.1
        while True:
            missing = [w for w in missing if not store.check([f"hello/{w}"])]
            if not missing:
                return {w: store.get(f"hello/{w}") for w in target.members}
            self._raise_if_void(target)
            if time.monotonic() > next_probe:
                next_probe = time.monotonic() + 0.1
                self.membership.bury_the_dead(missing)
            self._raise_if_out_of_reach(target)
            if time.monotonic() > deadline:
                raise self._too_late(
                    target,
                    f"round {target.number}: waited {self.config.form_timeout_s:.0f} s for {', '.join(missing)} to arrive",
                )
            # Not the store's own wait: it cannot be interrupted, and says on stderr every time that it ran out.
            self._pause(0.003)

    def _connect_gloo(
        self, target: RoundRecord, store: Store, deadline: float, workers: Sequence[str], check: Callable[[], None]
    ) -> dist.ProcessGroupGloo:
        """Gloo's connections among the members of a round, or others.

        Gloo waits for a member that has died meanwhile as long as for a slow one, several times the timeout of a collective,
        and where it waits for the other to connect there is no socket to shut down. So it waits in a thread of its own, which
        is left behind when the round has become void.
        """
        connected: Future[dist.ProcessGroupGloo] = Future()

        def connect() -> None:
            timeout = timedelta(seconds=self.config.collective_timeout_s)
            try:
                rank = workers.index(self.worker_id)
                connected.set_result(dist.ProcessGroupGloo(store, rank, len(workers), timeout))
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name="dlrover-connect", daemon=True).start()
        next_probe = time.monotonic() + 0.1
        while not wait([connected], timeout=0.02).done:
            check()
            if time.monotonic() > next_probe:
                next_probe = time.monotonic() + 0.1
                self.membership.bury_the_dead(workers)
            self._raise_if_out_of_reach(target)
            if time.monotonic() > deadline:
                raise self._too_late(target, f"round {target.number}: the workers could not connect to each other")
        return connected.result()

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        """A further group, beside that of a round, whose ranks are `workers`; to be called by all of them.

        They are the members of the round that this worker has formed last, some of them, or these and workers that the round
        goes on without. The group ends with the round: when that breaks, whatever waits in the group fails.

        Args:
            target: the round.
            name: of the group, another one each time.

        Raises:
            RoundEndedError: the round has broken, or one of `workers` has gone.
            UnreachableError: they could not connect in time.
        """
        deadline = time.monotonic() + self.config.form_timeout_s
        self._next_reach_probe = time.monotonic() + OUT_OF_REACH_S
        known = set(_inet_sockets().values())

        def raise_if_over() -> None:
            view = self.membership.view
            if self._member.must_cut_off(view, target.number, False, self.membership.evicted):
                raise RoundEndedError(f"round {target.number} ended while {name} was being connected")
            if gone := [w for w in workers if w not in view.workers]:
                raise RoundEndedError(f"round {target.number}: {', '.join(gone)} ended while {name} was being connected")

        store = PrefixStore(f"round/{target.number}/{name}", self._connect(target, deadline, raise_if_over))
        group = self._connect_gloo(target, store, deadline, workers, raise_if_over)
        self._groups.append(group)
        with self._lock:
            self._sockets += [(fd, inode) for fd, inode in _inet_sockets().items() if inode not in known]
        raise_if_over()  # it may have ended while the sockets were not known yet
        return group

    def _too_late(self, target: RoundRecord, text: str) -> UnreachableError:
        """Names those that are out of reach from here; who merely is late, as in a long validation run, is not."""
        return UnreachableError(text, self._out_of_reach(target.members))

    def _raise_if_out_of_reach(self, target: RoundRecord) -> None:
        """Said within seconds: the others wait for the round to form, too."""
        if time.monotonic() > self._next_reach_probe:
            self._next_reach_probe = time.monotonic() + OUT_OF_REACH_S
            if silent := self._out_of_reach(target.members):
                raise UnreachableError(f"round {target.number}: {', '.join(silent)} cannot be reached from here", silent)

    def _out_of_reach(self, members: Sequence[str], timeout_s: float = 1.0) -> list[str]:
        workers = self.membership.view.workers
        return silent_workers((workers[w] for w in members if w in workers and w != self.worker_id), timeout_s)

    def _raise_if_void(self, target: RoundRecord) -> None:
        if self._member.will_never_form(self.membership.view, target.number):
            raise VoidRoundError
        if self.membership.evicted:
            raise EvictedError(f"worker {self.worker_id} was removed from the job while forming round {target.number}")

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            self.membership.wait_for(lambda view: None, seconds, "nothing")

    # --- tearing down ------------------------------------------------------------------------------------------------

    def _destroy(self, is_last: bool = False) -> None:
        self._vote = None
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self.wishes = []  # they were said in a round that is over
        # This thread must not be the last one to have a group: see `waits`. Since this round was formed nobody has those of the
        # one before any more, as models were wrapped anew.
        if dist.is_initialized() and not is_last:
            self._are_unused.set()
            self._are_unused = threading.Event()
            self._dropping, self._keeping = self._keeping, []
        former, self._groups = self._groups, []
        self._keeping.append(waits.let_go(former, self._are_unused))
        if not dist.is_initialized():
            return
        if "nccl" in self.backend and self._severed:
            dist.distributed_c10d._abort_process_group()
            return
        # Other processes, such as forked loader workers, may hold copies of the sockets; closing ours would then go
        # unnoticed by the peers, shutting them down does not.
        self._sever(self._member.number, quietly=True)
        dist.destroy_process_group()

    def _round_of_waits(self) -> tuple[int, bool]:
        self._raise_mismatch()
        return self._member.number, self._severed and time.monotonic() - self._severed_at > AWAKE_S

    def _on_view(self, view: View) -> None:
        """Membership thread: cut the group off when it will complete no more collectives."""
        with self._lock:
            number, forming = self._member.number, self._member.forming
        if number == 0:
            return
        self._member.note(view)
        must_cut_off = self._member.must_cut_off(view, number, forming, self.membership.evicted)
        # While it is being formed, again and again: what the main thread waits on may have been opened after the last time.
        if must_cut_off and (forming or not self._severed):
            self._sever(number)

    def _on_tick(self) -> None:
        """Membership thread: see that the next rank's process lives and can be reached.

        Its death also breaks our collectives, but not while we compute or validate, and with NCCL not by itself.
        """
        formation = self.formation
        if formation is None or self._member.forming or formation.size == 1 or time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + PROBE_INTERVAL_S
        neighbour = [formation.round.members[(formation.rank + 1) % formation.size]]
        self.membership.bury_the_dead(neighbour)
        if not self._out_of_reach(neighbour, PROBE_INTERVAL_S):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > OUT_OF_REACH_S:
            # Collectives would wait until their timeout. In the next round both sides say whom they do not reach.
            self._silent_since = None
            self._sever(formation.round.number)

    def _sever(self, number: int, quietly: bool = False) -> None:
        """Shut down the connections of round `number`, unless the main thread has gone on to another round meanwhile."""
        with self._lock:
            if number != self._member.number:
                return
            if not quietly and not self._severed:
                self._severed, self._severed_at = True, time.monotonic()
            if self._member.forming:
                doomed = [(fd, inode) for fd, inode in _inet_sockets().items() if inode not in self._known_inodes]
            else:
                doomed, self._sockets = self._sockets, []
            etcd_ports = {port for _, port in parse_endpoints(self.config.etcd.endpoints)}
            for fd, inode in doomed:
                _shut_down(fd, inode, etcd_ports, self._server.port)
            if not quietly and "nccl" in self.backend and dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group()


class _Means:
    """What `Member` asks for, done by blocking the worker's thread."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def worker_id(self) -> str:
        return self._world.membership.worker_id

    @property
    def view(self) -> View:
        return self._world.membership.view

    async def until(
        self, found: Callable[[View], T | None], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> T:
        membership = self._world.membership
        last_probe = time.monotonic()
        news_at = last_probe + NEWS_S

        def tick() -> None:
            nonlocal last_probe, news_at
            if time.monotonic() > news_at:
                news_at = float("inf")
                self._world.tell_wait(what)
            if probe and time.monotonic() - last_probe > 0.05:
                last_probe = time.monotonic()
                membership.bury_the_dead(probe)

        try:
            limit_s = timeout_s or self._world.config.wait_timeout_s
            return membership.wait_for(found, limit_s, what, tick, membership.is_being_staffed)
        except TimeoutError as error:
            raise TooLateError(str(error)) from error

    async def write(
        self, state: WorkerState, number: int, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        # While etcd is away a change of membership waits.
        deadline = time.monotonic() + self._world.config.wait_timeout_s
        while True:
            try:
                self._world.membership.update(state, number, fingerprint, unreachable)
                return
            except EtcdUnavailableError as error:
                if time.monotonic() > deadline:
                    raise WorldError(f"worker {self._world.worker_id} could not say that it is {state}: {error}") from error
                time.sleep(FULL_PAUSE_S)  # a full etcd refuses at once

    async def bury_the_dead(self, workers: Sequence[str]) -> None:
        self._world.membership.bury_the_dead(workers)

    async def out_of_reach(self, workers: Sequence[str]) -> list[str]:
        return self._world._out_of_reach(workers)

    async def form(self, target: RoundRecord, hello: bytes) -> Formation:
        try:
            formation = self._world._form(target, hello)
        except EvictedError:
            raise
        except (VoidRoundError, CannotMeetError, RuntimeError) as error:
            log.info(
                "run %s: round %d did not form: %s",
                self._world.config.run_id,
                target.number,
                error or type(error).__doc__,
            )
            raise
        self._world.membership.reached.update(target.members)
        return formation

    async def destroy(self) -> None:
        self._world._destroy()


class _LoneWorld(World):
    """The world of a script that was started by hand: one worker, no etcd, the same calls."""

    def __init__(self) -> None:
        self.backend = "gloo"
        self._left_state = None
        self._formation: Formation | None = None

    @property
    def worker_id(self) -> str:
        return "alone"

    def start(self) -> Formation:
        round_ = RoundRecord(1, [self.worker_id], "start with 1 worker", "start", planned=True)
        # A group of one: the user's collectives work as anywhere else.
        dist.init_process_group(self.backend, store=HashStore(), rank=0, world_size=1)
        self._formation = Formation(round_, {self.worker_id: b""}, 0)
        return self._formation

    @property
    def formation(self) -> Formation | None:
        return self._formation

    @property
    def broken(self) -> bool:
        return False

    @property
    def is_voting(self) -> bool:
        return False

    def compared(self, purpose: Callable[[], Purpose]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        pass  # there is nobody to agree with

    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None:
        pass

    def is_failure(self, error: BaseException) -> bool:
        return False

    def finish(self, num_steps: int, fit: int = 1) -> None:
        pass

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def listen_for_sigterm(self) -> None:
        pass

    def event(self, kind: str, text: str, data: dict[str, Any]) -> None:
        pass

    def report_error(self, error: BaseException) -> None:
        pass


@contextlib.contextmanager
def _as_gloo(connected: dist.ProcessGroupGloo) -> Iterator[None]:
    """Let `init_process_group` take a gloo backend that is connected already instead of making its own."""
    original = dist.distributed_c10d.ProcessGroupGloo
    handed_over = [connected]  # emptied: the classes below live until they are collected, the group must not

    class Meta(type):
        def __call__(cls, *args: object, **kwargs: object) -> dist.ProcessGroupGloo:
            return handed_over.pop()

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Connected(metaclass=Meta):
        pass

    dist.distributed_c10d.ProcessGroupGloo = Connected  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        handed_over.clear()
        dist.distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


def end_with_agent() -> None:
    """Let this process receive SIGTERM when its agent ends: nobody would restart it, or end it with its node.

    Raises:
        SystemExit: the agent has ended already.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    agent = os.environ.get("DLROVER_AGENT_PID", "")
    if not agent:
        return
    try:
        has_ended = psutil.Process(int(agent)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        has_ended = True
    if has_ended:
        # While this process was importing torch: too early for the signal.
        raise SystemExit(f"the elastic agent of this worker, process {agent}, has ended: so does the worker")


def _with_gloo(backend: str) -> str:
    """The backend with gloo for tensors on the CPU: votes and the state of joiners travel through it."""
    if backend == "nccl":
        return "cpu:gloo,cuda:nccl"
    if backend != "gloo" and "cpu:gloo" not in backend.split(","):
        raise ValueError(
            f"process groups of the backend {backend!r} have no gloo for tensors on the CPU, through which workers vote and "
            "hand over their state: use 'gloo', 'nccl', or 'cpu:gloo' beside another one, such as 'cpu:gloo,cuda:nccl'"
        )
    return backend


def _num_begun(group: Any, has_nccl: bool) -> int:
    """Collectives that this worker has begun in its round's group, whoever began them."""
    number: int = group._get_sequence_number_for_group()
    if has_nccl and (default := dist.group.WORLD) is not None:
        with contextlib.suppress(RuntimeError):  # not used yet
            nccl: Any = default._get_backend(torch.device("cuda"))
            number += nccl._get_sequence_number_for_group()
    return number


def _has_no_group(error: BaseException) -> bool:
    return isinstance(error, ValueError) and "Default process group has not been initialized" in str(error)


@functools.cache
def _protect_forks() -> None:
    """Keep forked children, such as loader workers, from collecting process groups that their parent has left behind.

    A group's destructor waits for its threads, which do not exist in the child: it would hang there for good.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _own_address(endpoints: str) -> str:
    """The address of this host on the way to etcd: the other workers come the same way.

    Raises:
        EtcdUnavailableError: none of the endpoints can be reached.
    """
    problems = []
    for host, port in parse_endpoints(endpoints):
        try:
            with socket.create_connection((host, port), timeout=5.0) as probe:
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            problems.append(f"{host}:{port}: {error}")
    raise EtcdUnavailableError(f"no endpoint of etcd can be reached from this host ({'; '.join(problems)})")


def _use_interface_of(address: str) -> None:
    """Let gloo use the interface that `address` belongs to, unless the user chose one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _inet_sockets() -> dict[int, int]:
    """Connected or listening sockets of this process: inode by file descriptor."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(entry.name)] = status.st_ino
    return found


def _shut_down(fd: int, inode: int, spared_peer_ports: set[int], store_port: int) -> None:
    try:
        if os.stat(fd).st_ino != inode:
            return  # the descriptor belongs to something else by now
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            # A listening gloo socket must stay: shutting it down ends the process (uncaught in gloo's listener).
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return
            if sock.getpeername()[1] in spared_peer_ports:
                return
            # Others may be connected to our store already for a newer round than the one that is cut off.
            if sock.getsockname()[1] == store_port:
                return
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected, or closed meanwhile
