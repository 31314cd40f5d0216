"""Values logged over an epoch are the same for any split of its samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryPrecision, BinaryRecall, MulticlassAccuracy

from lightning_dlrover.live.metrics import add_partial, ignore_advice_to_reduce, partial_values, reset_metrics, restore_partial
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


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


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
