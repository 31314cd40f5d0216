"""Checkpoints, and the tables of one module in the hands of several Trainers."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_dlrover.live.checkpoints import TablesOfTrainer, TablesSettings, replace_folder
from lightning_dlrover.tables.elastic import ElasticTables
from lightning_dlrover.tables.snapshots import SnapshotConfig
from tests.support.live_parts import Wrapping, a_trainer


@pytest.mark.parametrize("former", ["folder", "file", "nothing"])
def test_kill_while_the_former_checkpoint_is_removed_leaves_a_complete_one(
    former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    place, new = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.unfinished"
    new.mkdir()
    (new / "trainer.ckpt").write_text("new")
    if former == "folder":
        place.mkdir()
        (place / "trainer.ckpt").write_text("old")
    elif former == "file":
        place.write_text("old")

    def killed(path: Path, **_: object) -> None:
        if path.is_dir():
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        try:
            replace_folder(place, new)
        except KilledError:
            assert former == "folder"
    assert (place / "trainer.ckpt").read_text() == "new"
    again = tmp_path / "again"
    again.mkdir()
    replace_folder(place, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"]


START = {
    "start_workers": 2,
    "lane_workers": 2,
    "streams": [{"stream": "rows", "epoch": 1}],
    "iterables": [{"row": 3}],
    "random": {"seed": "1"},
}


@pytest.mark.parametrize("key", ["iterables", "sequences"])  # the second one is of earlier commits
@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
def test_only_a_fit_goes_back_to_a_checkpoints_rows(fn: TrainerFn, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {name if name != "iterables" else key: value for name, value in START.items()}
    monkeypatch.setattr(Strategy, "load_checkpoint", lambda *args: {"dlrover": saved})
    trainer = a_trainer()
    trainer.state = SimpleNamespace(fn=fn)
    resumed: list[Any] = []
    live: Any = SimpleNamespace(
        windows=SimpleNamespace(resume=resumed.extend),
        loaders=SimpleNamespace(saved={}),
        checkpoints=SimpleNamespace(saved_random=None),
    )
    strategy: Any = Wrapping(trainer.lightning_module)
    strategy._job = SimpleNamespace(live=live, start_workers=1, lane_workers=1)
    strategy.load_checkpoint("best.ckpt")
    is_fit = fn == TrainerFn.FITTING
    assert (resumed, live.loaders.saved) == ((START["streams"], START) if is_fit else ([], {}))
    assert live.checkpoints.saved_random == (START["random"] if is_fit else None)


def test_tables_are_wrapped_as_in_the_world_of_the_trainer_that_has_taken_them_over() -> None:
    module = L.LightningModule()
    elastic = ElasticTables.__new__(ElasticTables)
    sharded: Any = SimpleNamespace(module=module)

    def tables_of(world_size: int) -> TablesOfTrainer:
        def wrap(module: nn.Module, sharded: list[str], init_sync: bool) -> nn.Module:
            return nn.Linear(1, world_size)

        return TablesOfTrainer(module, torch.device("cpu"), TablesSettings(None, None, SnapshotConfig()), wrap)

    first = TablesOfTrainer.__new__(TablesOfTrainer)
    first._module, first.sharded, first.elastic = module, sharded, elastic
    first.model = module
    first.keep_on_module()
    assert tables_of(2).elastic is elastic
    wrapped: Any = elastic._wrap_dense(module, [])
    assert wrapped.out_features == 2
