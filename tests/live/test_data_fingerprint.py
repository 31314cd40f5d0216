"""Different data are detected, and equal data are never considered different."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from lightning_dlrover.live import data_agreement
from lightning_dlrover.live.data_agreement import (
    DataFingerprint,
    LoaderFingerprint,
    Sketch,
    are_same_row,
    described_row,
    difference,
    fingerprint_data,
    refuse_different_data,
    sketch,
)
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.rdzv.membership.member import MembershipError


class Images(Dataset[Any]):
    """Reads its samples lazily, as from files. `change` simulates a modification of each one."""

    def __init__(self, seed: int = 0, num_samples: int = 30, change: Callable[[np.ndarray[Any, Any]], object] = lambda x: x):
        self.pixels = np.random.default_rng(seed).integers(0, 256, (num_samples, 3, 16, 16), dtype=np.uint8)
        self.change = change
        self.num_fetched = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> object:
        self.num_fetched += 1
        return self.change(self.pixels[index]), index % 10


def flipped_by_chance(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def with_noise(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(pixels) + torch.randn(pixels.shape)


def decoded_elsewhere(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Simulates another version of a decoder: slightly different levels here and there."""
    levels: np.ndarray[Any, Any] = np.clip(pixels.astype(np.int64) + (np.indices(pixels.shape).sum(0) % 3 == 0), 0, 255)
    return levels.astype(np.uint8)


def elastic(dataset: Dataset[Any], **kwargs: Any) -> ElasticLoader:
    return ElasticLoader(DataLoader(dataset, 4, **kwargs), 4, training=True)


def data_of(dataset: Dataset[Any], compare_samples: bool = True, **kwargs: Any) -> DataFingerprint:
    return fingerprint_data([elastic(dataset, **kwargs)], None, compare_samples)


def are_same(row: object, other: object) -> bool:
    mine, theirs = described_row(row), described_row(other)
    assert mine is not None
    assert theirs is not None
    return are_same_row(mine, theirs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_with_equal_data_have_equal_fingerprints(num_workers: int) -> None:
    one = data_of(Images(), num_workers=num_workers)
    assert all(one.train[0].sketches)
    assert one == data_of(Images(), num_workers=num_workers)
    assert difference(one, data_of(Images())) == ""


@pytest.mark.parametrize(
    "own, other, words",
    [
        (Images(0), Images(1), "30 samples, the first one being"),
        (Images(num_samples=30), Images(num_samples=29), "30 samples here, 29 there"),
        (TensorDataset(torch.randn(9, 4)), TensorDataset(torch.randn(9, 4)), "9 samples, the first one"),
    ],
)
def test_different_data_have_different_fingerprints(own: Dataset[Any], other: Dataset[Any], words: str) -> None:
    assert words in difference(data_of(own), data_of(other))


def test_unseeded_split_has_another_fingerprint() -> None:
    rows = TensorDataset(torch.randn(100, 4))
    splits = [torch.utils.data.random_split(rows, [80, 20], torch.Generator().manual_seed(seed))[0] for seed in (0, 1)]
    assert difference(data_of(splits[0]), data_of(splits[1]))
    samplers = [SubsetRandomSampler(split.indices) for split in splits]
    assert difference(data_of(rows, sampler=samplers[0]), data_of(rows, sampler=samplers[1]))


def test_last_digits_of_another_machine_do_not_count() -> None:
    ours, theirs = data_of(Images()), data_of(Images(change=decoded_elsewhere))
    assert ours != theirs
    assert difference(ours, theirs) == ""


@pytest.mark.parametrize(
    ("row", "neighbour"),
    [
        ({"id": 5000, "x": 20.1}, {"id": 5001, "x": 20.1}),
        ({"time": 1.7e9, "x": 20.0}, {"time": 1.7e9 + 60, "x": 20.001}),
        (1.7e9, 1.7e9 + 3600),
        (torch.tensor([5000.0]), torch.tensor([5000.1])),
        (torch.arange(3000), torch.arange(3000) + (torch.arange(3000) == 100)),
        ([40_000, 40_001, 40_002], [40_001, 40_002, 40_003]),
        (np.uint8(200), np.uint8(201)),
        (True, False),
    ],
)
def test_neighbouring_rows_differ(row: object, neighbour: object) -> None:
    assert are_same(row, row)
    assert not are_same(row, neighbour)


@pytest.mark.parametrize(
    ("row", "elsewhere"),
    [
        (0.1 + 0.2, 0.3),
        (torch.tensor(1.0), torch.tensor(1.0 + 2e-7)),
        (1e-17, 0.0),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)),
        (torch.tensor(1.0, dtype=torch.float16), torch.tensor(1.001, dtype=torch.float16)),
        (torch.linspace(0, 1, 99), torch.linspace(0, 1, 99) * 1.001),
        (np.full(99, 1000, np.int16), np.full(99, 1001, np.int16)),
    ],
)
def test_row_is_the_same_in_spite_of_last_digits(row: object, elsewhere: object) -> None:
    assert are_same(row, elsewhere)


