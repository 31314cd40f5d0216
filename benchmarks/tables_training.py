"""Training script of the benchmarks with sharded embedding tables, started by torchrun. Its workers record their work.

The same model and data in two ways. `--strategy=dlrover`: a LightningModule under our strategy. `--strategy=stock`: a plain
loop around torchrec's `DistributedModelParallel`, which reads and writes its checkpoints with `torch.distributed.checkpoint`.

A worker writes a line for each step, for each round (its shards, and the traffic of the exchange before it) and for each
snapshot in which it takes part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from jobs import Step
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.layout import plan_to_dict
from lightning_dlrover.tables.snapshots import SnapshotConfig

MEMORY = SnapshotConfig().memory
DIM = 64
NUM_SAMPLES = 10_000_000
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad}


@dataclass(frozen=True)
class Tables:
    """Shape of the tables. Their memory, including their optimizers', is `mib`."""

    mib: int
    num_tables: int
    kind: str
    optimizer: str

    @property
    def state_bytes_per_row(self) -> int:
        return 4 if self.optimizer == "rowwise_adagrad" else 4 * DIM

    @property
    def num_rows(self) -> list[int]:
        """Rows of each table: the second is twice as large as the first, the third three times, and so on."""
        rows = (self.mib << 20) / (4 * DIM + self.state_bytes_per_row)
        unit = rows / (self.num_tables * (self.num_tables + 1) / 2)
        return [int(unit * (i + 1)) for i in range(self.num_tables)]

    @property
    def arguments(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in asdict(self).items()]


@dataclass(frozen=True)
class RoundLine:
    """Record of one worker after its first step in a round."""

    pid: int
    worker: str
    round_number: int
    members: list[str]
    plan: dict[str, Any]  # plan of all tables, see `placement.plan_from_dict`
    shard_bytes: int  # bytes of this worker's shards
    received_bytes: int  # bytes received in the exchange before this round
    began_s: float  # start of that exchange; monotonic clock
    exchange_s: float


@dataclass(frozen=True)
class SnapshotLine:
    """One snapshot, as the training thread of one worker saw it."""

    pid: int
    round_number: int
    began_s: float  # monotonic clock
    stall_s: float


@dataclass(frozen=True)
class SaveLine:
    """One way of saving the state, all workers together."""

    pid: int
    way: str
    num_bytes: int  # bytes that this worker has written
    seconds: float


Line = RoundLine | SnapshotLine | SaveLine
SUFFIXES: dict[type[Line], str] = {RoundLine: "rounds", SnapshotLine: "snapshots", SaveLine: "saves"}


def lines_in(folder: Path, kind: type[Any]) -> Iterator[Any]:
    """All lines of this kind in the workers' records; those of one worker in order."""
    for file in sorted(folder.glob(f"*.{SUFFIXES[kind]}")):
        for line in file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # the writer may be killed, or interrupted, in mid-line
                yield kind(**json.loads(line))


