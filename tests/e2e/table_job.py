"""Scripts of jobs with sharded tables. The process that forks workers imports this module, like `toy_job`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, Sampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live import checkpoints, handover
from lightning_dlrover.live.order import epoch_order
from lightning_dlrover.rdzv.job.folders import ROOT
from lightning_dlrover.tables import elastic, snapshot_store, snapshots
from lightning_dlrover.tables.growing import GrowingEmbeddingBagCollection
from lightning_dlrover.tables.growing_optimizers import Adagrad
from lightning_dlrover.tables.growing_rows import SECTIONS, Growth, ids_of
from lightning_dlrover.tables.snapshots import SnapshotConfig
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, fingerprint, make_trainer

KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel")
NUM_ROWS = (41, 30, 7, 19)
DIM = 8


@dataclass(frozen=True)
class TableSettings:
    """A training run of a model with one table of each kind."""

    num_rows: int = 240
    batch_size: int = 8
    max_epochs: int = 2
    step_s: float = 0.02
    slow: str = ""  # name of a worker that needs three times as long per sample, until the test lets the job hurry
    snapshot_s: float = 0.2
    replicas: int = 1
    max_bytes: int | None = None
    kinds: tuple[str, ...] = KINDS
    is_bag: bool = True  # EmbeddingBagCollection if true, else EmbeddingCollection
    manual: bool = False
    users_optimizer: bool = False  # the tables are only in the optimizer of `configure_optimizers`, which has a schedule
    num_val_rows: int = 0
    val_every: int | None = None  # batches between validations; None: once per epoch
    save_at: int | None = None  # step after which the script saves `checkpoint` in the job's folder
    ckpt_path: str | None = None
    stale_s: float = 300.0  # age of snapshots from which a newer checkpoint is preferred
    on_disk: bool = False  # copy snapshots to `disk` in the job's folder
    saves_together: bool = False  # a collective in `on_save_checkpoint`
    apart: bool = True  # each worker has its own memory, as on separate hosts; else all share this host's

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    @property
    def num_steps(self) -> int:
        return self.max_epochs * self.batches_per_epoch


class TableModel(ToyModel):
    """The toy model on embeddings of the rows' indices."""

    def __init__(self, recorder: Recorder, settings: TableSettings) -> None:
        super().__init__(recorder, settings.step_s)
        self.automatic_optimization = not settings.manual
        self.settings = settings
        self.kinds = settings.kinds
        make, config = (
            (EmbeddingBagCollection, EmbeddingBagConfig) if settings.is_bag else (EmbeddingCollection, EmbeddingConfig)
        )
        configs = {
            i: config(name=f"t{i}", embedding_dim=DIM, num_embeddings=NUM_ROWS[i], feature_names=[f"f{i}"])
            for i in range(len(settings.kinds))
        }
        growing = [c for i, c in configs.items() if settings.kinds[i] == "growing"]
        fixed = [c for i, c in configs.items() if settings.kinds[i] != "growing"]
        if fixed:
            self.tables = make(device=torch.device("meta"), tables=fixed)
        if growing:
            growth = {growing[0].name: Growth(), **{c.name: Growth(min_count=2) for c in growing[1:]}}
            self.grown = GrowingEmbeddingBagCollection(growing, Adagrad(0.05), growth)
        if not fixed:
            self.net = nn.Sequential(nn.Linear(DIM * len(settings.kinds), 16), nn.ReLU(), nn.Linear(16, 1))
            return
        fused = [p for name, p in self.tables.named_parameters() if self.kinds[int(name.split(".t")[1][0])] != "data_parallel"]
        if not settings.users_optimizer:
            _apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.05})
        self.net = nn.Sequential(nn.Linear(DIM * len(settings.kinds), 16), nn.ReLU(), nn.Linear(16, 1))

    def logits(self, batch: Any) -> Tensor:
        ids = batch[2]
        values = torch.cat([(ids * (2 * i + 1)) % NUM_ROWS[i] for i in range(len(self.kinds))])
        keys = [f"f{i}" for i in range(len(self.kinds))]
        lengths = torch.ones(len(values), dtype=torch.int64)
        if "growing" in self.kinds:
            out: Tensor = self.net(self._with_growing(keys, values, lengths))
            return out
        found = self.tables(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
        # By name: torchrec concatenates in an order that depends on the placement of the tables.
        embedded = torch.cat([found[key] if self.settings.is_bag else found[key].values() for key in keys], 1)
        out = self.net(embedded)
        return out

    def _with_growing(self, keys: list[str], values: Tensor, lengths: Tensor) -> Tensor:
        """Look up fixed tables, and growing ones with ids of 64 bits."""
        wide = self.grown(KeyedJaggedTensor(keys=keys, values=values * 0x123456789ABCD - 2**62, lengths=lengths))
        found = {key: wide[key] for key in wide.keys()}  # noqa: SIM118  # a KeyedTensor
        if hasattr(self, "tables"):
            fixed = self.tables(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
            found |= {key: fixed[key] for key in fixed.keys()}  # noqa: SIM118
        return torch.cat([found[key] for key in keys], 1)

    def on_train_start(self) -> None:
        if self.settings.ckpt_path is not None:
            self.record_tables("loaded")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record_share(batch, batch_idx)
        self.recorder.moment("forward")
        self.recorder.pace(self.step_s * self.relative_time(len(batch[2])))
        loss = nn.functional.mse_loss(self.logits(batch), batch[1])
        self._loss, self._weight = float(loss.detach()), len(batch[2])
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.recorder.moment("backward")
            self.manual_backward(loss)
            self.recorder.moment("reduced")
            optimizer.step()
            self.recorder.moment("zero_grad")
        return loss

    def relative_time(self, num_samples: int) -> float:
        """Return the time of a step, relative to that of a worker that is not slow and has an equal share."""
        if not self.settings.slow:
            return 1.0
        slowness = 3.0 if self.recorder.place.agent_id == self.settings.slow else 1.0
        return slowness * num_samples * self.trainer.world_size / self.settings.batch_size

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step == self.settings.save_at:
            self.record_tables("saved")
            self.trainer.save_checkpoint(f"{self.recorder.place.folder}/checkpoint")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.settings.saves_together:
            checkpoint["num_workers"] = len(self.all_gather(torch.ones(1)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.recorder.write("val", **self.where(), step=self.trainer.global_step, ids=batch[2].tolist())
        self.recorder.moment("validation")
        self.log("val", nn.functional.mse_loss(self.logits(batch), batch[1]), sync_dist=True, batch_size=len(batch[2]))

    def on_validation_end(self) -> None:
        metric = float(self.trainer.callback_metrics["val"])
        self.recorder.write("val_done", **self.where(), step=self.trainer.global_step, metric=metric)

    def record_done(self) -> None:
        self.recorder.write(
            "done",
            **self._share,
            step=self.trainer.global_step,
            loss=self._loss,
            weight=self._weight,
            parameters=fingerprint(list(self.net.parameters())),
        )

    def record_tables(self, when: str) -> None:
        """Record this worker's parts of the tables."""
        assert isinstance(self.trainer.strategy, DLRoverStrategy)
        assert self.trainer.strategy.tables is not None
        tables = self.trainer.strategy.tables.sharded
        blocks = [
            {"name": f"{b.table}.{b.what}", "region": list(vars(b.region).values()), "values": b.values.tolist()}
            for b in tables.blocks()
            if b.values.numel()
        ]
        grown = {
            name: {
                str(int(id_)): torch.cat([rows.columns[c][slot] for c in ("weight", "state0")]).tolist()
                for slot, id_ in enumerate(ids_of(rows.columns["key"][SECTIONS : rows.num_slots]), SECTIONS)
            }
            for name, rows in tables.growing.rows.items()
        }
        counters = {name: number for name, number in tables.counters().items() if "/" not in name}
        kept = {"blocks": blocks, "grown": grown, "counters": counters}
        self.recorder.write("tables", **self.where(), when=when, step=self.trainer.global_step, **kept)

    def on_train_epoch_end(self) -> None:
        mean = float(self.trainer.callback_metrics["mean_loss"])
        self.recorder.write("epoch_done", **self.where(), epoch=self.trainer.current_epoch, mean_loss=mean)

    def on_train_end(self) -> None:
        self.recorder.moment("train_end")
        self.record_tables("end")

    def configure_optimizers(self) -> Any:
        if not self.settings.users_optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)
        optimizer = torch.optim.Adagrad(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def table_trainer(recorder: Recorder, settings: TableSettings) -> L.Trainer:
    memory = Path(recorder.place.folder) / "memory" / str(os.getpid()) if settings.apart else ROOT
    memory.mkdir(parents=True, exist_ok=True)
    return make_trainer(  # type: ignore[no-any-return]
        recorder.place.folder,
        strategy=DLRoverStrategy(
            global_batch_size=settings.batch_size,
            check_interval_s=0.03,
            sharding_constraints={
                f"t{i}": ParameterConstraints(sharding_types=[kind], min_partition=4)
                for i, kind in enumerate(settings.kinds)
                if kind != "growing"
            },
            snapshots=SnapshotConfig(
                settings.snapshot_s,
                settings.replicas,
                settings.max_bytes,
                memory,
                disk=Path(recorder.place.folder) / "disk" if settings.on_disk else None,
                disk_interval_s=0.1,
            ),
        ),
        max_epochs=settings.max_epochs,
        val_check_interval=settings.val_every,
        limit_val_batches=None if settings.num_val_rows else 0,
    )


def train_tables(recorder: Recorder, settings: TableSettings) -> TableModel:
    """Train a model with sharded tables."""
    add_moments(recorder)
    handover.STALE_S = settings.stale_s
    L.seed_everything(SEED, verbose=False)
    trainer, model = table_trainer(recorder, settings), TableModel(recorder, settings)
    loader = DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True)
    val_loader = DataLoader(Rows(settings.num_val_rows), settings.batch_size) if settings.num_val_rows else None
    trainer.fit(model, loader, val_loader, ckpt_path=settings.ckpt_path)
    recorder.write("after_fit", step=trainer.global_step)
    return model


def train_tables_twice(recorder: Recorder, settings: TableSettings) -> None:
    model = train_tables(recorder, settings)
    trainer = table_trainer(recorder, settings)
    trainer.fit(model, DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True))
    recorder.write("after_second_fit", step=trainer.global_step)


def train_tables_then_another_model(recorder: Recorder, settings: TableSettings) -> None:
    train_tables(recorder, settings)
    trainer = make_trainer(recorder.place.folder, max_epochs=1, limit_val_batches=0)
    trainer.fit(ToyModel(recorder, 0.0), DataLoader(Rows(40), 8))
    recorder.write("after_second_fit", step=trainer.global_step)


class StockTableModel(TableModel):
    """The same model without sharding."""

    def __init__(self, recorder: Recorder, settings: TableSettings) -> None:
        super().__init__(recorder, settings)
        self.tables.to_empty(device="cpu")
        for parameter in self.tables.parameters():
            nn.init.uniform_(parameter, -0.2, 0.2)

    @property
    def live(self) -> None:
        return None

    def record_tables(self, when: str) -> None:
        torch.save(self.state_dict(), f"{self.recorder.place.folder}/{when}.pt")


class JobsOrder(Sampler[int]):
    """The order of samples in an elastic job."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(self._num_rows, True, SEED, self._epoch).tolist())

    def __len__(self) -> int:
        return self._num_rows


def train_stock(recorder: Recorder, settings: TableSettings) -> None:
    """Train with stock Lightning. Saves `stock.ckpt` after an epoch, and the state dict `end.pt` after the last one."""
    for last, ckpt_path in ((1, None), (settings.max_epochs, f"{recorder.place.folder}/stock.ckpt")):
        L.seed_everything(SEED, verbose=False)
        trainer = make_trainer(recorder.place.folder, strategy="auto", devices=1, max_epochs=last, limit_val_batches=0)
        loader = DataLoader(Rows(settings.num_rows), settings.batch_size, sampler=JobsOrder(settings.num_rows))
        trainer.fit(StockTableModel(recorder, settings), loader, ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(f"{recorder.place.folder}/stock.ckpt")


# --- moments inside the product, to be killed at -----------------------------------------------------------------------------


def add_moments(recorder: Recorder) -> None:
    """Make a moment of every place at which a worker's death hurts most. This process runs one script only."""
    around(recorder, elastic.ElasticTables, "reshard")
    around(recorder, elastic.ElasticTables, "hand_over")
    around(recorder, elastic.ElasticTables, "roll_back")
    around(recorder, snapshots.Snapshots, "enter")
    around(recorder, snapshots.Snapshots, "_take")
    around(recorder, snapshots.Neighbours, "replicate")
    snapshots.MAX_STALL = 1e6  # take every snapshot at its interval, however busy the machine is
    voted = snapshots.Snapshots.voted
    exchange, commit = elastic.exchange, snapshot_store.PartWriter.commit  # type: ignore[attr-defined]
    put_block = snapshot_store.PartWriter.put_block
    swap, replicate = snapshots.swap, snapshots.Neighbours.replicate  # type: ignore[attr-defined]
    swaps = itertools.count()

    def watched_exchange(group: Any, *args: Any, **kwargs: Any) -> Any:
        return exchange(group and WatchedGroup(group, recorder), *args, **kwargs)  # type: ignore[arg-type]

    def watched_put_block(self: Any, block: Any, *args: Any) -> None:
        put_block(self, block, *args)
        if args:  # one of several that a thread copies while the steps go on
            recorder.moment("copying")

    def watched_commit(self: Any) -> Any:
        recorder.moment("commit" if self.header.owner == self._holder else "commit_copy")
        return commit(self)

    def watched_replicate(self: Any, *args: Any) -> None:
        nonlocal swaps
        swaps = itertools.count()
        replicate(self, *args)

    def watched_swap(*args: Any) -> None:
        recorder.moment(f"swap{next(swaps)}")  # exchanges of lengths, headers, answers and values
        swap(*args)

    def watched_voted(self: Any, *args: Any) -> bool:
        former = self._counted
        result = voted(self, *args)
        if self._counted > former:
            recorder.write("counted", round=self._keep[0], batch=self._keep[1])
        return result

    save_tables = checkpoints.save_tables  # type: ignore[attr-defined]

    def watched_save(*args: Any) -> None:
        recorder.moment("save")
        save_tables(*args)
        recorder.moment("save_done")

    checkpoints.save_tables = watched_save  # type: ignore[assignment, attr-defined]
    snapshots.Snapshots.voted = watched_voted  # type: ignore[assignment, method-assign]
    elastic.exchange = watched_exchange  # type: ignore[attr-defined]
    snapshots.swap = watched_swap  # type: ignore[assignment, attr-defined]
    snapshots.Neighbours.replicate = watched_replicate  # type: ignore[assignment, method-assign]
    snapshot_store.PartWriter.put_block = watched_put_block  # type: ignore[assignment, method-assign]
    snapshot_store.PartWriter.commit = watched_commit  # type: ignore[method-assign]


def around(recorder: Recorder, owner: type, name: str) -> None:
    """Make moments before and after a method: its name, and `{name}_done`."""
    run: Callable[..., Any] = getattr(owner, name)
    moment = name.lstrip("_")

    def watched(*args: Any, **kwargs: Any) -> Any:
        recorder.moment(moment)
        result = run(*args, **kwargs)
        recorder.moment(f"{moment}_done")
        return result

    setattr(owner, name, watched)


class WatchedGroup:
    """A process group that makes a moment of an exchange's second message."""

    def __init__(self, group: Any, recorder: Recorder) -> None:
        self._group = group
        self._recorder = recorder
        self._messages = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *args: Any) -> Any:
        return self._counted(self._group.send(*args))

    def recv(self, *args: Any) -> Any:
        return self._counted(self._group.recv(*args))

    def _counted(self, work: Any) -> Any:
        if next(self._messages) == 2:
            self._recorder.moment("exchange")
        return work
