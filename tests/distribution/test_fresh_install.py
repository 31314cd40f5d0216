"""The wheel, installed with pip from a package index into an environment that has nothing but a CPU build of torch.

It downloads some hundred MB. `test_wheel.py` holds the checks that need no index.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkouts import copy_checkout
from tests.support.distributions import CUDA, GIVEN, Distributions, build
from tests.support.environments import INSTALL_S, Environment
from tests.support.small_job import run_small_job

pytestmark = [pytest.mark.on_demand, pytest.mark.timeout(1800)]


@pytest.fixture
def built(tmp_path: Path) -> Distributions:
    if given := os.environ.get(GIVEN):
        return Distributions(Path(given))
    return build(copy_checkout(tmp_path / "checkout"), tmp_path / "dist")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment, removed after the test: pytest would keep a gigabyte for three runs."""
    made = Environment.create(tmp_path / "environment")
    yield made
    shutil.rmtree(made.folder)


def megabytes(folder: Path) -> float:
    files = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (path.stat() for path in folder.rglob("*") if path.is_file())}
    return sum(files.values()) / 1e6


def test_cpu_build_of_torch_is_kept_and_a_job_runs(built: Distributions, environment: Environment, tmp_path: Path) -> None:
    torch = importlib.metadata.version("torch").partition("+")[0]
    begin = time.monotonic()
    environment.pip("install", f"torch=={torch}", "numpy")
    before = installed(environment)
    if any(CUDA.search(name) for name in before):
        pytest.skip(f"the package index has no CPU build of torch {torch}")
    torch_s, torch_mb = time.monotonic() - begin, megabytes(environment.packages)

    report = tmp_path / "report.json"
    environment.pip("install", "--dry-run", "--report", report, built.wheel)
    added = [each for each in json.loads(report.read_text())["install"] if not each["is_direct"]]
    names = {each["metadata"]["name"].lower() for each in added}
    assert "torch" not in names
    assert [name for name in names if CUDA.search(name)] == []
    assert [name for name in added_by_uv(environment, built.wheel) if name == "torch" or CUDA.search(name)] == []

    begin = time.monotonic()
    wheels = tmp_path / "wheels"
    environment.pip("download", "--no-deps", "--dest", wheels, *[each["download_info"]["url"] for each in added])
    environment.pip("install", "--find-links", wheels, built.wheel)
    environment.pip("check")
    after = installed(environment)
    assert {name: after[name] for name in before} == before
    run_small_job(environment, tmp_path)
    print(
        f"torch {before['torch']}: {torch_mb:.0f} MB in {torch_s:.0f} s; the package and {len(added)} others: "
        f"{megabytes(wheels):.0f} MB downloaded, {megabytes(environment.packages) - torch_mb:.0f} MB installed, "
        f"in {time.monotonic() - begin:.0f} s with a job"
    )


def installed(environment: Environment) -> dict[str, str]:
    return {each["name"]: each["version"] for each in json.loads(environment.pip("list", "--format=json"))}


def added_by_uv(environment: Environment, wheel: Path) -> list[str]:
    """Names of the distributions that uv would install, or replace, for the wheel."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--python", str(environment.interpreter), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in (done.stdout + done.stderr).splitlines()]
    names = [line[1].partition("==")[0] for line in lines if line[:1] in (["+"], ["-"], ["~"])]
    assert "lightning-dlrover" in names
    return names


def test_source_distribution_builds_with_what_it_declares(
    built: Distributions, environment: Environment, tmp_path: Path
) -> None:
    environment.pip("wheel", "--no-deps", "--wheel-dir", tmp_path / "wheels", built.sdist)
    rebuilt = Distributions(tmp_path / "wheels").in_wheel
    # Another setuptools signs its name, and may write the metadata's fields in another order.
    assert {name: data for name, data in rebuilt.items() if ".dist-info/" not in name} == {
        name: data for name, data in built.in_wheel.items() if ".dist-info/" not in name
    }


def test_an_index_would_accept_the_distributions(built: Distributions) -> None:
    command = [sys.executable, "-m", "uv", "tool", "run", "twine", "check", "--strict", str(built.wheel), str(built.sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
