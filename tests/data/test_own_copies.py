"""Rows that come again are as they were read, whatever a transform, a `collate_fn` or a `training_step` has done to them."""

from __future__ import annotations

import copy
import io
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_dlrover.data import Shard, files, parquet, stream
from lightning_dlrover.data.rows import own_copies
from lightning_dlrover.live.loader import ElasticLoader
from tests.support.iterable_loaders import SETTINGS

NUM_ROWS, GLOBAL_BATCH = 44, 8


@dataclass
class Sample:
    row: int
    x: Any
    cls: int


class Locked(dict[str, Any]):
    """Refuses to be copied, as a row with an open file does."""

    def __init__(self, row: int) -> None:
        super().__init__(row=row, x=[row * 2], cls=row % 3, lock=threading.Lock())


MAKERS: dict[str, Callable[[int], Any]] = {
    "numbers": lambda row: {"row": row, "x": row * 2, "cls": row % 3},
    "lists": lambda row: {"row": row, "x": [row * 2], "cls": row % 3},
    "arrays": lambda row: {"row": row, "x": np.array([row * 2]), "cls": row % 3},
    "tensors": lambda row: {"row": row, "x": torch.arange(100)[row * 2 : row * 2 + 1], "cls": row % 3},
    "nested": lambda row: {"row": row, "x": ({"at": [row * 2]},), "cls": row % 3},
    "objects": lambda row: Sample(row, [row * 2], row % 3),
    "locks": Locked,
}


