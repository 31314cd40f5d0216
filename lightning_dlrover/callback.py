"""The Lightning callback: when measurements are taken, published and turned into plans.

The training thread only counts steps and, every few seconds, hands a finished window to a background thread. That thread
publishes it, and on rank 0 keeps the job's history of windows, fits the performance model and asks the planner. Whoever starts
and ends nodes reads the plan from etcd; without such a controller a plan is a recommendation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from statistics import median
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.perf.model import StepTimeModel
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.autoscale import Situation, plan
from lightning_dlrover.planner.objective import Objective
from lightning_dlrover.planner.plan import Decision
from lightning_dlrover.planner.space import Limits
from lightning_dlrover.profiler import COMMUNICATION_SAMPLE_STEPS, Place, StepProfiler
from lightning_dlrover.rdzv.client import EtcdError
from lightning_dlrover.rdzv.membership import Membership
from lightning_dlrover.rdzv.records import PlanRecord, encode, from_fields
from lightning_dlrover.sampler import ElasticLoader
from lightning_dlrover.strategy import DLRoverStrategy

__all__ = ["DLRoverCallback"]

log = logging.getLogger(__name__)

DEFAULT_RESIZE_COST_S = 0.5
"""Assumed until the job has measured a resize of its own."""

NUM_REMEMBERED_WINDOWS = 500

PATIENCE_WITH_A_PLAN_S = 120.0
"""How long a plan may take to be carried out before another one is made: new nodes may queue, and have to start."""


class DLRoverCallback(L.Callback):
    """Profiles every step, learns what workers do to step time, and plans the number of workers.

    Needs `DLRoverStrategy`. Metrics go to the Trainer's loggers as `dlrover/...` and to the progress bar.

    Args:
        window_s: seconds of steps that make one profile.
        plan_every_s: least time between two decisions; 0 switches planning off.
    """

    def __init__(self, window_s: float = 2.0, plan_every_s: float = 10.0) -> None:
        if window_s <= 0 or plan_every_s < 0:
            raise ValueError(f"window_s must be above 0 and plan_every_s at least 0, not {window_s} and {plan_every_s}")
        self._window_s = window_s
        self._plan_every_s = plan_every_s
        self._profiler: StepProfiler | None = None
        self._analyst: _Analyst | None = None
        self._strategy: DLRoverStrategy | None = None
        self._timed_model = 0
        self._known_place: tuple[tuple[int, int], Place | None] = ((0, 0), None)
        self._batch_ended = 0.0

    # --- Lightning's hooks ---------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, DLRoverStrategy):
            raise TypeError(
                f"DLRoverCallback needs Trainer(strategy=DLRoverStrategy()), this Trainer has {type(strategy).__name__}; "
                "strategy='dlrover' works too once lightning_dlrover was imported"
            )
        live = strategy.live
        membership = live.world.membership if live is not None else None
        worker_id = membership.worker_id if membership is not None else f"local-{os.getpid()}"
        self._strategy = strategy
        self._profiler = StepProfiler(worker_id, strategy.root_device, strategy.times)
        self._analyst = _Analyst(membership, self._plan_every_s, nodes_cores=float(os.cpu_count() or 1))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._strategy is not None
        combined = trainer.fit_loop._combined_loader
        loader = combined.flattened[0] if combined is not None else None
        if isinstance(loader, ElasticLoader):
            self._strategy.times.data_wait_s = loader.wait_s
        elif self._batch_ended:
            # No loader of ours that could tell: all between two steps counts as waiting for data.
            self._strategy.times.data_wait_s = time.perf_counter() - self._batch_ended

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profiler, strategy = self._profiler, self._strategy
        assert profiler is not None
        assert strategy is not None
        profiler.step_ended(self._place(trainer, strategy), trainer.global_step)
        if id(strategy.model) != self._timed_model:
            # Not the model itself: keeping an old DDP wrapper alive would keep its group and hooks alive, too.
            self._timed_model = id(strategy.model)
            if isinstance(strategy.model, DistributedDataParallel):
                strategy.model._set_ddp_runtime_logging_sample_rate(COMMUNICATION_SAMPLE_STEPS)  # type: ignore[no-untyped-call]
        if profiler.age_s >= self._window_s and profiler.num_steps >= 3 and (profile := self._close_window(trainer)):
            pl_module.log("samples/s", profile.samples_per_s, prog_bar=True, logger=False, rank_zero_only=True)
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
        self._finish(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    # --- windows ---------------------------------------------------------------------------------------------------------

    def _place(self, trainer: L.Trainer, strategy: DLRoverStrategy) -> Place:
        live = strategy.live
        combined = trainer.fit_loop._combined_loader
        loader = combined.flattened[0] if combined is not None else None
        known, place = self._known_place
        if place is not None and known == (id(live.formation) if live is not None else 0, id(loader)):
            return place
        place = self._new_place(strategy, loader)
        self._known_place = (id(live.formation) if live is not None else 0, id(loader)), place
        return place

    def _new_place(self, strategy: DLRoverStrategy, loader: object) -> Place:
        live = strategy.live
        if live is not None and live.formation is not None and isinstance(loader, ElasticLoader):
            formation = live.formation
            return Place(
                round_number=formation.round.number,
                global_rank=formation.rank,
                num_workers=formation.size,
                num_nodes=live.num_nodes,
                global_batch=loader.global_batch_size,
                local_batch=math.ceil(loader.global_batch_size / formation.size),
                loader_workers=loader.num_workers,
            )
        local_batch = getattr(loader, "batch_size", None) or 1
        return Place(
            round_number=0,
            global_rank=strategy.global_rank,
            num_workers=strategy.world_size,
            num_nodes=strategy.num_nodes,
            global_batch=local_batch * strategy.world_size,
            local_batch=local_batch,
            loader_workers=getattr(loader, "num_workers", 0),
        )

    def _close_window(self, trainer: L.Trainer) -> StepProfile | None:
        assert self._profiler is not None
        assert self._strategy is not None
        assert self._analyst is not None
        profile = self._profiler.close_window(trainer.global_step, self._strategy.model)
        if profile is None:
            return None
        self._analyst.submit(profile, _remaining_samples(trainer, profile.global_batch))
        if trainer.is_global_zero:
            metrics = {
                f"dlrover/{f.name}": float(value)
                for f in dataclasses.fields(profile)
                if f.name not in ("at", "global_rank", "first_step")
                and isinstance(value := getattr(profile, f.name), int | float)
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        return profile

    def _finish(self, trainer: L.Trainer) -> None:
        analyst, self._analyst = self._analyst, None
        self._profiler = None
        if analyst is None:
            return
        decision = analyst.close()
        if analyst.is_alone and decision is not None:
            verdict = (
                f"{decision.chosen_workers} workers would do this job in less time"
                if decision.is_change
                else "one worker is right for this job on this machine"
            )
            rank_zero_info(f"DLRover: {verdict}: {decision.reason}. `dlrover run` resizes a job while it trains.")


def _remaining_samples(trainer: L.Trainer, global_batch: int) -> float | None:
    total = trainer.estimated_stepping_batches
    if math.isinf(total):
        return None
    return max(0.0, (total - trainer.global_step) * trainer.accumulate_grad_batches * global_batch)


class _Analyst:
    """Background thread: publishes windows; on rank 0 learns from them and plans."""

    def __init__(self, membership: Membership | None, plan_every_s: float, nodes_cores: float) -> None:
        self._membership = membership
        self._plan_every_s = plan_every_s
        self._node_cores = nodes_cores
        self._windows: list[StepProfile] = []
        self._decisions: list[Decision] = []
        self._knows_past = False
        self._planned_at = 0.0
        self._in_round = (0, 0)  # round number, windows seen in it
        self._inbox: queue.SimpleQueue[tuple[StepProfile, float | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlrover-analyst", daemon=True)
        self._thread.start()

    @property
    def is_alone(self) -> bool:
        return self._membership is None

    def submit(self, profile: StepProfile, remaining_samples: float | None) -> None:
        self._inbox.put((profile, remaining_samples))

    def close(self, timeout_s: float = 10.0) -> Decision | None:
        """End the thread once it has dealt with what was submitted. Returns the last decision."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return self._decisions[-1] if self._decisions else None

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            # Fitting must not take a core away from training.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        away = False
        while (item := self._inbox.get()) is not None:
            try:
                self._digest(*item)
                away = False
            except EtcdError as error:
                if not away:
                    log.warning("step profiles are not published until etcd is back: %s", error)
                away = True
            except Exception:
                # Training must go on without plans; what went wrong is said once per window, with its traceback.
                log.exception("planning failed")

    def _digest(self, profile: StepProfile, remaining_samples: float | None) -> None:
        if self._membership is not None:
            self._membership.put_profile(encode(profile))
        if profile.global_rank != 0:
            self._knows_past = False
            return
        if not self._knows_past:
            self._read_past()
        if self._membership is not None:
            self._membership.event("profile", "", dataclasses.asdict(profile))
        self._windows = [*self._windows[-NUM_REMEMBERED_WINDOWS:], profile]
        round_number, seen = self._in_round
        self._in_round = (profile.round_number, seen + 1 if round_number == profile.round_number else 1)
        waited = time.monotonic() - self._planned_at >= self._plan_every_s or not self._decisions
        if self._plan_every_s and waited and self._in_round[1] >= 3 and not self._is_under_way(profile):
            self._plan(profile, remaining_samples)

    def _is_under_way(self, profile: StepProfile) -> bool:
        """Whether nodes are still being started or ended for the current plan; judging it now would take it back."""
        plan = self._membership.view.plan if self._membership is not None else None
        if plan is None or not plan.binding or plan.num_workers == profile.num_workers:
            return False
        return time.time() - plan.created_at < PATIENCE_WITH_A_PLAN_S

    def _read_past(self) -> None:
        """What earlier rank 0s have learned and decided; this worker may be the first one or the tenth."""
        self._knows_past = True
        if self._membership is None:
            return
        windows, decisions = [], []
        for event in self._membership.past_events():
            try:
                if event.kind == "profile":
                    windows.append(from_fields(StepProfile, event.data, "a profile"))
                elif event.kind == "decision":
                    decisions.append(Decision.from_data(event.data))
            except (TypeError, ValueError, KeyError) as error:
                log.warning("an event of the job's past cannot be read: %s", error)
        self._windows, self._decisions = windows[-NUM_REMEMBERED_WINDOWS:], decisions

    def _plan(self, profile: StepProfile, remaining_samples: float | None) -> None:
        membership = self._membership
        limits = Limits(1, max(2, int(self._node_cores)))
        wish: PlanRecord | None = None
        resize_cost_s = DEFAULT_RESIZE_COST_S
        if membership is not None:
            job, wish = membership.view.job, membership.view.plan
            if job is None:
                return
            limits = Limits(job.min_workers, job.max_workers)
            past = [e.data.get("seconds") for e in membership.past_events() if e.kind == "stall"]
            stalls = [seconds for seconds in past if isinstance(seconds, float) and 0 <= seconds < math.inf]
            resize_cost_s = median(stalls) if stalls else DEFAULT_RESIZE_COST_S
        model = StepTimeModel.fit(self._windows, node_cores=self._node_cores)
        situation = Situation(
            self._windows,
            node_cores=self._node_cores,
            remaining_samples=remaining_samples,
            resize_cost_s=resize_cost_s,
            past=self._decisions,
        )
        decision = plan(situation, model, limits, Objective(), decision_id=len(self._decisions) + 1, at=time.time())
        self._planned_at = time.monotonic()
        self._decisions.append(decision)
        if membership is None:
            return
        followed = membership.has_controller()
        by_hand = wish is not None and wish.source == "user"
        data = decision.to_data()
        if by_hand:
            data["reason"] = f"{decision.reason} (a recommendation: the size was set by hand)"
        elif not followed and decision.is_change:
            data["reason"] = f"{decision.reason} (a recommendation: no controller starts or ends nodes)"
        membership.event("decision", data["reason"], data)
        if by_hand or (wish is not None and wish.num_workers == decision.chosen_workers and wish.binding == followed):
            return
        proposed = PlanRecord(
            num_workers=decision.chosen_workers,
            source="planner",
            reason=decision.reason,
            binding=followed,
            decision_id=decision.decision_id,
            created_at=time.time(),
        )
        membership.update_plan(lambda now: None if now is not None and now.source == "user" else proposed)
