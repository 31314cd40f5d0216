"""A lost worker's part of an epoch's values is kept as bytes, and counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dlrover.live.metrics import KeptValues, Layout, Table, Version, row_bytes, values_in
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation

CPU = torch.device("cpu")


def logged(reduce_fx: str, *values: float) -> Any:
    results = _ResultCollection(training=True)
    for value in values:
        results.log("training_step", "x", torch.tensor(value), on_epoch=True, batch_size=3, reduce_fx=reduce_fx)
    return results["training_step.x"]


def layout_of(entries: dict[str, Any], metrics: dict[str, Any]) -> Layout:
    def name_of(value: Tensor) -> str:
        return str(value.dtype).removeprefix("torch.")

    def states(metric: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        return tuple((n, tuple(getattr(metric, n).shape), name_of(getattr(metric, n))) for n in metric._defaults)

    return Layout(
        tuple((key, name_of(metric.value)) for key, metric in entries.items()),
        tuple((path, states(metric)) for path, metric in metrics.items()),
    )


def test_values_travel_as_bytes_without_a_change() -> None:
    entries = {"mean": logged("mean", 0.1, 0.7), "sum": logged("sum", 3.0), "max": logged("max", -1.5)}
    metrics = {"accuracy": MulticlassAccuracy(5), "mean": MeanMetric().double(), "unused": MeanMetric()}
    metrics["accuracy"].update(torch.tensor([1, 2, 2]), torch.tensor([1, 2, 3]))
    metrics["mean"].update(torch.tensor([1 / 3]))
    layout = layout_of(entries, metrics)
    row = row_bytes(layout, layout.digest, list(entries.values()), list(metrics.values()), CPU)
    digest, num_bytes = row[:16].view(torch.int64).tolist()
    assert (digest, num_bytes) == (layout.digest, len(row))
    part = values_in(torch.cat([row, torch.zeros(100, dtype=torch.uint8)]), layout)
    for key, metric in entries.items():
        value, weight = part["logged"][key]
        assert torch.equal(value, metric.value)
        assert value.dtype == metric.value.dtype
        assert weight == (6 if key == "mean" else 0)
    assert set(part["states"]) == {"accuracy", "mean"}
    for path, (count, states) in part["states"].items():
        assert count == metrics[path]._update_count
        assert all(torch.equal(states[name], getattr(metrics[path], name)) for name in states)


@pytest.mark.parametrize("change", ["key", "shape", "type", "left_out"])
def test_workers_with_different_values_have_different_layouts(change: str) -> None:
    state = ("value", (3,), "float32")
    states: dict[str, Any] = {
        "key": Layout((("y", "float32"),), (("m", (state,)),)),
        "shape": Layout((("x", "float32"),), (("m", (("value", (4,), "float32"),)),)),
        "type": Layout((("x", "float64"),), (("m", (state,)),)),
        "left_out": Layout((("x", "float32"),), (("m", (state,)),), ("n",)),
    }
    assert states[change].digest != Layout((("x", "float32"),), (("m", (state,)),)).digest


def part(name: str) -> tuple[tuple[str, int], Any]:
    return (name, 7), {}


def test_each_part_has_one_owner_through_several_losses() -> None:
    table = Table((7, 0, 1, 0), {name: [part(name)] for name in "abcd"})
    second = table.inherited(["a", "c", "d"], "a", 2)
    third = second.inherited(["c", "d", "joiner"], "c", 3)
    assert second.parts == {"a": [part("a"), part("b")], "c": [part("c")], "d": [part("d")]}
    assert third.parts == {"c": [part("c"), part("a"), part("b")], "d": [part("d")], "joiner": []}
    assert table.version < second.version < third.version


def test_a_later_update_counts_before_a_later_round() -> None:
    assert Table((7, 0, 2, 0)).version < Table((8, 0, 1, 0)).version


def kept_values(updates: int, tables: object = None) -> KeptValues:
    trainer = cast(TrainerOfFit, SimpleNamespace(elastic_tables=tables))
    return KeptValues(cast(World, None), trainer, FitPosition(None, updates=updates))


FORMER = cast(Formation, SimpleNamespace(round=SimpleNamespace(number=3, members=["a", "b", "c"])))


def test_before_a_change_only_leavers_send_their_values_if_the_others_are_held_by_all() -> None:
    kept = kept_values(7)
    kept._table = Table((7, 0, 3, 0), {"a": [part("a"), part("lost")], "b": [part("b")]})
    assert kept.is_current
    kept.exchanged(FORMER, {"b": {"logged": {"x": 1}}})
    parts = {"a": [part("a"), part("lost")], "b": [(("b", 7), {"logged": {"x": 1}})], "c": []}
    assert kept._table == Table((7, 0, 3, 1), parts)


@pytest.mark.parametrize(
    ("version", "tables"),
    [((6, 0, 3, 0), None), ((7, 1, 3, 0), None), ((7, 0, 3, 0), object())],
    ids=["another update", "computed for the former epoch", "tables"],
)
def test_before_a_change_all_send_their_values_if_others_do_not_hold_them(version: Version, tables: object) -> None:
    kept = kept_values(7, tables)
    kept._table = Table(version, {"a": [part("old")]})
    assert not kept.is_current
    kept.exchanged(FORMER, {worker: {} for worker in "abc"})
    assert kept._table == Table((7, 0, 3, 1), {worker: [part(worker)] for worker in "abc"})
