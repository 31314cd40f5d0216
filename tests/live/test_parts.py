"""Shares that are computed in parts, on a worker without processes. Whole jobs are in `tests/e2e/test_shares_in_parts.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dlrover.rdzv.membership.member import RoundEndedError
from lightning_dlrover.watchdog import HangPatience
from tests.support.live_parts import a_worker


def automatic_worker() -> Any:
    live = a_worker()
    live._trainer.module.automatic_optimization = True
    return live


def test_part_is_halved_until_it_fits_and_the_room_is_kept() -> None:
    live = automatic_worker()
    parts, sizes = live.steps.parts, []

    def compute(again: bool) -> str:
        parts._size = parts.room or 20
        sizes.append((parts._size, again, live.position.is_in_parts))
        if parts._size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert parts.until_it_fits(compute) == "done"
    assert sizes == [(20, False, False), (10, True, True), (5, True, True), (3, True, True)]
    assert parts.room == 3
    assert parts.num_at_once(10) == 3
    assert parts.num_at_once(2) == 2
    assert not live.position.is_in_parts


def test_several_batches_start_over_together() -> None:
    parts = automatic_worker().steps.parts
    done: list[str] = []

    def batch(name: str) -> None:
        parts._size = parts.room or 8
        if name == "second" and parts._size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(name)

    def window(again: bool) -> None:
        for name in ("first", "second"):
            parts.until_it_fits(lambda _, name=name: batch(name))

    parts.until_it_fits(window)
    assert done == ["first", "first", "second"]


def test_memory_that_runs_out_between_passes_is_not_halved_for_ever() -> None:
    parts = automatic_worker().steps.parts

    def compute(again: bool) -> None:
        if not again:
            parts._size = 8
        raise torch.OutOfMemoryError("while the next batch was sent to the device" if again else "in a pass")

    with pytest.raises(torch.OutOfMemoryError, match="while the next batch"):
        parts.until_it_fits(compute)


def test_loss_of_a_worker_ends_a_share_in_parts() -> None:
    live = automatic_worker()
    live.position.is_in_parts = True

    def compute(again: bool) -> None:
        raise RoundEndedError("a worker was lost")

    with pytest.raises(RoundEndedError):
        live.steps.parts.until_it_fits(compute)
    assert not live.position.is_in_parts


def test_share_in_parts_is_no_hang() -> None:
    live = automatic_worker()
    live.position.formation = SimpleNamespace(round=SimpleNamespace(number=1), rank=0, size=1)
    val_loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=0)))
    live._trainer.lightning.fit_loop.epoch_loop.val_loop = val_loop
    live.position.in_step = live.position.is_in_parts = True
    before = live.progress.now
    live.position.parts += 1
    assert live.progress.now != before, "each part is progress"
    assert HangPatience().limit_s(before.phase, 100, 0.1) == HangPatience().first_s