@pytest.mark.parametrize("change", [flipped_by_chance, with_noise])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_augmentation_is_not_compared(change: Callable[[Any], object], num_workers: int) -> None:
    data = data_of(Images(change=change), num_workers=num_workers)
    assert data.train[0].sketches == [None] * 3
    assert difference(data, data_of(Images())) == ""


def test_one_differing_sample_may_be_chance() -> None:
    same, odd = Sketch("a", []), Sketch("b", [])
    ours = DataFingerprint([LoaderFingerprint(9, [same, None, None])], None)
    theirs = DataFingerprint([LoaderFingerprint(9, [odd, same, same])], None)
    assert difference(ours, theirs) == ""
    assert difference(theirs, DataFingerprint([LoaderFingerprint(9, [same, same, odd])], None)) == ""
    assert difference(theirs, DataFingerprint([LoaderFingerprint(9, [same, odd, odd])], None))


def test_fetched_samples_leave_the_random_numbers_unchanged() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed()
    expected = drawn()
    for num_workers in (0, 1):
        seed()
        data_of(Images(change=with_noise), num_workers=num_workers)
        assert drawn() == expected


def test_dataset_of_loader_workers_is_not_touched_in_their_parent() -> None:
    images = Images()
    data_of(images, num_workers=1)
    assert images.num_fetched == 0  # forked processes would share its lazily opened files


def test_samples_that_raise_are_left_to_training() -> None:
    def broken(_: object) -> object:
        raise OSError("no such file")

    for num_workers in (0, 1):
        assert data_of(Images(change=broken), num_workers=num_workers).train[0].sketches == [None] * 3


def test_slow_samples_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_agreement, "PROBING_S", 0.0)
    images = Images()
    assert data_of(images).train[0].sketches == [None] * 3
    assert images.num_fetched == 1


def test_only_lengths_are_compared_if_samples_are_meant_to_differ() -> None:
    own, other = (data_of(Images(seed), compare_samples=False) for seed in (0, 1))
    assert own.train[0].num_samples == 30
    assert difference(own, other) == ""
    assert difference(own, data_of(Images(num_samples=29), compare_samples=False))


def test_validation_data_are_compared_by_their_lengths() -> None:
    ours, theirs = ([LoaderFingerprint(3, [])], [40]), ([LoaderFingerprint(3, [])], [41])
    assert "validation data" in difference(DataFingerprint(*ours), DataFingerprint(*theirs))
    assert difference(DataFingerprint(*ours), DataFingerprint(theirs[0], None)) == ""


@dataclass
class Row:
    text: str
    ids: list[int]


@pytest.mark.parametrize(
    "sample, other",
    [
        (1.0, 2.0),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan"), 0.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        ({"text": "/data/a", "ids": [1, 2]}, {"text": "/data/b", "ids": [1, 2]}),
        (Row("a", [1, 2]), Row("a", [1, 3])),
        ((b"a", None, True), (b"b", None, True)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        ([], [None]),
        (Fraction(1, 2), Fraction(1, 3)),
        (SimpleNamespace(x=torch.zeros(2)), SimpleNamespace(x=torch.ones(2))),
        (deque([1, 2]), deque([1, 3])),
        ({1, 2}, {1, 3}),
    ],
)
def test_sketch_differs_between_samples(sample: object, other: object) -> None:
    mine, theirs = sketch(sample), sketch(other)
    assert mine is not None
    assert theirs is not None
    assert mine == sketch(sample)
    assert mine != theirs


def test_place_of_a_file_is_not_part_of_a_sketch() -> None:
    assert sketch("/scratch/node1/a.png") == sketch("/scratch/node2/a.png")
    assert sketch(Path("/scratch/node1/a.png")) == sketch(Path("/scratch/node2/a.png")) != sketch(Path("/scratch/node2/b.png"))


@pytest.mark.parametrize("sample", [object(), io.BytesIO(), (x for x in "ab"), np.array([object()])])
def test_object_of_unknown_class_has_no_sketch(sample: object) -> None:
    assert sketch([1, sample]) is None


def test_fingerprint_survives_its_record() -> None:
    data = data_of(Images())
    assert DataFingerprint.decode(data.encode()) == data


@given(st.text() | st.sampled_from(['{"train": [{}]}', '{"train": 3, "val": null}', "[]", "{}"]))
def test_garbage_in_a_record_is_an_error_that_can_be_caught(text: str) -> None:
    with pytest.raises(ValueError, match="not a fingerprint of data"):
        DataFingerprint.decode(text)


def test_data_of_any_two_workers_are_compared() -> None:
    unknown = data_of(Images(), compare_samples=False)  # differs from neither of the two below
    encoded = [each.encode() for each in (unknown, data_of(Images(0)), data_of(Images(1)))]
    refuse_different_data([encoded[0], encoded[1], encoded[1]], "run 'job'")
    with pytest.raises(MembershipError, match=r"^run 'job': the data of rank 1 differ from rank 2's: .*The job ends"):
        refuse_different_data(encoded, "run 'job'")
    with pytest.raises(MembershipError, match="the data of rank 0 cannot be compared"):
        refuse_different_data(["garbage", encoded[0]], "run 'job'")