class Source:
    """Rows that are in memory, unless they cannot be copied, in two shards."""

    def __init__(self, kind: str) -> None:
        self.make = MAKERS[kind]
        self.kept = None if kind == "locks" else [self.make(row) for row in range(NUM_ROWS)]

    def shards(self) -> Sequence[Shard]:
        return [Shard("a", 20), Shard("b", NUM_ROWS - 20)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        first = 0 if shard.key == "a" else 20
        rows = range(first + row, first + shard.rows)
        yield from map(self.make if self.kept is None else self.kept.__getitem__, rows)


class Sequential(IterableDataset[Any]):
    def __init__(self, kind: str) -> None:
        self.source = Source(kind)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        for shard in self.source.shards():
            yield from self.source.read(shard, 0)


class Stateful(Sequential):
    resumes = False

    def __iter__(self) -> Iterator[Any]:
        self.next, self.resumes = self.next if self.resumes else 0, False
        for row in [row for shard in self.source.shards() for row in self.source.read(shard, 0)][self.next :]:
            self.next += 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.resumes = state["next"], True


def files_of(kind: str, folder: Path) -> Any:
    if kind == "tar":
        with tarfile.open(folder / "a.tar", "w") as archive:
            for row in range(NUM_ROWS):
                for name, number in (("row", row), ("x", row * 2), ("cls", row % 3)):
                    member = tarfile.TarInfo(f"{row:03}.{name}")
                    member.size = len(str(number))
                    archive.addfile(member, io.BytesIO(str(number).encode()))
        return files(str(folder / "a.tar"))
    table = pa.Table.from_pylist([MAKERS["lists" if kind == "parquet" else "numbers"](row) for row in range(NUM_ROWS)])
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet")
        return parquet(str(folder))
    (folder / "a.csv").write_text("row,x,cls\n" + "".join(f"{row},{row * 2},{row % 3}\n" for row in range(NUM_ROWS)))
    return files(str(folder / "a.csv"))


def change(row: Any) -> dict[str, Any]:
    """Edit a row in place, as far as it can be edited; return it as a sample that can be collated."""
    values = row if isinstance(row, dict) else vars(row)
    values["label"] = int(values.pop("cls"))
    values["seen"] = values.get("seen", 0) + 1
    x = values["x"]
    if isinstance(x, tuple):
        x[0]["at"][0] -= 100
        x = x[0]["at"][0]
    elif isinstance(x, list | np.ndarray | torch.Tensor):
        x[0] -= 100
        x = x[0]
    else:
        x = values["x"] = int(x) - 100
    return {**{name: int(values[name]) for name in ("row", "label", "seen")}, "x": int(x)}


def collate(rows: Sequence[Any]) -> Any:
    return default_collate([change(row) for row in rows])


def edit_and_collate(rows: Any) -> Any:
    for row in rows:
        row["label"] = int(row.pop("cls"))
        row["x"] = (int(row["x"][0]) if isinstance(row["x"], list) else int(row["x"])) - 100
        row["seen"] = 1
    if isinstance(rows[0].get("__key__"), str):
        rows = [{name: int(value) for name, value in row.items() if name != "__key__"} for row in rows]
    return default_collate(rows)


def check(batch: Any) -> list[int]:
    """Check that each row was changed once. Change the batch in place, too, as a `training_step` may. Return the rows."""
    numbers = batch["row"].tolist()
    assert batch["x"].tolist() == [row * 2 - 100 for row in numbers]
    assert batch["label"].tolist() == [row % 3 for row in numbers]
    assert batch["seen"].tolist() == [1] * len(numbers)
    for tensor in batch.values():
        tensor -= 1000
    return list(numbers)


def steps(loader: ElasticLoader, number: int) -> list[list[int]]:
    return [check(loader.refetch()) for _ in range(number)]


def next_epochs(make: Callable[..., ElasticLoader]) -> None:
    loader = make()
    for epoch in range(3):
        iter(loader)
        loader.set_epoch(epoch)
        assert sorted(chain.from_iterable(steps(loader, 6))) == list(range(NUM_ROWS))
    loader.close()


def lost_steps(make: Callable[..., ElasticLoader]) -> None:
    loader = make()
    for _ in range(3):
        read = steps(loader, 2)
        loader.reshard(0, 1, rewind=1)
        assert steps(loader, 1) == read[1:]
    loader.close()


def resizes(make: Callable[..., ElasticLoader]) -> None:
    loader, other = make(), make()
    found: list[list[int]] = []
    for size in (1, 2, 1, 2, 1):
        loader.reshard(0, size)
        other.reshard(1, size) if size == 2 else other.reshard(0, 1)
        found += [a + b if size == 2 else a for a, b in zip(steps(loader, 1), steps(other, 1), strict=True)]
    assert len(set(chain.from_iterable(found))) == 5 * GLOBAL_BATCH
    loader.close()
    other.close()


def validations(make: Callable[..., ElasticLoader]) -> None:
    loader = make(training=False)
    for _ in range(3):
        iter(loader)
        assert sorted(chain.from_iterable(steps(loader, len(loader)))) == list(range(NUM_ROWS))
    loader.close()


def rollbacks(make: Callable[..., ElasticLoader]) -> None:
    loader = make()
    read = steps(loader, 4)
    for back in (3, 1, 2):
        loader.reshard(0, 1, rewind=back)
        assert steps(loader, back) == read[4 - back :]
    loader.close()


def restarts(make: Callable[..., ElasticLoader]) -> None:
    loader = make()
    steps(loader, 3)
    state = loader.state()
    expected = steps(loader, 2)
    for _ in range(2):
        other = make()
        other.load_state(state)
        assert steps(other, 2) == expected
        other.close()
    loader.close()


PATHS = [next_epochs, lost_steps, resizes, validations, rollbacks, restarts]
SOURCES = [*MAKERS, "tar", "csv", "parquet"]


def makes(data: Any, num_workers: int, collate_fn: Any) -> Callable[..., ElasticLoader]:
    def make(training: bool = True) -> ElasticLoader:
        loader = DataLoader(data, batch_size=GLOBAL_BATCH, num_workers=num_workers, collate_fn=collate_fn)
        made = ElasticLoader(loader, GLOBAL_BATCH, training, iterable=SETTINGS)
        if made.iterable is not None:
            made.iterable.redo_batches = 2
        iter(made)
        made.set_epoch(0)
        return made

    return make


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_rows_of_a_stream_are_repeated_as_they_were_read(kind: str, path: Any, where: str, tmp_path: Path) -> None:
    source = Source(kind) if kind in MAKERS else files_of(kind, tmp_path)
    if where == "transform":
        path(makes(stream(source, change), 0, None))
    else:
        path(makes(stream(source), 0, edit_and_collate if kind in ("csv", "parquet") else collate))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dataset", [Sequential, Stateful])
def test_rows_of_an_iterable_dataset_are_repeated_as_they_were_read(dataset: Any, kind: str, path: Any) -> None:
    path(makes(dataset(kind), 0, collate))


@pytest.mark.parametrize("path", [lost_steps, resizes])
@pytest.mark.parametrize("data", [stream(Source("arrays")), Sequential("arrays")])
def test_loader_worker_repeats_rows_as_they_were_read(data: Any, path: Any) -> None:
    path(makes(data, 1, collate))


def test_copies_share_nothing_that_can_be_changed() -> None:
    shared = [1]
    rows = [
        {"a": shared, "b": (shared, {"c": np.zeros(2)}), "d": torch.zeros(2), "e": "text", "f": Sample(1, [2], 3)},
        shared,
        7,
    ]
    before = copy.deepcopy(rows)
    copies = own_copies(rows)
    assert copies is not None
    first = copies[0]
    assert first["b"][0] is first["a"]  # as in the row
    first["a"].append(2)
    first["b"][1]["c"] += 1
    first["d"] += 1
    first["f"].x.append(3)
    copies[1].append(5)
    assert str(rows) == str(before)


def test_view_of_a_large_tensor_is_copied_alone() -> None:
    row = torch.zeros(1000)[3:4]
    copies = own_copies([{"x": row}])
    assert copies is not None
    assert copies[0]["x"].untyped_storage().nbytes() == 4


def test_row_that_comes_twice_is_two_rows() -> None:
    row = {"x": 1}
    copies = own_copies([row, row])
    assert copies is not None
    assert copies[0] is not copies[1]


def test_rows_that_cannot_be_copied_are_recognised() -> None:
    assert own_copies([1, Locked(3)]) is None
