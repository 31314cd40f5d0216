"""GPUs that are visible to programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.components.targets.machine import visible_devices

TWO_OF_WHICH_ONE_IS_DIVIDED = """\
GPU 0: NVIDIA H200 (UUID: GPU-5c9a1f64-0000-0000-0000-000000000000)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaaaaaa-0000-0000-0000-000000000000)
  MIG 1g.18gb     Device  1: (UUID: MIG-bbbbbbbb-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-77777777-0000-0000-0000-000000000000)
"""


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,1,2", ["0", "1", "2"]),
        (" 3, 1", ["3", "1"]),
        ("GPU-5c9a1f64,MIG-aaaa/1/2", ["GPU-5c9a1f64", "MIG-aaaa/1/2"]),
        ("0,-1,1", ["0"]),  # CUDA stops at an invalid entry
        ("2,2", ["2"]),
        ("", []),
        ("none", []),
    ],
)
def test_devices_are_those_visible_to_cuda(value: str, names: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == names


def put_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_divided_devices_are_listed_as_their_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, f"cat <<'END'\n{TWO_OF_WHICH_ONE_IS_DIVIDED}END")
    assert [name[:8] for name in visible_devices({})] == ["MIG-aaaa", "MIG-bbbb", "GPU-7777"]


def test_without_a_driver_that_works_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed because it found no driver'; exit 9")
    assert visible_devices({}) == []
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices({}) == []
