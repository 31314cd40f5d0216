"""Parts of a fit apart from its steps: its begin and end, searches, prepared data, progress, and the rows of streams."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch.distributed as dist

from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.data.source import DataError, Ranges, WindowKeeper, Windows, num_rows
from lightning_dlrover.lightning_compat import LearningRateFinder, package_of, submodule
from lightning_dlrover.live import lightning_adapter
from lightning_dlrover.live.data_agreement import (
    DataFingerprint,
    compare_next_batches,
    fingerprint_data,
    opened_iterables,
    opened_streams,
    refuse_other_data,
)
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import FitPosition, Position
from lightning_dlrover.live.recovery import ResilientCollectives
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.desync import CollectiveCall, shown
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.group.loop import Pace
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import RowsSkipped
from lightning_dlrover.rdzv.job.folders import ROOT, is_private, users_folder
from lightning_dlrover.rdzv.job.records import PlacesRecord, RoundRecord, SearchRecord, WindowRecord
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError, WorldError
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.report.streams import shown_ranges
from lightning_dlrover.tuning.health import Pulse

if TYPE_CHECKING:
    import lightning as L

log = logging.getLogger(__name__)

# Begin and end the `fit` calls of a script together with the other workers.

FAIL_TOGETHER_S = 2.0
"""Seconds to wait for the others to fail at the same place. A worker that fails alone holds up the others for so long."""


@dataclass(eq=False)
class Fits:
    """The `fit` calls of one worker's script. All workers run the same script, so they count the same calls."""

    _world: World
    _collectives: ResilientCollectives
    _trainer: TrainerOfFit
    _position: FitPosition

    def begin_later(self) -> None:
        """Continue with the remaining workers before another `fit` of the script sets up.

        A worker may have been lost since the last step. If that happened while all workers met at the end of `fit`, some have
        continued and others have not. They meet here, and those that are behind receive the results that they lack.

        Raises:
            WorldError: no round could be formed.
        """
        position = self._position
        if self._world.num_fits == 0 or position.is_standby:
            return  # this is the first `fit`
        number = self._world.num_fits + 1
        self._world.standing.begin_fit(number)  # no later: a worker lost from here on must not count as finished
        if position.size == 1 or self._trainer.elastic_tables is not None:
            return
        position.has_entered = position.is_between_fits = True
        try:
            self._collectives.exchange(f"the start of fit number {number}", _meet)
        finally:
            position.has_entered = position.is_between_fits = False

    def fail_together(self) -> bool:
        """Return whether all workers have left this `fit` by an error at one place, so that a script may catch it.

        The others need not recover from the loss of this worker then, and all of them run the same code next.
        """
        position = self._position
        if not position.has_entered or self._trainer.elastic_tables is not None or self._world.broken:
            return False
        place = f"error/{position.fit}/{position.batch}/{position.collective}/{position.validation}"
        try:
            together = self._world.all_reach(place, FAIL_TOGETHER_S)
        except WorldError:
            return False
        if together:
            position.has_entered = position.in_step = position.is_redoing = False
            position.validation = 0
        return together

    def end_early(self) -> None:
        """Record the end of a `fit` that an error has ended on all workers, once the script has caught it."""
        self._world.finish(self._trainer.global_step, self._position.fit)

    def finish(self) -> None:
        """Mark the end of the training loop. All updates are done, so the job does not change from here on.

        Every worker publishes this before it continues, so that the first one to exit does not count as lost.
        """
        position, trainer = self._position, self._trainer.lightning
        if not position.has_entered:
            if position.fit > 1 and position.formation is not None:
                self._world.finish(trainer.global_step, position.fit)  # there was nothing to train
            return
        position.is_finishing = True
        if position.size > 1:
            # A finished job has no more rounds, so no worker may still need one to get its last update.
            try:
                if self._trainer.elastic_tables is None:
                    self._collectives.exchange("the end of training", self._end_together)
                elif self._collectives.attempt(self._end_together) is None:
                    self._await_finish()
            except WorldError:
                if not self._world.standing.has_finished_fit(position.fit):
                    raise
        position.has_entered = position.is_finishing = False
        self._world.finish(trainer.global_step, position.fit)

    def _end_together(self) -> None:
        frame = sys._getframe()
        with self._world.compared(lambda: CollectiveCall("the end of fit", place=shown(frame))):
            self._collectives.wait_for_results()  # another worker's last collective may need this one's device until here
            transfer.barrier()

    def _await_finish(self) -> None:
        """Find out why workers were missing at the end: one has already ended and published that all is done, or one is lost.

        Raises:
            WorldError: it is lost, together with its tables. The loops have ended, so there is nothing to go back to.
        """
        formation = self._position.formation
        assert formation is not None
        number, fit = formation.round.number, self._position.fit

        def look(view: WorkerView) -> str | None:
            if self._world.standing.has_finished_fit(fit):
                return "finished"
            if view.job is not None and view.job.is_over:
                return view.job.phase
            newest = view.round
            return "lost" if newest is not None and newest.number > number and not newest.planned else None

        what = "the others to confirm that the job has finished"
        if self._world.membership.wait_for(look, self._world.config.wait_timeout_s, what) != "finished":
            raise WorldError(
                "a worker was lost after the last step, with its part of the tables: all workers have to start again, "
                "from the newest snapshot or checkpoint"
            )


