"""Modules depend on each other in no circle, and the core names no add-on. Annotations and names in strings count."""

from __future__ import annotations

import ast
import graphlib
import itertools
import sys
from functools import cache
from pathlib import Path

import grimp

import lightning_dlrover

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PACKAGE = Path(lightning_dlrover.__file__).parent
NAME = "lightning_dlrover"


@cache
def imports() -> dict[str, set[str]]:
    """Modules that each module imports, also where only a type checker does."""
    graph = grimp.build_graph(NAME, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@cache
def named() -> dict[str, set[str]]:
    """Modules that each module names in strings, as for `importlib`. Programs that it starts, with `-m`, do not count."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        lists = [node.elts for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple)]
        programs = {after for items in lists for before, after in itertools.pairwise(items) if _text(before) == "-m"}
        texts = {_text(node) for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in programs}
        found[module] = {text for text in texts if text in imports() and text not in (module, NAME)}
    return found


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_modules_depend_on_each_other_in_no_circle() -> None:
    graph = {module: imported | named().get(module, set()) for module, imported in imports().items()}
    assert any(named().values())  # the search for names has found something
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError that shows the circle


def test_core_names_no_add_on_in_a_string() -> None:
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract["name"].startswith("The core imports no add-on")]
    add_ons = tuple(contract["forbidden_modules"])
    assert all(module in imports() for module in add_ons), "the contract names a module that is gone"

    def is_add_on(module: str) -> bool:
        return module.startswith(tuple(f"{add_on}." for add_on in add_ons)) or module in add_ons

    core = set(imports()) - {module for module in imports() if is_add_on(module)}
    covered = {module for module in core if module.startswith(tuple(f"{source}." for source in contract["source_modules"]))}
    packages = {source.rpartition(".")[0] for source in contract["source_modules"]} | {NAME}
    assert core - covered - {*contract["source_modules"]} - packages == set(), "modules that the contract does not cover"
    assert {module: names for module in core if (names := {name for name in named().get(module, ()) if is_add_on(name)})} == {}
