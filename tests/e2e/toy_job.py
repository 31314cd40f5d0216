"""Scripts of the tests' workers: a small model that records everything that it does, for `harness.py` to check.

The process that forks workers imports this module, so a worker starts in milliseconds instead of seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.data import Stream, parquet, stream
from lightning_dlrover.live.training import LiveTraining
from tests.e2e.iterables import ITERABLES
from tests.support.quiet_trainer import lightning, quiet_trainer

torch.set_num_threads(1)

L: Any = lightning
"""Lightning package that the workers' scripts use."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _MixedIn
else:
    _MixedIn = object

SEED = 1

Script = Callable[["Recorder", Any], None]


@dataclass(frozen=True)
class Place:
    """A worker's identity: the variables that its elastic agent would export, and the files that it writes."""

    endpoint: str
    run_id: str
    agent_id: str
    folder: str
    min_workers: int = 1
    max_workers: int = 4
    lease_ttl_s: int = 5

    @property
    def output(self) -> Path:
        return Path(self.folder) / f"{self.agent_id}.out"

    @property
    def records(self) -> Path:
        return Path(self.folder) / f"{self.agent_id}.jsonl"

    @property
    def armed(self) -> Path:
        """File that exists when the worker must die; it holds the name of the moment."""
        return Path(self.folder) / f"{self.agent_id}.armed"

    @property
    def end(self) -> Path:
        """File that exists when a plain loop must end with its next step."""
        return Path(self.folder) / "end"

    @property
    def dawdle(self) -> Path:
        """A file that exists since a test waits for workers that a busy machine starts slowly."""
        return Path(self.folder) / "dawdle"

    @property
    def hurry(self) -> Path:
        """File that exists while steps take no longer than they need, see `Recorder.pace`."""
        return Path(self.folder) / "hurry"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DLROVER_ENDPOINT": self.endpoint,
            "DLROVER_RUN_ID": self.run_id,
            "DLROVER_AGENT_ID": self.agent_id,
            "DLROVER_MIN_NODES": str(self.min_workers),
            "DLROVER_MAX_NODES": str(self.max_workers),
            "DLROVER_LEASE_TTL_S": str(self.lease_ttl_s),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
        }


PATIENCE_S = 0.3
"""Seconds in which an idle machine makes most changes of a job's workers."""

DAWDLE_S = 0.6
"""Longest time in seconds of a step while a test waits for a change of workers. Some changes take a dozen steps."""

DAWDLE_SHARE = 0.3
"""Share of the time waited so far that such a step takes: an idle machine makes a change within a few quick steps."""


