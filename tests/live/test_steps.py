"""Training steps that a loss interrupts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loops.progress import _OptimizerProgress

from lightning_dlrover.live import steps as module
from lightning_dlrover.rdzv.membership.member import RoundEndedError
from tests.support.live_parts import a_worker


def test_redone_batches_are_not_counted_for_the_closing_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = a_worker()
    trainer, steps = live._trainer.lightning, live.steps
    live.position.formation = SimpleNamespace(size=1, rank=0)
    progress = _OptimizerProgress()
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization = SimpleNamespace(optim_progress=SimpleNamespace(optimizer=progress))
    trainer.accumulate_grad_batches, trainer.fit_loop._should_accumulate = 2, lambda: False
    live.metrics.agree_on_step = lambda: None
    live.collectives.recover = lambda: False
    steps._redo_window = lambda inside: steps.backward_begins()
    monkeypatch.setattr(module, "call_restart_hooks", lambda trainer, batch_idx: None)
    failures = [RoundEndedError("a worker was lost")]

    def run(*args: Any) -> dict[str, Any]:
        steps.backward_begins()
        if failures:
            raise failures.pop()
        return {}

    steps.run_automatic(run, None, 1, {})
    assert steps._max_backwards == 1
