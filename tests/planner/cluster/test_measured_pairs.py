"""Speeds of pairs come from the measured ones, and from nothing beyond them."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_clusters import write_pairs

from lightning_dlrover.planner.cluster.measured_pairs import PairsError, read_pairs

PAIRS = "device,job_a,num_devices_a,job_b,num_devices_b,steps_per_s_a,steps_per_s_b\n"
ALONE = "device,job,num_devices,steps_per_s\n"


def write(folder: Path, pairs: str, alone: str = "v100,A (batch size 8),1,4\nv100,A (batch size 32),1,2\n") -> Path:
    (folder / "throughputs.csv").write_text(ALONE + alone)
    path = folder / "pairs.csv"
    path.write_text(PAIRS + pairs)
    return path


def test_speed_is_relative_to_that_alone_and_log_linear_between_batches(tmp_path: Path) -> None:
    rows = "v100,A (batch size 8),1,A (batch size 8),1,3.6,3.6\n"
    rows += "v100,A (batch size 8),1,A (batch size 32),1,4,1.6\n"
    pairs = read_pairs(write(tmp_path, rows + "v100,A (batch size 32),1,A (batch size 32),1,0.8,0.8\n"))
    assert pairs.relative_speed(("A", 8), ("A", 8)) == pytest.approx(0.9)
    assert pairs.relative_speed(("A", 32), ("A", 8)) == pytest.approx(0.8)
    assert pairs.relative_speed(("A", 8), ("A", 32)) == pytest.approx(1.0)
    assert pairs.relative_speed(("A", 16), ("A", 8)) == pytest.approx((0.9 * 0.8) ** 0.5)
    assert pairs.alone_per_s(("A", 16)) == pytest.approx(8**0.5)


@pytest.mark.parametrize("batch", [7, 33])
def test_batch_beyond_the_measured_ones_has_no_pair(tmp_path: Path, batch: int) -> None:
    pairs = read_pairs(write(tmp_path, "v100,A (batch size 8),1,A (batch size 32),1,2,1\n"))
    assert pairs.relative_speed(("A", batch), ("A", 32)) is None
    assert pairs.relative_speed(("A", 8), ("A", batch)) is None
    with pytest.raises(ValueError, match="'A' was not measured with batch size"):
        pairs.alone_per_s(("A", batch))


def test_pair_between_one_that_fits_and_one_that_does_not_is_no_pair(tmp_path: Path) -> None:
    rows = "v100,A (batch size 8),1,A (batch size 8),1,3,3\nv100,A (batch size 32),1,A (batch size 8),1,0,0\n"
    pairs = read_pairs(write(tmp_path, rows))
    assert pairs.relative_speed(("A", 8), ("A", 8)) == 0.75
    assert pairs.relative_speed(("A", 16), ("A", 8)) is None


def test_pairs_on_several_devices_do_not_count(tmp_path: Path) -> None:
    rows = "v100,A (batch size 8),1,A (batch size 8),1,3,3\nv100,A (batch size 8),2,A (batch size 8),2,0,0\n"
    assert read_pairs(write(tmp_path, rows)).relative_speed(("A", 8), ("A", 8)) == 0.75


def test_only_applications_that_train_the_same_model_have_a_counterpart(tmp_path: Path) -> None:
    resnet = read_pairs(write_pairs(tmp_path, 0.9, "ResNet-18"))
    assert resnet.model("cifar10") == "ResNet-18"
    assert [resnet.model(name) for name in ("ncf", "bert", "deepspeech2", "yolov3", "imagenet")] == [None] * 5


def test_kind_of_device_has_to_be_named_where_several_are_possible(tmp_path: Path) -> None:
    rows = "".join(f"{kind},A (batch size 8),1,A (batch size 8),1,3,3\n" for kind in ("k80", "p100"))
    path = write(tmp_path, rows, "k80,A (batch size 8),1,4\np100,A (batch size 8),1,6\n")
    with pytest.raises(PairsError, match=r"pairs.csv holds pairs on k80, p100; name the kind with --pairs-device"):
        read_pairs(path)
    assert read_pairs(path, "p100").relative_speed(("A", 8), ("A", 8)) == 0.5
    with pytest.raises(PairsError, match=r"no pair that fits on one device of kind 'a100'; its kinds are k80, p100"):
        read_pairs(path, "a100")


@pytest.mark.parametrize(
    "row, message",
    [
        ("v100,A (batch size 8),1,A (batch size 8),1,fast,3", r"pairs.csv:2: 'fast' is no speed"),
        ("v100,A (batch size 8),1,A (batch size 8),1,-1,3", r"pairs.csv:2: '-1' is no speed"),
        ("v100,A (batch size 8),1,A (batch size 8),1,3", r"pairs.csv:2: the row has fewer values than columns"),
        ("v100,B (batch size 8),1,A (batch size 8),1,3,3", r"pairs.csv:2: no speed of 'B' with batch size 8 alone on v100"),
    ],
)
def test_bad_line_is_refused_with_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(PairsError, match=message):
        read_pairs(write(tmp_path, row + "\n"))


def test_missing_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.write_text("device,job_a\nv100,A\n")
    with pytest.raises(PairsError, match=r"pairs.csv:1: no column num_devices_a, job_b"):
        read_pairs(path)
