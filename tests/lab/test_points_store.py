from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.lab.characterize import results as store_module
from lightning_dlrover.lab.characterize.points import Limit, Machine, Point
from lightning_dlrover.lab.characterize.results import FILE_NAME, Store, StoreError, read_store
from tests.support.characterize_points import visit

MACHINE = Machine("host", "a processor", 2.0, 24, "", "2.13")
VISIT = visit(Point("p"), 1.0, 2.0)


def filled(folder: Path) -> Path:
    with Store(folder, MACHINE) as store:
        store.add(VISIT)
        store.add(Limit("copy", "GB/s", 2, 1.0, 1.0, (10.0,)))
    return folder / FILE_NAME


def test_measurements_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path, MACHINE) as store:
        assert store.found.visits == [VISIT]
        assert store.found.limits[0].blocks == (10.0,)
        store.add(VISIT)
    assert read_store(tmp_path).visits == [VISIT, VISIT]


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_half_a_last_line_is_removed_and_the_rest_continues(tmp_path: Path, cut: int) -> None:
    path = filled(tmp_path)
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[1][:cut])
    with Store(tmp_path, MACHINE) as store:
        store.add(VISIT)
    assert read_store(tmp_path).visits == [VISIT, VISIT]


def test_half_a_header_is_written_again(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'{"kind":"hea')
    with Store(tmp_path, MACHINE) as store:
        assert store.found.header.machine == MACHINE


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[]\n", b'{"kind":"visit"}\n', b'{"kind":"other"}\n', b"NaN\n"])
def test_garbage_is_refused_with_its_file_and_line(tmp_path: Path, garbage: bytes) -> None:
    path = filled(tmp_path)
    with path.open("ab") as file:
        file.write(garbage)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"{FILE_NAME}, line 4.*give another --out"):
        Store(tmp_path, MACHINE)
    assert path.read_bytes() == before


def test_other_machine_is_refused_by_what_differs(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(StoreError, match=r"another machine \(cores 2.0 there, 4.0 here\)"):
        Store(tmp_path, replace(MACHINE, cores=4.0))


def test_other_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr(store_module, "__version__", "9.9")
    with pytest.raises(StoreError, match=r"release .*this is 9\.9"):
        Store(tmp_path, MACHINE)


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path, MACHINE), pytest.raises(StoreError, match="in use"):
        Store(tmp_path, MACHINE)


def test_folder_without_measurements_is_refused_for_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has no points\.jsonl"):
        read_store(tmp_path)
