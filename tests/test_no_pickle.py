"""No line of ours can turn foreign bytes into running code.

Calls inside of other libraries are followed by `tests/e2e/test_unpickling.py`, which runs jobs whose unpicklers refuse.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "lightning_dlrover").rglob("*.py"))

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing.reduction"}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
UNPICKLER = ROOT / "lightning_dlrover" / "rdzv" / "transport" / "data_unpickler.py"
"""The only file that may import pickle: its unpickler, by which torch's collectives read, finds accepted classes only."""

COLLECTIVES = {  # torch pickles the arguments of these
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def offences(source: str) -> list[str]:
    """Uses of functions that execute their input, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        bad = [name for name in names if name in MODULES or name.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in FUNCTIONS or last in COLLECTIVES:
                bad.append(called)
            is_load = called == "torch.load" or last == "load_checkpoint"
            if is_load and options.get("weights_only") != "True" and not called.startswith("super()"):
                bad.append(f"{called} without weights_only=True")
            if options.get("allow_pickle") == "True" or options.get("shell") == "True":
                bad.append(ast.unparse(node))
            if called.startswith("yaml.") and last in ("load", "unsafe_load", "full_load"):
                bad.append(called)
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in bad]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_of_the_package_pickles_or_evaluates_input(file: Path) -> None:
    found = offences(file.read_text())
    # A spare process runs the user's own script, as `python` would.
    known = {UNPICKLER: ["pickle"], ROOT / "lightning_dlrover/spares.py": ["exec", "compile"]}
    assert [offence.partition(": ")[2] for offence in found] == known.get(file, []), found


def test_the_unpickler_of_collectives_finds_nothing_by_the_lookup_of_pickle() -> None:
    [unpickler] = [node for node in ast.parse(UNPICKLER.read_text()).body if isinstance(node, ast.ClassDef)]
    assert [ast.unparse(base) for base in unpickler.bases] == ["pickle.Unpickler"]
    assert [node.name for node in unpickler.body if isinstance(node, ast.FunctionDef)] == ["find_class"]
    assert "super()" not in ast.unparse(unpickler)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.reduction",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "strategy.load_checkpoint(path)",
        "dist.all_gather_object(a, b)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_search_finds_planted_uses(source: str) -> None:
    assert offences(source) != []
