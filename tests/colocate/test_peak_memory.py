from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dlrover.colocate.peak_memory import (
    ChildError,
    LoaderShape,
    MemoryEstimate,
    Unknown,
    estimate_peak,
    run_in_child,
    step_of,
)
from lightning_dlrover.tuning.memory import MemoryMargin

MIB = 1 << 20


class Tables(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50_000, 32, sparse=sparse)
        self.top = nn.Linear(32, 256)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.top(self.table(batch)).square().mean()
        return out


def estimated(module: nn.Module, batch: Any, *optimizers: torch.optim.Optimizer, **options: Any) -> MemoryEstimate:
    found = estimate_peak(module, optimizers, batch, options.pop("step", module), **options)
    assert isinstance(found, MemoryEstimate), found
    return found


def ids(size: int = 2048) -> Tensor:
    return torch.randint(0, 50_000, (size,))


def test_parts_of_a_dense_table_with_adam_have_their_exact_sizes() -> None:
    module = Tables()
    found = estimated(module, ids(), torch.optim.Adam(module.parameters()))
    weights = 4 * (50_000 * 32 + 32 * 256 + 256)
    assert found.source == "shapes"
    assert found.parts.parameters == weights
    assert found.parts.embedding_gradients == 4 * 50_000 * 32
    assert found.parts.gradients == 4 * (32 * 256 + 256)
    assert found.parts.optimizer_state == pytest.approx(2 * weights, rel=1e-3)
    assert found.margin_bytes == MemoryMargin.of().bytes_for(found.total_bytes)


def test_sparse_gradient_is_as_large_as_the_batch_not_the_table() -> None:
    module = Tables(sparse=True)
    optimizer = torch.optim.SparseAdam([module.table.weight])
    found = estimated(module, ids(), optimizer, step=lambda batch: module.table(batch).square().sum())
    assert found.source == "shapes"
    assert 0 < found.parts.embedding_gradients <= 2 * 2048 * (4 * 32 + 8)


def test_activations_grow_with_the_batch() -> None:
    module = Tables()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    meta = [torch.empty(size, dtype=torch.int64, device="meta") for size in (100_000, 200_000)]
    small, large = [estimated(module, batch, optimizer).parts for batch in meta]
    added = [each.activations + each.workspace for each in (small, large)]
    assert added[1] - added[0] >= 4 * 256 * 100_000


def test_estimate_changes_neither_weights_nor_state_nor_random_numbers() -> None:
    module = Tables()
    optimizer = torch.optim.Adam(module.parameters())
    before = [each.clone() for each in module.parameters()]
    batch = ids()
    random_state = torch.get_rng_state()
    estimated(module, batch, optimizer, step=lambda batch: module(batch) + torch.rand(()))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert not optimizer.state
    assert all(each.grad is None and type(each) is nn.Parameter for each in module.parameters())


def test_step_that_reads_values_is_bounded_by_shapes() -> None:
    module = Tables()

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = module(batch[batch > 10_000])
        return loss * 2 if loss.item() > 3 else loss

    assert estimated(module, ids(), torch.optim.SGD(module.parameters(), 0.01), step=step).source == "shapes"


class OpaqueStep(torch.autograd.Function):
    """An operation that leaves torch, so that it needs values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.from_numpy(tensor.detach().numpy().repeat(40, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][:, ::40].contiguous()


def test_module_without_shape_rules_is_measured_on_a_part_of_the_batch() -> None:
    module = nn.Linear(64, 64)
    samples = 16_384
    found = estimated(
        module,
        torch.randn(samples, 64),
        torch.optim.SGD(module.parameters(), 0.01),
        step=lambda batch: OpaqueStep.apply(module(batch)).square().mean(),  # type: ignore[no-untyped-call]
    )
    assert found.source == "measured"
    assert 4 * samples * 64 * 40 <= found.parts.activations <= 6 * 4 * samples * 64 * 40


def test_module_that_fails_gives_the_reason() -> None:
    def step(batch: Tensor) -> Tensor:
        raise RuntimeError("no such column")

    found = estimate_peak(nn.Linear(1, 1), [], torch.ones(4), step)
    assert isinstance(found, Unknown)
    assert "no such column" in found.reason


def test_hanging_step_ends_at_its_deadline() -> None:
    def step(batch: Tensor) -> Tensor:
        while True:
            time.sleep(1)

    start = time.monotonic()
    found = estimate_peak(nn.Linear(1, 1), [], torch.ones(4), step, deadline_s=0.3)
    assert isinstance(found, Unknown)
    assert time.monotonic() - start < 10


class TwoOptimizers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(32, 512), nn.Linear(512, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        pair: Any = self.optimizers()
        loss = self.second(self.first(batch)).square().mean()
        self.manual_backward(loss)
        for each in pair:
            each.step()
            each.zero_grad()
        self.log("loss", loss)


def test_lightning_module_steps_its_own_optimizers_without_a_trainer() -> None:
    module = TwoOptimizers()
    optimizers = [torch.optim.Adam(module.first.parameters()), torch.optim.SGD(module.second.parameters(), 0.1)]
    found = estimated(module, torch.randn(8, 32), *optimizers, step=step_of(module, optimizers))
    assert found.parts.optimizer_state == pytest.approx(2 * 4 * (32 * 512 + 512), rel=0.01)
    assert "log" not in vars(module)


def test_loader_workers_and_their_batches_are_added() -> None:
    module = Tables()
    batch = ids(100_000)
    alone = estimated(module, batch)
    loaded = estimated(module, batch, loader=LoaderShape(num_workers=3, prefetch_factor=4))
    assert loaded.parts.loader_workers - alone.parts.loader_workers > 3 * 4 * 8 * 100_000


def test_cuda_counts_the_device_and_not_the_process() -> None:
    module = Tables()
    found = estimated(module, ids(), torch.optim.Adam(module.parameters()), device="cuda")
    assert found.parts.framework_context == 500 * MIB
    assert found.parts.loader_workers == 0


def test_copy_that_dies_is_reported() -> None:
    with pytest.raises(ChildError, match="without an answer"):
        run_in_child(lambda: os._exit(3), 10.0)


def test_copy_above_its_limit_is_reported() -> None:
    with pytest.raises(ChildError, match=r"MemoryError|alloc"):
        run_in_child(lambda: len(bytearray(300 * MIB)), 10.0, extra_bytes=50 * MIB)
