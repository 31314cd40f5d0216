"""The compatibility pages name a test for each feature, and hold the results with other versions."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lightning_dlrover.private_names import TESTED, minor
from tests.versions import PAGE, results, table

ROOT = Path(__file__).parent.parent
PAGES = (PAGE.with_name("compatibility.md"), PAGE)
ROW = re.compile(r"\| (?P<feature>.+) \| (works|refused|warned)(: [^|]+)? \| `(?P<test>tests/[^`|]+)` \|")


def rows() -> list[re.Match[str]]:
    """Return the rows of features of both pages; each line of a table with other content fails."""
    lines = [line for page in PAGES for line in page.read_text().partition("\n## Versions\n")[0].splitlines()]
    found = []
    for line in lines:
        if line.startswith("|") and line not in ("| feature | | shown by |", "| --- | --- | --- |"):
            row = ROW.fullmatch(line)
            assert row is not None, f"no feature, verdict and test: {line}"
            found.append(row)
    return found


ROWS = rows()


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_page_ends_with_the_kept_results() -> None:
    assert PAGE.read_text().endswith(f"\n\n{table()}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["feature"])
def test_row_names_a_test_that_exists(row: re.Match[str]) -> None:
    path, _, name = row["test"].partition("::")
    function, _, case = name.partition("[")
    assert function in functions_of(ROOT / path), row["test"]
    if case:
        folder = (ROOT / path).parent
        sources = "\n".join(file.read_text() for file in [*folder.glob("*.py")])
        files = {file.stem for file in folder.glob("scripts/*.py")}
        assert case.rstrip("]") in files or re.search(rf"""["']{case.rstrip("]")}["']""", sources), row["test"]


def test_every_feature_of_the_tables_has_a_row() -> None:
    cases = {case for row in ROWS for case in re.findall(r"\[(\w+)\]", row["test"])}
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