class Recorder:
    """Appends JSON lines that survive a SIGKILL, and lets a test kill its worker at a chosen moment."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._fd = os.open(place.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Looked for several times in each step, and building a path costs more than the look.
        self._armed, self._dawdle, self._hurry = str(place.armed), str(place.dawdle), str(place.hurry)
        self._paced: object = None  # newest optimizer step

    def write(self, kind: str, **values: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "at": time.time(), **values}) + "\n").encode())

    def pace(self, seconds: float, step: object = None) -> None:
        """Make a step slow, so that the test has time for its changes. Steps are fast once the test lets the job hurry.

        Args:
            step: names the optimizer step. Only its first batch, and the first evaluation of that, is slower for a test.
        """
        try:
            waited_s = PATIENCE_S + time.time() - os.stat(self._dawdle).st_mtime
        except FileNotFoundError:
            if seconds and not os.path.exists(self._hurry):
                time.sleep(seconds)
            return
        is_first, self._paced = step is None or step != self._paced, step
        time.sleep(max(seconds, min(DAWDLE_S, DAWDLE_SHARE * waited_s)) if is_first else seconds)

    def moment(self, name: str) -> None:
        """Die here if the test has armed this worker for the moment `name`."""
        if self.is_armed(name):
            self.write("killed", moment=name)
            os.kill(os.getpid(), signal.SIGKILL)

    def is_armed(self, name: str) -> bool:
        """Return whether the test has armed this worker for the moment `name`."""
        try:
            with open(self._armed) as file:
                return file.read() == name
        except FileNotFoundError:
            return False


def run_worker(place: Place, script: Script, settings: Any) -> None:
    """Run one worker, in a freshly forked process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the test
    atexit._clear()
    multiprocessing.set_start_method("fork", force=True)  # loader workers fork, as in a plain script
    output = os.open(place.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(place.environment)
    try:
        script(Recorder(place), settings)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves with os._exit


# --- data and model ---------------------------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Rows of a linear problem, each with its index."""

    def __init__(self, num_rows: int, num_features: int = 8) -> None:
        self.x = torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(0))
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def write_files(folder: Path, num_rows: int) -> None:
    """Write the same rows to Parquet files of uneven lengths, one of them empty, in row groups of a few rows."""
    folder.mkdir(parents=True)
    rows = Rows(num_rows)
    columns = {"x": rows.x.tolist(), "y": rows.y.tolist(), "id": list(range(num_rows))}
    table = pa.table(columns)
    cuts = sorted({0, num_rows // 7, num_rows // 2, num_rows // 2 + num_rows // 5, num_rows})
    for number, (start, stop) in enumerate([*itertools.pairwise(cuts), (num_rows, num_rows)]):
        pq.write_table(table.slice(start, stop - start), folder / f"{number}.parquet", row_group_size=11)


def streamed(folder: Path, shuffle: bool, on_error: str = "raise", row_s: float = 0.0, threads: int = 0) -> Stream:
    """Return the rows of such files, which come in blocks of a few rows if shuffled.

    Args:
        row_s: seconds that each row takes until the test lets the job hurry.
        threads: threads that read blocks ahead.
    """
    transform = partial(_as_sample, row_s=row_s, hurry=folder.parent / "hurry")
    shuffle_rows = 64 if shuffle else 0
    return stream(parquet(str(folder), on_error=on_error), transform, shuffle_rows=shuffle_rows, seed=SEED, threads=threads)


def _as_sample(row: dict[str, Any], row_s: float, hurry: Path) -> tuple[Tensor, Tensor, int]:
    if row_s and not hurry.exists():
        time.sleep(row_s)
    return torch.tensor(row["x"]), torch.tensor(row["y"]), row["id"]


@dataclass(frozen=True)
class ToySettings:
    """A training run that records every sample's index and every parameter's hash."""

    num_rows: int = 203
    batch_size: int = 8
    shuffle: bool = True
    max_epochs: int = 2
    step_s: float = 0.01  # until the test lets the job hurry
    slow: str = ""  # name of a worker that needs three times as long, until the test lets the job hurry
    loader_workers: int = 0
    accumulate: int = 1
    num_val_rows: int = 0
    val_every: int | None = None  # batches between validations; None: once per epoch
    global_batch_size: int | None = None
    slow_start_s: float = 0.0  # seconds before the worker reaches the training loop
    streams: bool = False  # read from Parquet files in the job's folder
    threads: int = 0  # threads that read blocks of the stream ahead
    on_error: str = "raise"  # reason of training rows that cannot be read
    iterable: str = ""  # kind of an `IterableDataset`, see `iterables.py`
    row_s: float = 0.0  # seconds that a row of it, or of a stream, takes
    is_tuned: bool = False  # let the planner choose loader workers
    max_catch_up_s: float = 60.0
    save_every: int = 0  # batches between checkpoints
    saves_epochs: bool = False  # write a checkpoint at each epoch's end
    resumes: str = ""  # checkpoint to resume from
    limits: dict[str, Any] = field(default_factory=dict)  # further arguments of the Trainer
    ddp: dict[str, Any] = field(default_factory=dict)  # further arguments of the strategy

    def write_streams(self, folder: Path) -> None:
        """Write the files that a job in this folder streams."""
        write_files(folder / "train", self.num_rows)
        write_files(folder / "val", self.num_val_rows or 1)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    @property
    def num_steps(self) -> int:
        return self.max_epochs * -(-self.batches_per_epoch // self.accumulate)


class ToySteps(_MixedIn):
    """Records every share, every finished batch and every validation batch."""

    window = 0  # batches of an optimizer step in manual optimization

    def __init__(self, recorder: Recorder, step_s: float = 0.0, slow_start_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("scale", torch.ones(1))  # DDP broadcasts buffers before every forward pass
        self.step_s = step_s
        self.slow_start_s = slow_start_s
        self.recorder = recorder
        self._share: dict[str, Any] = {}

    @property
    def live(self) -> LiveTraining | None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, DLRoverStrategy)
        return strategy.live

    def where(self) -> dict[str, int]:
        formation = self.live.formation if self.live else None
        number = formation.round.number if formation else 0
        return {"round": number, "rank": self.trainer.global_rank, "world": self.trainer.world_size, "pid": os.getpid()}

    def record_share(self, batch: Any, batch_idx: int) -> None:
        speeds = self.live.position.speeds if self.live else ()
        self._share = {**self.where(), "speeds": speeds, "epoch": self.trainer.current_epoch, "batch": batch_idx}
        self.recorder.write("share", **self._share, ids=batch[2].tolist())

    def on_fit_start(self) -> None:
        self.recorder.write("fit_start")
        time.sleep(self.slow_start_s)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.record_share(batch, batch_idx)
        self.recorder.moment("forward")
        equal_share = self.live.loaders.first.global_batch_size / self.trainer.world_size if self.live else len(batch[2])
        self.pace(batch_idx, self.step_s * len(batch[2]) / equal_share)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self._loss = float(loss.detach())
        self._weight = len(batch[2])
        return loss

    def pace(self, batch_idx: int, step_s: float | None = None) -> None:
        step = self.trainer.current_epoch, batch_idx // (self.window or self.trainer.accumulate_grad_batches)
        self.recorder.pace(self.step_s if step_s is None else step_s, step)

    def on_before_backward(self, loss: Tensor) -> None:
        self.recorder.moment("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.recorder.moment("reduced")  # gradients are reduced, weights not updated yet

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.recorder.moment("zero_grad")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.moment("batch_end")
        self.record_done()

    def record_done(self) -> None:
        self.recorder.write(
            "done",
            **self._share,
            step=self.trainer.global_step,
            loss=self._loss,
            weight=self._weight,
            threads=torch.get_num_threads(),
            loader_workers=[loader.num_workers for loader in self.trainer.fit_loop._combined_loader.flattened],  # type: ignore[union-attr]
            lr=[group["lr"] for o in self.trainer.optimizers for group in o.param_groups],
            parameters=fingerprint(list(self.parameters())),
            optimizer=fingerprint(
                [
                    value
                    for o in self.trainer.optimizers
                    for state in o.state.values()
                    for value in state.values()
                    if isinstance(value, Tensor | int | float)
                ]
            ),
        )

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.write("val_start", **self.where(), step=self.trainer.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.write("val", **self.where(), step=self.trainer.global_step, ids=batch[2].tolist())
        self.recorder.moment("validation")
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True, batch_size=len(batch[2]))

    def on_validation_epoch_end(self) -> None:
        self.recorder.moment("validation_end")

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            metric = float(self.trainer.callback_metrics["val"])
            self.recorder.write("val_done", **self.where(), step=self.trainer.global_step, metric=metric)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class ToyModel(ToySteps, L.LightningModule):  # type: ignore[misc]
    """The model of most tests."""


def fingerprint(tensors: list[Any]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def make_trainer(folder: str, **kwargs: Any) -> L.Trainer:
    """Build a Trainer with our strategy and only the features that a test asks for."""
    return quiet_trainer(**{"strategy": DLRoverStrategy(), "default_root_dir": folder, **kwargs})


def train_toy(recorder: Recorder, settings: ToySettings, model: type[ToyModel] = ToyModel) -> None:
    """Train the toy model: the script of most tests."""
    L.seed_everything(SEED, verbose=False)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(
            global_batch_size=settings.global_batch_size or settings.batch_size,
            check_interval_s=0.03,
            max_catch_up_s=settings.max_catch_up_s,
            **settings.ddp,
        ),
        **{"max_epochs": settings.max_epochs, **settings.limits},
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.val_every,
        limit_val_batches=None if settings.num_val_rows else 0,
        **_callbacks(recorder, settings),
    )
    train: Dataset[Any] = Rows(settings.num_rows)
    val: Dataset[Any] = Rows(settings.num_val_rows)
    if settings.streams:
        folder = Path(recorder.place.folder)
        train = streamed(folder / "train", settings.shuffle, settings.on_error, settings.row_s, settings.threads)
        val = streamed(folder / "val", shuffle=False, threads=settings.threads)
    if settings.iterable:
        train = ITERABLES[settings.iterable](train, settings.shuffle, settings.row_s)
        val = ITERABLES[settings.iterable](val, shuffle=False)
    shuffle = settings.shuffle and not settings.streams and not settings.iterable
    loader = DataLoader(train, settings.batch_size, shuffle=shuffle, num_workers=settings.loader_workers)
    val_loader = DataLoader(val, settings.batch_size) if settings.num_val_rows else None
    slowness = 3.0 if recorder.place.agent_id == settings.slow else 1.0
    made = model(recorder, settings.step_s * slowness, settings.slow_start_s)
    trainer.fit(made, loader, val_loader, ckpt_path=settings.resumes or None)
    recorder.write("after_fit", step=trainer.global_step)


def _callbacks(recorder: Recorder, settings: ToySettings) -> dict[str, Any]:
    if settings.is_tuned:
        tuning = DLRoverCallback(window_s=0.3, plan_every_s=0.5, tune=["loader_workers"], history="off")
        return {"callbacks": [tuning]}
    if not settings.save_every and not settings.saves_epochs:
        return {}
    folder = Path(recorder.place.folder) / "checkpoints"
    checkpoints = importlib.import_module(f"{L.__name__}.pytorch.callbacks" if L.__name__ == "lightning" else L.__name__)
    every = {"save_on_train_epoch_end": True} if settings.saves_epochs else {"every_n_train_steps": settings.save_every}
    saves = checkpoints.ModelCheckpoint(folder, "{step}", save_top_k=-1, **every)
    return {"callbacks": [saves], "enable_checkpointing": True}