def _meet() -> None:
    if not dist.is_initialized():
        raise RoundEndedError("the round has ended")  # this worker left it at the end of the former `fit`
    transfer.barrier()


# Keep a search for a learning rate, as by `Tuner.lr_find`, apart from the job: no worker joins it, and it finishes nothing.
#
# The members of the first round search together, before they train. Later joiners take their result instead of searching.


@dataclass(eq=False)
class Searches:
    """The searches of one worker's script, identified by count: every worker runs the same script."""

    _world: World
    _position: FitPosition
    num_begun: int = 0
    is_running: bool = False  # set while the Trainer's loop makes steps that do not count

    def attend(self, callbacks: Iterable[object]) -> None:
        """Wrap the searches of these callbacks. Call it once for each `fit`, before its hooks run."""
        for callback in callbacks:
            if isinstance(callback, LearningRateFinder):
                callback.__dict__.pop("lr_find", None)
                callback.lr_find = self._attended(callback, callback.lr_find)  # type: ignore[method-assign]

    def _attended(self, finder: Any, search: Callable[..., None]) -> Callable[..., None]:
        def lr_find(trainer: Any, module: Any) -> None:
            self.num_begun += 1
            if trainer.fast_dev_run:
                search(trainer, module)
            elif self._position.is_in_loops:
                raise RuntimeError(
                    f"{type(finder).__name__} searches for a learning rate while the job trains; its steps would be mixed with "
                    "the job's. Search before training: in on_fit_start, as LearningRateFinder does, or with Tuner.lr_find"
                )
            elif self._position.is_standby:
                self._take(finder, trainer, module)
            else:
                self._search(finder, lambda: search(trainer, module))

        return lr_find

    def _search(self, finder: Any, search: Callable[[], None]) -> None:
        self.is_running = True
        try:
            search()
        finally:
            self.is_running = False
            found = finder.optimal_lr  # set even if Tuner.lr_find ends its `fit` with an exception
            if found is not None and self._position.formation is not None and self._position.rank == 0:
                results = json.dumps({**found.results, "total_batch_idx": found._total_batch_idx})
                self._world.records.put_search(self.num_begun, SearchRecord(results))

    def _take(self, finder: Any, trainer: Any, module: Any) -> None:
        """Do the same as Lightning after a search, with the result of the training workers."""
        lightning_adapter.adopt_search(finder, trainer, module, json.loads(self._results()))
        if lightning_adapter.ends_after_search(finder):
            raise submodule(package_of(trainer), "utilities.exceptions")._TunerExitException()

    def _results(self) -> str:
        membership = self._world.membership

        def look(view: WorkerView) -> str | None:
            if (record := membership.shared.search(self.num_begun)) is not None:
                return record.results
            # Once the searching workers are gone, no result can appear any more.
            return "" if view.round is not None and len(view.lost) == len(view.round.members) else None

        what = f"the first workers to find a learning rate (search {self.num_begun} of the script)"
        results = membership.wait_for(look, self._world.config.wait_timeout_s, what)
        if not results:
            raise WorldError(
                "the workers that searched for a learning rate were lost before they had found one: this worker has to start "
                "again, and search"
            )
        return results


