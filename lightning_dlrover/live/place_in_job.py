"""Enter the job of this process, hand it from one Trainer of the script to the next, and leave it."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_dlrover.checks.script import UnsupportedScriptError, different_callbacks, monitoring
from lightning_dlrover.live.leaving import leave_quietly
from lightning_dlrover.live.lightning_names import (
    is_search,
    replace_preparation,
    surround_requests_of_data,
)
from lightning_dlrover.live.position import can_meet
from lightning_dlrover.live.prepared_data import PreparedData
from lightning_dlrover.live.state import is_lightnings
from lightning_dlrover.live.training import LiveTraining
from lightning_dlrover.output import drop_what_cannot_be_written
from lightning_dlrover.packages import TrainerFn, fabric_submodule, package_of
from lightning_dlrover.rdzv.group import transfer, waits
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.admission import JobClosedError
from lightning_dlrover.rdzv.live.member import Formation, LeftOutError, MembershipError, WorldError
from lightning_dlrover.tables.snapshot_store import SnapshotStore

if TYPE_CHECKING:
    from lightning_dlrover.live.live_strategy import LiveStrategy
    from lightning_dlrover.live.tables_of_trainer import TablesOfTrainer

__all__ = ["JobSession"]

log = logging.getLogger(__name__)


class JobSession:
    """A strategy's place in the job. The newest one of the process holds the world.

    Args:
        check_interval_s: approximate seconds between two votes on whether the world should change.

    Attributes:
        live: the job's rounds from this worker's point of view; None until a Trainer has entered the job.
        start_workers: number of workers that the job started with, or the fewest that it may have if a pool chose the number;
            0 if not known yet.
        lane_workers: number of workers for which the rows of streams are laid out; 0 if not known yet.
        tables: sharded tables of the Trainer's model.
    """

    newest: ClassVar[JobSession | None] = None
    _closes_at_exit: ClassVar[bool] = False

    def __init__(self, config: WorldConfig, strategy: LiveStrategy, check_interval_s: float) -> None:
        self.config = config
        self.world: World | None = None
        self.live: LiveTraining | None = None
        self.start_workers = self.lane_workers = 0
        self.tables: TablesOfTrainer | None = None
        self._stores: list[SnapshotStore] = []  # stores of all models with tables that this script has trained
        self._prepared = PreparedData(f"{config.etcd.endpoints}/{config.prefix}/{config.run_id}")
        self._strategy = strategy
        self._check_interval_s = check_interval_s
        self._common_error: Exception | None = None  # has ended the `fit` on all workers; the script may catch it
        self._undo_quiet: Callable[[], None] | None = None  # set while Lightning handles a leave before this Trainer's loops

    # --- entering ----------------------------------------------------------------------------------------------------------

    def enter(self, trainer: Any, backend: str) -> None:
        """Take a place for a Trainer that begins to work: in the job, or in the next `fit` of the script.

        Args:
            backend: torch's name for the backend of the job's process groups.
        """
        former = JobSession.newest
        if former is not None:
            former.continue_after_error()
        is_about_to_fit = trainer.state.fn == TrainerFn.FITTING and not is_search(trainer)
        if former is not None and former.live is not None and former.world is not None and is_about_to_fit:
            try:
                former.live.fits.begin_later()
            except SystemExit:
                if former is not self:  # else the former Trainer is quiet already
                    self._undo_quiet = leave_quietly(trainer)
                raise
        if self.live is None or former not in (self, None):
            if self.config.node:  # `dlrover run` has chosen where the output goes
                drop_what_cannot_be_written()
            fabric_submodule(package_of(trainer), "utilities.seed").reset_seed()
            if former is not None and former.world is not None:
                self._go_on_from(former, trainer)
            else:
                self._start(trainer, backend)
        if self.live is not None:
            self.live.searches.attend(trainer.callbacks)
            replace_preparation(trainer, self._prepared.prepare)
            surround_requests_of_data(trainer, self._ask_as_at_start)

    def _start(self, trainer: Any, backend: str) -> None:
        """Start the world for the script's first Trainer."""
        try:
            self.world = World(self.config, backend, self._strategy.root_device, can_meet)
            formation = self.world.start()
        except JobClosedError as error:
            # A worker started again, or late, for a job that has ended meanwhile. Nothing is wrong with it.
            log.warning("%s", error)
            self.close()
            raise SystemExit(0) from error
        except LeftOutError as left_out:
            log.info("this worker leaves: %s", left_out)
            self.close()
            self._undo_quiet = leave_quietly(trainer)
            raise SystemExit(left_out.exit_code) from left_out
        except BaseException:
            self.close()
            raise
        self.live = self._take_over_world(self.world, trainer, formation)
        if formation is not None and formation.round.number > 1:
            _let_configs_be_replaced(trainer)
        if formation is not None and formation.rank == 0:
            self._compare_with_arguments(trainer, formation)
        if formation is not None and formation.size > 1:
            _compare_callbacks(self.live, trainer)

    def _go_on_from(self, former: JobSession, trainer: Any) -> None:
        """Take over the world from an earlier Trainer in the same script."""
        assert former.live is not None
        self.world, former.world = former.world, None
        assert self.world is not None
        self.start_workers, self.lane_workers = former.start_workers, former.lane_workers
        self._stores, self._prepared = former._stores, former._prepared
        self.live = self._take_over_world(self.world, trainer, former.live.formation)
        self.live.searches.num_begun = former.live.searches.num_begun

    def _take_over_world(self, world: World, trainer: Any, formation: Formation | None) -> LiveTraining:
        JobSession.newest = self
        # Registered once: a handler for each strategy would keep every Trainer and model of the script alive.
        if not JobSession._closes_at_exit:
            JobSession._closes_at_exit = True
            atexit.register(_close_newest)
            _report_what_is_not_caught()
        live = LiveTraining(self._strategy, trainer, world, formation, self._check_interval_s)
        waits.time_with(self._strategy.clock.stopped)
        self._strategy.enter_round(*self._place_in(formation))
        return live

    def _place_in(self, formation: Formation | None) -> tuple[int, int]:
        """Return rank and number of workers; a joiner is alone until it is admitted, and never the worker that logs."""
        return (formation.rank, formation.size) if formation is not None else (self.config.max_workers, 1)

    def _ask_as_at_start(self, ask: Callable[[], Any]) -> Any:
        """Ask the user's hooks for loaders, and show them the number of workers of which global batches are made.

        A hook that divides its batch by `trainer.world_size` gives the same global batch then, whoever joins or leaves.
        """
        assert self.live is not None
        self.agree_on_start()
        self._strategy.show_place(min(self._strategy.global_rank, self.start_workers - 1), self.start_workers)
        try:
            return ask()
        finally:
            self._strategy.show_place(*self._place_in(self.live.formation))  # a collective may have ended a round

    def _batches_at_start(self, formation: Formation) -> int:
        """Return how many of the DataLoader's batches a step takes. A pool's free room decides nothing about the training."""
        return self.config.min_workers if self.config.pool else formation.size

    def _compare_with_arguments(self, trainer: Any, formation: Formation) -> None:
        """Warn if the script was written for another number of workers than the job's: a step then has another batch size."""
        strategy = self._strategy
        devices = trainer._accelerator_connector._devices_flag
        by_default = devices in (-1, "-1", type(strategy.accelerator).auto_device_count())  # here "auto" is a number
        per_node = self.config.workers_per_node * self.config.node_workers if by_default else strategy.num_processes
        if (wanted := per_node * strategy.num_nodes) in (1, num_batches := self._batches_at_start(formation)):
            return
        log.warning(
            "Trainer(devices=%r, num_nodes=%d) is meant for %d workers, but has no effect in a live job: it starts with %d "
            "and may have %d to %d, as set by `dlrover run --workers MIN:MAX`, or torchrun's --nnodes and --nproc-per-node. "
            "A step takes the DataLoader's batch size times %d; DLRoverStrategy(global_batch_size=...) sets it for any number",
            *(devices, strategy.num_nodes, wanted, formation.size),
            *(self.config.min_workers, self.config.max_workers, num_batches),
        )

    def agree_on_start(self) -> None:
        """Set the numbers of workers of the job's first start, on which global batches depend, and rows of streams."""
        assert self.live is not None
        world, formation = self.live.world, self.live.formation
        if formation is not None and formation.rank == 0:
            # A resumed checkpoint has its own number.
            number, lanes = (
                self.start_workers or self._batches_at_start(formation),
                self.lane_workers or self.config.max_workers,
            )
            world.records.record(
                f"run {self.config.run_id}: the number of workers at the start",
                lambda job: job if job.start_workers else replace(job, start_workers=number, lane_workers=lanes),
            )
        if self.start_workers == 0 or self.lane_workers == 0:
            job = world.membership.wait_for(
                lambda view: view.job if view.job and view.job.start_workers else None,
                world.config.wait_timeout_s,
                "rank 0 to send the number of workers at the start",
            )
            self.start_workers, self.lane_workers = self.start_workers or job.start_workers, job.lane_workers or 1

    def build(self, tables: TablesOfTrainer, trainer: Any) -> None:
        """Build a Trainer's new tables in the job, and keep track of their snapshots."""
        assert self.world is not None
        assert self.live is not None
        elastic = tables.build_in_job(self.world, self.live.formation)
        if elastic.store is not None:
            self._stores.append(elastic.store)
        if self.live.formation is None:
            # A joiner gets its shards when it is admitted. Until then it cannot compute with them.
            trainer.num_sanity_val_steps = 0

    # --- leaving -----------------------------------------------------------------------------------------------------------

    def trainer_ends(self, trainer: Any | None) -> None:
        """End a Trainer's work. The job goes on in the script's next Trainer, unless this worker leaves.

        Args:
            trainer: None if the Trainer has ended before it had a model.
        """
        if self._undo_quiet is not None:
            self._undo_quiet()
            self._undo_quiet = None
        live = self.live
        if live is None or trainer is None:
            return
        live.leaving.end()
        live.skipped.publish(is_last=True)
        live.loaders.close()
        live.position.is_in_loops = False
        if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted and not live.position.is_standby:
            live.fits.finish()
        if (trainer.interrupted and self._common_error is None) or live.leaving.has_left:
            self.close()

    def report_error(self, error: BaseException) -> None:
        """Report why a Trainer ends, unless the script may catch the error and go on in all workers."""
        assert self.live is not None
        is_fitting = self.live.position.has_entered and isinstance(error, Exception)
        if is_fitting and not isinstance(error, WorldError | MembershipError) and self.live.fits.fail_together():
            self._common_error = error  # type: ignore[assignment]
        else:
            self.live.world.report_error(error)

    def not_caught(self, error: BaseException) -> None:
        """Report an error that ends this process, after one that has ended a `fit` on all workers."""
        if self._common_error is not None and self.world is not None:
            self._common_error = None
            self.world.report_error(error)

    def continue_after_error(self) -> None:
        """Record the end of a `fit` whose error the script has caught, if there is one."""
        if self._common_error is not None and self.live is not None:
            self._common_error = None
            self.live.fits.end_early()

    def close(self) -> None:
        if self.live is not None and self.live.position.fit > 1:  # else the job is not done, and another process may go on
            self.continue_after_error()
        if self.tables is not None:
            self.tables.close(self._is_over)
        for store in self._stores:  # includes models that an earlier Trainer has trained
            store.close()
        if self._stores and self._is_over():  # asked once: an etcd that is away takes seconds to give no answer
            for store in self._stores:
                store.clear()
        if self.world is not None:
            with suppress(Exception):
                self.world.leave()
        self.world = None

    def _is_over(self) -> bool:
        """Whether no worker will ever continue the job, so that nothing of it need be kept for one."""
        standing = self.world.standing if self.world is not None else None
        return standing is not None and (standing.ask_whether_finished() or standing.ask_whether_cancelled())


def _let_configs_be_replaced(trainer: Any) -> None:
    """Let LightningCLI write its configuration again, as an earlier life of the job has left the file."""
    for callback in trainer.callbacks:
        if is_lightnings(callback, "SaveConfigCallback"):
            callback.overwrite = True


def _compare_callbacks(live: LiveTraining, trainer: Any) -> None:
    """Compare callbacks before Lightning's first collectives.

    Collectives of a callback that some workers lack would meet other collectives.

    Raises:
        UnsupportedScriptError: the workers have different callbacks.
    """
    mine = monitoring(trainer.callbacks)
    by_rank = live.collectives.named("the comparison of callbacks", lambda: transfer.all_gather(mine))
    for rank, theirs in enumerate(by_rank):  # all workers compare with rank 0, so that all of them end
        if problem := different_callbacks(by_rank[0], theirs, "rank 0", f"rank {rank}"):
            raise UnsupportedScriptError(problem)


def _report_what_is_not_caught() -> None:
    former = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if JobSession.newest is not None:
            JobSession.newest.not_caught(error)
        former(kind, error, trace)

    sys.excepthook = report


def _close_newest() -> None:
    if JobSession.newest is not None:
        JobSession.newest.close()
