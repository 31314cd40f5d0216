"""The Lightning script that all benchmarks train, started by torchrun. Its workers record every step.

The same model, data and recording for our strategy and for stock DDP: only `--strategy` differs. With `--parquet` the rows come
from files, as a stream.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from jobs import HURRY, STACKS_SIGNAL, Block, Step, add_device_options, use_backend
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.data import parquet, stream

NUM_FEATURES = 256
SLICE_S = 0.001
"""Seconds per slice of a forward pass that must take long."""

NUM_DISTINCT = 997
"""Number of distinct rows of the data set. It repeats them, so that long epochs cost no memory."""

ROWS_PER_GROUP = 512
SHUFFLE_ROWS = 10_000


@dataclass(frozen=True)
class Options:
    strategy: str
    device: str
    backend: str  # of process groups; empty: the strategy's choice for the device
    profiled: bool  # add DLRoverCallback
    on_drift: str
    shares: str
    plan_every_s: float
    records: Path
    width: int
    num_layers: int
    batch_size: int
    num_samples: int
    loader_workers: int
    max_steps: int
    checkpoint: Path | None  # written at the end, and every `checkpoint_every` steps; resumed from if it exists
    checkpoint_every: int
    digests: bool
    losses: bool
    step_floor_s: float  # minimum duration of a step's forward pass
    sample_s: float  # additional duration of it per sample, in which no core is used
    gate: str  # socket at which `overhead.py` waits
    parquet: Path | None  # folder of rows by `write_rows`, read as a stream

    @staticmethod
    def from_command_line() -> Options:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--strategy", choices=("dlrover", "ddp"), required=True)
        add_device_options(parser)
        parser.add_argument("--profiled", action="store_true")
        parser.add_argument("--on-drift", default="end")
        parser.add_argument("--shares", default="by-speed")
        parser.add_argument("--plan-every-s", type=float, default=10.0)
        parser.add_argument("--records", type=Path, required=True)
        parser.add_argument("--width", type=int, default=64)
        parser.add_argument("--num-layers", type=int, default=1)
        parser.add_argument("--batch-size", type=int, default=32)
        parser.add_argument("--num-samples", type=int, default=100_000)
        parser.add_argument("--loader-workers", type=int, default=0)
        parser.add_argument("--max-steps", type=int, default=-1)
        parser.add_argument("--checkpoint", type=Path)
        parser.add_argument("--checkpoint-every", type=int, default=0)
        parser.add_argument("--digests", action="store_true")
        parser.add_argument("--losses", action="store_true")
        parser.add_argument("--step-floor-s", type=float, default=0.0)
        parser.add_argument("--sample-s", type=float, default=0.0)
        parser.add_argument("--gate", default="")
        parser.add_argument("--parquet", type=Path)
        return Options(**vars(parser.parse_args()))


class RepeatedRows(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A regression problem. Every sample contains its own number."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(NUM_DISTINCT, NUM_FEATURES, generator=generator)
        self._targets = self._inputs[:, :8].sum(1, keepdim=True)

    @property
    def all_distinct(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs, self._targets

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        row = index % NUM_DISTINCT
        return self._inputs[row], self._targets[row], index


def write_rows(folder: Path, num_samples: int, num_files: int = 4) -> None:
    """Write the rows of `RepeatedRows` as Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    data = RepeatedRows(NUM_DISTINCT)
    inputs, targets = data.all_distinct
    for number in range(num_files):
        indices = np.arange(num_samples)[number::num_files]
        rows = indices % NUM_DISTINCT
        flat = pa.array(inputs.numpy()[rows].ravel())
        columns = {
            "inputs": pa.FixedSizeListArray.from_arrays(flat, NUM_FEATURES),
            "target": pa.array(targets.numpy()[rows, 0]),
            "number": pa.array(indices),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=ROWS_PER_GROUP)


