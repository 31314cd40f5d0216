"""The tables of one module in the hands of several Trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_dlrover.live.checkpoints import TablesOfTrainer, TablesSettings
from lightning_dlrover.tables.elastic import ElasticTables
from lightning_dlrover.tables.snapshots import SnapshotConfig


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
