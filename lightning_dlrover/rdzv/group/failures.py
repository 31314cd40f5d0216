"""Progress of a job in its etcd record: whether it is announced, its fits begun and finished, and whether joiners can enter."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.events import FitFinished, StateClosed
from lightning_dlrover.rdzv.job.records import JobRecord, NodesRecord, RecordError
from lightning_dlrover.rdzv.live.member import HasFormation, MembershipError
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.probe import dead_workers

__all__ = ["JobStanding"]

log = logging.getLogger(__name__)


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
        self._has_ended = False  # True once this worker has written or read that nothing is left to train
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
                f"{job.unjoinable}. The job goes on without this worker"
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
            return "Whether the job goes on without it is unknown, as etcd does not answer: see `dlrover status` later"
        members = [view.workers[worker] for worker in view.survivors]
        if len(dead_workers(members)) < len(members):  # records outlast their workers by a few seconds
            return "The job goes on without it"
        weights = ""
        with contextlib.suppress(EtcdError, RecordError):  # without the record the remedy is the same
            if (record := self._membership.shared.newest_checkpoint()) is not None:
                weights = f"; to keep what was learned, give its fit ckpt_path={record.path!r}"
        return (
            f"All workers of job {self._run_id!r} have ended before it was done, and under its name it goes on with the "
            f"model and the data it had. If these were changed on purpose, start a new job under another --rdzv-id{weights}"
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
        """Read from etcd whether nothing is left to train, in a later `fit` either; the view lags by the delay of a watch.

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
