"""`dlrover init` on small scripts of every form, and on the strangers' scripts, which then train as jobs."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.init import converted
from tests.strangers.stranger_job import SCRIPTS
from tests.support.dlrover_process import Dlrover
from tests.support.run_cli import RunCli

IMPORT = "from lightning_dlrover import DLRoverCallback, DLRoverStrategy\n"
BOTH = "strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()]"


def text(lines: str) -> str:
    return textwrap.dedent(lines).lstrip("\n")


def convert(before: str, folder: Path = Path()) -> str:
    """The converted script, which a second conversion leaves as it is."""
    after = converted(text(before), "train.py", folder)
    assert converted(after, "train.py", folder) == after
    return after


# --- imports and calls ---


@pytest.mark.parametrize(
    "imported, call",
    [
        ("import lightning as L", "L.Trainer"),
        ("import lightning", "lightning.Trainer"),
        ("import lightning.pytorch", "lightning.pytorch.Trainer"),
        ("import lightning.pytorch as pl", "pl.Trainer"),
        ("import pytorch_lightning as pl", "pl.Trainer"),
        ("from lightning import pytorch as pl", "pl.Trainer"),
        ("from lightning import Trainer", "Trainer"),
        ("from lightning.pytorch import Trainer as T", "T"),
        ("from pytorch_lightning.trainer import Trainer", "Trainer"),
        ("from lightning.pytorch import *", "Trainer"),
    ],
)
def test_trainer_is_found_under_every_name(imported: str, call: str) -> None:
    assert convert(f"{imported}\nx = {call}(max_epochs=1)\n") == f"{imported}\n{IMPORT}x = {call}(max_epochs=1, {BOTH})\n"


@pytest.mark.parametrize(
    "call, expected",
    [
        ("Trainer()", f"Trainer({BOTH})"),
        ("Trainer( )", f"Trainer({BOTH} )"),
        ("Trainer(max_epochs=1,)", f"Trainer(max_epochs=1, {BOTH})"),
        ("Trainer(max_epochs=(1))", f"Trainer(max_epochs=(1), {BOTH})"),
        ('Trainer(precision="bf16-mixed ü", max_epochs=1)', f'Trainer(precision="bf16-mixed ü", max_epochs=1, {BOTH})'),
        ("Trainer(strategy='auto')", "Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])"),
        ("Trainer(strategy='ddp')", "Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])"),
        ("Trainer(strategy=DDPStrategy())", "Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])"),
        (
            "Trainer(strategy='ddp_find_unused_parameters_true')",
            "Trainer(strategy=DLRoverStrategy(find_unused_parameters=True), callbacks=[DLRoverCallback()])",
        ),
        ("Trainer(callbacks=None)", "Trainer(callbacks=[DLRoverCallback()], strategy=DLRoverStrategy())"),
        ("Trainer(callbacks=[])", "Trainer(callbacks=[DLRoverCallback()], strategy=DLRoverStrategy())"),
        ("Trainer(callbacks=[A(),])", "Trainer(callbacks=[A(), DLRoverCallback()], strategy=DLRoverStrategy())"),
        ("Trainer(callbacks=A())", "Trainer(callbacks=[A(), DLRoverCallback()], strategy=DLRoverStrategy())"),
        ("Trainer(callbacks=found)", "Trainer(callbacks=[*found, DLRoverCallback()], strategy=DLRoverStrategy())"),
        (
            "Trainer(callbacks=found + [A()])",
            "Trainer(callbacks=[*(found + [A()]), DLRoverCallback()], strategy=DLRoverStrategy())",
        ),
        (
            "Trainer(strategy='ddp', callbacks=[], **more)",
            "Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()], **more)",
        ),
    ],
)
def test_arguments_are_added_to_a_call(call: str, expected: str) -> None:
    imports = "from lightning import Trainer\nfrom lightning.pytorch.strategies import DDPStrategy\n"
    rest = "found = [A()]\nx = "
    assert convert(f"{imports}{rest}{call}\n") == f"{imports}{IMPORT}{rest}{expected}\n"


def test_formatting_comments_and_line_ends_stay() -> None:
    before = '''
        #!/usr/bin/env python
        """Doc."""
        from __future__ import annotations

        import lightning as L  # the library

        def main(args):
        \ttrainer = L.Trainer(
        \t\tmax_epochs = args.epochs,   # many
        \t\tcallbacks=[
        \t\t\tA(),  # first
        \t\t\tB()   # last
        \t\t]  # no comma
        \t)
        \ttrainer.fit(Model())
    '''
    after = '''
        #!/usr/bin/env python
        """Doc."""
        from __future__ import annotations

        import lightning as L  # the library
        from lightning_dlrover import DLRoverCallback, DLRoverStrategy

        def main(args):
        \ttrainer = L.Trainer(
        \t\tmax_epochs = args.epochs,   # many
        \t\tcallbacks=[
        \t\t\tA(),  # first
        \t\t\tB(),   # last
        \t\t\tDLRoverCallback(),
        \t\t],  # no comma
        \t\tstrategy=DLRoverStrategy(),
        \t)
        \ttrainer.fit(Model())
    '''
    assert convert(before) == text(after)
    windows = text(before).replace("\n", "\r\n")
    assert converted(windows, "train.py", Path()) == text(after).replace("\n", "\r\n")


def test_import_follows_that_of_lightning_which_decides_on_the_package() -> None:
    before = """
        import os

        def one():
            from pytorch_lightning import Trainer
            return Trainer()

        def two():
            import pytorch_lightning as pl; import json
            return [pl.Trainer(max_epochs=n) for n in range(2)]
    """
    after = f"""
        import os

        def one():
            from pytorch_lightning import Trainer
            {IMPORT.strip()}
            return Trainer({BOTH})

        def two():
            import pytorch_lightning as pl; import json
            {IMPORT.strip()}
            return [pl.Trainer(max_epochs=n, {BOTH}) for n in range(2)]
    """
    assert convert(before) == text(after)
    guarded = "try:\n    import lightning as L\nexcept ImportError:\n    import pytorch_lightning as L\nx = L.Trainer()\n"
    assert convert(guarded) == guarded.replace("x = L.Trainer()", f"{IMPORT}x = L.Trainer({BOTH})")


def test_only_what_is_missing_is_added() -> None:
    half = "import lightning as L\nfrom lightning_dlrover import DLRoverStrategy\nx = L.Trainer(strategy=DLRoverStrategy())\n"
    assert convert(half) == (
        "import lightning as L\nfrom lightning_dlrover import DLRoverStrategy\nfrom lightning_dlrover import DLRoverCallback\n"
        "x = L.Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])\n"
    )


@pytest.mark.parametrize(
    "script",
    [
        f"import lightning as L\n{IMPORT}x = L.Trainer({BOTH})\n",
        "import lightning as L\nimport lightning_dlrover as d\n"
        "x = L.Trainer(strategy='dlrover', callbacks=[d.DLRoverCallback()])\n",
        f"import lightning as L\n{IMPORT}s = DLRoverStrategy()\nc = [DLRoverCallback()]\n"
        "x = L.Trainer(strategy=s, callbacks=c)\n",
        f"import lightning as L\n{IMPORT}def f():\n  c = []\n  c.append(DLRoverCallback())\n"
        "  return L.Trainer(strategy=DLRoverStrategy(), callbacks=c)\n",
    ],
)
def test_nothing_is_done_twice(script: str) -> None:
    assert convert(script) == script


# --- refusals ---


@pytest.mark.parametrize(
    "lines, reason",
    [
        ("x = L.Trainer(**config)", "line 2: **config may hold arguments of the Trainer; see that it gets strategy="),
        ("x = L.Trainer(strategy='ddp', **config)", "see that it gets callbacks=[DLRoverCallback()]"),
        ("x = L.Trainer(strategy=args.strategy)", "line 2: strategy=args.strategy is decided elsewhere; let it be DLR"),
        ("x = L.Trainer(strategy='fsdp')", "strategy='fsdp' distributes the model in another way"),
        (
            "import lightning.pytorch.strategies as s\nx = L.Trainer(strategy=s.DDPStrategy(static_graph=True))",
            "pass the arguments that you need to DLRoverStrategy(...), which takes those of DDP",
        ),
        ("def f(c): return L.Trainer(callbacks=c)", "callbacks=c may be a list or not; add DLRoverCallback() to it"),
        ("c = A()\nc = [c]\nx = L.Trainer(callbacks=c)", "callbacks=c may be a list or not"),
        ("x = L.Trainer(callbacks=make())", "callbacks=make() may be a list or not"),
        ("x = L.Trainer()\ny = L.Trainer(**config)", "line 3: **config may hold"),
        ("x = L.Fabric()", "it uses Fabric; a loop of its own becomes elastic by World.steps"),
        ("x = 1", "it makes no Lightning Trainer. Where another module or library makes it, pass strategy="),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(A)", "strategy: dlrover\n    callbacks:\n    - class"),
    ],
)
def test_undecidable_script_is_left_as_it_is(lines: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        converted(f"import lightning as L\n{lines}\n", "train.py", Path())


def test_module_that_makes_the_trainer_is_named(dlrover: RunCli) -> None:
    Path("ours").mkdir()
    Path("ours/loop.py").write_text("import lightning as L\n\ndef trainer():\n    return L.Trainer()\n")
    Path("main.py").write_text("from ours.loop import trainer\ntrainer().fit(None)\n")
    assert "its Trainer is made in ours/loop.py; run `dlrover init` on that file" in dlrover.refused("init", "main.py")


# --- the command ---


def test_diff_can_be_applied_and_equals_what_is_written(dlrover: RunCli) -> None:
    script = Path("train.py")
    before = "# coding: latin-1\nimport lightning as L\nx = 'ü'; t = L.Trainer(max_epochs=1)"
    script.write_bytes(before.encode("latin-1"))
    script.chmod(0o750)
    diff = dlrover.output("init", "train.py")
    assert script.read_bytes() == before.encode("latin-1")
    Path("copy").mkdir()
    Path("copy/train.py").write_bytes(before.encode("latin-1"))
    subprocess.run(["git", "apply", "-"], cwd="copy", input=diff.encode("latin-1"), check=True, capture_output=True)
    assert "written" in dlrover.output("init", "--write", "train.py")
    assert script.read_bytes() == Path("copy/train.py").read_bytes()
    assert f"max_epochs=1, {BOTH})".encode() in script.read_bytes()
    assert script.stat().st_mode & 0o777 == 0o750
    assert "nothing to do" in dlrover.output("init", "train.py")


# --- scripts of strangers ---

DECIDABLE = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("cli", "tabular"))
RUN_BY_DEFAULT = ("autoencoder", "gan", "kfold")
NEED_MORE = {"dlrm": "torchrec", "warehouse": "pyarrow"}


def without_dlrover(name: str) -> str:
    """A stranger's script as it was before it became elastic."""
    found = (SCRIPTS / f"{name}.py").read_text()
    found = re.sub(r"from lightning_dlrover import .*\n", "", found)
    found = re.sub(r"(?m)^ *(strategy=DLRoverStrategy\(\)|callbacks=\[DLRoverCallback\(\)\]),\n", "", found)
    found = re.sub(r", (strategy=DLRoverStrategy\(\)|callbacks=\[DLRoverCallback\(\)\])", "", found)
    found = re.sub(r", DLRoverCallback\(\)|DLRoverCallback\(\), ", "", found)
    assert "DLRover" not in found
    return found


