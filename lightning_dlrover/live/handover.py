"""Save the job's checkpoints, and continue from the newest one when no living worker has the state.

The newest checkpoint is on record in etcd. It counts only if it is ahead of the worker that reads the record.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_dlrover.live.checkpoints import absolute, load_own_checkpoint, unreadable
from lightning_dlrover.live.job_state import JobState
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.set_aside import SetAside
from lightning_dlrover.live.state import go_on_drawing, resume
from lightning_dlrover.packages import ModelCheckpoint
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.events import FitResumed
from lightning_dlrover.rdzv.job.records import CheckpointRecord, RecordError
from lightning_dlrover.rdzv.live.member import Formation, WorldError

__all__ = ["JobCheckpoints"]

log = logging.getLogger(__name__)

STALE_S = 300.0
"""Age from which a snapshot of sharded tables is given up for a newer checkpoint, although all workers must start again."""


class JobCheckpoints:
    """The job's checkpoints from one worker's point of view."""

    def __init__(
        self, job: Job, round_: Round, batches: Batches, trainer: TrainerPort, position: FitPosition, state: JobState
    ) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._state = state
        self.saved_random: Mapping[str, Any] | None = None  # random generators of a checkpoint that was loaded
        self._aside = SetAside(job, self)
        self._taken = ""  # the user's `ckpt_path` that this worker has put on record

    # --- saving -----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint where the user keeps them, else in the Trainer's folder. All workers call it between two steps."""
        trainer = self._trainer.lightning
        kept = (str(c.dirpath) for c in self._trainer.callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        folder = next(kept, str(trainer.default_root_dir)).rstrip("/")  # may be a URL
        self._position.at_boundary = False  # a loss meanwhile must not count as one at a boundary
        try:
            trainer.save_checkpoint(f"{folder}/dlrover-{self._job.config.run_id}.ckpt")
        finally:
            self._position.at_boundary = True

    def save_if_rank_zero_was_lost(self) -> None:
        """Write the last checkpoint of a job that stops if rank 0 was lost before it was on record.

        No further round is formed, so the workers take turns in rank order: each waits until those before it have ended.
        """
        former, membership = self._round.formation, self._job.membership
        if former is None or self._trainer.elastic_tables is not None or not self._trainer.lightning.checkpoint_callbacks:
            return
        before = former.round.members[: former.rank]
        with suppress(TimeoutError, EtcdError):  # then both may write the file, which appears only when it is complete
            membership.wait_until_gone(before, self._job.config.wait_timeout_s, "to save the job's last checkpoint")
        with suppress(EtcdError, RecordError):
            record = self._job.records.newest_checkpoint()
            if record is not None and record.global_step >= self._trainer.global_step:
                return
        self._position.formation = Formation(replace(former.round, members=[self._job.worker_id]), {}, rank=0)
        self._trainer.strategy.enter_round(0, 1)
        self.save()

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or folder at once, as the Trainer's checkpoint plugin does."""
        plugin = self._trainer.strategy.checkpoint_io
        plugin.remove_checkpoint(path)

    def round_number(self) -> int:
        """The round in which this worker trains; 0 before the first one."""
        formation = self._round.formation
        return formation.round.number if formation is not None else 0

    def place(self, path: Any) -> Any:
        """Rank 0: return where a checkpoint may be written, see `SetAside.place`."""
        return self._aside.place(path, self.round_number()) if self._position.has_entered else path

    def may_remove(self, path: Any) -> bool:
        """Rank 0: return whether a checkpoint may be removed, see `SetAside.may_remove`."""
        return not self._position.has_entered or self._aside.may_remove(path)

    def saved(self, path: str, global_step: int) -> None:
        """Rank 0: record a checkpoint, in case no living worker is left."""
        if self._round.rank != 0 or not self._position.has_entered:
            return
        try:
            record = CheckpointRecord(path=self._aside.written(path), global_step=global_step)
            self._job.records.put_checkpoint(record, self._aside.settle)
        except EtcdError as error:
            log.warning("run %s: checkpoint %s is not on record: %s", self._job.config.run_id, path, error)

    # --- resuming ---------------------------------------------------------------------------------------------------------

    def unread(self) -> CheckpointRecord | None:
        """The job's newest checkpoint, if it is ahead of this worker."""
        record = self._job.records.newest_checkpoint()
        if record is None or record.global_step <= self._trainer.global_step:
            return None
        if not os.path.isabs(record.path) and "://" not in record.path:  # this job writes no such path
            log.error("run %s: ignored a record of a checkpoint at %r", self._job.config.run_id, record.path)
            return None
        return record

    def take_users_choice(self) -> bool:
        """Let the user's `ckpt_path` replace the job's newest checkpoint, if it is a new choice. Return whether it is.

        Called by rank 0 of a round without the job's state.

        A script that begins with the same `ckpt_path` at each start continues from the job's newest checkpoint.
        """
        chosen = str(self._trainer.lightning.ckpt_path or "")
        if not chosen or os.path.basename(chosen).startswith("last"):  # "last" means the newest, another file at each start
            return False
        job = self._job.view.job
        if job is None or chosen == job.started_from:
            return bool(chosen) and chosen == self._taken  # the round in which it was taken may have broken
        self._taken = chosen
        self._job.records.update_job(lambda job: replace(job, started_from=chosen))
        record = self.unread()
        if record is not None:
            log.warning(
                "run %s: going back from the job's newest checkpoint %s (step %d) to ckpt_path=%s (step %d)",
                *(self._job.config.run_id, record.path, record.global_step, chosen, self._trainer.global_step),
            )
            self._job.records.put_checkpoint(CheckpointRecord(path=absolute(chosen), global_step=self._trainer.global_step))
        return True

    def go_on_drawing(self) -> None:
        """Let random generators go on from a checkpoint that was loaded, if there is one."""
        saved, self.saved_random = self.saved_random, None
        if saved is not None:
            position = self._position
            go_on_drawing(saved, self._trainer.device, (self._batches.batch_number, position.rank))

    def resume_together(self) -> None:
        """First round: continue from the job's newest checkpoint if an earlier life of the job has left one.

        Raises:
                WorldError: there is one, but no worker can read it.
        """
        record = self.unread()
        newest = self._round.gathered((record.global_step, record.path) if record is not None else None)[0]
        if newest is None:
            return
        record = CheckpointRecord(path=newest[1], global_step=newest[0])
        problems = self._round.gathered(unreadable(record.path))
        if all(problems):
            raise WorldError(self._cannot_read(record.path, problems[0]))
        source = problems.index("")
        if self._round.rank == source:
            self._load(record)
        self._state.spread(source)

    def resume_alone(self) -> None:
        """Load the newest checkpoint on the first of the joiners, once all workers with the state are gone.

        Raises:
            WorldError: it cannot be read here. The next worker tries.
        """
        record = self.unread()
        if record is not None:
            if problem := unreadable(record.path):
                raise WorldError(self._cannot_read(record.path, problem))
            self._load(record)

    def have_new_choice(self) -> bool:
        """Return whether rank 0 has a new `ckpt_path`, see `take_users_choice`. All workers of the round call it."""
        is_new: bool = self._round.gathered(self._round.rank == 0 and self.take_users_choice())[0]
        return is_new

    def resume_with_tables(self, step: int, has_choice: bool) -> None:
        """Continue from the job's or the user's checkpoint if it is newer. Each worker reads its own part of the tables.

        Args:
            has_choice: whether the user's was chosen for this start, so that the job's does not count.
        """
        record = None
        if self._round.rank == 0 and not has_choice:
            record = self._job.records.newest_checkpoint()
        found = [(record.global_step, record.path)] if record is not None and os.path.isdir(record.path) else []
        found += [self._trainer.strategy.unread_checkpoint] if self._trainer.strategy.unread_checkpoint is not None else []
        newest, path = self._round.gathered(max(found, default=(0, "")))[0]
        if newest > step:
            self._load(CheckpointRecord(path=path, global_step=newest))

    def raise_if_much_newer(self, age_s: float) -> None:
        """Prefer the newest checkpoint to the snapshot that all workers have just returned to, if that is old.

        A new start costs about as much as `STALE_S` of training, so a younger snapshot is used in any case.

        Args:
            age_s: age of the snapshot; rank 0's counts.

        Raises:
            WorldError: the checkpoint is newer. It needs new processes, because a worker inside the loops cannot load it.
        """
        record = None
        if self._round.rank == 0 and age_s > STALE_S:
            with suppress(EtcdError, RecordError):
                record = self.unread()
        found = (record.global_step, record.path) if record is not None and os.path.isdir(record.path) else None
        newest = self._round.gathered(found)[0]
        if newest is not None:
            raise WorldError(
                f"run {self._job.config.run_id!r}: the newest snapshot, of step {self._trainer.global_step}, is more "
                f"than {STALE_S:.0f} s old, and the checkpoint {newest[1]} of step {newest[0]} is newer: all workers must "
                "start again, to continue from there"
            )

    def _load(self, record: CheckpointRecord) -> None:
        try:
            checkpoint = load_own_checkpoint(self._trainer.strategy.load_checkpoint, record.path, self._state.names)
        except Exception as error:  # a foreign or broken file may raise anything
            if self._round.is_failure(error):
                raise
            raise WorldError(self._cannot_read(record.path, str(error))) from error
        log.warning("run %s: no living worker has the state; going on from %s", self._job.config.run_id, record.path)
        resume(self._trainer.lightning, checkpoint, self._trainer.strategy.reruns_epoch_hooks)
        for loader in self._batches.all:
            loader.set_epoch(self._trainer.current_epoch)
        self._batches.recount()
        self._batches.begin_at(self._trainer.num_handed_out)
        self._batches.lead_fetcher()
        self._position.updates = self._trainer.global_step
        self._position.batch = self._batches.batch_number
        self.go_on_drawing()
        resumed = FitResumed(record.global_step)
        self._job.event(resumed, f"went on from {record.path} at step {record.global_step}")

    def _cannot_read(self, path: str, problem: str) -> str:
        return (
            f"run {self._job.config.run_id!r}: the newest checkpoint {path} cannot be read here: {problem}. Training "
            "from the beginning would overwrite the job's results: let checkpoints be written where all hosts can read them "
            "(ModelCheckpoint(dirpath=...), a shared folder or a URL), or start a new job under another name"
        )
