"""Slurm, Kubernetes, imports and GPUs: trouble where something is set up and does not work, none where nothing is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dlrover.doctor.imports import Imported, check_gpus, check_imports, import_all
from lightning_dlrover.doctor.report import check_kubernetes, check_slurm
from tests.support.kubernetes_cluster import kubernetes_cluster


def commands(folder: Path, **scripts: str) -> dict[str, str]:
    """Environment in which only these commands are found."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("answer", "verdict", "text"),
    [
        ("echo 'Slurmctld(primary) at host is UP'", "ok", "is UP"),
        ("echo 'Slurmctld(primary) at host is DOWN'", "warning", "DOWN"),
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", "ok", "no cluster"),
    ],
)
def test_slurm_without_an_answer_is_named(tmp_path: Path, answer: str, verdict: str, text: str) -> None:
    environ = commands(tmp_path, sbatch="", squeue="", scontrol=answer)
    found = check_slurm(environ)
    assert found.verdict == verdict
    assert text in found.text
    assert ("slurmctld" in found.next_move) is (verdict != "ok")


def test_incomplete_and_absent_slurm_differ(tmp_path: Path) -> None:
    assert check_slurm({"PATH": str(tmp_path)}).verdict == "ok"
    incomplete = check_slurm(commands(tmp_path, sbatch=""))
    assert (incomplete.verdict, incomplete.text) == ("warning", "sbatch without squeue, scontrol")


def test_kubernetes_is_checked_only_where_it_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert check_kubernetes().verdict == "ok"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    missing = check_kubernetes()
    assert missing.verdict == "warning"
    assert "KUBECONFIG" in missing.next_move


@pytest.mark.parametrize(("has_volcano", "text"), [(True, ", with Volcano"), (False, ", without Volcano")])
def test_volcano_of_a_cluster_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_volcano: bool, text: str) -> None:
    with kubernetes_cluster(tmp_path, runs_pods=False, has_volcano=has_volcano) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        found = check_kubernetes()
    assert found.verdict == "ok"
    assert found.text.endswith(text)


def test_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    """A torch that ends the process, and one that lacks a name: both are put before the installed one on the path."""
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    [crashed] = check_imports(import_all(environ))
    assert crashed.verdict == "error"
    assert "torch: its import ended the process (SIGABRT)" in crashed.text
    (tmp_path / "torch.py").write_text("raise ImportError('libfbgemm.so: undefined symbol')\n")
    [broken] = check_imports(import_all(environ))
    assert "undefined symbol" in broken.text
    assert "pip install" in broken.next_move


def test_imports_that_take_too_long_are_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    [late] = check_imports(import_all({**os.environ, "PYTHONPATH": str(tmp_path)}, deadline_s=1.0))
    assert "have not ended within 1 s" in late.text


@pytest.mark.parametrize(
    ("imported", "devices", "verdict", "text"),
    [
        (Imported(), 0, "ok", "none"),
        (Imported(), 2, "warning", "CPU build"),
        (
            Imported(cuda="13.0", nccl=(2, 29, 2), num_devices=2),
            2,
            "ok",
            "driver 580.1, torch for CUDA 13.0, NCCL 2.29.2",
        ),
        (Imported(cuda="13.0", nccl=(2, 28, 5), num_devices=2), 2, "warning", "may crash"),
        (Imported(cuda="13.0", device_problem="driver too old"), 1, "error", "torch can use none: driver too old"),
    ],
)
def test_gpus_that_torch_cannot_use_are_named(imported: Imported, devices: int, verdict: str, text: str) -> None:
    found = check_gpus(imported, devices, "580.1")
    assert found.verdict == verdict
    assert text in found.text
    assert bool(found.next_move) is (verdict != "ok")
