"""The wheel and the source distribution: what is in them, and that the wheel works where the repository is not.

The environment has exactly what the wheel requires, linked from the environment of the tests. `test_fresh_install.py` installs
from a package index.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover import __version__
from lightning_dlrover.private_names import minor
from tests.support.checkouts import REPOSITORY, committable_files, copy_checkout
from tests.support.distributions import CUDA, GIVEN, Distributions, build
from tests.support.environments import Environment, required_distributions
from tests.support.small_job import run_small_job
from tests.versions import results

ONLY_FOR_THE_REPOSITORY = {".gitignore", ".pre-commit-config.yaml", "rdzv", "components"}
"""Tracked files that the source distribution leaves out. The last two are links to folders of the package."""

LIGHT = """
import sys, lightning_dlrover
print(lightning_dlrover.__file__, *{"torch", "pytorch_lightning", "numpy"} & {*sys.modules})
"""
"""Prints where the package was loaded from, and the large packages that were loaded with it."""

ALL_MODULES = """
import importlib, pkgutil, sys, lightning_dlrover
for found in pkgutil.walk_packages(lightning_dlrover.__path__, "lightning_dlrover."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            print(f"{found.name}: {error.name}")
"""
"""Prints the modules that need a package which is not installed."""

NEED_AN_EXTRA = {"torchrec", "fbgemm_gpu", "tensordict", "kubernetes", "textual", "uvicorn"}
"""Packages of the extras."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    if given := os.environ.get(GIVEN):
        return Distributions(Path(given))
    folder = tmp_path_factory.mktemp("built")
    return build(copy_checkout(folder / "checkout"), folder / "dist")


@pytest.fixture(scope="module")
def environment(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The wheel, installed beside its requirements and nothing else."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    made = Environment.linked(folder, built.requirements)
    made.pip_without_index("install", built.wheel)
    yield made
    shutil.rmtree(folder)  # pytest would keep it for three runs


def package_files() -> set[str]:
    return {str(path) for path in committable_files() if path.parts[0] == "lightning_dlrover"}


# --- contents ---


def test_wheel_holds_the_package_and_nothing_else(built: Distributions) -> None:
    inside = {name for name in built.in_wheel if ".dist-info/" not in name}
    assert inside == package_files()
    assert {"lightning_dlrover/py.typed", "lightning_dlrover/report/page.html.j2"} <= inside
    assert [name for name in built.in_wheel if name.endswith(".dist-info/licenses/LICENSE")]


def test_sdist_holds_what_the_tests_need(built: Distributions) -> None:
    tracked = {str(path) for path in committable_files()} - ONLY_FOR_THE_REPOSITORY
    made_by_setuptools = {name for name in built.in_sdist if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert built.in_sdist - made_by_setuptools == tracked


def test_links_at_the_top_lead_into_the_package() -> None:
    links = {path for path in committable_files() if (REPOSITORY / path).is_symlink()}
    assert {str(link): str((REPOSITORY / link).resolve().relative_to(REPOSITORY)) for link in links} == {
        "rdzv": "lightning_dlrover/rdzv",
        "components": "lightning_dlrover/components",
    }


def test_wheel_of_the_checkout_is_that_of_the_sdist(built: Distributions, tmp_path: Path) -> None:
    straight = build(copy_checkout(tmp_path / "checkout"), tmp_path / "dist", "--wheel")
    assert straight.wheel.name == built.wheel.name
    assert straight.in_wheel == built.in_wheel


# --- metadata ---


def test_metadata_are_valid_and_match_what_is_tested(built: Distributions) -> None:
    metadata = built.metadata
    assert (metadata.name, str(metadata.version)) == ("lightning-dlrover", __version__)
    assert (metadata.license_expression, metadata.license_files) == ("Apache-2.0", ["LICENSE"])
    classifiers = metadata.classifiers or []
    assert not [each for each in classifiers if each.startswith("License ::")]  # refused beside an expression
    versions = {
        each.rpartition(" ")[2] for each in classifiers if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", each)
    }
    assert versions == {minor(result.python) for result in results()}


def test_page_of_an_index_has_no_link_into_the_repository(built: Distributions) -> None:
    page = built.metadata.description or ""
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "docs/start/quickstart.md" in page
    assert "kill.svg" not in page
    assert (REPOSITORY / "README.md").read_text().partition("\n")[0] == page.partition("\n")[0]


# --- the installed wheel ---


def test_installation_changes_nothing_but_adds_the_package(environment: Environment, built: Distributions) -> None:
    assert environment.pip("check").strip() == "No broken requirements found."
    required = required_distributions(built.requirements)
    listed = {each["name"]: each["version"] for each in json.loads(environment.pip("list", "--format=json"))}
    assert {name.lower().replace("_", "-").replace(".", "-") for name in listed} == {*required, "lightning-dlrover"}
    assert listed["lightning-dlrover"] == __version__
    assert listed["torch"] == importlib.metadata.version("torch")


def test_requirements_bring_no_cuda_if_torch_is_a_cpu_build(built: Distributions) -> None:
    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("the tests run with a CUDA build of torch")
    assert [name for name in required_distributions(built.requirements) if CUDA.search(name)] == []


def test_package_is_imported_from_the_wheel_and_alone(environment: Environment, tmp_path: Path) -> None:
    assert environment.run(LIGHT, tmp_path) == str(environment.packages / "lightning_dlrover" / "__init__.py")


def test_every_module_is_imported_with_the_requirements_alone(environment: Environment, tmp_path: Path) -> None:
    lacking = environment.run(ALL_MODULES, tmp_path)
    assert {line.rpartition(" ")[2].partition(".")[0] for line in lacking.splitlines()} <= NEED_AN_EXTRA, lacking


@pytest.mark.long
@pytest.mark.timeout(400)
def test_job_outside_of_the_repository_runs_to_its_end(environment: Environment, tmp_path: Path) -> None:
    run_small_job(environment, tmp_path)
