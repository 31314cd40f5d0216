"""The house rules of CONTRIBUTING.md that can be counted: public faces, few and deep modules, and no file without a subject."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import lightning_dlrover

PACKAGE = Path(lightning_dlrover.__file__).parent

MAX_FILES = 228
MAX_LINES = 1000
REASON_FOR_LENGTH = "long because"
"""Words with which the docstring of a longer module begins its reason."""

MAX_SHARE_OF_IMPORTS = 0.055

OTHERS = ("tests", "benchmarks", "examples")
"""Folders of the repository whose files a module may name, too."""


def sources() -> dict[Path, str]:
    return {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def all_of(module: ast.Module) -> ast.stmt | None:
    """Return the statement that sets `__all__`; None without one."""
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return node
    return None


def test_only_public_faces_have_all() -> None:
    having = [path for path, text in sources().items() if all_of(ast.parse(text)) is not None]
    assert [path for path in having if path.name != "__init__.py"] == []
    assert having  # the search has found something


def test_the_package_has_few_files() -> None:
    assert len(sources()) <= MAX_FILES


def test_a_module_is_short_or_says_why_it_is_not() -> None:
    long = {path: text for path, text in sources().items() if len(text.splitlines()) > MAX_LINES}
    without = [path for path, text in long.items() if REASON_FOR_LENGTH not in (ast.get_docstring(ast.parse(text)) or "")]
    assert without == []


def test_imports_are_a_small_part_of_the_lines() -> None:
    num_lines = num_imports = 0
    for text in sources().values():
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        nodes += [node for node in [all_of(tree)] if node is not None]  # type: ignore[misc]
        num_lines += len(text.splitlines())
        num_imports += sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)
    assert num_imports <= MAX_SHARE_OF_IMPORTS * num_lines


def test_files_that_modules_name_exist_elsewhere() -> None:
    tracked = {path.as_posix() for path in sources()}
    tracked |= {
        path.relative_to(PACKAGE.parent).as_posix() for room in OTHERS for path in (PACKAGE.parent / room).rglob("*.py")
    }
    wrong: dict[str, list[str]] = {}
    for path, text in sources().items():
        for name in re.findall(r"`([\w/]+\.py)`", text):
            name = name.removeprefix("lightning_dlrover/")
            names_itself = f"/{path.as_posix()}".endswith(f"/{name}") and path.name != "__init__.py"
            if names_itself or not any(f"/{each}".endswith(f"/{name}") for each in tracked):
                wrong.setdefault(path.as_posix(), []).append(name)
    assert wrong == {}


def test_modules_do_not_use_private_names_of_each_other() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_dlrover"):
                found[str(path)] |= {alias.name for alias in node.names if alias.name.startswith("_")}
    assert {path: names for path, names in found.items() if names - {"_version", "__version__"}} == {}


def test_paths_that_order_the_test_run_exist() -> None:
    folder = Path(__file__).parent
    lists = {"CHECKED_FOR_LEAKS", "COMPUTING", "PATIENT", "TOGETHER", "WAITING"}
    found = [
        each.value
        for node in ast.parse((folder / "conftest.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in lists
        for each in ast.walk(node.value)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    assert len(found) > len(lists)
    assert [beginning for beginning in found if not [*folder.glob(f"{beginning.rstrip('/')}*")]] == []
