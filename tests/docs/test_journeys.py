"""The lists of files in docs/internals/journeys.md lead through code that exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lightning_dlrover

PACKAGE = Path(lightning_dlrover.__file__).parent
PAGE = PACKAGE.parent / "docs" / "internals" / "journeys.md"
STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py):(?P<name>[\w.]+)`", re.MULTILINE)

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

MAX_FILES = {
    "From a measured step to a plan in etcd": 12,
    "From a plan in etcd to a started node": 10,
    "From a row of a stream to `training_step`": 10,
    "From a killed worker to the next step": 15,
    "A table row through a resize": 10,
}


def journeys() -> dict[str, str]:
    """Text of each journey by its heading."""
    _, *sections = PAGE.read_text().split("\n## ")
    return dict(section.split("\n", 1) for section in sections)


@cache
def names_in(file: str) -> set[str]:
    """Classes and functions of a file, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTION)}
        if isinstance(node, ast.ClassDef | FUNCTION):
            found.add(node.name)
    return found


def test_page_describes_the_five_journeys() -> None:
    assert [*journeys()] == [*MAX_FILES]


@pytest.mark.parametrize("journey", MAX_FILES)
def test_journey_leads_through_few_files_and_each_function_exists(journey: str) -> None:
    text = journeys()[journey]
    steps = [(step["file"], step["name"]) for step in STEP.finditer(text)]
    assert len(steps) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)), "a step names no `file.py:function`"
    assert [step for step in steps if step[1] not in names_in(step[0])] == []
    entered = Counter(file for file, _ in steps)
    assert max(entered.values()) <= 2, entered
    assert len(entered) <= MAX_FILES[journey], sorted(entered)


def test_other_files_that_the_page_names_exist() -> None:
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert [name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files)] == []
