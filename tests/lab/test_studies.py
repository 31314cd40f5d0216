from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dlrover.lab.characterize.points import (
    STUDIES,
    WORKLOADS,
    all_studies,
    layers,
    lookup_bytes,
    mlp_flops,
    table_bytes,
)
from tests.support.characterize_points import SCOPE


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize("cores", [1, 2, 3, 16, 64])
def test_points_are_valid_on_every_machine(size: str, cores: int) -> None:
    for study in all_studies(replace(SCOPE, size=size, cores=cores)):  # type: ignore[arg-type]
        assert len(set(study.points)) == len(study.points), study.name
        for point in study.points:
            assert point.batch % point.num_workers == 0
            assert point.threads >= 1
            assert point.num_workers * point.threads <= max(cores + 1, 2 * point.threads)


def test_every_study_has_points_on_a_cpu() -> None:
    studies = all_studies(SCOPE)
    assert [study.name for study in studies] == list(STUDIES)
    assert all(study.points for study in studies)


def test_only_named_studies_are_made_in_their_order() -> None:
    assert [study.name for study in all_studies(SCOPE, ["mlp", "batch"])] == ["batch", "mlp"]


def test_missing_torchrec_is_a_reason_and_leaves_no_divided_table() -> None:
    studies = {study.name: study for study in all_studies(replace(SCOPE, has_torchrec=False))}
    assert "torchrec is not installed" in studies["placement"].skipped[0]
    kinds = {point.placement for study in studies.values() for point in study.points}
    assert kinds == {"local", "replicated"}


def test_tables_larger_than_the_room_are_left_out_with_a_reason() -> None:
    small = {study.name: study for study in all_studies(replace(SCOPE, memory_bytes=1 << 30))}
    assert max(map(table_bytes, small["rows"].points)) <= 0.3 * 2**30
    assert "may be used here" in small["rows"].skipped[-1]


def test_gpu_studies_are_skipped_with_a_reason_on_a_cpu() -> None:
    studies = {study.name: study for study in all_studies(SCOPE)}
    assert any("--device cpu" in text for text in studies["devices"].skipped)
    on_gpu = {study.name: study for study in all_studies(replace(SCOPE, device="cuda"))}
    assert {point.device for point in on_gpu["devices"].points} == {"cpu", "cuda", "mix"}


def test_users_model_joins_the_devices() -> None:
    (study,) = all_studies(replace(SCOPE, users_model="train.py:Net"), ["devices"])
    assert study.points[-1].model == "train.py:Net"


def test_work_of_a_model_without_tables_is_its_products() -> None:
    point = WORKLOADS["compute"]
    bottom, top = layers(point)
    assert bottom == []
    assert top == [(256, 512), (512, 512), (512, 512), (512, 512), (512, 1)]
    assert mlp_flops(point) == 6 * (256 * 512 + 3 * 512 * 512 + 512)
    assert lookup_bytes(point) == 0
