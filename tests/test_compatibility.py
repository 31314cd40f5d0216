"""The compatibility page matches the tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lightning_dlrover.private_names import TESTED, minor
from tests.compatibility import FOLDER, ROWS, Row, render
from tests.versions import results

ROOT = Path(__file__).parent.parent


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_pages_are_written_from_the_table() -> None:
    pages = render(ROWS, results())
    assert {name: (FOLDER / name).read_text() for name in pages} == pages, "write them again: python -m tests.compatibility"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.feature)
def test_row_names_a_test_that_exists(row: Row) -> None:
    path, _, name = row.test.partition("::")
    function, _, case = name.partition("[")
    assert function in functions_of(ROOT / path), row.test
    if case:
        folder = (ROOT / path).parent
        sources = "\n".join(file.read_text() for file in [*folder.glob("*.py")])
        files = {file.stem for file in folder.glob("scripts/*.py")}
        assert case.rstrip("]") in files or re.search(rf"""["']{case.rstrip("]")}["']""", sources), row.test


def test_every_feature_of_the_tables_has_a_row() -> None:
    cases = {case for row in ROWS for case in re.findall(r"\[(\w+)\]", row.test)}
    table = (ROOT / "tests/e2e/table_of_features.py").read_text()
    features = set(re.findall(r'^    "(\w+)": Setup\(', table, re.MULTILINE))
    scripts = {file.stem for file in (ROOT / "tests/strangers/scripts").glob("*.py")}
    assert features
    assert scripts
    assert (features | scripts) - cases == set()


def test_every_environment_on_the_page_has_passed() -> None:
    assert results()
    for result in results():
        assert result.passed == result.of > 0, result


def test_releases_that_count_as_tested_are_on_the_page() -> None:
    tried = {
        "python": {minor(result.python) for result in results()},
        "torch": {minor(result.torch) for result in results()},
        "lightning": {minor(result.lightning) for result in results()},
        "torchrec": {minor(result.torchrec) for result in results() if result.torchrec},
    }
    assert {name: tried[name] for name in tried} == {name: set(TESTED[name]) for name in tried}
    assert TESTED["pytorch-lightning"] == TESTED["lightning"]
