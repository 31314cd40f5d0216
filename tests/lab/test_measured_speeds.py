"""Step times at measured placements are the measured ones, and lie between their neighbours elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.lab.simulate.traces import MeasuredApplication, TraceError, even_placement, read_applications
from tests.support.measured_clusters import COMPUTE_S, toy_time_s, write_speeds

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "step_traces"


@pytest.fixture
def toy(tmp_path: Path) -> MeasuredApplication:
    return read_applications(write_speeds(tmp_path))["toy"]


@pytest.mark.parametrize("placement", [(1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2), (2, 2, 2, 2)])
@pytest.mark.parametrize("local_batch", [4, 8, 16])
def test_a_measured_placement_has_its_measured_time(
    toy: MeasuredApplication, placement: tuple[int, ...], local_batch: int
) -> None:
    time = toy.step_time(placement, local_batch * sum(placement))
    assert (time.step_s, time.sync_s) == pytest.approx(toy_time_s(placement, local_batch))


def test_a_batch_between_two_measured_ones_takes_a_time_between_theirs(toy: MeasuredApplication) -> None:
    times = [toy.step_time((1,), batch).step_s for batch in (4, 5, 6, 7, 8)]
    assert times == sorted(times)
    assert toy.step_time((1,), 6).step_s == pytest.approx(6 * COMPUTE_S)  # a power law is exact


def test_a_larger_batch_than_measured_is_accumulated_and_synchronises_once(toy: MeasuredApplication) -> None:
    step_s, sync_s = toy_time_s((2,), 16)
    time = toy.step_time((2,), 128)  # 64 samples for each device, in four passes of 16
    assert (time.step_s, time.sync_s) == pytest.approx((4 * (step_s - sync_s) + sync_s, sync_s))


def test_nodes_between_measured_ones_are_interpolated(toy: MeasuredApplication) -> None:
    two, three, four = (toy.step_time((2,) * nodes, 8 * 2 * nodes).step_s for nodes in (2, 3, 4))
    assert two < three < four


def test_the_smallest_local_batch_bounds_the_devices(toy: MeasuredApplication) -> None:
    assert (toy.most_devices(64), toy.most_devices(20), toy.most_devices(3)) == (8, 5, 0)
    with pytest.raises(ValueError, match="at least 4 samples per device"):
        toy.step_time((2, 2), 15)
    with pytest.raises(ValueError, match="at most 2 devices on a node"):
        toy.step_time((3,), 64)


@pytest.mark.parametrize("devices, nodes", [(1, 1), (7, 2), (8, 3), (64, 16), (5, 5)])
def test_an_even_placement_differs_by_one_device_at_most(devices: int, nodes: int) -> None:
    placement = even_placement(devices, nodes)
    assert (sum(placement), len(placement)) == (devices, nodes)
    assert max(placement) - min(placement) <= 1


def test_a_folder_without_measurements_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no file NAME-placements\.csv"):
        read_applications(tmp_path)


@pytest.mark.parametrize(
    "row, message",
    [
        ("1a,4,0.1,0", r"toy-placements.csv:17: placement='1a'"),
        ("1,4,0,0", r"toy-placements.csv:17: step_time=0.0 is not a time"),
        ("1,4,fast,0", r"toy-placements.csv:17: step_time='fast' is not a number"),
        ("1,4", r"toy-placements.csv:17 has another number of fields"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    path = write_speeds(tmp_path) / "toy-placements.csv"
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(TraceError, match=message):
        read_applications(tmp_path)


def test_a_placements_file_without_placements_is_refused(tmp_path: Path) -> None:
    write_speeds(tmp_path)
    (tmp_path / "toy-placements.csv").write_text("num_nodes,num_replicas,local_bsz,step_time\n1,1,4,0.1\n")
    with pytest.raises(TraceError, match=r"toy-placements.csv, row 1, has no placement"):
        read_applications(tmp_path)


def test_every_published_size_has_a_speed() -> None:
    if not TRACES.is_dir():
        pytest.skip(f"{TRACES} does not exist")
    for application in read_applications(TRACES).values():
        for devices in range(1, 65):
            for nodes in range(-(-devices // 4), min(devices, 16) + 1):
                assert application.steps_per_s(even_placement(devices, nodes), 64 * application.min_local_batch) > 0
