"""The Lightning callback: when measurements are taken, published and turned into plans.

The training thread only counts steps. Every few seconds it hands a finished window to a background thread
(`tuning/analyst.py`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dlrover.checks import UnsupportedLoaderError, check_no_view_of_a_stream
from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.lightning_compat import CSVLogger, TrainerFn, on_import, submodule
from lightning_dlrover.live.fit_parts import batches_done, remaining_batches
from lightning_dlrover.live.hooks import WorldInfo
from lightning_dlrover.live.lightning_adapter import combined_loader
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.output import counted
from lightning_dlrover.plugins import CALLBACKS, CallbackPlugin, PluginError, plugins
from lightning_dlrover.rdzv.job.records import ProgressRecord
from lightning_dlrover.strategy import DLRoverStrategy
from lightning_dlrover.tuning.analyst import Analyst
from lightning_dlrover.tuning.autoscale import TrialWatch
from lightning_dlrover.tuning.autotuner import TuningConfig
from lightning_dlrover.tuning.history import history_url
from lightning_dlrover.tuning.plan import Aim, Decision, Objective, Settings, objective_from, step_text
from lightning_dlrover.tuning.profiler import (
    Descriptors,
    ForwardWatch,
    Model,
    ProfileKey,
    StepProfiler,
    dense_gradient_bytes,
    embedding_bytes,
    uses_dynamo,
)
from lightning_dlrover.tuning.resources import MachineLoad
from lightning_dlrover.tuning.samples import StepProfile
from lightning_dlrover.watchdog import HangPatience, Watchdog

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch import Callback

    WorldHook = Callable[[L.Trainer, L.LightningModule, WorldInfo | None, WorldInfo], object]
    NoticeHook = Callable[[L.Trainer, L.LightningModule, float], object]

else:

    class Callback:
        """Placeholder until one of Lightning's packages is imported, see `_derive`."""


Tunable = Literal["num_workers", "loader_workers", "intra_op_threads", "prefetch_factor", "first_loader_workers"]
TUNABLE: tuple[Tunable, ...] = get_args(Tunable)
"""Settings that the planner may change while a job runs.

`first_loader_workers` adds to `loader_workers` the change from 0, for any dataset. The script's own dataset objects then stay
as they are when the loader workers are forked: what `training_step` writes to them later is not in the batches.
"""

_NOTABLE = 0.95
"""Part of the measured step time from which on a predicted one is called faster."""

TUNED: tuple[Tunable, ...] = tuple(name for name in TUNABLE if name != "first_loader_workers")
"""Settings that the planner changes by default."""


_OF_WINDOWS = tuple(
    f.name
    for f in dataclasses.fields(StepProfile)
    if f.type in ("int", "float") and f.name not in ("at", "global_rank", "first_step", "num_workers", "round_number")
)

SERIES = ("world_size", "round", "stall_s", "predicted_step_time_s", *_OF_WINDOWS)
"""Names of a job's series in the Trainer's loggers, there after `dlrover/`."""


