"""The transfer that makes two workers' models equal after one of them has missed an update."""

from __future__ import annotations

import pytest
import torch

from lightning_dlrover.live.recovery import ManualWindow, apply, capture
from tests.support.live_parts import a_trainer


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
