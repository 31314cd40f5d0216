"""Apply a plan's threads, loader workers and prefetching in one worker while it trains.

Workers need not agree on the time, because none of these changes which samples a worker gets. `live/loader_workers.py` replaces
loader workers without a pause. The number of workers is a matter of rounds (`live/training.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.events import SettingsApplied
from lightning_dlrover.rdzv.job.records import PlanRecord

__all__ = ["SettingsInForce"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Settings:
    loader_workers: list[int]  # one per loader
    prefetch_factor: list[int]
    intra_op_threads: int

    def __str__(self) -> str:
        workers, ahead = ("+".join(map(str, of_loaders)) for of_loaders in (self.loader_workers, self.prefetch_factor))
        return f"{workers} loader workers, {ahead} batches ahead, {counted(self.intra_op_threads, 'thread')}"


class SettingsInForce:
    """Follows the plan. Settings that it leaves open stay as they are, at first as in the user's script.

    Args:
        cores: cores that this worker may use. It never computes with more threads. It has more loader workers only if the
            user's loader or a manual plan requests them, because other plans may be made for larger nodes.
    """

    def __init__(self, cores: float) -> None:
        self._cores = max(1, int(cores))
        self._plan: PlanRecord | None = None  # the plan that was last carried out
        self._loaders: Sequence[ElasticLoader] = ()  # loaders of that plan; a Trainer may make new ones for each epoch
        self._begun: tuple[PlanRecord, _Settings] | None = None  # plan under way, and the settings before it

    def follow(
        self, plan: PlanRecord | None, loaders: Sequence[ElasticLoader], may_add_workers: bool
    ) -> tuple[SettingsApplied, str] | None:
        """Apply as much of the plan as possible. Call it between any two batches.

        Args:
            may_add_workers: whether the planner may give loader workers to any dataset whose loader has none.

        Returns:
            The change and its text, once it is complete.
        """
        if plan is None or (plan is self._plan and loaders == self._loaders):
            return None
        if self._begun is None or self._begun[0] is not plan:
            self._begun = plan, _in_force(loaders)
            for loader in loaders:
                loader.workers.handover_s = 0.0
        if plan.intra_op_threads is not None:
            threads = min(plan.intra_op_threads or self._cores, self._cores)
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        refusals = {loader.workers.refusal for loader in loaders}
        wanted = [self._loader_workers(plan, loader, may_add_workers) for loader in loaders]
        under_way = [x for x, number in zip(loaders, wanted, strict=True) if not x.workers.retune(number, plan.prefetch_factor)]
        if under_way:
            return None
        before, now = self._begun[1], _in_force(loaders)
        self._plan, self._loaders, self._begun = plan, loaders, None
        refused = "; ".join(sorted({loader.workers.refusal for loader in loaders} - refusals))
        if refused:
            log.warning("loader workers stay as they are: %s", refused)
        if now == before and not refused:
            return None
        seconds = sum(loader.workers.handover_s for loader in loaders) if now != before else 0.0
        text = f"{now} on each worker, instead of {before}" + (f"; not more loader workers: {refused}" if refused else "")
        return SettingsApplied(**asdict(now), before=asdict(before), seconds=seconds, refused=refused), text

    def _loader_workers(self, plan: PlanRecord, loader: ElasticLoader, may_add_workers: bool) -> int | None:
        if plan.loader_workers is None or plan.source == "user":
            return plan.loader_workers
        if loader.workers.would_be_first and not may_add_workers:
            return None
        wanted = min(plan.loader_workers, max(self._cores, loader.workers.users_number))
        return loader.order.fitting_loader_workers(wanted)


def _in_force(loaders: Sequence[ElasticLoader]) -> _Settings:
    return _Settings(
        [loader.num_workers for loader in loaders],
        [loader.prefetch_factor for loader in loaders],
        torch.get_num_threads(),
    )
