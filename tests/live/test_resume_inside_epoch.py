"""Loaders that continue from a checkpoint inside an epoch: the missing samples follow, or it is refused with a reason."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stream_schedules import Numbered, rows_of
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_dlrover.data import DataError, stream
from lightning_dlrover.live.loader import ElasticLoader
from tests.support.loaders import Numbers

NUM_ROWS, BATCH, DONE = 600, 8, 20

Make = Callable[..., Any]


class OneByOne(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def loader(data: Any, batch_size: int = BATCH, seed: int = 0) -> ElasticLoader:
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed)) if isinstance(data, Numbers) else None
    made = ElasticLoader(DataLoader(data, batch_size=batch_size, sampler=sampler), batch_size, training=True, max_workers=3)
    iter(made)
    return made


def stop(made: ElasticLoader) -> dict[str, Any]:
    """Train 20 batches. Return the rows, and what the checkpoint holds."""
    trained = [int(row) for _ in range(DONE) for row in rows(made.refetch())]
    saved = made.order_in_checkpoint, made.position_in_stream, made.iterable and made.iterable.in_checkpoint()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return {"trained": trained, "saved": torch.load(file, weights_only=True)}


def rows(batch: Any) -> list[int]:
    found: list[int] = (batch if isinstance(batch, torch.Tensor) else rows_of(batch)).tolist()
    return found


def rest_of(made: ElasticLoader, saved: Any, cursor: int = DONE) -> list[int]:
    made.cursor = cursor
    made.resume(*saved)
    found = []
    while made.cursor < made.num_epoch_batches:
        try:
            found += rows(made.refetch())
        except StopIteration:
            break
    return found


def streamed(num_rows: int = NUM_ROWS, **options: Any) -> Any:
    return stream(Numbered([num_rows // 2, num_rows - num_rows // 2]), **{"shuffle_rows": 90, "seed": 1, **options})


@pytest.mark.parametrize(
    "before, after",
    [
        (loader(streamed()), loader(streamed())),
        (loader(streamed()), loader(streamed(seed=2))),
        (loader(streamed()), loader(streamed(shuffle_rows=300))),
        (loader(streamed(shuffle_rows=0)), loader(streamed(shuffle_rows=0, keep_order=True))),
        (loader(Numbers(NUM_ROWS), seed=1), loader(Numbers(NUM_ROWS), seed=2)),
        (loader(OneByOne(NUM_ROWS)), loader(OneByOne(NUM_ROWS))),
    ],
    ids=["stream", "seed of a stream", "shuffle_rows", "keep_order", "seed of a sampler", "iterable"],
)
def test_no_sample_is_lost_or_twice_after_a_resume(before: ElasticLoader, after: ElasticLoader) -> None:
    stopped = stop(before)
    rest = rest_of(after, stopped["saved"])
    assert len(rest) == NUM_ROWS - DONE * BATCH
    assert sorted(stopped["trained"] + rest) == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    "before, after, message",
    [
        (streamed, lambda: loader(streamed(), 16), "global_batch_size=8, and the training loader has global_batch_size=16 now"),
        (lambda: Numbers(NUM_ROWS), lambda: loader(Numbers(NUM_ROWS), 16), "has global_batch_size=16 now"),
        (lambda: OneByOne(NUM_ROWS), lambda: loader(OneByOne(NUM_ROWS), 16), "has global_batch_size=16 now"),
        (streamed, lambda: loader(streamed(NUM_ROWS + 8)), "files came, went or changed their number of rows"),
        (streamed, lambda: loader(streamed(shuffle_rows=0)), "shuffle_rows=0 does not shuffle, unlike before"),
        (lambda: Numbers(NUM_ROWS), lambda: loader(Numbers(NUM_ROWS + 1)), "num_samples=600, and .* num_samples=601 now"),
        (streamed, lambda: loader(Numbers(NUM_ROWS)), "kind=stream, and the training loader has kind=map-style dataset now"),
        (lambda: Numbers(NUM_ROWS), lambda: loader(OneByOne(NUM_ROWS)), "has kind=IterableDataset now"),
    ],
)
def test_resume_with_other_samples_is_refused(before: Make, after: Make, message: str) -> None:
    saved = stop(loader(before()))["saved"]
    with pytest.raises(DataError, match=message):
        rest_of(after(), saved)


def test_any_data_may_follow_a_checkpoint_of_an_epochs_end() -> None:
    saved = stop(loader(streamed()))["saved"]
    assert sorted(rest_of(loader(streamed(NUM_ROWS + 8, shuffle_rows=0), 16), saved, cursor=0)) == list(range(NUM_ROWS + 8))


def test_checkpoint_that_lacks_the_order_is_resumed_as_it_is() -> None:
    assert len(rest_of(loader(Numbers(NUM_ROWS)), (None, None, None))) == NUM_ROWS - DONE * BATCH
