"""The documentation site, its links, and the commands and code in its pages.

A block of code is checked, or the line above it gives the reason why not: `<!-- not run: it needs a cluster -->`. Commands of
this package are checked in any case.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lightning_dlrover.cli.parser import build_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]
OTHER_PAGES = [REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")]

LANGUAGES = {"bash", "python", "yaml", "json", "toml", "text"}
DIRECTIVES = {"{toctree}", "{eval-rst}", "{include}"}


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    text: str
    reason: str  # why it is not run; empty if it has to be

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command of a shell, without its comment."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            tokens = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            tokens.whitespace_split = True
            for is_separator, words in itertools.groupby(tokens, lambda token: bool(token) and set(token) <= set("|&;")):
                if not is_separator:
                    found.append(list(words))
        return found


def id_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@functools.cache
def blocks_of(page: Path) -> list[Block]:
    pattern = r"(?:^<!-- not run: (?P<reason>.+) -->\n)?^```(?P<language>\S*)\n(?P<text>.*?)^```"
    found = re.finditer(pattern, page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Block(each["language"], each["text"], each["reason"] or "") for each in found]


def without_blocks(text: str) -> str:
    """Return a page without fenced and indented blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?:^ {4}(?! *[-*] ).*\n)+", "", text, flags=re.MULTILINE)


def python_of(page: Path) -> list[str]:
    return [block.text for block in blocks_of(page) if block.language == "python"]


# --- the site and its links ---------------------------------------------------------------------------------------------------


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Warnings are dead links, pages that no other page leads to, and code that cannot be highlighted."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*command, str(REPOSITORY / "docs"), str(tmp_path / "site")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workers-per-node" in (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert "The first release." in (tmp_path / "site" / "reference" / "changelog.html").read_text()
    for folder in (REPOSITORY / "docs", tmp_path / "site"):
        text = (folder / "llms.txt").read_text()
        links = re.findall(r"^- \[.+?\]\((.+?)\)(?:: .+)?$", text, flags=re.M)
        assert len(links) == text.count("\n- ") > 20
        assert [link for link in links if not (folder / link).is_file()] == []


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """Return the names of a page's headings, as MyST and code hosts form them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=id_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_blocks(page.read_text())):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_pages_that_code_and_messages_name_exist() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.split()
    names = tracked or [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.py")]
    readable = [name for name in names if name.endswith((".py", ".md", ".toml", ".yaml", ".sh", "Makefile")) or "/" not in name]
    dead = []
    for path in (REPOSITORY / name for name in readable):
        if path.is_file() and not path.is_symlink():
            for named in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(errors="replace")):
                if not (REPOSITORY / named).exists():
                    dead.append(f"{path.relative_to(REPOSITORY)}: {named}")
    assert dead == []


# --- lengths ------------------------------------------------------------------------------------------------------------------


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 700


@pytest.mark.parametrize("page", PAGES[1:], ids=id_of)
def test_page_is_short_enough_to_read(page: Path) -> None:
    """Words of tables count, blocks of code do not."""
    assert len(without_blocks(page.read_text()).split()) <= 1500, "make it two pages, by topic"


# --- code ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_blocks_of_a_page_have_a_language_and_commands_are_in_blocks(page: Path) -> None:
    assert {block.language for block in blocks_of(page)} <= LANGUAGES | DIRECTIVES
    fenced = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4}(?:dlrover|torchrun|torchx|python|pip|make|bash|etcdctl|kubectl) .*", fenced, flags=re.M) == []


def complaint_about(words: list[str]) -> str | None:
    """Return why a command cannot be run as written, an empty string if it can, None if this test does not know the program."""
    program, *arguments = words
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint), contextlib.suppress(SystemExit):
        match program:
            case "dlrover":
                build_parser(arguments).parse_args(arguments)
            case "torchrun":
                get_args_parser().parse_args(arguments)
            case "python" if arguments[:1] == ["-m"]:
                return "" if importlib.util.find_spec(arguments[1]) else f"there is no module {arguments[1]}"
            case "python" if arguments[0] == "train.py" or (REPOSITORY / arguments[0]).exists():
                return ""
            case "python":
                return f"there is no script {arguments[0]}"
            case "make":
                targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
                return "" if {word for word in arguments if "=" not in word} <= {*targets} else "there is no such target"
            case "torchx" if arguments[0] == "run":
                # tests/components/test_elastic.py runs those of docs/start/torchx.md.
                return "" if {"dlrover.train", "dlrover.node"} & {*arguments} else "there is no such component"
            case _:
                return None
    return complaint.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "bash" for b in blocks_of(page))], ids=id_of)
def test_commands_of_a_page_are_accepted(page: Path) -> None:
    for block in (block for block in blocks_of(page) if block.language == "bash"):
        for words in block.commands:
            complaint = complaint_about(words)
            assert not complaint, words
            assert complaint is not None or block.reason, f"{words}: it is not checked, so say why above the block"


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_commands_that_sentences_name_exist(page: Path) -> None:
    parser = build_parser(["--help"])
    known = {name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices}
    named = re.findall(r"`dlrover ([a-z][a-z-]*)", page.read_text())
    assert {*named} <= known


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=id_of)
def test_code_of_a_page_is_valid_and_imports_what_exists(page: Path) -> None:
    for block in python_of(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_dlrover"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


READERS: dict[str, Any] = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language in READERS for b in blocks_of(page))], ids=id_of)
def test_data_of_a_page_can_be_read(page: Path) -> None:
    for block in blocks_of(page):
        if block.language in READERS:
            assert READERS[block.language](block.text)


def scripts() -> Iterator[tuple[str, str]]:
    """Return the complete scripts of the documentation, made short, with the line that ends their training."""
    (readme,) = python_of(README)
    yield readme, "`max_epochs=10` reached"
    (quickstart,) = python_of(REPOSITORY / "docs" / "start" / "quickstart.md")
    short = quickstart.replace("200_000", "2_048").replace("max_epochs=100", "max_epochs=7")
    yield short, "`max_epochs=7` reached"


def test_scripts_of_the_readme_and_the_quickstart_train(tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(
        "import lightning as L, torch\n"
        "class Model(L.LightningModule):\n"
        "    def __init__(self): super().__init__(); self.net = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, _): return self.net(batch[0]).mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)\n"
        "dataset = torch.utils.data.TensorDataset(torch.randn(2048, 4))\n"
    )
    (tmp_path / "train.py").write_text("\n".join(script for script, _ in scripts()))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={"PATH": "", "DLROVER_HISTORY": "off", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(f"`Trainer.fit` stopped: {end}" in done.stderr for _, end in scripts())
