"""Names that modules of the package offer to each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import lightning_dlrover

PACKAGE = Path(lightning_dlrover.__file__).parent


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def exported(module: ast.Module) -> set[str] | None:
    """Names in `__all__`; None without one."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return None


def test_all_lists_each_class_and_function_that_another_module_imports() -> None:
    trees = modules()
    imported: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in trees and node.module != name:
                imported[node.module] |= {alias.name for alias in node.names}
    missing = {}
    for name, tree in trees.items():
        if (listed := exported(tree)) is None:
            continue
        own = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
        if left_out := sorted(n for n in (imported[name] & own) - listed if not n.startswith("_")):
            missing[name] = left_out
    assert not missing
    assert sum(map(len, imported.values())) > 500  # the search has found something
