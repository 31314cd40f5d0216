"""Columns of a batch on their way from a loader worker: the same values, each tensor with memory that a step may write to."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_dlrover.data import Shard, stream
from lightning_dlrover.data.rows import MAX_SENT_BYTES, Columns

pa = pytest.importorskip("pyarrow")

NUM_ROWS = 640


def sent(batch: dict[str, Any]) -> Any:
    return pickle.loads(ForkingPickler.dumps(Columns(batch)))


def test_tensors_of_all_types_and_other_values_arrive_in_their_order() -> None:
    batch = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "name": "text",
        "double": torch.rand(5, dtype=torch.float64),
        "half": torch.rand(5).half(),
        "brain": torch.rand(5).bfloat16(),
        "flag": torch.tensor([True, False]),
        "lists": torch.arange(12).reshape(4, 3),
        "none": torch.empty(0),
        "apart": torch.arange(12).reshape(4, 3).t(),
        "learned": torch.ones(3, requires_grad=True),
        "int": torch.arange(5),
    }
    found = sent(batch)
    assert type(found) is dict
    assert list(found) == list(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
        else:
            assert found[name] == value


def test_change_of_a_tensor_that_arrived_changes_no_other_and_counts_as_no_change_of_it() -> None:
    found = sent({name: torch.zeros(4, requires_grad=False) for name in "abc"})
    weight = torch.ones(4, requires_grad=True)
    loss = (found["b"] * weight).sum()
    found["a"].add_(1)
    loss.backward()  # an error if the change of `a` counted as one of `b`, which backward needs
    assert found["b"].sum() == found["c"].sum() == 0


def test_small_batch_arrives_without_shared_memory_and_a_large_one_with_it() -> None:
    small, large = sent({"x": torch.zeros(8)}), sent({"x": torch.zeros(MAX_SENT_BYTES)})
    assert not small["x"].is_shared()
    assert large["x"].is_shared()


def test_copy_of_columns_shares_nothing() -> None:
    batch = Columns({"x": torch.zeros(3)})
    copied = copy.copy(batch)
    copied["x"].add_(1)
    assert batch["x"].sum() == 0


class Batches:
    """Record batches of two columns."""

    def shards(self) -> list[Shard]:
        return [Shard("all", NUM_ROWS)]

    def read(self, shard: Shard, row: int) -> Any:
        numbers = np.arange(row, shard.rows)
        yield pa.record_batch({"number": numbers, "half": numbers.astype(np.float32) / 2})


def with_label_apart(rows: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch = default_collate(rows)
    label = batch.pop("half")
    batch["more"] = batch["number"] + 1
    return batch, label


@pytest.mark.parametrize("collate_fn", [None, with_label_apart])
def test_batches_of_loader_workers_are_those_without_them(collate_fn: Any) -> None:
    loaders = [DataLoader(stream(Batches()), 32, num_workers=n, collate_fn=collate_fn) for n in (0, 2)]
    for alone, prepared in zip(*loaders, strict=True):
        values = (alone, prepared) if collate_fn is None else (alone[0], prepared[0])
        assert type(values[1]) is dict
        assert list(values[0]) == list(values[1])
        for name in values[0]:
            assert torch.equal(values[0][name], values[1][name])
        if collate_fn is not None:
            assert torch.equal(alone[1], prepared[1])
