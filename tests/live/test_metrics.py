"""Values logged over an epoch are the same for any split of its samples, whoever is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryPrecision, BinaryRecall, MulticlassAccuracy

from lightning_dlrover.live.metrics import (
    KeptValues,
    Layout,
    Table,
    Version,
    add_partial,
    ignore_advice_to_reduce,
    partial_values,
    reset_metrics,
    restore_partial,
    row_bytes,
    values_in,
)
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.transport import transfer

NUM_SAMPLES = 60


class Holder(nn.Module):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.metric: Any = metric


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(NUM_SAMPLES, generator=generator), torch.randint(0, 2, (NUM_SAMPLES,), generator=generator)


def update(metric: Any, first: int, last: int) -> None:
    scores, labels = samples()
    for start in range(first, last, 5):
        rows = slice(start, min(start + 5, last))
        if isinstance(metric, MeanMetric | MaxMetric | MinMetric | SumMetric | CatMetric):
            metric.update(scores[rows])
        elif isinstance(metric, MulticlassAccuracy):
            metric.update((scores[rows] > 0.4).long(), labels[rows])
        else:
            metric.update(scores[rows], labels[rows])


def compute(metric: Any) -> dict[str, Tensor]:
    result = metric.compute()
    return result if isinstance(result, dict) else {"value": result}


def sent(part: Any) -> Any:
    """The part as another worker receives it."""
    return transfer.loads(transfer.dumps(part))


MAKE: list[Callable[[], Any]] = [
    MeanMetric,
    MaxMetric,
    MinMetric,
    SumMetric,
    CatMetric,
    BinaryAUROC,
    lambda: BinaryAUROC(thresholds=10),
    lambda: MulticlassAccuracy(2),
    lambda: MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryF1Score()]),
]


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("stays_empty", [False, True])
def test_metric_of_a_leaver_is_merged(make: Callable[[], Any], stays_empty: bool) -> None:
    whole, stays, leaves = Holder(make()), Holder(make()), Holder(make())
    update(whole.metric, 0, NUM_SAMPLES)
    middle = 0 if stays_empty else 35
    update(stays.metric, 0, middle)
    update(leaves.metric, middle, 50)
    add_partial({}, stays, sent(partial_values({}, leaves)))
    update(stays.metric, 50, NUM_SAMPLES)
    for name, value in compute(whole.metric).items():
        torch.testing.assert_close(compute(stays.metric)[name], value)


def test_metric_that_cannot_be_merged_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stays, leaves = Holder(PearsonCorrCoef()), Holder(PearsonCorrCoef())
    for holder in (stays, leaves):
        holder.metric.update(*(part.float() for part in samples()))
    before = stays.metric.compute()
    with caplog.at_level(logging.WARNING):
        add_partial({}, stays, sent(partial_values({}, leaves)))
    assert "metric metric (PearsonCorrCoef)" in caplog.text
    stays.metric._computed = None
    assert stays.metric.compute() == before


def test_large_states_are_left_out_unless_asked_for() -> None:
    holder = Holder(CatMetric())
    holder.metric.update(torch.zeros(1 << 19))
    assert partial_values({}, holder, with_large=False)["states"] == {}
    assert set(partial_values({}, holder)["states"]) == {"metric"}


def logged(values: list[float], **options: Any) -> _ResultCollection:
    results = _ResultCollection(training=True)
    for value in values:
        results.log("training_step", "x", torch.tensor(value), on_epoch=True, batch_size=1, **options)
    return results


@pytest.mark.parametrize("reduce_fx, expected", [("mean", 3.5), ("sum", 14.0), ("max", 9.0), ("min", -1.0)])
def test_logged_value_of_a_leaver_is_merged(reduce_fx: str, expected: float) -> None:
    stays, leaves = logged([2.0, 4.0], reduce_fx=reduce_fx), logged([-1.0, 9.0], reduce_fx=reduce_fx)
    add_partial(stays, nn.Module(), sent(partial_values(leaves, nn.Module())))
    assert float(stays["training_step.x"].compute()) == expected


def test_values_return_to_their_earlier_state() -> None:
    results, holder = logged([2.0, 4.0]), Holder(MeanMetric())
    update(holder.metric, 0, 20)
    own, mean = sent(partial_values(results, holder)), holder.metric.compute()
    results.log("training_step", "x", torch.tensor(100.0), on_epoch=True, batch_size=1)
    update(holder.metric, 20, 40)
    restore_partial(results, holder, own)
    assert float(results["training_step.x"].compute()) == 3.0
    assert holder.metric.compute() == mean


def test_joiner_forgets_samples_that_count_elsewhere() -> None:
    giver, joiner = Holder(SumMetric()), Holder(SumMetric())
    assert isinstance(giver.metric, Metric)
    for holder in (giver, joiner):
        assert isinstance(holder.metric, Metric)
        holder.metric.persistent(True)
    update(giver.metric, 0, 20)
    update(joiner.metric, 0, 5)
    joiner.load_state_dict(giver.state_dict())
    assert joiner.state_dict() == giver.state_dict()
    reset_metrics(joiner)
    assert float(joiner.metric.compute()) == 0.0


def test_advice_to_reduce_values_is_not_passed_on(group_of_one: None, recwarn: pytest.WarningsRecorder) -> None:
    """Lightning gives its advice for each name once, so each reading takes names of its own."""
    read_at_epoch_end("with_advice")
    assert [str(warning.message)[:40] for warning in recwarn] == ["It is recommended to use `self.log('with"]
    recwarn.clear()
    ignore_advice_to_reduce()
    read_at_epoch_end("without_advice")
    assert not recwarn


def read_at_epoch_end(name: str) -> None:
    results = _ResultCollection(training=True)
    results.log("training_step", name, torch.tensor(1.0), on_epoch=True, batch_size=1)
    assert results.metrics(on_step=False)["callback"] == {name: 1.0}


CPU = torch.device("cpu")


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
    values = {"mean": [0.1, 0.7], "sum": [3.0], "max": [-1.5]}
    entries: dict[str, Any] = {fx: logged(values[fx], reduce_fx=fx)["training_step.x"] for fx in values}
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
        assert weight == (2 if key == "mean" else 0)
    assert set(part["states"]) == {"accuracy", "mean"}
    for path, (count, states) in part["states"].items():
        assert count == metrics[path]._update_count
        assert all(torch.equal(states[name], getattr(metrics[path], name)) for name in states)


X, STATES = (("x", "float32"),), (("m", (("value", (3,), "float32"),)),)


@pytest.mark.parametrize(
    "other",
    [
        Layout((("y", "float32"),), STATES),
        Layout(X, (("m", (("value", (4,), "float32"),)),)),
        Layout((("x", "float64"),), STATES),
        Layout(X, STATES, ("n",)),
    ],
    ids=["key", "shape", "type", "left_out"],
)
def test_workers_with_different_values_have_different_layouts(other: Layout) -> None:
    assert other.digest != Layout(X, STATES).digest


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
