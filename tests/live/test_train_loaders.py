"""Loaders that a script makes, and the settings of them that a plan changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, TensorDataset

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data import stream
from lightning_dlrover.data.source import Ranges, Shard
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import FitPosition, global_batch_of_next
from lightning_dlrover.live.train_loaders import SettingsInForce, TrainLoaders
from lightning_dlrover.live.wiring import UsersLoaders
from lightning_dlrover.rdzv.job.events import SettingsApplied
from lightning_dlrover.rdzv.job.records import PlanRecord
from tests.support.loaders import Numbers, over

PLAN = PlanRecord(1, "planner", "a test says so", binding=False, loader_workers=1, prefetch_factor=2)
CORES = 2.0


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tens:
    """Source of ten rows."""

    def shards(self) -> Sequence[Shard]:
        return [Shard("tens", 10)]

    def read(self, shard: Shard, row: int) -> Iterator[int]:
        return iter(range(row, shard.rows))


def make_loader() -> ElasticLoader:
    return over(DataLoader(TensorDataset(torch.arange(100)), 1), 1)


def follow(settings: SettingsInForce, plan: PlanRecord, loader: ElasticLoader, num_batches: int = 10) -> list[SettingsApplied]:
    done = []
    for _ in range(num_batches):
        applied = settings.follow(plan, [loader], may_add_workers=True)
        done += [applied[0]] if applied is not None else []
        next(loader)
    return done


def test_rebuilt_loaders_follow_the_plan() -> None:
    """Lightning recreates loaders with `reload_dataloaders_every_n_epochs`."""
    settings = SettingsInForce(CORES)
    first, second = make_loader(), make_loader()
    assert len(follow(settings, PLAN, first)) == 1
    assert len(follow(settings, PLAN, second)) == 1
    assert (first.num_workers, second.num_workers) == (1, 1)
    assert follow(settings, PLAN, second) == []


class Bank(Numbers):
    """Samples that training writes."""

    def __init__(self) -> None:
        super().__init__(40)
        self.values = [0] * 40

    def __getitem__(self, index: int) -> int:
        return self.values[index]


def test_planner_gives_no_loader_workers_to_a_dataset_that_training_may_write_to() -> None:
    bank, settings = Bank(), SettingsInForce(CORES)
    loader = over(DataLoader(bank, 1), 1)
    fetched = []
    for step in range(20):
        settings.follow(PLAN, [loader], may_add_workers=False)
        bank.values[step] = step
        fetched.append(int(next(loader)))
    assert fetched == [*range(20)]


@pytest.mark.parametrize(
    ("loader", "source", "allowed", "expected"),
    [
        ({"dataset": Bank()}, "planner", False, 0),
        ({"dataset": Bank()}, "planner", True, 1),
        ({"dataset": Bank()}, "brain", False, 0),
        ({"dataset": Bank()}, "user", False, 1),
        ({"dataset": Bank(), "num_workers": 2}, "planner", False, 1),
        ({"dataset": stream(Tens())}, "planner", False, 1),
    ],
)
def test_first_loader_workers_need_a_permission(loader: dict[str, Any], source: Any, allowed: bool, expected: int) -> None:
    settings, made = SettingsInForce(CORES), over(DataLoader(batch_size=1, **loader), 1)
    for _ in range(8):
        settings.follow(replace(PLAN, source=source), [made], may_add_workers=allowed)
        next(made)
    assert made.num_workers == expected


def test_change_of_threads_is_not_charged_with_an_earlier_change() -> None:
    settings, loader = SettingsInForce(CORES), make_loader()
    next(loader)
    (loaders,) = follow(settings, PLAN, loader)
    assert loaders.seconds > 0
    (threads,) = follow(settings, replace(PLAN, intra_op_threads=2), loader)
    assert threads.intra_op_threads == 2
    assert threads.seconds == 0


class Growing(Tens):
    """Source of ten rows in each window."""

    grows, dry_s = True, 0.0

    def shards(self) -> Sequence[Shard]:
        return []

    def window(self, after: Mapping[str, int] | None) -> Ranges:
        first = after["a"] if after is not None else 0
        return {"a": (first, first + 10)}

    def shards_in(self, ranges: Ranges) -> Sequence[Shard]:
        return [Shard(key, stop - first) for key, (first, stop) in ranges.items()]


def replaced(loader: DataLoader[Any], **options: Any) -> Any:
    """Hand a loader to the strategy."""
    limits = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False, **options}
    # Loaders that are not refused come back as they are, because the Trainer predicts.
    state = SimpleNamespace(fn="fit", stage="train")
    trainer = SimpleNamespace(state=state, training=True, predicting=True, current_epoch=0, **limits)
    live = SimpleNamespace(windows=SimpleNamespace(attend=lambda data, epoch: None))
    job: Any = SimpleNamespace(live=live)
    return UsersLoaders(None).replaced(loader, trainer, job, cast(Any, None))


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        ({"batch_size": 4}, {}),
        ({"batch_size": 4}, {"limit_train_batches": 1, "fast_dev_run": True}),
        ({"batch_size": 4}, {"limit_train_batches": 3, "fast_dev_run": 3}),
    ],
)
def test_loader_that_trains_every_row_is_accepted(loader: dict[str, Any], options: dict[str, Any]) -> None:
    made: DataLoader[Any] = DataLoader(stream(Growing()), **loader)
    assert replaced(made, **options) is made


class Pairs(Sampler[list[int]]):
    """Batches of a user's own making."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 9], [1, 8]])

    def __len__(self) -> int:
        return 2


