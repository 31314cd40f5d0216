"""No thread of ours draws from the global random numbers, which may be those of a user's dataset just then."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_dlrover"
KEEPERS = {"data/iterable.py", "live/state.py", "live/data_agreement.py", "tables/sharded.py"}
"""Files that read and restore the global states, in the thread that trains or reads data."""

SEEDERS = {"spares.py"}
"""Files that seed a program that has been forked, before its script begins."""

OWN = {"Random", "SystemRandom", "RandomState", "Generator", "default_rng"}
STATES = {"getstate", "setstate", "get_state", "set_state"}


def global_draws(source: str, allowed: set[str]) -> list[str]:
    """Uses of the modules `random` and `numpy.random` that concern their global generators, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            found += [f"{node.lineno}: {each.name}" for each in node.names if each.name not in allowed]
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("random", "np.random", "numpy.random"):
            found += [f"{node.lineno}: {ast.unparse(node)}"] if node.attr not in allowed else []
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_global_random_numbers_are_left_to_the_user(file: Path) -> None:
    name = str(file.relative_to(PACKAGE))
    allowed = OWN | (STATES if name in KEEPERS else set()) | ({"seed"} if name in SEEDERS else set())
    assert global_draws(file.read_text(), allowed) == []


@pytest.mark.parametrize(
    "source", ["random.uniform(0, 1)", "from random import choice", "np.random.rand()", "random.getstate()"]
)
def test_search_finds_planted_uses(source: str) -> None:
    assert global_draws(source, OWN) != []
