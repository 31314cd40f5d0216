"""What is repeated after a loss: updates, counts, buffers, collectives. Workers without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.progress import _OptimizationProgress, _OptimizerProgress, _Progress
from torch import nn

from lightning_dlrover.live.order import Position
from lightning_dlrover.live.recovery import Before, Counts, ManualWindow, apply, capture
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import BufferCopies
from tests.support.live_parts import a_formation, a_trainer, a_worker, hellos


@pytest.mark.parametrize("is_in_next_step", [False, True])
def test_missed_update_brings_an_open_manual_window(is_in_next_step: bool) -> None:
    ahead, behind = a_trainer(), a_trainer()
    source, target = ManualWindow(ahead), ManualWindow(behind)
    weight = ahead.lightning_module.weight
    weight.grad = torch.tensor([[1.0, 2.0]])
    source.is_open = True
    if is_in_next_step:
        source.remember()
        weight.grad += 5.0  # gradient of the next batch, which will be computed again
    target.take_over(source.newest_update())
    assert target.is_open
    assert torch.equal(behind.lightning_module.weight.grad, torch.tensor([[1.0, 2.0]]))
    assert behind.lightning_module.bias.grad is None


def test_missed_update_brings_counters_of_parameter_groups() -> None:
    source = a_trainer(lr=0.1, k=7, weight_sum=0.5)  # counters as of schedule-free optimizers
    target = a_trainer(lr=0.2, k=6, weight_sum=0.4)
    apply(target, capture(source))
    (group,) = target.optimizers[0].param_groups
    assert (group["k"], group["weight_sum"]) == (7, 0.5)
    assert group["lr"] == 0.2  # set by its own scheduler
    assert torch.equal(source.lightning_module.weight, target.lightning_module.weight)


@pytest.mark.parametrize("make", [_OptimizerProgress, _Progress, _OptimizationProgress])
def test_counts_go_back_to_what_was_taken(make: Any) -> None:
    progress = make()
    of_steps = getattr(getattr(progress, "optimizer", progress), "step", progress)
    of_steps.increment_ready()
    before = progress.state_dict()
    counts = Counts(progress)
    taken = counts.take()
    for _ in range(2):
        of_steps.increment_ready()
        of_steps.increment_completed()
        assert progress.state_dict() != before
        counts.restore(taken)
        assert progress.state_dict() == before


class Model(nn.Module):
    """Writes buffers in each of the ways that models do."""

    queue: torch.Tensor
    center: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("center", torch.zeros(2), persistent=False)
        self.register_buffer("cache", None)
        self.register_buffer("expanded", torch.zeros(1).expand(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.queue.data[1:] = self.queue[:-1].clone()  # no version counter shows it
        self.queue.data[0] = rows.mean()
        self.center = self.center * 0.9 + rows.mean(0)
        self.cache = rows.sum(0)
        result: torch.Tensor = self.norm(rows)
        return result


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values_of(module)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_buffers_return_to_their_copies_however_they_were_written() -> None:
    model = Model()
    copies = BufferCopies(model)
    for step in range(3):
        copies.keep()
        before, held = values_of(model), dict(model.norm.named_buffers())
        for _ in range(2):
            model(torch.randn(4, 2) + step)
            model.norm.running_mean.fill_(float("nan"))  # type: ignore[union-attr]  # as after an aborted collective
            copies.restore()
            assert_equal(model, before)
        assert all(buffer is held[name] for name, buffer in model.norm.named_buffers())  # DDP holds the same tensors
        model(torch.randn(4, 2))


def test_copies_keep_their_memory_from_step_to_step() -> None:
    model = Model()
    copies = BufferCopies(model)
    copies.keep()
    addresses = {copy.data_ptr() for copy in copies._copies}
    model(torch.randn(4, 2))
    model.cache = None
    copies.keep()
    assert {copy.data_ptr() for copy in copies._copies} == addresses


def test_model_without_buffers_needs_no_copies() -> None:
    copies = BufferCopies(nn.Linear(2, 1))
    copies.keep()
    copies.restore()


def test_large_buffer_is_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transfer, "MAX_COPIED_BYTES", 8)
    model = Model()
    copies = BufferCopies(model)
    for _ in range(2):
        copies.keep()
        model(torch.randn(4, 2))
        copies.restore()
    assert int(model.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert model.queue.any()
    assert caplog.text.count("Buffer queue has") == 1
    assert "norm" not in caplog.text


def test_survivor_in_the_next_step_sends_the_buffers_of_its_last_update() -> None:
    """The other survivor has not had that update, and may have any value of an aborted collective in its buffers."""
    ahead, behind = a_worker("w0"), a_worker("w1")
    for live in (ahead, behind):
        live._trainer.module.norm = Model()
    source, target = (live._trainer.module.norm for live in (ahead, behind))
    source(torch.randn(4, 2))
    expected = values_of(source)
    ahead.steps._before = Before([], SimpleNamespace(items={}.items), BufferCopies(source))
    source(torch.randn(4, 2))
    target(torch.randn(4, 2))
    target.norm.running_mean.fill_(float("nan"))
    target.center.fill_(float("nan"))
    ahead.steps.broken()
    behind.steps.window.take_over(ahead.steps.window.newest_update())
    assert_equal(target, expected)


TWO = hellos(Position(5, 5, False, 0, 0, True), Position(5, 5, False, 0, 0, True))


def test_results_of_earlier_collectives_are_dropped_when_all_have_them() -> None:
    collectives = a_worker("w0", a_formation("w0", TWO)).collectives
    collectives._checked = lambda run: run()
    for _ in range(100):
        collectives.run(lambda: torch.ones(1000))
    assert list(collectives._results) == [(5, 100)]


@pytest.mark.parametrize("decision", [True, False])
def test_decision_that_a_survivor_took_with_the_lost_worker_holds_for_all(decision: bool) -> None:
    collectives = a_worker("w1", a_formation("w1", TWO)).collectives
    collectives._missed = {(5, 1): decision}
    assert collectives.run(lambda: not decision) is decision