def test_test_loader_that_cannot_be_split_does_not_end_a_job_that_has_trained(caplog: pytest.LogCaptureFixture) -> None:
    job: Any = SimpleNamespace(live=SimpleNamespace(), start_workers=2, agree_on_start=lambda: None)
    loader: DataLoader[Any] = DataLoader(range(10), batch_sampler=Pairs())  # type: ignore[arg-type]

    def replaced_in(fn: str, stage: str) -> Any:
        state = SimpleNamespace(fn=fn, stage=stage)
        trainer = SimpleNamespace(state=state, training=stage == "train", predicting=False)
        return UsersLoaders(None).replaced(loader, trainer, job, cast(Any, None))

    assert replaced_in("test", "test") is loader
    assert "batch_sampler Pairs decides which samples form a batch" in caplog.text
    with pytest.raises(UnsupportedLoaderError, match="batch_sampler Pairs"):
        replaced_in("fit", "train")


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        ({"batch_size": 4}, {"limit_train_batches": 1}, "limit_train_batches=1 and"),
        ({"batch_size": 4}, {"limit_train_batches": 0.5}, "limit_train_batches=0.5 and"),
        ({"batch_size": 4}, {"overfit_batches": 2}, "overfit_batches=2 would leave rows"),
        ({"batch_size": 4, "drop_last": True}, {}, "drop_last=True would leave the last rows"),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, True)}, {}, "drop_last=True"),
    ],
)
def test_loader_that_leaves_rows_out_is_refused(loader: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedLoaderError, match=words):
        replaced(DataLoader(stream(Growing()), **loader), **options)


@pytest.mark.parametrize("total", [48, 50, 7])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_script_that_divides_by_the_number_of_workers_keeps_its_global_batch(total: int, sizes: tuple[int, int]) -> None:
    former, now = sizes
    assert global_batch_of_next(total // now, total // former, total, sizes) == total
    assert global_batch_of_next(-(-total // now), -(-total // former), total, sizes) == total


def test_global_batch_follows_a_batch_size_that_the_script_changes() -> None:
    assert global_batch_of_next(48, 24, 48, (2, 2)) == 96
    assert global_batch_of_next(48, 24, 48, (2, 3)) == 96
    assert global_batch_of_next(24, 24, 48, (2, 3)) == 48
    assert global_batch_of_next(96, 48, 48, (1, 3)) == 96  # a joiner's first loader was made where it was alone


class Weighed(Tens):
    """Source whose blocks have another number of rows on each host."""

    def __init__(self, block_rows: int) -> None:
        self.block_rows = block_rows

    def shards(self) -> Sequence[Shard]:
        return [Shard("a", 10_000)]


def test_loader_that_is_made_again_has_the_layout_of_rank_0() -> None:
    """Another one would give a worker other rows of a shuffled stream."""

    def made(block_rows: int) -> ElasticLoader:
        return ElasticLoader(DataLoader(stream(Weighed(block_rows), shuffle_rows=100), 4), 8, training=True)

    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=None))
    loaders = TrainLoaders(trainer, FitPosition(None), False)
    of_rank_zero = made(256).order.layout
    assert of_rank_zero is not None
    loaders.before_set_up()
    peers: Any = SimpleNamespace(of_rank_zero=lambda _: asdict(of_rank_zero))
    loaders.agree_on_layout(first := made(128), peers)
    assert first.order.layout != of_rank_zero  # other workers may not be there yet; they agree when they begin
    trainer.fit_loop._combined_loader = SimpleNamespace(flattened=[first])
    loaders.before_set_up()
    loaders.agree_on_layout(second := made(128), peers)
    assert second.order.layout == of_rank_zero


NO_SETTINGS = PlanRecord(1, "user", "", True)


@pytest.mark.parametrize(
    ("threads_per_core", "before", "cores", "expected"),
    [
        (1.0, 2, 4, 4),  # as many as cores: they follow the cores
        (0.5, 1, 4, 2),  # two workers share the node
        (1.0, 1, 4, 1),  # the script has chosen one
        (0.0, 2, 4, 2),  # the user has chosen two
        (0.0, 2, 1, 1),
        (1.0, 2, 1, 1),
    ],
)
def test_threads_follow_the_cores_of_the_node_unless_they_were_chosen(
    threads_per_core: float, before: int, cores: int, expected: int
) -> None:
    torch.set_num_threads(before)
    settings, loader = SettingsInForce(2, threads_per_core), make_loader()
    assert follow(settings, NO_SETTINGS, loader) == []
    settings.set_cores(cores)
    changes = follow(settings, NO_SETTINGS, loader)
    assert torch.get_num_threads() == expected
    assert [change.intra_op_threads for change in changes] == ([expected] if expected != before else [])


def test_plan_for_a_larger_node_takes_effect_once_it_has_its_cores() -> None:
    torch.set_num_threads(1)
    settings, loader = SettingsInForce(1), make_loader()
    plan = replace(NO_SETTINGS, intra_op_threads=3)
    assert follow(settings, plan, loader) == []
    settings.set_cores(4.0)
    assert [change.intra_op_threads for change in follow(settings, plan, loader)] == [3]
