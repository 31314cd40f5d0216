"""Packages of others add commands, hooks of `dlrover run` and callbacks, and a broken one disturbs nothing else."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.plugins import PluginError
from tests.support.run_cli import RunCli

Install = Callable[..., None]
"""Installs a distribution: its name, the source of its only module, and its entry points, as `group.name = object`."""

GREETER = """
from lightning_dlrover.cli.errors import UsageError

class Greet:
    summary = "greet somebody in 100 % of all cases"

    def add_options(self, parser):
        parser.add_argument("--name", required=True)

    def run(self, options):
        if options.name == "nobody":
            raise UsageError("nobody can be greeted")
        print("hello", options.name)
        return 7

GREET = Greet()
NUMBER = 3

class Failing(Greet):
    def add_options(self, parser):
        parser.add_argument("--help")

FAILING = Failing()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    made = []

    def installed(name: str, source: str, *points: str) -> None:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}_plugin.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = []
        for point in points:
            group, _, rest = point.partition(":")
            lines.append(f"[dlrover.{group}]\n{rest.replace('= ', f'= {name}_plugin:')}\n")
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(site))
        made.append(f"{name}_plugin")

    yield installed
    for module in made:
        sys.modules.pop(module, None)


def test_command_of_another_package_runs_like_a_built_in_one(dlrover: RunCli, install: Install) -> None:
    install("greeter", GREETER, "commands:greet = GREET")
    assert dlrover("greet", "--name", "x") == (7, "hello x\n", "")
    assert "greet somebody in 100 % of all cases" in dlrover("--help")[1]
    assert "--name NAME" in dlrover("greet", "--help")[1]
    code, _, errors = dlrover("greet", "--name", "nobody")
    assert (code, errors) == (2, "dlrover: nobody can be greeted\n")


@pytest.mark.parametrize(
    "source, point, problem",
    [
        ("import nowhere", "greet = GREET", "greeter_plugin:GREET cannot be imported: ModuleNotFoundError: No module named"),
        (GREETER, "greet = MISSING", "greeter_plugin:MISSING cannot be imported: AttributeError"),
        (GREETER, "greet = NUMBER", "greeter_plugin:NUMBER is 3, which is not a Command"),
        (GREETER, "greet = Greet", "which is not a Command"),
        (GREETER, "greet = FAILING", "its options: ArgumentError: argument --help: conflicting option string"),
    ],
)
def test_broken_command_is_named_with_its_distribution(
    dlrover: RunCli, install: Install, source: str, point: str, problem: str
) -> None:
    install("greeter", source, f"commands:{point}")
    code, _, errors = dlrover("greet", "--name", "x")
    assert code == 2
    assert "dlrover.commands 'greet' of greeter 1.2 cannot be used: " in errors
    assert problem in errors
    assert "Traceback" not in errors
    assert dlrover("pool", "status", "--help")[0] == 0
    assert dlrover("list") == (0, "no jobs in folder runs\n", "")
    code, output, errors = dlrover("--help")
    assert (code, errors) == (0, "")
    assert point.endswith("FAILING") or "of greeter 1.2 cannot be used" in " ".join(output.split())  # its options are not read


def test_built_in_command_keeps_its_name(dlrover: RunCli, install: Install) -> None:
    install("greeter", GREETER, "commands:list = GREET")
    assert dlrover("list") == (0, "no jobs in folder runs\n", "")
    assert "'list' of greeter 1.2 cannot be used: lightning-dlrover itself has that name" in " ".join(
        dlrover("--help")[1].split()
    )


def test_name_that_two_packages_claim_is_given_to_neither(dlrover: RunCli, install: Install) -> None:
    install("greeter", GREETER, "commands:greet = GREET")
    install("other", GREETER, "commands:greet = GREET")
    code, output, errors = dlrover("greet", "--name", "x")
    assert (code, output) == (2, "")
    assert "'greet' of other 1.2 and greeter 1.2 cannot be used: both have that name" in errors


GATE = """
from lightning_dlrover.cli.errors import UsageError

class Gate:
    def add_options(self, run):
        run.add_argument("--gate")

    def request(self, options, endpoint, prefix):
        if options.gate == "closed":
            raise UsageError(f"the gate is closed for {prefix}")

    def ticket_key(self, client, keys):
        return None

GATE = Gate()
"""


def test_hook_of_another_package_can_refuse_a_run(dlrover: RunCli, install: Install) -> None:
    install("gate", GATE, "run:gate = GATE")
    code, _, errors = dlrover("run", "--gate", "closed", "script.py")
    assert (code, errors) == (2, "dlrover: the gate is closed for /dlrover\n")


def test_run_goes_on_without_a_broken_hook(dlrover: RunCli, install: Install) -> None:
    install("gate", "import nowhere", "run:gate = GATE")
    errors = dlrover.refused("run", "--priority", "1", "script.py")
    assert "dlrover.run 'gate' of gate 1.2 cannot be used: gate_plugin:GATE cannot be imported" in errors
    assert "--priority: only with --pool NAME" in errors


COUNTER = """
from lightning.pytorch import Callback

CALLS = []

class Counter(Callback):
    def setup(self, trainer, pl_module, stage):
        CALLS.append("setup")

    def on_train_batch_end(self, *arguments):
        CALLS.append("batch")

class Plugin:
    def applies(self, environ):
        if environ.get("COUNTED") == "broken":
            raise RuntimeError("no counter")
        return "COUNTED" in environ

    def callback(self, trainer):
        return Counter()

PLUGIN = Plugin()
"""


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.net(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(callback: DLRoverCallback) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy=DLRoverStrategy(), callbacks=[callback], accelerator="cpu", max_steps=3, enable_model_summary=False, **quiet
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(24, 4)), batch_size=8))
    return trainer


def test_callback_of_another_package_is_called_in_each_fit_where_it_applies(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("counter", COUNTER, "callbacks:counter = PLUGIN")
    monkeypatch.setenv("COUNTED", "1")
    callback = DLRoverCallback(plan_every_s=0)
    trainer = fit(callback)
    import counter_plugin  # type: ignore[import-not-found]

    assert ["setup", *["batch"] * 3] == counter_plugin.CALLS
    assert [type(each).__name__ for each in trainer.callbacks][:2] == ["DLRoverCallback", "Counter"]  # type: ignore[attr-defined]
    fit(callback)
    assert ["setup", *["batch"] * 3] * 2 == counter_plugin.CALLS
    monkeypatch.delenv("COUNTED")
    fit(DLRoverCallback(plan_every_s=0))
    assert len(counter_plugin.CALLS) == 8


def test_callback_that_fails_where_it_applies_is_named_with_its_distribution(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("counter", COUNTER, "callbacks:counter = PLUGIN")
    monkeypatch.setenv("COUNTED", "broken")
    with pytest.raises(
        PluginError, match=r"dlrover.callbacks 'counter' of counter 1.2 cannot be used: it failed: .*no counter"
    ):
        fit(DLRoverCallback(plan_every_s=0))


def test_training_goes_on_without_a_callback_that_cannot_be_imported(install: Install) -> None:
    install("counter", "import nowhere", "callbacks:counter = PLUGIN")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert fit(DLRoverCallback(plan_every_s=0)).global_step == 3
    assert any("'counter' of counter 1.2 cannot be used" in str(warning.message) for warning in seen)
