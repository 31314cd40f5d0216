"""Rows for a click model from a folder that `criteo_to_parquet.py` wrote, read as streams while a job trains.

Decides what is in such a folder and how columns become a batch. The folder holds Parquet files in `train`, `val` and `test`,
and `clicks.json`, which describes them. Nothing is loaded beforehand, so the rows may need more space than there is memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ctr_data import CRITEO_CATEGORIES, CRITEO_NUMBERS, Batch, DataError

from lightning_dlrover import data as streams
from lightning_dlrover.data import Stream, parquet, stream

SETS = ("train", "val", "test")
"""Folders of the Parquet files, in the order of time."""

LABEL = "label"
"""Column of labels, int8: 1 for a click."""

NUMBERS = tuple(CRITEO_NUMBERS.values())
"""Columns of signed logarithms, float32, NaN where a number is missing."""

CATEGORIES = tuple(CRITEO_CATEGORIES.values())
"""Columns of ids, int32, 0 where a category is missing."""

DESCRIPTION = "clicks.json"


@dataclass(frozen=True)
class Description:
    """Properties of the rows that a model needs before it reads them."""

    source: str  # where the rows came from
    rows: tuple[int, int, int]  # rows of each of `SETS`
    means: tuple[float, ...]  # means of `NUMBERS` over the training rows
    deviations: tuple[float, ...]
    cardinalities: tuple[int, ...]  # ids of each of `CATEGORIES`
    best_auc: float | None = None  # test AUC of the model that made the labels, if known

    def write(self, folder: Path) -> None:
        (folder / DESCRIPTION).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Return the description of a folder.

        Raises:
            DataError: it is missing or damaged.
        """
        path = folder / DESCRIPTION
        try:
            found = json.loads(path.read_text())
            train, val, test = found["rows"]
            return cls(
                source=str(found["source"]),
                rows=(int(train), int(val), int(test)),
                means=_floats(found["means"], len(NUMBERS)),
                deviations=_floats(found["deviations"], len(NUMBERS)),
                cardinalities=tuple(int(number) for number in _floats(found["cardinalities"], len(CATEGORIES))),
                best_auc=None if found["best_auc"] is None else float(found["best_auc"]),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is not a description of click rows ({type(error).__name__}: {error}); write the folder again with "
                "examples/criteo_to_parquet.py"
            ) from error


class Collate:
    """Makes a batch from the columns of its rows."""

    def __init__(self, description: Description) -> None:
        self._means = torch.tensor(description.means, dtype=torch.float32)
        self._deviations = torch.tensor(description.deviations, dtype=torch.float32)

    def __call__(self, rows: Any) -> Batch:
        """Return numbers, ids and labels.

        Args:
            rows: `lightning_dlrover.data.Rows` of a stream.
        """
        numbers = torch.stack([rows.tensor(name) for name in NUMBERS], dim=1)
        numbers = torch.nan_to_num((numbers - self._means) / self._deviations)  # a missing number becomes the mean
        categories = torch.stack([rows.tensor(name) for name in CATEGORIES], dim=1)
        return numbers, categories.long(), rows.tensor(LABEL).float()


@dataclass(frozen=True)
class ClickStreams:
    """Counterpart of `ctr_data.ClickData` for rows that are read while the model trains."""

    name: str
    about: str  # one sentence: the data, and the best that a model can reach with them
    train: Stream
    val: Stream
    test: Stream
    cardinalities: tuple[int, ...]  # ids per category
    best_auc: float | None  # test AUC of the model that made the labels, if known
    collate: Collate

    @property
    def num_numbers(self) -> int:
        return len(NUMBERS)


def is_click_folder(path: Path) -> bool:
    """Whether rows are to be read with `load_streams`, which names the missing part of a damaged folder."""
    return (path / DESCRIPTION).is_file() or (path / "train").is_dir()


def load_streams(folder: Path, shuffle_rows: int) -> ClickStreams:
    """Return the rows of a folder as streams. Only the training rows are shuffled.

    Args:
        shuffle_rows: rows that are shuffled together, over all workers; 0: no shuffling.

    Raises:
        DataError: the folder is not as `criteo_to_parquet.py` left it.
    """
    described = Description.read(folder)
    train, val, test = (
        stream(parquet(str(folder / name)), shuffle_rows=shuffle_rows if name == "train" else 0) for name in SETS
    )
    for name, data, expected in zip(SETS, (train, val, test), described.rows, strict=True):
        try:
            found = len(data)
        except streams.DataError as error:
            raise DataError(f"{folder}: {error}") from error
        if found != expected:
            raise DataError(
                f"{folder / name} holds {found:,} rows, but {DESCRIPTION} counts {expected:,}: files were added or removed; "
                "write the folder again with examples/criteo_to_parquet.py"
            )
    best = "" if described.best_auc is None else f"; no model can beat a test AUC of {described.best_auc:.4f}"
    return ClickStreams(
        name=folder.resolve().name,
        about=(
            f"using {sum(described.rows):,} rows of {folder} ({described.source}): {len(train):,} to train, "
            f"the newest {len(test):,} to test{best}"
        ),
        train=train,
        val=val,
        test=test,
        cardinalities=described.cardinalities,
        best_auc=described.best_auc,
        collate=Collate(described),
    )


def _floats(values: Any, length: int) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if len(found) != length:
        raise ValueError(f"{len(found)} values instead of {length}")
    return found