class DLRoverCallback(Callback):
    """Profiles every step, learns how long steps take, and plans workers, loader workers, threads and prefetching.

    Needs `DLRoverStrategy`. Metrics go to the Trainer's loggers as `dlrover/...`, and outside of a job to the bar.

    Args:
        window_s: seconds of steps that make one profile.
        plan_every_s: minimum seconds between two decisions; 0 switches planning off.
        objective: `fastest`, `cheapest`, `efficient`, or an `Objective` with deadline, budget and prices.
            None: the objective of `dlrover run`, else the fastest.
        history: storage of past jobs, from which later ones start: a path, a SQLAlchemy URL, or `off`.
            None: the variable DLROVER_HISTORY, else a file in the user's data folder.
        tune: settings that the planner may change. All others keep the script's values, or those of `dlrover scale`.
            A DataLoader with num_workers=0 gets loader workers only if it reads a stream, or if `tune` holds
            `first_loader_workers`, as in ``tune=TUNABLE``, and the dataset holds no open file.
        hang_after_s: minimum seconds without a step before all workers report their position. The wait is also at least 20
            times as long as a usual step. 0 switches the report off.
        log_world: whether the Trainer's loggers get the job's series. They cost no collective, as only rank 0 logs.
        on_world_change: called between two batches with Trainer, module, the former world and the new one, on every worker of
            the new one. The former is None on a worker that has just joined.
        on_notice: called with Trainer, module and a time in seconds since the epoch: this worker will be taken away then.

    Example:
        >>> from lightning_dlrover.tuning import Objective, Prices
        >>> objective = Objective("cheapest", deadline_s=7200, prices=Prices(core_hour=0.04))
        >>> callback = DLRoverCallback(objective=objective, tune=["num_workers"])  # leave threads and loader workers alone
    """

    def __init__(
        self,
        window_s: float = 2.0,
        plan_every_s: float = 10.0,
        *,
        objective: Aim | Objective | None = None,
        history: str | None = None,
        tune: Collection[Tunable] = TUNED,
        hang_after_s: float = 60.0,
        log_world: bool = True,
        on_world_change: WorldHook | None = None,
        on_notice: NoticeHook | None = None,
    ) -> None:
        if not 0 <= hang_after_s < math.inf:
            raise ValueError(f"hang_after_s is {hang_after_s}, it must be 0 (off) or a time in seconds")
        if window_s <= 0 or plan_every_s < 0:
            raise ValueError(f"window_s must be above 0 and plan_every_s at least 0, not {window_s} and {plan_every_s}")
        if unknown := sorted({*tune} - {*TUNABLE}):
            raise ValueError(f"tune names {unknown}, which cannot be tuned; it may hold {', '.join(TUNABLE)}")
        self._tune = tuple(tune)
        self._logs_world = log_world
        self._users_world_hook, self._users_notice_hook = on_world_change, on_notice
        self._patience = HangPatience(floor_s=hang_after_s)
        self._watchdog: Watchdog | None = None
        self._window_s = window_s
        if not isinstance(objective, Objective):
            objective = Objective(aim=objective) if objective is not None else objective_from(os.environ)
        self._tuning = TuningConfig(plan_every_s, objective, history_url(history))
        self._profiler: StepProfiler | None = None
        self._analyst: Analyst | None = None
        self._trial_watch = TrialWatch()
        self._strategy: DLRoverStrategy | None = None
        self._watch: ForwardWatch | None = None  # records the first step
        self._descriptors = Descriptors()
        self._place_now: ProfileKey | None = None
        self._known_by: tuple[object, ...] = ()  # inputs of the current place, compared in every step
        self._batch_ended = 0.0
        self._has_window = False  # of this fit
        self._logged_round: int | None = None  # round of the newest world that was logged; None before the first
        self._stalled_s = 0.0  # pauses of this worker up to then
        self._loss: torch.Tensor | None = None  # of the newest batch, on its device
        self._plugged: list[Callback] | None = None  # callbacks of other packages; None before the first fit

    # --- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the callbacks that other packages plug in follow this one, so that Lightning calls their hooks, too."""
        if stage != TrainerFn.FITTING:
            return
        if self._plugged is None:
            self._plugged = _plugged_callbacks(trainer)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        behind = callbacks.index(self) + 1
        callbacks[behind:behind] = [callback for callback in self._plugged if callback not in callbacks]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, DLRoverStrategy):
            raise TypeError(
                f"DLRoverCallback needs Trainer(strategy=DLRoverStrategy()), this Trainer has {type(strategy).__name__}; "
                "strategy='dlrover' works too once lightning_dlrover was imported"
            )
        live = strategy.live
        membership = live.world.membership if live is not None else None
        if live is not None:
            live.loaders.may_add_workers = "first_loader_workers" in self._tune
        worker_id = membership.worker_id if membership is not None else f"local-{os.getpid()}"
        self._strategy = strategy
        self._has_window = False
        self._logged_round, self._stalled_s = None, 0.0
        self._profiler = StepProfiler(worker_id, strategy.root_device, strategy.times)
        self._watch = ForwardWatch(pl_module) if not uses_dynamo(pl_module) else None
        if self._watch is not None:
            strategy.watch_next_forward(self._watch)
        self._watchdog = Watchdog(live.progress, self._patience) if live is not None else None
        self._analyst = Analyst(membership, self._tuning, node_cores=float(os.cpu_count() or 1), load=MachineLoad())

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        combined = combined_loader(trainer.fit_loop)
        for loader in combined.flattened if combined is not None else ():
            data = getattr(loader, "dataset", None)
            check_no_view_of_a_stream(data)
            # Not a live job's loader, which asks for rows by seed. An epoch that was resumed in its middle continues.
            if not isinstance(loader, ElasticLoader) and isinstance(data, Stream) and data.epoch != trainer.current_epoch:
                if data.grows:
                    raise UnsupportedLoaderError(
                        f"{data.source!r:.120} grows, and Lightning alone has counted only the first epoch's batches: run the "
                        "script with `dlrover run` and DLRoverStrategy, or give the source a place to stop"
                    )
                data.set_epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._strategy is not None
        loader = _loader(trainer)
        if isinstance(loader, ElasticLoader):
            self._strategy.times.data_wait_s = loader.wait_s
        elif self._batch_ended:
            # Without a loader of ours that measures it, all time between two steps counts as waiting for data.
            self._strategy.times.data_wait_s = time.perf_counter() - self._batch_ended
        self._log_world(trainer, self._strategy)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profiler, strategy = self._profiler, self._strategy
        assert profiler is not None
        assert strategy is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else None
        place = self._place(trainer, strategy)
        profiler.step_ended(place, batches_done(trainer))
        self._watch_trial(place, profiler.newest_step_s)
        if self._watch is not None:
            self._descriptors = self._watch.descriptors(_num_watched_samples(strategy, _loader(trainer)))
            self._watch = None
        is_due = profiler.age_s >= self._window_s and profiler.num_steps >= 3
        profile = self._close_window(trainer) if is_due else None
        if profile is not None:
            # A job's progress has the rate already, and the first window holds steps that are slow.
            if strategy.live is None and self._has_window:
                pl_module.log("samples/s", profile.samples_per_s, prog_bar=True, logger=False, rank_zero_only=True)
            self._has_window = True
        self._batch_ended = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.resume()
        self._batch_ended = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profiler is not None and self._profiler.num_steps:
            self._close_window(trainer)
        self._finish("finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._finish("failed" if isinstance(exception, Exception) else "running")

    # --- hooks of a changing job, which the strategy calls ---------------------------------------------------------------

    def on_world_change(
        self, trainer: L.Trainer, pl_module: L.LightningModule, former: WorldInfo | None, world: WorldInfo
    ) -> None:
        if self._users_world_hook is not None:
            self._users_world_hook(trainer, pl_module, former, world)

    def on_notice(self, trainer: L.Trainer, pl_module: L.LightningModule, notice: float) -> None:
        if self._users_notice_hook is not None:
            self._users_notice_hook(trainer, pl_module, notice)

    # --- windows ---------------------------------------------------------------------------------------------------------

    def _place(self, trainer: L.Trainer, strategy: DLRoverStrategy) -> ProfileKey:
        live, loader = strategy.live, _loader(trainer)
        formation = live.formation if live is not None else None
        settings: dict[str, int] = {
            "loader_workers": getattr(loader, "num_workers", 0),
            "prefetch_factor": getattr(loader, "prefetch_factor", 0) or 0,
            "intra_op_threads": torch.get_num_threads(),
        }
        known = formation, loader, *settings.values()  # objects, as an id may be used again once its object is gone
        if self._place_now is None or self._known_by != known:
            self._known_by, self._place_now = known, _new_place(strategy, loader, settings)
        return self._place_now

    def _watch_trial(self, place: ProfileKey, step_s: float | None) -> None:
        """Give a trial up once its steps are far too slow."""
        assert self._analyst is not None
        trial = self._analyst.trial
        if trial is None or step_s is None:
            return
        ahead = place.prefetch_factor if place.loader_workers else 0
        settings = Settings(place.num_workers, place.loader_workers, place.intra_op_threads, ahead)
        if (usual_s := self._trial_watch.step_ended(trial, settings, step_s, place.round_number)) is not None:
            self._analyst.give_up(trial, usual_s)

    def _close_window(self, trainer: L.Trainer) -> StepProfile | None:
        assert self._profiler is not None
        assert self._strategy is not None
        assert self._analyst is not None
        module = trainer.lightning_module
        model = Model(self._descriptors, dense_gradient_bytes(module, self._strategy.sharded_names), embedding_bytes(module))
        profile = self._profiler.close_window(batches_done(trainer), model)
        if profile is None:
            return None
        if self._watchdog is not None:
            self._watchdog.saw(profile)
        live = self._strategy.live
        batches = remaining_batches(trainer)
        self._analyst.submit(
            profile,
            None if batches is None else batches * profile.global_batch,
            tunable=live is not None and isinstance(_loader(trainer), ElasticLoader),
            untunable={*TUNABLE} - {*self._tune} | {*(live.progress.untunable if live is not None else ())},
            progress=_progress(trainer, profile, batches, self._loss) if trainer.is_global_zero else None,
        )
        predicted_s = self._analyst.predicted_step_time_s(profile)
        self._log(trainer, _series(profile) | ({"predicted_step_time_s": predicted_s} if predicted_s is not None else {}))
        return profile

    # --- series of the job in the Trainer's loggers ------------------------------------------------------------------------

    def _log_world(self, trainer: L.Trainer, strategy: DLRoverStrategy) -> None:
        """Log the world of the first batch, and of the first batch after each change, with the pause before it."""
        world = strategy.world
        if self._logged_round == world.round:
            return
        is_first, self._logged_round = self._logged_round is None, world.round
        stalled_s = strategy.live.progress.stalled_s if strategy.live is not None else 0.0
        pause_s, self._stalled_s = stalled_s - self._stalled_s, stalled_s
        row = {"world_size": world.size, "round": world.round, "stall_s": pause_s}
        self._log(trainer, row, is_first=is_first)

    def _log(self, trainer: L.Trainer, values: Mapping[str, float], *, is_first: bool = False) -> None:
        if not self._logs_world or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            # Each name that comes later makes a CSVLogger write its whole file again.
            row = {**dict.fromkeys(SERIES, math.nan), **values} if is_first and isinstance(logger, CSVLogger) else values
            logger.log_metrics({f"dlrover/{name}": float(value) for name, value in row.items()}, step=trainer.global_step)

    def _finish(self, end: Literal["running", "finished", "failed"]) -> None:
        watchdog, self._watchdog = self._watchdog, None
        profiler, self._profiler = self._profiler, None
        analyst, self._analyst = self._analyst, None
        for closed in (watchdog, profiler):
            if closed is not None:
                closed.close()
        if analyst is None:
            return
        decision = analyst.close(end)
        if analyst.is_alone and decision is not None:
            rank_zero_info(f"DLRover: {_advice(decision)}. `dlrover run` resizes a job while it trains.")


def _advice(decision: Decision) -> str:
    """Return what is known of other numbers of workers after a fit with one. How long the next fit takes is unknown."""
    now_s = decision.observed_step_time_s
    best = min((c for c in decision.candidates if c.feasible), key=lambda c: c.step_time_s, default=decision.choice)
    if best.num_workers == 1 or best.step_time_s > _NOTABLE * now_s:
        return f"one worker is enough for this job on this machine, with {step_text(now_s)} a step"
    may = "would" if best.high_s < now_s else "might"
    return (
        f"{counted(best.num_workers, 'worker')} {may} be faster: {step_text(best.step_time_s)} a step predicted "
        f"({step_text(best.low_s)} to {step_text(best.high_s)}), {step_text(now_s)} measured with one"
    )


def _derive(package: str) -> None:
    """Add the package's own callback to the bases of the class. The hooks of both packages' callbacks do nothing."""
    own: type = submodule(package, "callbacks").Callback
    if own not in DLRoverCallback.__mro__:
        others = (base for base in DLRoverCallback.__bases__ if base is not Callback)
        DLRoverCallback.__bases__ = (*others, own)


on_import(_derive)


def _plugged_callbacks(trainer: L.Trainer) -> list[Callback]:
    """Return the callbacks that other packages plug into this process. Those that cannot be used are left out with a warning.

    Raises:
        PluginError: a plug-in that applies to this process could not make its callback.
    """
    made = []
    for plugin in plugins(CALLBACKS):
        try:
            plugged = plugin.load(CallbackPlugin)  # type: ignore[type-abstract]
        except PluginError as error:
            rank_zero_warn(str(error))
            continue
        try:
            if plugged.applies(os.environ):
                made.append(plugged.callback(trainer))
        except Exception as error:  # of a foreign module
            raise plugin.error(f"it failed: {type(error).__name__}: {error}") from error
    return made


def _series(profile: StepProfile) -> dict[str, float]:
    """Return a window's values for the loggers, by name."""
    of_world = {"world_size": profile.num_workers, "round": profile.round_number}
    return of_world | {name: getattr(profile, name) for name in _OF_WINDOWS}


def _loader(trainer: L.Trainer) -> object:
    combined = combined_loader(trainer.fit_loop)
    return combined.flattened[0] if combined is not None else None


def _progress(
    trainer: L.Trainer, profile: StepProfile, batches_left: float | None, loss: torch.Tensor | None
) -> ProgressRecord:
    num_batches = trainer.num_training_batches
    return ProgressRecord(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        batch=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        num_workers=profile.num_workers,
        samples_per_s=float(f"{profile.samples_per_s:.4g}"),
        max_epochs=trainer.max_epochs if trainer.max_epochs not in (None, -1) else None,
        num_batches=int(num_batches) if math.isfinite(num_batches) else None,
        seconds_left=round(batches_left * profile.step_time_s, 1) if batches_left is not None else None,
        loss=f"{float(loss):.4g}" if loss is not None and loss.numel() == 1 else "",
        at=round(time.time(), 1),
    )


def _num_watched_samples(strategy: DLRoverStrategy, loader: object) -> int:
    """Samples of this worker's first pass over the last batch, at least 1: a worker without any computes a stand-in."""
    if strategy.live is not None and isinstance(loader, ElasticLoader):
        return strategy.live.steps.parts.num_at_once(max(1, loader.split.num_own_samples(loader.cursor - 1)))
    return getattr(loader, "batch_size", None) or 1


def _new_place(strategy: DLRoverStrategy, loader: object, settings: dict[str, int]) -> ProfileKey:
    live = strategy.live
    if live is not None and live.formation is not None and isinstance(loader, ElasticLoader):
        formation = live.formation
        by_host = formation.workers_by_host
        return ProfileKey(
            round_number=formation.round.number,
            global_rank=formation.rank,
            num_workers=formation.size,
            num_nodes=len(by_host),
            global_batch=loader.global_batch_size,
            local_batch=math.ceil(loader.global_batch_size / formation.size),
            fullest_node=max(by_host.values()),
            emptiest_node=min(by_host.values()),
            workers_here=formation.num_workers_here,
            pass_limit=0 if live.steps.parts.refusal else live.steps.parts.room or loader.global_batch_size,
            **settings,
        )
    local_batch = getattr(loader, "batch_size", None) or 1
    return ProfileKey(
        round_number=0,
        global_rank=strategy.global_rank,
        num_workers=strategy.world_size,
        num_nodes=strategy.num_nodes,
        global_batch=local_batch * strategy.world_size,
        local_batch=local_batch,
        workers_here=math.ceil(strategy.world_size / strategy.num_nodes),
        **settings,
    )
