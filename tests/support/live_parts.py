"""A worker's `LiveTraining` without processes: its group is never formed, and its Trainer has no loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live.order import Position
from lightning_dlrover.live.replica import Replica
from lightning_dlrover.live.training import LiveTraining
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError
from lightning_dlrover.tuning.health import OwnClock

BETWEEN = Position(updates=5, batch=5, in_step=False, collective=0, validation=0, at_boundary=True)
INSIDE = Position(updates=5, batch=5, in_step=True, collective=0, validation=0, at_boundary=False)
JOINER = b""


def hellos(*said: Position | bytes) -> dict[str, bytes]:
    return {f"w{i}": each if isinstance(each, bytes) else each.encode() for i, each in enumerate(said)}


def a_formation(worker: str, said: dict[str, bytes], number: int = 2) -> Formation:
    """A round, as the worker enters it."""
    return Formation(RoundRecord(number, [*said], "", "grow", planned=True), said, [*said].index(worker))


def a_trainer(**options: float) -> Any:
    """A Trainer with manual optimization. `options` are those of its one parameter group."""
    module: Any = torch.nn.Linear(2, 1)
    module.automatic_optimization = False
    progress = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    epoch_loop = SimpleNamespace(
        manual_optimization=SimpleNamespace(optim_step_progress=progress),
        batch_progress=SimpleNamespace(total=SimpleNamespace(ready=0), current=SimpleNamespace(ready=2)),
        val_loop=SimpleNamespace(_combined_loader=None),
        _results={},
    )
    trainer = SimpleNamespace(
        lightning_module=module,
        optimizers=[torch.optim.SGD([{"params": module.parameters(), **({"lr": 0.1} | options)}])],
        precision_plugin=SimpleNamespace(state_dict=dict),
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop, _combined_loader=SimpleNamespace(flattened=[])),
        training=True,
        should_stop=False,
        global_step=0,
        ckpt_path=None,
        callbacks=[],
        loggers=[],
    )
    module.trainer = trainer
    return trainer


class Wrapping(DLRoverStrategy):
    """Strategy of one of two workers that forms no group."""

    world_size = 2
    elastic_tables = lightning_module = model = None
    root_device = torch.device("cpu")
    tables = None
    has_global_batch_size = False
    max_share = None
    on_drift = "end"
    shares = "equal"

    def __init__(self, lightning_module: Any) -> None:
        self.lightning_module = lightning_module
        unused: Any = SimpleNamespace(agree=lambda found, is_first: None)
        self.replica = Replica(self, unused)
        self.clock = OwnClock()
        self._ddp_kwargs: dict[str, Any] = {}

    def enter_round(self, rank: int, size: int) -> None:
        pass

    def configure_ddp(self) -> None:
        replica: Any = DistributedDataParallel.__new__(DistributedDataParallel)
        torch.nn.Module.__init__(replica)
        replica.require_forward_param_sync = True
        self.model = replica


def a_worker(name: str = "w0", formation: Formation | None = None) -> Any:
    """A worker that has entered the training loop and is in batch 5."""
    trainer = a_trainer()
    world = SimpleNamespace(
        worker_id=name,
        config=SimpleNamespace(max_workers=2, run_id="job"),
        is_failure=lambda error: isinstance(error, RoundEndedError),
        is_recoverable=lambda error, is_in_step: isinstance(error, RoundEndedError),
        formation=None,
        broken=False,
        num_fits=0,
    )
    strategy: Any = Wrapping(trainer.lightning_module)
    live: Any = LiveTraining(strategy, trainer, world, formation, 0.1)  # type: ignore[arg-type]
    live.position.has_entered, live.position.batch = True, 5
    return live
