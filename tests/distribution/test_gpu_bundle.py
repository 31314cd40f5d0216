"""The folder that tests the package on a machine with a GPU and no network: its wheels, and how its parts are run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gpu_parts
import psutil
import pytest
from gpu_bundle import BARE, BundleError, download_missing, lacking
from gpu_parts import Part, last_line, run_parts
from packaging.requirements import Requirement

from tests.support.checkouts import REPOSITORY
from tests.support.environments import Environment

# --- wheels -------------------------------------------------------------------------------------------------------------------


def make_wheel(folder: Path, name: str, *requires: str, version: str = "1.0") -> Path:
    """Write a wheel that has metadata and nothing else."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    files = {
        "METADATA": "".join(f"{line}\n" for line in ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"))
        + "".join(f"Requires-Dist: {each}\n" for each in requires),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{name}-{version}.dist-info/{file}", text)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels, the only ones that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize(
    "python, carried", [("3.12", {"first", "second", "fourth"}), ("3.10", {"first", "second", "third", "fourth"})]
)
def test_wheels_are_those_that_a_bare_machine_with_the_target_python_lacks(
    index: Path, tmp_path: Path, python: str, carried: set[str]
) -> None:
    make_wheel(index, "first", "second[more]>=1", "torch>=2", 'third; python_version < "3.11"', 'unused; extra == "other"')
    make_wheel(index, "second", "numpy", "fourth<2 ; extra == 'more'")
    make_wheel(index, "third", "first")
    make_wheel(index, "fourth")
    make_wheel(index, "fourth", version="2.0")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    download_missing(wheels, [Requirement("first")], python)
    assert {wheel.name.partition("-")[0] for wheel in wheels.iterdir()} == carried
    assert (wheels / "fourth-1.0-py3-none-any.whl").exists()


def test_a_bundle_carries_no_library_of_cuda(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "first", "nvidia-cublas-cu13>=13")
    with pytest.raises(BundleError, match="first requires nvidia-cublas-cu13>=13, which no bundle carries"):
        lacking([wheel], [], "3.12")


def test_wheels_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    wheels = [
        make_wheel(tmp_path, "first", "third>=2"),
        make_wheel(tmp_path, "second", "third<2"),
        make_wheel(tmp_path, "third"),
    ]
    with pytest.raises(BundleError, match=r"the wheel of third 1\.0 does not meet"):
        lacking(wheels, [], "3.12")


# --- parts --------------------------------------------------------------------------------------------------------------------


def python(name: str, code: str, limit_s: float = 20.0, needs_gpu: bool = False) -> Part:
    return Part(name, [sys.executable, "-c", code], limit_s, needs_gpu)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, flush=True)
print("seen=7", flush=True)
time.sleep(60)
"""


def test_failing_and_endless_parts_end_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "GRACE_S", 1.0)
    parts = [
        python("fails", "print('so far=1'); print('count=3 share=0.5'); raise SystemExit(5)"),
        python("endless", STUBBORN, limit_s=4.0),
        python("on_gpu", "raise SystemExit(9)", needs_gpu=True),
        python("counts", "print('2 failed, 7 passed, 1 skipped in 3.1s')"),
    ]
    began = time.monotonic()
    results = run_parts(parts, "cpu", tmp_path / "results", began + 60, tmp_path / "copy")
    assert time.monotonic() - began < 15
    assert [result.rc for result in results] == [5, 124, None, 0]
    assert last_line(results, "cpu", 12.3) == (
        "gpu_bundle device=cpu seconds=12 failed=2 left_out=1 fails.rc=5 fails.count=3 fails.share=0.5 endless.rc=124 "
        "endless.seen=7 on_gpu.rc=none counts.rc=0 counts.failed=2 counts.passed=7 counts.skipped=1"
    )
    child = int((tmp_path / "results" / "endless.log").read_text().split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    written = json.loads((tmp_path / "copy" / "results.json").read_text())["parts"]
    assert [(each["name"], each["rc"]) for each in written] == [("fails", 5), ("endless", 124), ("on_gpu", None), ("counts", 0)]


def test_no_part_starts_after_the_time_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "MIN_S", 2.0)
    parts = [python("first", "import time; time.sleep(60)"), python("second", "print('x=1')")]
    began = time.monotonic()
    results = run_parts(parts, "cpu", tmp_path / "results", began + 3.0)
    assert time.monotonic() - began < 8
    assert [result.rc for result in results] == [124, None]
    assert "were left" in results[1].note


# --- the whole ----------------------------------------------------------------------------------------------------------------


@pytest.mark.on_demand
@pytest.mark.timeout(1800)
def test_bundle_runs_with_a_bare_machines_packages_and_no_index(tmp_path: Path) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    bundle = tmp_path / "bundle"
    command = [sys.executable, ".ci/gpu_bundle.py", "--python", version, "--out", str(bundle)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    environment = Environment.create(tmp_path / "environment")
    try:
        environment.pip("install", f"torch=={importlib.metadata.version('torch').partition('+')[0]}", "numpy")
        environment.pip("install", "pip", *BARE)
        run = ["bash", str(bundle / "run.sh"), "--device", "cpu", "--parts", "look", "faults", "tests", "characterize"]
        alone = {**environment.variables, "PYTHON": str(environment.interpreter), "PIP_INDEX_URL": "http://127.0.0.1:9"}
        done = subprocess.run(run, env=alone, capture_output=True, text=True, timeout=600, check=False)
    finally:
        shutil.rmtree(environment.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("gpu_bundle device=cpu ")
    assert " failed=0 left_out=0 " in done.stdout.splitlines()[-1]