@contextlib.contextmanager
def snapshot_memory() -> Iterator[Path]:
    """Folder for the snapshots of the jobs of one benchmark. Otherwise those of killed workers would stay in memory."""
    folder = Path(tempfile.mkdtemp(prefix="dlrover-benchmark-", dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_line(folder: Path, line: Line) -> None:
    with (folder / f"{os.getpid()}.{SUFFIXES[type(line)]}").open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


# --- model and data -----------------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Samples that are their own numbers. The lookups are computed for the whole batch."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class ClickNet(nn.Module):
    """Embedding tables of one lookup per sample each, and a small network on top."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.num_rows = tables.num_rows
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{i}"])
                for i, rows in enumerate(self.num_rows)
            ],
        )
        _apply_optimizer_in_backward(OPTIMIZERS[tables.optimizer], self.tables.parameters(), {"lr": 0.01})
        self.over = nn.Sequential(nn.Linear(DIM * len(self.num_rows), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor) -> Tensor:
        keys = [f"f{i}" for i in range(len(self.num_rows))]
        values = torch.cat([(numbers * (2654435761 + 2 * i)) % rows for i, rows in enumerate(self.num_rows)])
        pooled = self.tables(KeyedJaggedTensor(keys=keys, values=values, lengths=torch.ones(len(values), dtype=torch.int64)))
        logits: Tensor = self.over(pooled.values())
        return logits


def loss_of(net: nn.Module, numbers: Tensor) -> Tensor:
    clicked = (numbers % 3 == 0).float()[:, None]
    return nn.functional.binary_cross_entropy_with_logits(net(numbers), clicked)


def constraints(tables: Tables) -> dict[str, ParameterConstraints]:
    return {f"t{i}": ParameterConstraints(sharding_types=[tables.kind]) for i in range(tables.num_tables)}


# --- our way ------------------------------------------------------------------------------------------------------------------


class ElasticClicks(L.LightningModule):
    def __init__(self, tables: Tables, step_floor_s: float) -> None:
        super().__init__()
        self.net = ClickNet(tables)
        self._step_floor_s = step_floor_s

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step_floor_s)
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Recorder(L.Callback):
    """Writes through at once: the next line may never come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._round_number = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, DLRoverStrategy)
        tables = trainer.strategy.elastic_tables
        assert tables is not None
        tables.voted = self._timed(tables.voted, trainer.strategy)  # type: ignore[method-assign]

    def _timed(self, voted: Callable[..., bool], strategy: DLRoverStrategy) -> Callable[..., bool]:
        def voted_timed(*args: Any) -> bool:
            began_s = time.monotonic()
            taken = voted(*args)
            stall_s = time.monotonic() - began_s
            if taken:
                assert strategy.live is not None
                assert strategy.live.formation is not None
                line = SnapshotLine(os.getpid(), strategy.live.formation.round.number, began_s, stall_s)
                write_line(self._folder, line)
            return taken

        return voted_timed

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        ended_s = time.monotonic()
        strategy = trainer.strategy
        assert isinstance(strategy, DLRoverStrategy)
        assert strategy.live is not None
        assert strategy.live.formation is not None
        number = strategy.live.formation.round.number
        step = Step(
            os.getpid(), ended_s, trainer.global_step, trainer.current_epoch, trainer.global_rank, trainer.world_size, number
        )
        self._steps.write(step.encode())
        if number != self._round_number:
            self._round_number = number
            self._write_round(strategy)

    def _write_round(self, strategy: DLRoverStrategy) -> None:
        assert strategy.live is not None
        assert strategy.live.formation is not None
        tables = strategy.elastic_tables
        assert tables is not None
        assert tables.tables.plan is not None
        stats = tables.last_exchange
        line = RoundLine(
            pid=os.getpid(),
            worker=strategy.live.world.worker_id,
            round_number=self._round_number,
            members=list(strategy.live.formation.round.members),
            plan=plan_to_dict(tables.tables.plan),
            shard_bytes=_num_bytes(tables.tables.blocks()),
            received_bytes=stats.received_bytes,
            began_s=stats.began_s,
            exchange_s=stats.seconds,
        )
        write_line(self._folder, line)


def _num_bytes(blocks: list[Block]) -> int:
    return sum(block.values.nbytes for block in blocks)


def train_elastic(options: argparse.Namespace, tables: Tables) -> None:
    L.seed_everything(7, verbose=False)
    snapshots = SnapshotConfig(interval_s=options.snapshot_s, memory=options.memory)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DLRoverStrategy(
            global_batch_size=options.batch_size, sharding_constraints=constraints(tables), snapshots=snapshots
        ),
        callbacks=[Recorder(options.records)],
        max_steps=options.max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(ElasticClicks(tables, options.step_floor_s), DataLoader(Numbers(), options.batch_size, collate_fn=torch.tensor))


# --- the stock way ------------------------------------------------------------------------------------------------------------


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """torchrec offers blocks of rows on GPUs only, although gloo supports all their operations."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), "row_wise"]))


class StockTraining:
    """The model and its optimizers, sharded for the world that torchrun has started."""

    def __init__(self, tables: Tables) -> None:
        torch.manual_seed(7)
        dist.init_process_group("gloo")
        net, sharders, device = ClickNet(tables), [BagSharder()], torch.device("cpu")
        planner = EmbeddingShardingPlanner(
            topology=Topology(dist.get_world_size(), "cpu", local_world_size=dist.get_world_size()),
            constraints=constraints(tables),
        )
        plan = planner.collective_plan(net, sharders, dist.group.WORLD)
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.net = DistributedModelParallel(net, env, device, plan, sharders)
        dense = dict(in_backward_optimizer_filter(self.net.named_parameters()))
        self.optimizer = CombinedOptimizer(
            [self.net.fused_optimizer, KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))]
        )
        self.num_made = 0

    def make_step(self, batch_size: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        numbers = torch.arange(rank, batch_size, world_size) + self.num_made * batch_size
        self.optimizer.zero_grad()
        loss_of(self.net, numbers).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.num_made += 1

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "num_made": self.num_made}

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        self.optimizer.init_state({})
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_made = state["num_made"]


def train_stock(options: argparse.Namespace, tables: Tables) -> None:
    training = StockTraining(tables)
    if options.checkpoint is not None and options.checkpoint.exists():
        training.load(options.checkpoint)
    with (options.records / f"{os.getpid()}.jsonl").open("a", buffering=1) as steps:
        while training.num_made < options.max_steps:
            training.make_step(options.batch_size)
            made = Step(os.getpid(), time.monotonic(), training.num_made, 0, dist.get_rank(), dist.get_world_size(), 0)
            steps.write(made.encode())
    if options.checkpoint is not None:
        training.save(options.checkpoint)
    for number in range(options.saves):
        save_both_ways(training, options.records, options.save_folder, number)
    dist.destroy_process_group()
    # A gloo thread that still runs at the interpreter's exit sometimes aborts it, with all work done.
    sys.stdout.flush()
    os._exit(0)


def save_both_ways(training: StockTraining, records: Path, folder: Path, number: int) -> None:
    """Write each worker's part of the state with `torch.save`, and the whole with `torch.distributed.checkpoint`."""
    state = training.state()
    local: dict[str, Tensor] = {}
    for key, value in [*state["net"].items(), *_flat(state["optimizer"]["state"])]:
        if hasattr(value, "local_shards"):
            local |= {f"{key}/{i}": shard.tensor for i, shard in enumerate(value.local_shards())}
        elif isinstance(value, Tensor):
            local[key] = value
    num_bytes = sum(value.nbytes for value in local.values())
    rank = dist.get_rank()

    def timed(way: str, save: Callable[[], object]) -> None:
        dist.barrier()
        began_s = time.monotonic()
        save()
        write_line(records, SaveLine(os.getpid(), way, num_bytes, time.monotonic() - began_s))
        dist.barrier()

    file = folder / f"torch-save-{number}-{rank}.pt"
    timed("torch.save", lambda: torch.save(local, file))
    file.unlink()
    timed("dcp.save", lambda: dcp.save(state, checkpoint_id=folder / f"dcp-save-{number}"))


def _flat(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, of_parameter in state.items():
        for key, value in of_parameter.items():
            yield f"{name}/{key}", value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("dlrover", "stock"), required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--num-tables", type=int, default=8)
    parser.add_argument("--kind", default="row_wise")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--batch-size", type=int, default=512, help="samples per step, all workers together")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--step-floor-s", type=float, default=0.0, help="a step of ours takes at least so long")
    parser.add_argument("--snapshot-s", type=float, default=0.0, help="seconds between two; 0: none")
    parser.add_argument("--memory", type=Path, default=MEMORY, help="folder of the snapshots")
    parser.add_argument("--checkpoint", type=Path, help="stock: written at the end, resumed from where it exists")
    parser.add_argument("--saves", type=int, default=0, help="stock: how often the state is saved, both ways, at the end")
    parser.add_argument("--save-folder", type=Path)
    options = parser.parse_args()
    tables = Tables(options.mib, options.num_tables, options.kind, options.optimizer)
    {"dlrover": train_elastic, "stock": train_stock}[options.strategy](options, tables)


if __name__ == "__main__":
    main()
