"""Failures of a round: tell a lost peer from a script error, report it, leave on request, and undo a growth that fails."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_dlrover.codec import RecordError
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.desync import CollectiveMonitor, MismatchError
from lightning_dlrover.rdzv.etcd.types import EtcdError, EtcdUnavailableError, LeaseLostError
from lightning_dlrover.rdzv.group.forming import FailureDetector
from lightning_dlrover.rdzv.job.events import FitFinished, GrowthFailed, StateClosed, WorkerFailed, events_of
from lightning_dlrover.rdzv.job.records import JobRecord, NodesRecord, PlanRecord
from lightning_dlrover.rdzv.membership import rounds
from lightning_dlrover.rdzv.membership.member import (
    EvictedError,
    Formation,
    HasFormation,
    LeftOutError,
    MembershipError,
    RoundEndedError,
    WorldError,
)
from lightning_dlrover.rdzv.membership.membership import Membership
from lightning_dlrover.rdzv.membership.rounds import dead_workers
from lightning_dlrover.rdzv.membership.worker_records import dismiss
from lightning_dlrover.rdzv.transport.process_groups import RoundSockets

MAX_ATTEMPTS = 8  # recoveries at one place in the program before its error is attributed to the user's code


def is_group_failure(error: BaseException) -> bool:
    """Whether a lost peer, and not the user's own code, made a collective raise `error`.

    Example:
        >>> is_group_failure(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
        True
        >>> is_group_failure(ValueError("batch is empty"))
        False
    """
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
"""Texts of errors raised by collectives when a peer is gone."""

_MISTAKES = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "Duplicate GPU detected")
"""Texts of NCCL's errors that would recur in the next round, such as two workers on one GPU."""


class Failures:
    """Classify errors that end a worker's rounds as recoverable or not, and limit recoveries."""

    def __init__(self, sockets: RoundSockets, monitor: Callable[[], CollectiveMonitor | None]) -> None:
        self.mismatch: MismatchError | None = None
        self._sockets = sockets
        self._monitor = monitor
        self._attempts: tuple[bytes, int] = (b"", 0)  # hello, and the number of recoveries with it
        self._last_failure = ""  # text of the newest error that was attributed to a loss

    def is_failure(self, error: BaseException) -> bool:
        """See `World.is_failure`."""
        if isinstance(error, MembershipError | LeftOutError | MismatchError):
            return False
        self.raise_mismatch(error)
        is_loss = is_group_failure(error) or isinstance(error, RoundEndedError)
        is_loss = is_loss or (self._sockets.are_severed and _may_follow_from_an_abort(error))
        if is_loss:
            self._last_failure = f"{type(error).__name__}: {error}"[:2000]
        return is_loss

    def raise_mismatch(self, error: BaseException | None = None) -> None:
        """Raise the mismatch that has ended the round, if any, in place of `error`, its consequence."""
        if (monitor := self._monitor()) is not None:
            self.mismatch = monitor.await_mismatch()
        if self.mismatch is not None and error is not self.mismatch:
            raise self.mismatch from error

    def count_attempt(self, hello: bytes) -> None:
        """Count one more recovery at the place that `hello` names.

        Raises:
            WorldError: there were too many recoveries at this place.
        """
        self._attempts = (hello, self._attempts[1] + 1 if self._attempts[0] == hello else 1)
        if self._attempts[1] > MAX_ATTEMPTS:
            raise WorldError(
                f"collectives failed {MAX_ATTEMPTS} times in a row at {hello.decode()}; giving up. "
                f"The last error was: {self._last_failure or 'unknown'}"
            )


def _may_follow_from_an_abort(error: BaseException) -> bool:
    """Whether an error may come from the groups of a round that was ended while code used them."""
    if isinstance(error, torch.OutOfMemoryError):
        return False  # it would come again in the next round
    if isinstance(error, RuntimeError):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # Without its groups torch raises ValueError, KeyError, TypeError or AssertionError, whichever table it looks into first.
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed")


log = logging.getLogger(__name__)

MANY = 100  # members of a round above which they do not all read each other's records for a text


class Reports:
    """Report why a worker waits or fails: in its output, to its agent, and in the job's history.

    Args:
        worker: has the round that this worker formed last.
    """

    def __init__(self, membership: Membership, run_id: str, worker: HasFormation) -> None:
        self._membership = membership
        self._run_id = run_id
        self._worker = worker

    def error(self, error: BaseException) -> None:
        """See `World.report_error`."""
        if isinstance(error, WorldError | MembershipError) and (first := self._first_failure()) is not None:
            text, failed = first
            _add_note(error, f"\nThe first to fail was {text.partition(': ')[0]}:\n{failed.traceback}")
        if is_group_failure(error) and (lost := self._lost_members()):
            _add_note(
                error,
                f"\nThis worker failed because the job has lost {', '.join(lost)} in the middle of a collective: "
                "find out why that worker ended. Outside of a training loop a loss ends the other workers, too",
            )
        get_error_handler().record_exception(error)
        text = "".join(traceback.format_exception(error))
        worker_id, formation = self._membership.worker_id, self._worker.formation
        with contextlib.suppress(EtcdError):
            failed = WorkerFailed(worker_id, formation.rank if formation is not None else 0, text[-20000:], time.time())
            self._membership.shared.event(failed, f"worker {worker_id}: {type(error).__name__}: {error}"[:500])
            self._membership.shared.outbox.write()

    def wait(self, what: str) -> None:
        """Log the reason for this worker's wait, and the failure that led to it."""
        worker_id = self._membership.worker_id
        waits_for = ""
        with contextlib.suppress(EtcdError):
            if (round_ := self._membership.view.round) is None or len(round_.members) <= MANY:
                waits_for = rounds.waits(self._membership.all_records()).get(worker_id, "")
        waits_for = waits_for or f"waits for {what}"
        first = self._first_failure()
        log.warning(
            "run %s: worker %s: %s%s",
            self._run_id,
            worker_id,
            waits_for,
            f"; the first to fail was {first[0]}" if first is not None else "",
        )

    def _lost_members(self) -> list[str]:
        """Return dead members of the round that this worker formed last."""
        if (formation := self._worker.formation) is None:
            return []
        members = formation.round.members
        with contextlib.suppress(EtcdError):
            FailureDetector(self._membership, members, 0.0).look()
            with contextlib.suppress(TimeoutError, EvictedError):  # another worker may be evicting them, which takes a moment
                number = formation.round.number
                self._membership.wait_for(
                    lambda view: True if view.lost or (view.round and view.round.number > number) else None,
                    1.0,
                    "the loss of a worker",
                )
            if len(members) <= MANY:
                present = self._membership.workers.present(members)
                return [member for member in members if member not in present]
        return [member for member in members if member in self._membership.view.lost]

    def _first_failure(self) -> tuple[str, WorkerFailed] | None:
        """Return text and report of the first peer that failed with an error."""
        formation = self._worker.formation
        if formation is not None and formation.size > MANY and formation.rank != 0:
            return None  # rank 0 reads the history: a thousand workers that wait for one would keep etcd from their leases
        peers = set(formation.round.members) - {self._membership.worker_id} if formation is not None else set()
        with contextlib.suppress(EtcdError):
            events = self._membership.shared.journal.events() if peers else []
            return next(((r.text, failed) for r, failed in events_of(events, WorkerFailed) if failed.worker_id in peers), None)
        return None


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 prints no notes
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


class JobStanding:
    """The record of one worker's job, as this worker reads and writes it.

    Args:
        wait_timeout_s: seconds to wait until a write shows up in the view.
        worker: has the round that this worker formed last.

    Attributes:
        is_recorded: False once this worker has finished and etcd could not record it at once.
    """

    def __init__(self, membership: Membership, run_id: str, wait_timeout_s: float, worker: HasFormation) -> None:
        self._membership = membership
        self._journal = membership.shared.journal
        self._run_id = run_id
        self._wait_timeout_s = wait_timeout_s
        self._worker = worker
        self.is_recorded = True
        self._has_finished = False  # True once this worker itself has recorded the end
        self._has_stepped = False  # True once this worker knows that the job has made a step
        self._has_ended = False  # True once this worker has written or read that training is complete
        self._announcement: tuple[str, int, str] | None = None  # fingerprint, global batch and data, until the record has them

    # --- admission ---------------------------------------------------------------------------------------------------

    def check_joiner(self, fingerprint: str) -> None:
        """Raise a `MembershipError` if a worker with this model fingerprint cannot join."""
        job = self._membership.view.job
        if job is not None and job.fingerprint and job.fingerprint != fingerprint:
            raise MembershipError(
                f"run {self._run_id!r}: this worker's model has other parameter names or shapes than the job's "
                f"(fingerprint {fingerprint}, the job has {job.fingerprint}); start it with the same script and arguments. "
                f"{self.consequence_of_refusal()}"
            )
        if job is not None and job.unjoinable:
            raise MembershipError(
                f"run {self._run_id!r}: no worker can join this job, as its state cannot be handed over: "
                f"{job.unjoinable}. The job continues without this worker"
            )

    def close_to_joiners(self, reason: str) -> None:
        """Record why no worker can join; an empty reason opens the job again. Workers that train are not affected."""
        job = self._membership.view.job
        if job is None or job.unjoinable == reason[:1000]:
            return
        try:
            self._membership.shared.update_job(lambda job: dataclasses.replace(job, unjoinable=reason[:1000]))
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not record that no worker can join: %s", self._run_id, error)
        if reason:
            self._membership.shared.event(StateClosed(reason[:1000]), f"no worker can join: {reason}"[:500])

    def consequence_of_refusal(self) -> str:
        """Describe how a job that refuses this worker continues, and the remedy if no worker trains it any more."""
        try:
            view = self._membership.all_records()
        except EtcdError:
            return "Whether the job continues without it is unknown, as etcd does not answer: see `dlrover status` later"
        members = [view.workers[worker] for worker in view.survivors]
        if len(dead_workers(members)) < len(members):  # records outlast their workers by a few seconds
            return "The job continues without it"
        weights = ""
        with contextlib.suppress(EtcdError, RecordError):  # without the record the remedy is the same
            if (record := self._membership.shared.newest_checkpoint()) is not None:
                weights = f"; to keep what was learned, give its fit ckpt_path={record.path!r}"
        return (
            f"All workers of job {self._run_id!r} ended before it was done. Under its name it continues with the same model "
            f"and data. If these were changed on purpose, start a new job under another --rdzv-id{weights}"
        )

    def announce(self, fingerprint: str, global_batch_size: int, data: str) -> None:
        """See `World.announce`."""
        self._announcement = (fingerprint, global_batch_size, data)
        self.announce_as_first()

    def announce_as_first(self) -> None:
        """Write a pending announcement, if this worker is rank 0."""
        formation = self._worker.formation
        if self._announcement is None or formation is None or formation.rank != 0:
            return
        fingerprint, global_batch_size, data = self._announcement

        def announced(job: JobRecord) -> JobRecord:
            if job.phase == "starting":
                return dataclasses.replace(
                    job, phase="training", fingerprint=fingerprint, global_batch_size=global_batch_size, data=data
                )
            # Workers that restart a job after the loss of all may have other data. Data that the script of a finished job
            # trains on later does not matter to joiners.
            return dataclasses.replace(job, data=data) if job.phase == "training" and job.data != data else job

        self._membership.shared.record(f"run {self._run_id}: the start of the training", announced)
        self._announcement = None

    def step_made(self) -> None:
        """Record the job's first step, if this worker is rank 0. A failure before it is one of the script's start."""
        formation, job = self._worker.formation, self._membership.view.job
        if self._has_stepped or formation is None or formation.rank != 0:
            return
        self._has_stepped = True
        if job is None or not job.has_stepped:
            self._membership.shared.record(
                f"run {self._run_id}: the first step", lambda job: dataclasses.replace(job, has_stepped=True)
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def has_finished(self) -> bool:
        job = self._membership.view.job
        return self._has_finished or (job is not None and job.phase == "finished")

    def ask_whether_finished(self) -> bool:
        """Read from etcd whether training is complete, later `fit` calls included; the view lags by the delay of a watch.

        While etcd is unavailable, the view decides.
        """
        if not self._has_ended:
            job = self._membership.view.job
            with contextlib.suppress(EtcdError, RecordError):
                job = self._journal.get(JobRecord, self._membership.keys.job).record
            self._has_ended = job is not None and job.phase == "finished" and not job.unfinished_fit
        return self._has_ended

    def ask_whether_cancelled(self) -> bool:
        """Read from etcd whether the whole job was asked to end for good; False while etcd is unavailable."""
        with contextlib.suppress(EtcdError, RecordError):
            nodes = self._journal.get(NodesRecord, self._membership.keys.nodes).record
            return nodes is not None and bool(nodes.stop)
        return False

    def has_finished_fit(self, number: int) -> bool:
        """Whether a worker has reached the end of this `fit` of the script, from 1; others may have begun the next one."""
        job = self._membership.view.job
        return job is not None and job.phase == "finished" and job.fits_finished >= number

    def begin_fit(self, number: int) -> None:
        """Begin another `fit` of the script. The job survives losses again, but admits no more joiners.

        Args:
            number: number of this `fit` in the script, from 2.
        """
        self._has_ended = False
        try:
            self._membership.shared.update_job(lambda job: dataclasses.replace(job, fits_begun=max(job.fits_begun, number)))
            # A recovery that still saw the end of the former `fit` would treat the job as finished.
            self._membership.wait_for(
                lambda view: True if view.job is not None and view.job.fits_begun >= number else None,
                self._wait_timeout_s,
                f"etcd to show that fit number {number} has begun",
            )
        except (EtcdError, RecordError, TimeoutError) as error:
            log.warning("run %s: could not record that fit number %d begins: %s", self._run_id, number, error)

    def finish(self, num_steps: int, fit: int) -> None:
        """See `World.finish`."""
        formation = self._worker.formation
        try:
            self.is_recorded = self._membership.shared.record(
                f"run {self._run_id}: the end of the training",
                lambda job: dataclasses.replace(job, phase="finished", fits_finished=max(job.fits_finished, fit)),
            )
            self._has_finished = self._has_ended = True  # the view may lag behind when this process ends
            if formation is not None and formation.rank == 0:
                self._membership.shared.event(FitFinished(num_steps), f"finished after {counted(num_steps, 'step')}")
                if self.is_recorded:
                    self._membership.shared.outbox.write()
        except (EtcdError, RecordError) as error:
            # The work is done. Garbage in etcd must not turn it into a failure.
            log.warning("run %s: could not mark the job as finished: %s", self._run_id, error)


AGENT_GRACE_S = 30.0
"""Seconds from SIGTERM until torchrun kills a worker. Without its agent, a worker that cannot hand over ends itself by then."""


class DrainOnSigterm:
    """Make SIGTERM drain this worker, in addition to the script's own handler. A drained worker hands over and leaves.

    Args:
        wait_timeout_s: limit on trying to write the request; `AGENT_GRACE_S` if the agent has ended.
        agent_pid: process id of the agent; 0: unknown.
    """

    def __init__(self, membership: Membership, wait_timeout_s: float, agent_pid: int = 0) -> None:
        self._membership = membership
        self._wait_timeout_s = wait_timeout_s
        self._agent_pid = agent_pid
        self._pid = os.getpid()
        self._of_script: Any = None  # the script's handler; no function if it has none
        self._is_running = False
        self._is_listening = False
        self.deadline: float | None = None  # `AGENT_GRACE_S` after the first signal, seconds since the epoch

    def listen(self) -> None:
        """Take the place of the signal's handler, which is called, too. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._is_listening = True
            self.keep()

    def keep(self) -> None:
        """Listen again if the script has replaced the handler. Call it from the main thread, now and then."""
        if self._is_listening and (found := signal.getsignal(signal.SIGTERM)) != self._handle:
            self._of_script = found
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._is_running:
            return  # the script's handler has called the one that it replaced
        is_worker = os.getpid() == self._pid
        if is_worker:
            self.deadline = self.deadline or time.time() + AGENT_GRACE_S
            # A handler must not wait for etcd: the main thread may hold a lock that the client needs.
            threading.Thread(target=self._leave, name="dlrover-drain", daemon=True).start()
        if callable(self._of_script):
            self._is_running = True
            try:
                self._of_script(signum, frame)
            finally:
                self._is_running = False
        elif not is_worker:  # a process that the worker has forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self) -> None:
        # While etcd is unavailable training continues, and a change of membership waits.
        membership = self._membership
        began, is_explained = time.monotonic(), False
        deadline = began + self._wait_timeout_s
        while not membership.own.evicted:
            try:
                membership.own.drain("the worker received SIGTERM")
                return
            except (EtcdUnavailableError, LeaseLostError) as error:
                problem: EtcdError = error
            except EtcdError as error:
                problem, deadline = error, 0.0
            # An agent that is signalled twice, as by the threads of a killed parent, ends without killing its worker.
            if time.monotonic() > (min(deadline, began + AGENT_GRACE_S) if _has_ended(self._agent_pid) else deadline):
                # The request cannot be written, so no round would ever release this worker. The others will detect its end.
                log.warning("worker %s exits now, because it cannot announce that it leaves: %s", membership.worker_id, problem)
                os._exit(128 + signal.SIGTERM)
            if not is_explained and isinstance(problem, EtcdUnavailableError):
                is_explained = True
                log.warning(
                    "worker %s was asked to leave (SIGTERM), and cannot hand over because etcd does not answer. It continues "
                    "until etcd is back, or until its agent kills it, which torchrun does after 30 s. If no other worker "
                    "remains, start the job again with the newest checkpoint (trainer.fit(ckpt_path=...)): %s",
                    membership.worker_id,
                    problem,
                )
            time.sleep(0.1)


def end_with_agent(agent_pid: int) -> None:
    """Make this process receive SIGTERM when its agent ends: no other process would restart it, or end it with its node.

    Args:
        agent_pid: process id of the agent; 0: unknown.

    Raises:
        SystemExit: the agent has already ended.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if _has_ended(agent_pid):
        # The agent ended while this process was importing torch, too early for the signal.
        raise SystemExit(f"the elastic agent of this worker, process {agent_pid}, has ended: so does the worker")


def _has_ended(agent_pid: int) -> bool:
    """Return whether the agent is known and has ended."""
    if not agent_pid:
        return False
    try:
        return bool(psutil.Process(agent_pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


TRIAL_STEPS = 20  # steps after a growth within which an error of the script undoes it
MAX_CHARS = 300  # maximum length of a recorded reason


@dataclasses.dataclass
class _Growth:
    joiners: list[str]
    first_step: int | None = None  # first step after it


class Growth:
    """Undo a growth after which the script fails.

    A script may be right with n workers and wrong with more: it gathers shares of one size, or a share has a single sample,
    or a joiner's host is broken. A job that has trained must not end by that. So for `TRIAL_STEPS` steps after workers have
    joined, an error of the script is attributed to them: they are dismissed, and the others form the next round without them
    and repeat the step. If it fails again, the growth before is undone, too, if it is still open. An error without any open
    growth is the script's own.

    Each worker runs this in its own main thread. Several may find the failure; all of them write the same.
    """

    def __init__(self, membership: Membership, run_id: str) -> None:
        self._membership = membership
        self._run_id = run_id
        self._open: list[_Growth] = []  # oldest first
        self._size = self._round = 0  # size and number of the newest round
        self._step = 0  # next step, in this worker's view
        self._failed: list[int] = []  # world sizes at which the present step has failed, until it succeeds
        self._failed_step = 0

    def formed(self, formation: Formation) -> None:
        """Note that a round was formed."""
        members, hellos = formation.round.members, formation.hellos
        self._size, self._round = len(members), formation.round.number
        if formation.round.kind in ("grow", "replace"):
            self._open.append(_Growth([w for w in members if not hellos.get(w)]))  # only workers without the state send none
        for growth in self._open:
            growth.joiners = [worker for worker in growth.joiners if worker in members]
        self._open = [growth for growth in self._open if growth.joiners]

    def step_begins(self, number: int) -> None:
        """Note the number of the next step; called before some of the steps."""
        self._step = number
        for growth in self._open:
            growth.first_step = number if growth.first_step is None else growth.first_step
        self._open = [each for each in self._open if each.first_step is None or number - each.first_step < TRIAL_STEPS]
        if number > self._failed_step:
            self._failed = []

    def undo(self, error: BaseException) -> bool:
        """Dismiss the newest joiners because of an error in a step. Return False if it is the script's own.

        If this returns True, the caller has to recover, as after a loss.
        """
        job = self._membership.view.job
        if not self._open or self._former < (job.min_workers if job is not None else 1):
            self._acquit()
            return False
        reason = self._reason(error)
        # Indented, so that it is not mistaken for the error that has ended this process.
        trace = textwrap.indent("".join(traceback.format_exception(error)), "  | ")
        log.error("run %s: %s; the job goes back to %s\n%s", self._run_id, reason, counted(self._former, "worker"), trace)
        if not self._try_to_record(reason):
            return False
        self._failed.append(self._size)
        self._failed_step = self._step
        return True

    def ends_by(self, error: BaseException) -> None:
        """Keep the job from another growth to this size if this worker, a joiner, is about to end by an error."""
        if self._open and self._membership.worker_id in self._open[-1].joiners:
            self._try_to_record(self._reason(error))

    @property
    def _former(self) -> int:
        return self._size - len(self._open[-1].joiners)

    def _reason(self, error: BaseException) -> str:
        text = f"{counted(self._size, 'worker')} failed where {self._former} had trained: {type(error).__name__}: {error}"
        return " ".join(text.split())[:MAX_CHARS]

    def _try_to_record(self, reason: str) -> bool:
        try:
            self._record(reason)
        except (EtcdError, RecordError, MembershipError) as trouble:
            log.error("run %s: the growth cannot be undone, because etcd did not record it: %s", self._run_id, trouble)
            return False
        return True

    def _record(self, reason: str) -> None:
        shared, size, former = self._membership.shared, str(self._size), self._former
        is_first = False

        def failed(job: JobRecord) -> JobRecord:
            nonlocal is_first
            is_first = size not in job.failed_sizes
            return dataclasses.replace(job, failed_sizes={**job.failed_sizes, size: reason}) if is_first else job

        def smaller(plan: PlanRecord | None) -> PlanRecord | None:
            if plan is None or plan.num_workers <= former:
                return None
            return dataclasses.replace(plan, num_workers=former, reason=reason, created_at=time.time())

        shared.update_job(failed)  # first: no growth to this size may come in between
        for worker in self._open[-1].joiners:
            dismiss(shared.journal, worker, self._round, reason)
        shared.journal.swap(PlanRecord, shared.journal.keys.plan, smaller)
        if is_first:
            shared.event(GrowthFailed(self._size, former, self._membership.worker_id, reason), f"goes back: {reason}")

    def _acquit(self) -> None:
        """Allow growth to the sizes at which the present step has failed: it has failed with fewer workers, too."""
        sizes, self._failed = {str(size) for size in self._failed}, []
        if not sizes:
            return
        try:
            self._membership.shared.update_job(lambda job: job.trying_again(sizes))
        except (EtcdError, RecordError, MembershipError) as trouble:
            log.warning("run %s: the failure with %s workers remains recorded: %s", self._run_id, ", ".join(sizes), trouble)
