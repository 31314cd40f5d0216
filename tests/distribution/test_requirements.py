"""The package declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_dlrover

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PACKAGE = Path(lightning_dlrover.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]

INSTALLED_APART = {"torchrec"}
"""Distributions that an installation adds without their requirements, see the extra `torchrec`."""

IMPORTED_BY_NAME = {"lightning", "pytorch-lightning"}
"""Distributions of which the package takes the one that the user's script imports."""

NEEDED_BY_OTHERS = {"tensordict", "pyre-extensions"}
"""Distributions that etcd-sdk-python does not declare, or that torchrec would bring if it were installed with them."""


def declared() -> set[str]:
    """Distributions that the package or one of its extras for users asks for."""
    extras = {name: texts for name, texts in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
    lists = [PROJECT["dependencies"], *extras.values()]
    return {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a module imports when it runs, anywhere in its code."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.orelse:
                yield from imports(each)
            continue
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                yield module.partition(".")[0]
        yield from imports(node)


@cache
def imported() -> frozenset[str]:
    """Distributions that the package imports from."""
    packages = {name for file in PACKAGE.rglob("*.py") for name in imports(ast.parse(file.read_text()))}
    homes = importlib.metadata.packages_distributions()
    own = {*sys.stdlib_module_names, "lightning_dlrover"}
    found = ([canonicalize_name(home) for home in homes.get(name, [name])] for name in packages - own)
    # Several distributions may share a namespace, such as `google`.
    known = declared()
    return frozenset(next((home for home in of_name if home in known), of_name[0]) for of_name in found)


def test_every_import_is_declared() -> None:
    assert imported() - declared() == INSTALLED_APART


def test_every_requirement_is_imported() -> None:
    assert declared() - imported() == IMPORTED_BY_NAME | NEEDED_BY_OTHERS
