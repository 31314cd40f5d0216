"""Keep a search for a learning rate, as by `Tuner.lr_find`, apart from the job: no worker joins it, and it finishes nothing.

The members of the first round search together, before they train. Later joiners take their result instead of searching.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.ports import Job, Round
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.packages import LearningRateFinder
from lightning_dlrover.rdzv.job.records import SearchRecord
from lightning_dlrover.rdzv.live.member import WorldError
from lightning_dlrover.rdzv.live.worker_view import WorkerView

__all__ = ["Searches"]


class Searches:
    """The searches of one worker's script, identified by count: every worker runs the same script."""

    def __init__(self, job: Job, round_: Round, position: FitPosition) -> None:
        self._job = job
        self._round = round_
        self._position = position
        self.num_begun = 0
        self.is_running = False
        """True while the Trainer's loop makes steps that do not count."""

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
                    f"{type(finder).__name__} searches for a learning rate while the job trains; its steps cannot be told from "
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
            if found is not None and self._round.formation is not None and self._round.rank == 0:
                results = json.dumps(lightning_names.search_results(found))
                self._job.records.put_search(self.num_begun, SearchRecord(results))

    def _take(self, finder: Any, trainer: Any, module: Any) -> None:
        """Do the same as Lightning after a search, with the result of the training workers."""
        lightning_names.adopt_search(finder, trainer, module, json.loads(self._results()))
        if lightning_names.ends_after_search(finder):
            raise lightning_names.exit_after_search(trainer)

    def _results(self) -> str:
        membership = self._job.membership

        def look(view: WorkerView) -> str | None:
            if (record := membership.shared.search(self.num_begun)) is not None:
                return record.results
            # Once the searching workers are gone, no result can appear any more.
            return "" if view.round is not None and len(view.lost) == len(view.round.members) else None

        what = f"the first workers to find a learning rate (search {self.num_begun} of the script)"
        results = membership.wait_for(look, self._job.config.wait_timeout_s, what)
        if not results:
            raise WorldError(
                "the workers that searched for a learning rate were lost before they had found one: this worker has to start "
                "again, and search"
            )
        return results