# Measurements of a worker's fit for the watchdog and the callback. Nothing here changes the fit.

Phase = Literal["setup", "step", "parts", "between", "validation", "checkpoint", "resize"]


@dataclass(frozen=True)
class Progress:
    """A worker's activity and counters, which soon change while it makes progress."""

    phase: Phase
    round_number: int
    steps_in_round: int
    batch: int  # global batches handed out over all epochs
    counts: tuple[int, ...]  # updates, collectives, validation batches, looks for new rows, parts of shares


@dataclass(eq=False)
class FitProgress:
    """Measurements of this worker's fit; may be read from another thread."""

    world: World
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _pace: Pace
    pulse: Pulse

    @property
    def formation(self) -> Formation | None:
        return self._position.formation

    @property
    def now(self) -> Progress:
        position = self._position
        if position.formation is None or not position.has_entered:
            phase: Phase = "setup"
        elif self._pace.is_held_up:
            phase = "resize"
        elif position.is_saving:
            phase = "checkpoint"
        elif position.validation:
            phase = "validation"
        elif position.is_in_parts:
            phase = "parts"
        else:
            phase = "step" if position.in_step else "between"
        num_val_batches = self._trainer.epoch_loop.val_loop.batch_progress.total.ready
        counts = (position.updates, position.collective, num_val_batches, position.looks, position.parts)
        return Progress(phase, position.round_number, self._pace.steps_in_round, position.batch, counts)

    @property
    def is_in_collective(self) -> bool:
        """Whether this worker waits for others."""
        return self._trainer.strategy.clock.is_stopped

    @property
    def step_time_s(self) -> float:
        """Recent seconds per step; 0 while unknown."""
        return self._pace.step_time_s

    @property
    def stalled_s(self) -> float:
        """Seconds in which this worker made no step because the world changed, all changes of this fit together."""
        return self._pace.stalled_s

    @property
    def loads(self) -> list[float]:
        """Samples per thread in one batch, for each worker by rank."""
        first, size = self._batches.first, self._position.size
        threads = self.pulse.threads if len(self.pulse.threads) == size else (1,) * size
        shares = [share(first.global_batch_size, rank, size) for rank in range(size)]
        return [max(1, stop - start) / max(1, count) for (start, stop), count in zip(shares, threads, strict=True)]

    @property
    def remaining_steps(self) -> float | None:
        """Batches that the job still has to train on; None if unknown."""
        return remaining_batches(self._trainer.lightning)

    @property
    def untunable(self) -> dict[str, str]:
        """Settings of a plan that this worker cannot carry out, each with the reason."""
        return {"loader_workers": refusal} if (refusal := self._batches.refusal) else {}


def remaining_batches(trainer: L.Trainer) -> float | None:
    """Return the number of batches still to train on; None if it is unknown.

    A batch may take several optimizer steps, as in manual optimization of two models, or be one of several in a step.
    """
    done = batches_done(trainer)
    left = []
    if trainer.max_epochs not in (None, -1):
        assert trainer.max_epochs is not None
        left.append(trainer.num_training_batches * max(trainer.max_epochs, 1) - done)
    if trainer.max_steps != -1:
        steps_per_batch = 1 / trainer.accumulate_grad_batches
        if not trainer.lightning_module.automatic_optimization and done and trainer.global_step:
            steps_per_batch = trainer.global_step / done
        left.append((trainer.max_steps - trainer.global_step) / steps_per_batch)
    return max(0.0, float(min(left))) if left and math.isfinite(min(left)) else None