def batch_of_rows(rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.tensor("inputs"), rows.tensor("target")[:, None], rows.tensor("number")


def make_loader(options: Options) -> DataLoader[Any]:
    if options.parquet is None:
        data = RepeatedRows(options.num_samples)
        return DataLoader(data, batch_size=options.batch_size, shuffle=True, num_workers=options.loader_workers)
    return DataLoader(
        stream(parquet(str(options.parquet)), shuffle_rows=SHUFFLE_ROWS),
        batch_size=options.batch_size,
        num_workers=options.loader_workers,
        collate_fn=batch_of_rows,
    )


class Perceptron(L.LightningModule):
    def __init__(
        self, width: int, num_layers: int, step_floor_s: float = 0.0, hurry: Path | None = None, sample_s: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = [torch.nn.Linear(NUM_FEATURES, width), torch.nn.ReLU()]
        for _ in range(num_layers):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        self._step_floor_s = step_floor_s
        self._sample_s = sample_s
        self._hurry = hurry  # once this file exists, steps are as fast as they can be
        self.repeats = 1  # computations per step on its rows, as if the batch were that many times larger
        self.samples = torch.empty(0)  # samples of the current step, also when it is repeated

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, numbers = batch
        self.samples = numbers  # left on the device: reading them would wait for the stream
        pause_s = self._step_floor_s + self._sample_s * len(inputs)
        for _ in range(0 if self._hurry and self._hurry.exists() else round(pause_s / SLICE_S)):
            # Slices, like an accelerator's kernels, because a stopped worker must make no progress meanwhile.
            time.sleep(SLICE_S)
        outputs = self.net(inputs.repeat(self.repeats, 1))
        loss: torch.Tensor = (outputs - targets.repeat(self.repeats, 1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Recorder(L.Callback):
    """Writes one line per step and worker, flushed at once: the next line may never come.

    Args:
        waits: wait until a GPU has computed the step, before its end is recorded.
    """

    def __init__(self, folder: Path, with_digests: bool, with_losses: bool, waits: bool) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._with_digests = with_digests
        self._with_losses = with_losses
        self._waits = waits

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if self._waits:
            wait_for_device(pl_module)
        ended_s = time.monotonic()
        assert isinstance(pl_module, Perceptron)
        live = trainer.strategy.live if isinstance(trainer.strategy, DLRoverStrategy) else None
        step = Step(
            pid=os.getpid(),
            ended_s=ended_s,
            number=trainer.global_step,
            epoch=trainer.current_epoch,
            global_rank=trainer.global_rank,
            world_size=trainer.world_size,
            round_number=live.formation.round.number if live is not None and live.formation is not None else 0,
            digest=_digest(pl_module) if self._with_digests else "",
            samples=pl_module.samples.tolist() if self._with_digests else [],
            loss=float(outputs["loss"]) if self._with_losses else None,
        )
        self._file.write(step.encode())


class Gate(L.Callback):
    """Sends the durations of every block of steps to the benchmark and waits for the job's next turn.

    A GPU computes steps later than the host makes them, and waiting for each would hide what our strategy's own wait costs.
    There a block is timed as a whole, and its steps have equal durations.
    """

    def __init__(self, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        self._channel = connection.makefile("rw")
        self._num_steps = 5
        self._durations_s: list[float] = []
        self._ended_s = 0.0
        self._cpu_from_s = 0.0
        self._own_cpu_from_s = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        is_first, is_last = not self._ended_s, len(self._durations_s) + 1 == self._num_steps
        if is_first or is_last:
            wait_for_device(pl_module)
        now = time.perf_counter()
        if self._ended_s:
            self._durations_s.append(now - self._ended_s)
        else:
            self._cpu_from_s, self._own_cpu_from_s = time.process_time(), time.thread_time()
        self._ended_s = now
        if len(self._durations_s) == self._num_steps:
            if pl_module.device.type == "cuda":
                self._durations_s = [sum(self._durations_s) / self._num_steps] * self._num_steps
            cpu_s, own_s = time.process_time() - self._cpu_from_s, time.thread_time() - self._own_cpu_from_s
            block = Block(os.getpid(), trainer.global_rank, self._durations_s, cpu_s, cpu_s - own_s)
            self._channel.write(block.encode())
            self._channel.flush()
            assert isinstance(pl_module, Perceptron)
            self._num_steps, pl_module.repeats = map(int, self._channel.readline().split())
            self._durations_s = []
            self._ended_s = 0.0  # the following step contains the wait


class FinalCheckpoint(L.Callback):
    """Keeps the newest state of the training in one file, and resumes from it at the start."""

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        due = self._every and trainer.global_step % self._every == 0
        if due or trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self._path)


def wait_for_device(module: L.LightningModule) -> None:
    """Wait until a GPU has computed everything so far."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)


def _digest(module: L.LightningModule) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def main() -> None:
    faulthandler.register(STACKS_SIGNAL)
    options = Options.from_command_line()
    use_backend(options.backend)
    is_live = options.strategy == "dlrover"
    L.seed_everything(7, verbose=False)
    callbacks: list[L.Callback] = []
    if options.profiled:
        # Threads and loader workers stay as they are: a plan must not change the measured values.
        callbacks.append(DLRoverCallback(plan_every_s=options.plan_every_s, tune=["num_workers"]))
    callbacks.append(Recorder(options.records, options.digests, options.losses, waits=not options.gate))
    if options.checkpoint is not None:
        callbacks.append(FinalCheckpoint(options.checkpoint, options.checkpoint_every))
    if options.gate:
        callbacks.append(Gate(options.gate))
    backend = options.backend or None
    strategy: DDPStrategy = DDPStrategy(process_group_backend=backend)
    if is_live:
        strategy = DLRoverStrategy(
            process_group_backend=backend,
            on_drift=options.on_drift,  # type: ignore[arg-type]
            shares=options.shares,  # type: ignore[arg-type]
        )
    trainer = L.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1 if is_live else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if is_live else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy,
        callbacks=callbacks,
        max_steps=options.max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    resumed = options.checkpoint if options.checkpoint is not None and options.checkpoint.exists() else None
    loader = make_loader(options)
    model = Perceptron(options.width, options.num_layers, options.step_floor_s, options.records / HURRY, options.sample_s)
    trainer.fit(model, loader, ckpt_path=resumed)


if __name__ == "__main__":
    main()
