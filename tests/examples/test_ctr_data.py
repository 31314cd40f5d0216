from __future__ import annotations

import gzip
from pathlib import Path

import ctr_data
import numpy as np
import pytest
import torch
from ctr_auc import weighted_auc
from ctr_data import DataError, collate, generate, load
from torch.utils.data import DataLoader

ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K"
)
ADULT_RICH = "50, ?, 83311, Masters, 14, Divorced, Sales, Husband, Black, Female, 0, 99, 13, Laos, >50K"


def adult_folder(tmp_path: Path, train: str | None = None, test: str | None = None) -> Path:
    both = f"{ADULT_ROW}\n{ADULT_RICH}\n" * 50
    (tmp_path / "adult-train.csv").write_text(both if train is None else train)
    (tmp_path / "adult-test.csv").write_text(both.replace("50K\n", "50K.\n") if test is None else test)
    return tmp_path


def criteo_row(label: str = "0", numbers: str = "1", category: str = "68fd1e64") -> str:
    return "\t".join([label, *[numbers] * 13, *[category] * 26])


def criteo_file(tmp_path: Path, rows: list[str]) -> Path:
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def many_criteo_rows(num_rows: int = 200) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        criteo_row(str(rng.integers(2)), str(rng.integers(-2, 9)) if i % 3 else "", f"{i % 7:08x}" if i % 5 else "")
        for i in range(num_rows)
    ]


def test_model_with_the_planted_clicks_reaches_the_stated_auc() -> None:
    data = load(None, seed=3, rows=100_000)
    truth = generate(seed=3, num_rows=100_000).click_probability[-len(data.test) :]
    labels = data.test.labels.numpy()
    reached = weighted_auc(truth, labels, 1 - labels)
    assert data.best_auc is not None
    # 10,000 rows with a fifth of clicks: the AUC's own standard error is 0.006.
    assert reached == pytest.approx(data.best_auc, abs=0.015)
    assert 0.7 < data.best_auc < 0.95


def test_generated_rows_are_labelled_and_have_criteos_schema() -> None:
    data = load(None, seed=1, rows=2000)
    assert "no --data given" in data.about
    assert "generating 2,000 rows" in data.about
    assert (data.num_numbers, len(data.cardinalities)) == (13, 26)
    assert len(data.train) + len(data.val) + len(data.test) == 2000


def test_generated_ids_are_long_tailed_and_within_their_cardinality() -> None:
    made = generate(seed=0, num_rows=20_000)
    for column, cardinality in enumerate(made.cardinalities):
        assert made.categories[:, column].min() > 0
        assert made.categories[:, column].max() < cardinality
    counts = np.sort(np.bincount(made.categories[:, -1]))[::-1]
    assert counts[:100].sum() > 0.4 * counts.sum()  # concentrated on 100 of 16,383 ids
    assert (counts == 1).sum() > 1000


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_loads_the_same_rows(tmp_path: Path, seed: int) -> None:
    folder = adult_folder(tmp_path)
    one, two = load(folder, seed, 1000), load(folder, seed, 1000)
    assert torch.equal(one.train.numbers, two.train.numbers)
    assert torch.equal(one.val.categories, two.val.categories)


def test_adult_rows_become_numbers_categories_and_labels(tmp_path: Path) -> None:
    data = load(adult_folder(tmp_path), seed=0, rows=1000)
    assert (len(data.train), len(data.val), len(data.test)) == (90, 10, 100)
    assert (data.num_numbers, len(data.cardinalities)) == (6, 8)
    assert data.cardinalities == (3,) * 8  # two values and the unseen one
    assert data.test.labels.mean() == 0.5
    assert abs(float(data.train.numbers.mean())) < 1e-5
    assert data.best_auc is None
    assert str(tmp_path) in data.about


def test_a_category_that_was_not_in_the_training_rows_is_unseen(tmp_path: Path) -> None:
    unseen = ADULT_ROW.replace("Cuba", "Atlantis")
    data = load(adult_folder(tmp_path, test=f"{unseen}.\n{ADULT_ROW}\n"), seed=0, rows=1000)
    assert data.test.categories[0, -1] == ctr_data.UNSEEN
    assert data.test.categories[1, -1] != ctr_data.UNSEEN


def test_blank_lines_and_the_original_comment_line_are_skipped(tmp_path: Path) -> None:
    data = load(adult_folder(tmp_path, test=f"|1x3 Cross validator\n\n{ADULT_ROW}.\n\n"), seed=0, rows=1000)
    assert len(data.test) == 1


def test_criteo_rows_may_lack_numbers_and_categories(tmp_path: Path) -> None:
    data = load(criteo_file(tmp_path, many_criteo_rows()), seed=0, rows=1000)
    assert (len(data.train), len(data.val), len(data.test)) == (160, 20, 20)
    assert data.cardinalities == (8,) * 26
    assert torch.isfinite(data.train.numbers).all()
    assert (data.train.categories[::5] == ctr_data.UNSEEN).all()