def batches_done(trainer: L.Trainer) -> int:
    """Return the number of batches that the job has trained on, over all epochs, the current one included."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


# The data of a fit, as the workers of a job compare and record it.


@dataclass(eq=False)
class DataOfFit:
    """One worker's part in comparing and recording the data of its `fit`."""

    _world: World
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition

    def fingerprint(self) -> DataFingerprint:
        """Return the fingerprint of this worker's training and validation data."""
        val = self._trainer.epoch_loop.val_loop._combined_loader
        val_loaders = [x for x in val.flattened if isinstance(x, ElasticLoader)] if val is not None else None
        compare = self._trainer.strategy.compares_data and self._world.config.max_workers > 1
        return fingerprint_data(self._batches.all, val_loaders, compare)

    def refuse_data_of_another_job(self, data: DataFingerprint) -> None:
        """Raise `MembershipError` if the job trains on other data than this worker has."""
        job = self._world.view.job
        if job is not None and job.data:
            run = f"run {self._world.config.run_id!r}: this worker's data"
            refuse_other_data(data, job.data, run, "the job's", self._world.standing.consequence_of_refusal())

    def record(self, begins_epoch: bool = False) -> None:
        """Let rank 0 record the streams and iterable datasets that the fit reads."""
        if self._position.rank == 0:
            loaders, number = self._batches.all, self._position.fit
            streams = opened_streams(self._trainer.lightning, loaders, number, begins_epoch)
            for opened, text in [*streams, *opened_iterables(loaders, number)]:
                log.info("%s", text)
                self._world.event(opened, text)

    def compare_next_batches(self, joining: Sequence[str] = ()) -> None:
        """Make sure that all workers read the same rows of an `IterableDataset`.

        Args:
            joining: workers without the state, which are refused if their rows differ.
        """
        formation = self._position.formation
        assert formation is not None
        compare_next_batches(self._batches.all, self._position, [formation.rank_of(worker) for worker in joining])

    def compare_with_joiners(self, standing: Mapping[str, Position], joining: Sequence[tuple[str, str]]) -> None:
        """Let joiners read up to the others, before any step depends on them.

        Args:
            standing: positions of the workers with the state.
            joining: pairs of a worker with the state and the joiner that receives it.
        """
        if standing and joining and not self._position.is_between_fits:
            self.compare_next_batches([worker for _, worker in joining])


# Record the rows of streams that this worker's batches skip.

PUBLISH_EVERY_S = 2.0
"""Minimum seconds between two records, unless a fit ends: a damaged store has many corrupt row groups."""


@dataclass(eq=False)
class SkippedReports:
    """Records the rows that the training loaders of a fit skip."""

    _world: World
    _batches: TrainLoaders
    _position: FitPosition
    _next_at: float = 0.0

    def publish(self, is_last: bool = False) -> None:
        """Record what is new, unless there was a record a moment ago. Never waits for etcd.

        Args:
            is_last: whether the fit ends, so that nothing may be left for a later call.
        """
        loaders = self._batches.all if self._batches.are_made else []
        now = time.monotonic()
        if not any(loader.skipped.has_news for loader in loaders) or (now < self._next_at and not is_last):
            return
        self._next_at = now + PUBLISH_EVERY_S
        for number, loader in enumerate(loaders):
            for skipped in loader.skipped.take_news(self._position.fit, number):
                self._world.event(skipped, _sentence(skipped))


def _sentence(skipped: RowsSkipped) -> str:
    if not skipped.ranges:
        return f"leaves out more rows of {skipped.file} and other files than are listed here"
    ranges = [(first, stop) for first, stop in skipped.ranges]
    num_rows = sum(stop - first for first, stop in ranges)
    return f"leaves out {num_rows} rows of {skipped.file} (rows {shown_ranges(ranges)}): {skipped.reason}"


# Run `prepare_data` once on each host, or once in the job, however many workers prepare their Trainers at once.
#
# Lightning runs it where the local rank is 0. Each node of `dlrover run` has an agent of its own, so that is every worker
# of a host, and a joiner would write files that others are reading.
#
# Locks of the kernel keep the workers of a host apart: one for the worker that prepares, one for all living workers whose
# data is ready. A lock ends with its process, however that ends, and no child process inherits it.

LOCK_FILE = "prepared-data"
"""File in the user's folder in shared memory. It stays empty: each call of `prepare_data` locks two of its bytes."""

LOCK_RETRY_S = 0.1
FIRST_REPORT_S = 3.0
REPORT_EVERY_S = 60.0