@pytest.mark.parametrize("name", DECIDABLE)
def test_diff_adds_to_a_strangers_script_what_its_author_added(name: str) -> None:
    before = without_dlrover(name)
    after = convert(before)
    assert sorted(re.findall(r"DLRover\w+", after)) == sorted(re.findall(r"DLRover\w+", (SCRIPTS / f"{name}.py").read_text()))
    kept = [line for line in before.splitlines() if line in after.splitlines()]
    assert len(before.splitlines()) - len(kept) <= 1  # all but a line with callbacks, or with a whole call


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in RUN_BY_DEFAULT else pytest.mark.on_demand) for name in DECIDABLE]
)
def test_strangers_script_with_the_diff_applied_trains_with_two_workers(name: str, tmp_path: Path) -> None:
    if name in NEED_MORE:
        pytest.importorskip(NEED_MORE[name])
    job = Dlrover(tmp_path)
    (tmp_path / f"{name}.py").write_text(without_dlrover(name))
    try:
        assert job("init", "--write", f"{name}.py").returncode == 0
        run = job.start("--workers", "2:2", "--history", "off", f"{name}.py")
        assert run.wait_for_exit(150) == 0, run.output
        assert "[round] round 1: 2 workers" in run.output
        assert "Traceback" not in run.output
        job.assert_all_ended()
    finally:
        job.end()


def test_trainer_with_a_strangers_keyword_arguments_is_left_to_its_author() -> None:
    with pytest.raises(UsageError, match=re.escape("**self.trainer_config.trainer_kwargs may hold arguments of the Trainer")):
        converted((SCRIPTS / "tabular.py").read_text(), "tabular.py", SCRIPTS)
    with pytest.raises(UsageError, match="LightningCLI makes its Trainer"):
        converted((SCRIPTS / "cli.py").read_text(), "cli.py", SCRIPTS)
