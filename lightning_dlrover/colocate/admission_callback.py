"""The callback that admits a Trainer among a dispatcher's jobs: it requests memory before the first step, and reports steps.

`ADMISSION` plugs in by the entry point `dlrover.callbacks`, so the core does not depend on it. A job without a dispatcher,
which has no dispatcher's folder in its environment, has no such callback.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_dlrover.colocate.admission_client import AdmissionClient, AdmissionReport
from lightning_dlrover.lightning_compat import package_of, submodule
from lightning_dlrover.live.fit_parts import remaining_batches
from lightning_dlrover.live.lightning_adapter import combined_loader
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.records import PlanRecord
from lightning_dlrover.tuning.profiler import gpu_bytes

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.rdzv.membership.membership import Membership


class AdmissionPlugin:
    """Adds an `AdmissionCallback` to the Trainers of a job that a dispatcher has started."""

    def applies(self, environ: Mapping[str, str]) -> bool:
        return AdmissionClient.from_environment(environ, 0) is not None

    def callback(self, trainer: L.Trainer) -> Any:
        base: type = submodule(package_of(trainer), "callbacks").Callback
        return type("AdmissionCallback", (AdmissionCallback, base), {"__module__": __name__})()


ADMISSION = AdmissionPlugin()


class AdmissionCallback:
    """Hooks of Lightning, for one process of a job that a dispatcher has started. `AdmissionPlugin` derives a callback from
    it."""

    def __init__(self) -> None:
        self._client: AdmissionClient | None = None
        self._has_asked = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._client is None and (client := AdmissionClient.from_environment(os.environ, trainer.global_rank)) is not None:
            client.report(None, torch.get_num_threads(), gpu_bytes=gpu_bytes(trainer.strategy.root_device))
            self._client = client

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the first batch, report the peak memory of this process and wait until the dispatcher admits the job.

        A worker that joins a live job does not ask: the others, which were admitted, wait for it in the first step.

        Raises:
            NotAdmittedError: the dispatcher did not admit the job.
        """
        client = self._client
        if client is None or self._has_asked:
            return
        self._has_asked = True
        if _membership(trainer) is not None and client.answer().admitted:
            return
        if client.needs_no_estimate:
            report = AdmissionReport(os.getpid(), time.monotonic(), trainer.world_size, estimate_note="measured before")
        else:
            report = _estimate(trainer, pl_module, batch)
        now_bytes, peak_bytes = gpu_bytes(pl_module.device)
        answer = client.ask(replace(report, gpu_bytes=now_bytes, gpu_peak_bytes=peak_bytes))
        if answer.threads:
            torch.set_num_threads(answer.threads)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step, and follow the dispatcher: its threads, or its number of workers in a live job, which plans threads."""
        client, strategy = self._client, cast("Any", trainer.strategy)
        if client is None:
            return
        client.step_ended(strategy.times.data_wait_s)
        if not client.is_due:
            return
        batches = remaining_batches(trainer)
        left = None if batches is None else max(0, round(batches))
        answer = client.answer()
        on_gpu = gpu_bytes(strategy.root_device)
        membership = _membership(trainer)
        if membership is None:
            client.report(left, torch.get_num_threads(), gpu_bytes=on_gpu)
            if answer.threads and answer.threads != torch.get_num_threads():
                torch.set_num_threads(answer.threads)
            return
        job = membership.view.job
        fewest = job.min_workers if job is not None and membership.shared.has_controller() else 0
        client.report(left, torch.get_num_threads(), trainer.world_size, fewest, on_gpu)
        if trainer.global_rank == 0 and 0 < answer.most_processes < trainer.world_size:
            _shrink(membership, answer.most_processes)


def _membership(trainer: L.Trainer) -> Membership | None:
    """Return the live job's records; None outside of a live job."""
    strategy: Any = trainer.strategy
    return strategy.live.world.membership if strategy.live is not None else None


def _shrink(membership: Membership, num_workers: int) -> None:
    """Plan fewer workers, as `dlrover scale` does, so that the job's own planner does not take it back."""
    job = membership.view.job
    num_workers = job.world_sizes.at_most(num_workers) if job is not None else num_workers

    def fewer(plan: PlanRecord | None) -> PlanRecord | None:
        if plan is not None and plan.binding and plan.num_workers <= num_workers:
            return None
        reason = f"no memory for more than {counted(num_workers, 'worker')} next to the other jobs of this machine"
        unplanned = PlanRecord(num_workers, "user", reason, binding=True)
        changed: dict[str, Any] = {"num_workers": num_workers, "source": "user", "reason": reason, "binding": True}
        return replace(plan or unplanned, **changed, decision_id=0, created_at=time.time())

    shared = membership.shared
    shared.outbox.change("workers that fit next to the other jobs", lambda: shared.update_plan(fewer))


def _estimate(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> AdmissionReport:
    """Return the estimated peak of this process; zero bytes and the reason without an estimate."""
    # Imported here: jobs that run by themselves start faster without.
    from lightning_dlrover.colocate.peak_memory import LoaderShape, Unknown, estimate_peak, report_of, step_of

    if module.device.type != "cpu":
        # The estimate needs a copy of the process, and CUDA does not work in a copy of a process that uses it.
        return report_of(
            Unknown(f"the peak of a model on {module.device.type} is measured in its first steps"), trainer.world_size
        )
    combined = combined_loader(trainer.fit_loop)
    loaders = combined.flattened if combined is not None else []
    workers = sum(getattr(loader, "num_workers", 0) for loader in loaders)
    loader = LoaderShape(workers, max((getattr(loader, "prefetch_factor", None) or 2 for loader in loaders), default=2))
    step = step_of(module, trainer.optimizers)
    return report_of(estimate_peak(module, trainer.optimizers, batch, step, loader=loader), trainer.world_size)