LIMIT_S = 24 * 3600.0
"""Seconds for which a worker waits for another one's `prepare_data`, which may download for hours."""


class PreparedDataError(RuntimeError):
    """Another worker on this host has not finished `prepare_data` in time."""


@dataclass(eq=False)
class PreparedData:
    """The calls of `prepare_data` in one worker's script."""

    _job: str  # identity of the job among all others of this user
    _root: Path = ROOT  # where the user's folder is
    _calls: Counter[str] = field(default_factory=Counter)
    _file: BinaryIO | None = None  # closing it would end all locks

    def prepare(self, trainer: Any) -> None:
        """Prepare data as Lightning does, with one worker of each host, or rank 0 alone as the user has asked.

        Joiners have no rank: the data of a job that trains is prepared.
        """
        all_wait = submodule(package_of(trainer), "trainer.connectors.data_connector")._InfiniteBarrier
        for part, prepare in lightning_adapter.preparations(trainer):
            with all_wait():
                if part.prepare_data_per_node:
                    self.once_on_this_host(f"{type(part).__module__}.{type(part).__qualname__}.prepare_data", prepare)
                elif trainer.is_global_zero:
                    prepare()

    def once_on_this_host(self, name: str, prepare: Callable[[], None]) -> None:
        """Run one call of a script, unless a living worker on this host has run it; wait for one that runs it.

        Args:
            name: the same for the same call in all workers. A script's second call of a name differs from its first.

        Raises:
            PreparedDataError: another worker takes too long.
        """
        self._calls[name] += 1
        try:
            file = self._opened()
        except OSError as error:
            log.warning("%s runs on each worker of this host, because no lock can be taken: %s", name, error)
            prepare()
            return
        digest = hashlib.sha256(f"{self._job}/{name}/{self._calls[name]}".encode()).digest()
        preparing = int.from_bytes(digest[:7], "big") * 2
        is_prepared = preparing + 1
        _wait_for(file, preparing, name)
        try:
            if _try(file, is_prepared):  # no living worker has it
                prepare()
            fcntl.lockf(file, fcntl.LOCK_SH, 1, is_prepared)
        except BaseException:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, is_prepared)
            raise
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, preparing)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            folder = users_folder(self._root)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise PermissionError(f"{folder} is not a folder of this user's alone: remove it")
            self._file = os.fdopen(os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        return self._file


def _wait_for(file: BinaryIO, place: int, name: str) -> None:
    began = time.monotonic()
    report_at = began + FIRST_REPORT_S
    while not _try(file, place):
        now = time.monotonic()
        if now > began + LIMIT_S:
            raise PreparedDataError(
                f"{name} of {_holder(file, place)} on this host has not ended for {LIMIT_S:.0f} s: end that process, or run "
                "the work before the job starts"
            )
        if now > report_at:
            report_at = now + REPORT_EVERY_S
            log.warning("waiting for %s on this host, which runs %s, for %.0f s", _holder(file, place), name, now - began)
        time.sleep(LOCK_RETRY_S)


def _try(file: BinaryIO, place: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _holder(file: BinaryIO, place: int) -> str:
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    *_, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, request))
    return f"process {pid}" if pid > 0 else "a process"  # 0: of another container


# Open the lanes of a stream that a worker will read in the next round, while the workers still agree on that round.
#
# Otherwise the first step after a change waits until files are opened and blocks are decoded. A member that changes its
# rank lets its loader workers open the lanes together with the batches that they prepare then. A joiner's loader
# workers have nothing else to do, but the joiner lacks the others' place: rank 0 records it once for each round with
# joiners.
#
# Nothing depends on any of this. Lanes that are not needed after all are closed when others need their room.

LOOK_S = 0.05
"""Seconds between two looks of a joiner for a round that admits it."""

PLACES_S = 2.0
"""Seconds for which a joiner asks for the others' places after such a round has appeared. A job of map-style data has none."""

CLOSE_S = 360.0
"""Seconds for which a read that has begun may continue once the round is there: longer than a failing store is retried."""