def test_no_more_rows_than_asked_for_are_read_from_a_tsv(tmp_path: Path) -> None:
    rows = [*many_criteo_rows(150), "this line is broken"]
    data = load(criteo_file(tmp_path, rows), seed=0, rows=150)
    assert len(data.train) + len(data.val) + len(data.test) == 150


def test_many_distinct_values_share_a_bounded_number_of_ids(tmp_path: Path) -> None:
    rows = [criteo_row(category=f"{i * 2654435761 % 2**32:08x}") for i in range(25_000)]
    data = load(criteo_file(tmp_path, rows), seed=0, rows=25_000)
    assert data.cardinalities == (ctr_data.MAX_IDS,) * 26
    assert int(data.train.categories.max()) < ctr_data.MAX_IDS
    assert len(np.unique(data.train.categories[:, 0].numpy())) > 10_000


@pytest.mark.parametrize(
    "train, said",
    [
        (f"{ADULT_ROW}\n{ADULT_ROW}, 7\n", "line 2: 16 columns, expected 15"),
        (f"{ADULT_ROW}\n\n39, Private\n", "line 3: 2 columns, expected 15"),
        (ADULT_ROW.replace("39", "old"), "line 1: column 'age' is 'old', expected a number"),
        (
            f"{ADULT_ROW}\n" + ADULT_ROW.replace("39", "nan"),
            "line 2: column 'age' is 'nan', expected a number",
        ),
        (ADULT_ROW.replace("77516", ""), "line 1: column 'fnlwgt' is '', expected a number"),
        (ADULT_ROW.replace("<=50K", "50K"), "line 1: the label is 50K, expected '<=50K' or '>50K'"),
        (ADULT_ROW.replace("Cuba", ""), "line 1: column 'native-country' is empty"),
        ("", "holds no rows"),
        ("\n\n", "holds no rows"),
        ("\0\1\2\n", "is not text"),
    ],
)
def test_a_broken_adult_row_is_named_with_its_file_and_line(tmp_path: Path, train: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load(adult_folder(tmp_path, train=train), seed=0, rows=1000)
    assert said in str(caught.value)
    assert str(tmp_path / "adult-train.csv") in str(caught.value)
    assert "--data" in str(caught.value) or "first" in str(caught.value)


@pytest.mark.parametrize(
    "row, said",
    [
        (criteo_row() + "\t", "line 151: 41 columns, expected 40 separated by tabs"),
        (criteo_row(label="2"), "line 151: the label is 2, expected '0' or '1'"),
        (criteo_row(label=""), "line 151: the label is , expected"),
        (criteo_row(numbers="1.5.2"), "line 151: column 'I1' is '1.5.2', expected a number"),
        (criteo_row(numbers="inf"), "line 151: column 'I1' is 'inf', expected a number"),
        (criteo_row(category="xyz"), "line 151: column 'C1' is 'xyz', expected hexadecimal"),
        (ADULT_ROW, "line 151: 1 columns, expected 40 separated by tabs"),
    ],
)
def test_a_broken_criteo_row_is_named_with_its_file_and_line(tmp_path: Path, row: str, said: str) -> None:
    path = criteo_file(tmp_path, [*many_criteo_rows(150), row])
    with pytest.raises(DataError) as caught:
        load(path, seed=0, rows=1000)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_compressed_file_is_refused_as_not_text(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_bytes(gzip.compress("\n".join(many_criteo_rows()).encode()))
    with pytest.raises(DataError, match="decompress"):
        load(path, seed=0, rows=1000)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load(tmp_path / "nothing", seed=0, rows=1000)
    with pytest.raises(DataError, match=r"adult-train\.csv and adult-test\.csv not found"):
        load(tmp_path, seed=0, rows=1000)
    adult_folder(tmp_path)
    (tmp_path / "adult-test.csv").unlink()
    with pytest.raises(DataError, match=r": adult-test\.csv not found"):
        load(tmp_path, seed=0, rows=1000)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="99 rows are too few"):
        load(criteo_file(tmp_path, many_criteo_rows(99)), seed=0, rows=1000)
    with pytest.raises(DataError, match="99 rows are too few"):
        load(None, seed=0, rows=99)


def test_a_loader_yields_every_row_once_whether_batched_or_single(tmp_path: Path) -> None:
    rows = load(adult_folder(tmp_path), seed=0, rows=1000).train
    batched = list(DataLoader(rows, batch_size=32, collate_fn=collate))
    single = list(DataLoader(_OneByOne(rows), batch_size=32, collate_fn=collate))
    for one, two in zip(batched, single, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert sum(len(batch[2]) for batch in batched) == 90


class _OneByOne(torch.utils.data.Dataset[ctr_data.Batch]):
    """The same rows without `__getitems__`, as a wrapper of the dataset would offer them."""

    def __init__(self, rows: ctr_data.ClickRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ctr_data.Batch:
        return self.rows[index]
