"""The documentation site, and the commands and code in the documentation."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.cli.parser import build_parser

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def code_blocks(page: Path) -> Iterator[str]:
    """Return fenced and indented blocks, without the indentation."""
    text = page.read_text()
    yield from re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for indented in re.findall(r"(?:^ {4}.*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.M):
        yield re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Return the arguments of each `dlrover` command in the page's blocks of code."""
    for block in code_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("dlrover "):
                yield shlex.split(line, comments=True)[1:]


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Warnings are dead links, pages that no other page leads to, and code that cannot be highlighted."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*command, str(REPOSITORY / "docs"), str(tmp_path / "site")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workers-per-node" in (tmp_path / "site" / "reference" / "cli.html").read_text()


def test_links_of_the_readme_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)", PAGES[0].read_text())
    assert [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()] == []


def test_readme_is_short() -> None:
    assert len(PAGES[0].read_text().split()) <= 700


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_of(page))], ids=lambda page: page.stem)
def test_parser_accepts_every_command_of_a_page(page: Path) -> None:
    for arguments in commands_of(page):
        complaint = io.StringIO()
        with contextlib.redirect_stderr(complaint), contextlib.suppress(SystemExit):
            build_parser(arguments).parse_args(arguments)
        assert complaint.getvalue() == "", arguments


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.stem)
def test_code_of_a_page_is_valid_and_imports_what_exists(page: Path) -> None:
    for block in python_of(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_dlrover"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_script_of_the_readme_trains(tmp_path: Path) -> None:
    (block,) = python_of(PAGES[0])
    (tmp_path / "my_project.py").write_text(
        "import lightning as L, torch\n"
        "class Model(L.LightningModule):\n"
        "    def __init__(self): super().__init__(); self.net = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, _): return self.net(batch[0]).mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)\n"
        "dataset = torch.utils.data.TensorDataset(torch.randn(2048, 4))\n"
    )
    (tmp_path / "train.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={"PATH": "", "DLROVER_HISTORY": "off", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "`Trainer.fit` stopped: `max_epochs=10` reached" in done.stderr