@dataclass(eq=False)
class LanePrefetcher:
    """One worker's preparation for the round that follows."""

    _world: World
    _batches: TrainLoaders
    _position: FitPosition
    _seen: int = 0  # number of the newest round that was prepared for

    def look(self) -> None:
        """Prepare for a planned round that has appeared. Call between two batches."""
        formation, newest = self._position.formation, self._world.view.round
        if formation is None or newest is None or newest.number <= max(self._seen, formation.round.number):
            return
        self._seen = newest.number
        loaders = self._batches.all
        if not newest.planned or not any(loader.reads_lanes for loader in loaders):
            return
        if self._world.worker_id in newest.members:
            for loader in loaders:
                loader.expect_place(newest.members.index(self._world.worker_id), len(newest.members))
        if formation.rank == 0 and not {*newest.members} <= {*formation.round.members}:
            places = [[loader.epoch, loader.cursor, loader.order.seed] for loader in loaders]
            self._world.records.put_places(PlacesRecord(newest.number, places))

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Prepare for the round that admits this worker, in a thread, while the block waits for it.

        Raises:
            DataError: a read does not end.
        """
        if not any(loader.reads_lanes for loader in self._batches.all):
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._open_when_admitted, args=(is_over,), name="dlrover-lanes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(CLOSE_S)  # it uses the loaders
            if thread.is_alive():
                reading = (loader.dataset.source for loader in self._batches.all if loader.reads_lanes)
                raise DataError(
                    f"a loader worker has been reading ahead for {CLOSE_S:.0f} s and does not answer, so this worker cannot "
                    f"train: look for a file or a store that hangs in {', '.join(repr(source)[:120] for source in reading)}"
                )

    def _open_when_admitted(self, is_over: threading.Event) -> None:
        self._attempt(self._read_a_row)
        done = 0
        while not is_over.wait(LOOK_S):
            newest = self._world.view.round
            if newest is not None and newest.number != done and self._world.worker_id in newest.members:
                done = newest.number
                self._attempt(self._open, newest, is_over)

    def _attempt(self, run: Callable[..., None], *args: Any) -> None:
        try:
            run(*args)
        except Exception as error:  # the main thread meets it again where it can be reported
            log.debug("lanes could not be opened ahead: %s", error)

    def _read_a_row(self) -> None:
        """Let each loader worker read something. The first time takes it several times as long."""
        for loader in self._batches.all:
            if loader.reads_lanes:
                loader.open_lanes(loader.epoch, 0, loader.order.seed, 0, loader.global_batch_size)

    def _places(self, newest: RoundRecord, is_over: threading.Event) -> PlacesRecord | None:
        deadline = time.monotonic() + PLACES_S
        while newest.kind != "start" and time.monotonic() < deadline:
            record = self._world.records.places()
            if record is not None and record.round == newest.number:
                return record
            if is_over.wait(LOOK_S):
                return None
        return None

    def _open(self, newest: RoundRecord, is_over: threading.Event) -> None:
        record = self._places(newest, is_over)
        place = newest.members.index(self._world.worker_id), len(newest.members)
        for loader, (epoch, cursor, seed) in zip(self._batches.all, record.places if record else (), strict=False):
            if loader.reads_lanes:
                loader.open_lanes(epoch, cursor, seed, *place)


# Fix the windows of streams once for all workers of a job, in etcd.
#
# The worker that needs a window first writes its record. All others read it: those that join later, and those of a job that
# is started again. A checkpoint holds the window in which it was saved.

NUM_ON_RECORD, RANGES_ON_RECORD = 1000, 20_000
"""Maximum number of a stream's windows whose records are kept, and of their partitions. The first window is always kept."""


