"""Both of Lightning's packages, in each order of imports."""

from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_dlrover import DLRoverCallback, DLRoverStrategy, lightning_compat
from lightning_dlrover.live.wiring import DLRoverEnvironment

TRAINER: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
TRAINER |= {"enable_checkpointing": False, "enable_progress_bar": False}

both = pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning], ids=lambda package: str(package.__name__))


def run(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@both
def test_trainer_takes_strategy_by_name_and_by_instance(package: ModuleType) -> None:
    for strategy in ("dlrover", DLRoverStrategy()):
        trainer = package.Trainer(strategy=strategy, **TRAINER)
        assert isinstance(trainer.strategy, DLRoverStrategy)
        mro = [cls.__module__ for cls in type(trainer.strategy).__mro__ if cls.__name__ == "DDPStrategy"]
        assert mro == [f"{package.__name__}.strategies.ddp"]


@both
def test_strategy_of_the_users_own_is_taken(package: ModuleType) -> None:
    class Own(DLRoverStrategy):
        def __init__(self, name: str) -> None:
            super().__init__(find_unused_parameters=True)
            self.name = name

    strategy = Own("x")
    assert package.Trainer(strategy=strategy, **TRAINER).strategy is strategy
    assert isinstance(strategy, Own)
    assert strategy.name == "x"
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


@both
def test_classes_are_those_of_both_packages(package: ModuleType) -> None:
    assert issubclass(DLRoverStrategy, package.strategies.Strategy)  # required by jsonargparse
    assert issubclass(DLRoverCallback, package.Callback)
    fabric: Any = lightning_compat.fabric_submodule(package.__name__, "plugins")
    assert isinstance(DLRoverEnvironment({}), fabric.ClusterEnvironment)
    assert isinstance(package.callbacks.ModelCheckpoint(), lightning_compat.ModelCheckpoint)
    assert isinstance(package.callbacks.TQDMProgressBar(), lightning_compat.ProgressBar)
    assert not isinstance(package.callbacks.Timer(), lightning_compat.ModelCheckpoint)


@both
def test_pickled_strategy_keeps_its_package(package: ModuleType) -> None:
    strategy = DLRoverStrategy(global_batch_size=3)
    strategy._serve(package.__name__)
    copy = pickle.loads(pickle.dumps(strategy))
    assert type(copy) is type(strategy)
    assert copy._global_batch_size == 3


def test_strategy_refuses_a_trainer_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = DLRoverStrategy()
    monkeypatch.setattr(pytorch_lightning, "__version__", "2.4.0")
    with pytest.raises(RuntimeError, match=r"made for lightning.pytorch 2.*Trainer is of pytorch_lightning 2.4.0: install"):
        pytorch_lightning.Trainer(strategy=strategy, **TRAINER)  # type: ignore[arg-type]


def test_malicious_release_is_refused_before_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_compat, "loaded_packages", list)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"lightning": "2.6.3"}[name])
    with pytest.raises(ImportError, match=r"lightning 2\.6\.3 is installed, a malicious release"):
        lightning_compat.default_package()


def test_missing_lightning_is_named_with_its_installation() -> None:
    code = """
import sys
sys.modules.update(lightning=None, pytorch_lightning=None)
from lightning_dlrover import lightning_compat
try:
    lightning_compat.default_package()
except ImportError as error:
    print(error)
"""
    assert "neither lightning nor pytorch_lightning is installed: pip install" in run(code)


def test_package_imported_later_takes_the_strategy() -> None:
    code = """
import sys
from lightning_dlrover import DLRoverCallback, DLRoverStrategy
assert not {"lightning", "pytorch_lightning"} & {*sys.modules}
import pytorch_lightning as pl
strategy, other = DLRoverStrategy(), DLRoverStrategy()
trainer = pl.Trainer(strategy=strategy, callbacks=DLRoverCallback(), accelerator="cpu", devices=1, logger=False)
assert "lightning" not in sys.modules
assert pl.Trainer(strategy="dlrover", accelerator="cpu", devices=1, logger=False).strategy is not strategy
assert type(pl.__spec__.loader) is type(pl.callbacks.__spec__.loader)
import lightning
lightning.Trainer(strategy=other, callbacks=DLRoverCallback(), accelerator="cpu", devices=1, logger=False)
print(*(cls.__module__ for cls in type(other).__mro__ if cls.__name__ == "DDPStrategy"))
"""
    assert run(code) == "lightning.pytorch.strategies.ddp"


def test_action_for_one_module_runs_once_whenever_that_is_imported() -> None:
    code = """
        import sys
        from lightning_dlrover.lightning_compat import when_imported
        seen = []
        when_imported("json.tool", lambda module: seen.append((module, module.main)))
        assert "json.tool" not in sys.modules
        import json.tool, importlib
        importlib.reload(json.tool)
        assert seen == [(json.tool, seen[0][1])], seen
        when_imported("json.tool", lambda module: seen.append(module))
        print(len(seen), json.tool.__spec__.loader is json.tool.__loader__)
    """
    assert run(textwrap.dedent(code)) == "2 True"
