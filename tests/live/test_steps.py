"""Training steps that a loss or a lack of memory interrupts, and batches cut into parts. Workers without processes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loops.progress import _OptimizerProgress
from torch import Tensor

from lightning_dlrover.live import steps as module
from lightning_dlrover.live.steps import UnsplittableBatchError, num_rows, part_of, part_sizes, whole_output, whole_value
from lightning_dlrover.rdzv.membership.member import RoundEndedError
from lightning_dlrover.watchdog import HangPatience
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


def test_memory_that_runs_out_between_passes_ends_the_halving() -> None:
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


def test_share_in_parts_is_not_taken_for_a_hang() -> None:
    live = automatic_worker()
    live.position.formation = SimpleNamespace(round=SimpleNamespace(number=1), rank=0, size=1)
    val_loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=0)))
    live._trainer.lightning.fit_loop.epoch_loop.val_loop = val_loop
    live.position.in_step = live.position.is_in_parts = True
    before = live.progress.now
    live.position.parts += 1
    assert live.progress.now != before, "each part is progress"
    assert HangPatience().limit_s(before.phase, 100, 0.1) == HangPatience().first_s


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Boxes:
    image: Tensor
    labels: list[str]


def cut(batch: Any, num_samples: int, *sizes: int) -> list[Any]:
    stops = np.cumsum(sizes)
    return [part_of(batch, num_samples, slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


@pytest.mark.parametrize("num_samples", range(1, 20))
@pytest.mark.parametrize("room", [1, 2, 3, 7, 30])
def test_parts_hold_all_samples_and_no_part_exceeds_the_room(num_samples: int, room: int) -> None:
    sizes = part_sizes(num_samples, room)
    assert sum(sizes) == num_samples
    assert max(sizes) <= room
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_samples // room)
    assert sizes == sorted(sizes, reverse=True), "the last part, which other workers wait for, is no larger than one before"


def test_structure_of_a_batch_is_kept() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    batch = {
        "pair": Pair(x, [x, (x, 3)]),
        "boxes": Boxes(x, list("abcde")),
        "ordered": OrderedDict(y=x.numpy()),
        "scale": torch.tensor(2.0),
        "name": "train",
        "none": None,
    }
    first, last = cut(batch, 5, 3, 2)
    assert isinstance(first["pair"], Pair)
    assert isinstance(first["pair"].y[1], tuple)
    assert isinstance(first["ordered"], OrderedDict)
    assert first["boxes"].labels == ["a", "b", "c"]
    assert last["boxes"].labels == ["d", "e"]
    assert last["ordered"]["y"].tolist() == x[3:].tolist()
    assert last["pair"].y[1][1] == 3
    assert torch.equal(torch.cat([first["boxes"].image, last["boxes"].image]), x)
    assert first["scale"] == last["scale"] == 2.0
    assert first["name"] == "train"
    assert first["pair"].x.data_ptr() == x.data_ptr(), "no copy"


def test_lists_of_samples_are_told_from_lists_of_fields() -> None:
    images = [torch.zeros(3, 4, width) for width in (5, 6, 7, 8)]
    targets = [{"boxes": torch.zeros(number, 4)} for number in (1, 0, 2, 4)]
    first, _ = cut((images, targets), 4, 3, 1)
    assert [image.shape[2] for image in first[0]] == [5, 6, 7]
    assert len(first[1]) == 3

    x, y = torch.zeros(2, 8), torch.zeros(2)
    first, _ = cut([x, y], 2, 1, 1)
    assert [part.shape for part in first] == [(1, 8), (1,)]
    assert cut([x, 0.5], 2, 1, 1)[0][1] == 0.5


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.zeros(4, 2), "mask": torch.zeros(7, 4)}, r"batch\['mask'\] has the shape \[7, 4\]"),
        ([torch.zeros(4), object()], r"batch\[1\] is of type object"),
    ],
)
def test_value_that_shows_no_samples_is_named(batch: Any, text: str) -> None:
    with pytest.raises(UnsplittableBatchError, match=text + ".*define split_batch"):
        cut(batch, 4, 2, 2)


def test_skipped_rows_make_a_batch_smaller() -> None:
    assert num_rows({"x": torch.zeros(7, 2), "names": ["a"] * 7}, expected=8) == 7
    assert num_rows((["a"] * 8, torch.zeros(8)), expected=8) == 8
    assert num_rows(["a"] * 8, expected=8) == 8


def test_outputs_of_parts_become_those_of_the_share() -> None:
    outputs = [
        {"ids": torch.tensor([1.0, 2.0]), "mean": torch.tensor(1.5), "name": "a"},
        {"ids": torch.tensor([6.0]), "mean": torch.tensor(6.0), "name": "b"},
    ]
    whole = whole_output(outputs, [2, 1])
    assert whole["ids"].tolist() == [1.0, 2.0, 6.0]
    assert whole["mean"] == 3.0
    assert whole["name"] == "b"


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.0), ("sum", 7.5), ("max", 6.0), ("min", 1.5)])
def test_values_of_parts_become_that_of_the_share(reduction: str, expected: float) -> None:
    assert whole_value(reduction, [torch.tensor(1.5), torch.tensor(6.0)], [2, 1]) == pytest.approx(expected)
    assert whole_value("mean", [torch.tensor(1), torch.tensor(2)], [1, 1]) == 1.5