@dataclass(eq=False)
class JobWindows:
    """The windows of all streams that this worker reads in the job."""

    _world: World
    _position: FitPosition
    _windows: dict[str, Windows] = field(default_factory=dict)  # by the stream's name; they outlive the loaders
    _saved: dict[str, tuple[int, Ranges]] = field(default_factory=dict)  # windows of a checkpoint that is being resumed

    def attend(self, stream: Stream, epoch: int) -> None:
        """Let a stream have the windows of the job.

        Args:
            epoch: the one that is about to begin. An earlier fit may have ended before it because there were no rows.
        """
        if stream.windows is None:
            return
        name = stream.name
        if name not in self._windows:
            if isinstance(stream.windows.keeper, _Keeper):
                stream.windows.begin_again()  # an earlier fit has trained what is known
                stream.share_windows(stream.windows)
            else:
                stream.share_windows(stream.windows.unknown())  # the script has looked at the stream before
            stream.windows.keeper = _Keeper(name, stream.grows, self._world, self._position)
            self._windows[name] = stream.windows
        else:
            self._windows[name].look_again(epoch)
            stream.share_windows(self._windows[name])
        if name in self._saved:
            self._adopt(name)

    def resume(self, positions: Sequence[Mapping[str, Any] | None]) -> None:
        """Continue with the windows of a checkpoint, see `ElasticLoader.position_in_stream`."""
        for position in positions:
            if position is not None and "window" in position:
                self._saved[position["stream"]] = position["epoch"], dict(position["window"])
        for name in self._windows.keys() & self._saved.keys():
            self._adopt(name)

    def _adopt(self, name: str) -> None:
        epoch, ranges = self._saved.pop(name)
        if not num_rows(ranges):  # saved by a job that has ended because there were no rows, and there may be some now
            self._windows[name].decide_again_from(epoch, ranges)
            return
        self._windows[name].take(epoch, ranges)
        keeper = self._windows[name].keeper
        assert isinstance(keeper, _Keeper)
        keeper.put(epoch, ranges)


@dataclass(frozen=True)
class _Keeper(WindowKeeper):
    """The records of one stream's windows."""

    _name: str
    _grows: bool
    _world: World
    _position: FitPosition

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        return self._swapped(epoch, after, None)

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        fixed = self._swapped(epoch, after, WindowRecord(epoch, _plain(ranges), time.time()))
        assert fixed is not None
        return fixed

    def put(self, epoch: int, ranges: Mapping[str, Sequence[int]]) -> None:
        """Write a window over the recorded one."""
        new = WindowRecord(epoch, _plain(ranges), 0.0)
        self._record(epoch, lambda now: now if now is not None and now.ranges == new.ranges else new)

    def pause(self, seconds: float) -> None:
        self._position.looks += 1  # a worker that waits for rows does not hang
        if self._position.is_repeatable and self._world.broken:
            raise self._world.broken_error()  # the others wait for this worker in the next round
        time.sleep(seconds)

    def _swapped(self, epoch: int, after: Mapping[str, int] | None, new: WindowRecord | None) -> Ranges | None:
        def change(now: WindowRecord | None) -> WindowRecord | None:
            # A job that went back to an old checkpoint may have other windows since.
            return now if now is not None and _follows(now, after) else new

        found = self._record(epoch, change, len(new.ranges) if new is not None else 0)
        if found is None or not _follows(found, after):
            return None
        return {key: (first, stop) for key, (first, stop) in found.ranges.items()}

    def _record(self, epoch: int, change: Any, num_ranges: int = 0) -> WindowRecord | None:
        """Compare-and-swap a window's record.

        Args:
            num_ranges: partitions of a window that is written, which makes room for it; 0: it is only read.
        """
        folder = f"{self._name}/{self._position.fit if self._grows else 0}/"
        outdated = epoch - max(10, min(NUM_ON_RECORD, RANGES_ON_RECORD // num_ranges)) if num_ranges else 0
        config = self._world.config
        try:
            return self._world.records.window(
                f"{folder}{epoch:010d}", change, config.wait_timeout_s, f"{folder}{outdated:010d}" if outdated > 0 else ""
            )
        except EtcdUnavailableError as error:
            raise DataError(
                f"run {config.run_id!r}: the rows of epoch {epoch} are fixed in etcd, which has given no answer for "
                f"{config.wait_timeout_s:.0f} s: {error}. Start the job again once etcd is back; its checkpoint is kept"
            ) from error


def _plain(ranges: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {key: [int(first), int(stop)] for key, (first, stop) in ranges.items()}


def _follows(record: WindowRecord, after: Mapping[str, int] | None) -> bool:
    """Return whether a window begins where the one before has ended."""
    return after is None or all(record.ranges.get(key, [stop])[0] == stop for key, stop in after.items())
