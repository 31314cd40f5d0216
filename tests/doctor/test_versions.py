"""Findings about installed packages, places for nodes, imports and GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dlrover.doctor.imports import Imported, check_gpus, check_imports, import_all
from lightning_dlrover.doctor.report import check_kubernetes, check_slurm, check_versions, installed_versions, is_safe_to_import
from lightning_dlrover.output import Finding
from tests.support.kubernetes_cluster import kubernetes_cluster

FITTING = {
    "torch": "2.13.0+cpu",
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchx": "0.7.0",
}


def troubles(installed: dict[str, str | None], *requirements: str, python: str = "3.11.9") -> list[Finding]:
    """Findings about the fitting packages with some of them changed; None: not installed."""
    found = {name: version for name, version in {**FITTING, **installed}.items() if version is not None}
    return [finding for finding in check_versions(found, requirements, python) if finding.verdict != "ok"]


def test_installed_packages_fit_each_other() -> None:
    assert [finding for finding in check_versions(installed_versions()) if finding.verdict == "error"] == []


@pytest.mark.parametrize(
    "installed",
    [
        {},
        {"torchrec": None, "fbgemm-gpu-cpu": None},
        {"lightning": None},
        {"torch": "2.13.1", "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.1", "nvidia-cublas": "13.0"},
        {"torch": "2.13.1+cu130", "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.1"},
    ],
)
def test_fitting_packages_are_fine(installed: dict[str, str | None]) -> None:
    assert troubles(installed, "torch>=2.13", "kubernetes>=29; extra == 'kubernetes'") == []


def test_wrong_fbgemm_on_the_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fbgemm_gpu_cpu-1.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fbgemm-gpu-cpu\nVersion: 1.9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed = installed_versions()
    if "torchrec" not in installed:
        pytest.skip("needs torchrec")
    [trouble] = [finding for finding in check_versions(installed) if finding.check == "fbgemm"]
    assert trouble.verdict == "error"
    assert "torchrec 1.8.0 needs fbgemm-gpu-cpu 1.8, 1.9.0 is installed" in trouble.text
    assert trouble.next_move == "pip install 'fbgemm-gpu-cpu==1.8.*' && pip install --no-deps 'torchrec==1.8.*'"


@pytest.mark.parametrize(
    ("installed", "text", "move"),
    [
        ({"fbgemm-gpu-cpu": None}, "needs fbgemm-gpu-cpu, which is not installed", "'fbgemm-gpu-cpu==1.8.*'"),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, "fbgemm-gpu does not load with torch 2.13.0+cpu", "fbgemm-gpu-cpu"),
        ({"fbgemm-gpu": "1.8.0"}, "overwrite each other's files", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"),
        ({"torch": "2.14.0+cpu"}, "torchrec 1.8.0 is built for torch 2.13", "'torchrec==1.9.*'"),
        ({"torchrec": "1.9.0"}, "torchrec 1.9.0 needs fbgemm-gpu-cpu 1.9, 1.8.0 is installed", "'torchrec==1.8.*'"),
    ],
)
def test_wrong_triple_of_torchrec_is_named(installed: dict[str, str | None], text: str, move: str) -> None:
    [trouble] = [found for found in troubles(installed) if found.check == "fbgemm"]
    assert trouble.verdict == "error"
    assert text in trouble.text
    assert move in trouble.next_move


def test_missing_and_old_requirements_are_named() -> None:
    old, missing = troubles({}, "torch>=2.14", "no-such-package>=1", "no-such-extra; extra == 'x'")
    assert (old.verdict, old.text) == ("error", "torch>=2.14 is required, 2.13.0+cpu is installed")
    assert missing.next_move == "pip install 'no-such-package>=1'"


def test_untested_releases_are_warned_of() -> None:
    newer, older, python = troubles({"torch": "2.99.0+cpu", "torchrec": None, "torchx": "0.5.0"}, python="3.99.1")[::1]
    assert {newer.verdict, older.verdict, python.verdict} == {"warning"}
    texts = " ".join(f"{found.check} {found.text}" for found in (newer, older, python))
    assert "torch 2.99.0+cpu is newer than the tested releases" in texts
    assert "torchx 0.5.0 is not among the tested releases" in texts
    assert "python 3.99.1 is newer" in texts


def test_packages_of_different_releases_are_warned_of() -> None:
    [trouble] = troubles({"pytorch-lightning": "2.6.4"})
    assert trouble.verdict == "warning"
    assert "pip install pytorch-lightning==2.6.6" in trouble.next_move


def test_malicious_release_is_not_imported() -> None:
    installed = {**FITTING, "lightning": "2.6.3"}
    assert not is_safe_to_import(installed)
    [trouble] = [found for found in check_versions(installed, (), "3.11.9") if found.verdict == "error"]
    assert "steals credentials" in trouble.text
    assert is_safe_to_import(FITTING)


# --- places and imports ------------------------------------------------------------------------------------------------------


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
        (Imported(cuda="13.0", nccl=(2, 29, 2), num_devices=2), 2, "ok", "driver 580.1, torch for CUDA 13.0, NCCL 2.29.2"),
        (Imported(cuda="13.0", nccl=(2, 28, 5), num_devices=2), 2, "warning", "may crash"),
        (Imported(cuda="13.0", device_problem="driver too old"), 1, "error", "torch can use none: driver too old"),
    ],
)
def test_gpus_that_torch_cannot_use_are_named(imported: Imported, devices: int, verdict: str, text: str) -> None:
    found = check_gpus(imported, devices, "580.1")
    assert found.verdict == verdict
    assert text in found.text
    assert bool(found.next_move) is (verdict != "ok")
