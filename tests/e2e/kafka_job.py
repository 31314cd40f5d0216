"""A job on a Kafka topic: its script, and what has to be true of its records."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.data import kafka, stream
from lightning_dlrover.data.kafka_source import Kafka
from lightning_dlrover.data.lane_plan import share
from tests.e2e.harness import Job, Record
from tests.e2e.toy_job import SEED, L, Recorder, Rows, ToyModel, make_trainer
from tests.support.kafka_brokers import NUM_PARTITIONS, Broker

MAX_ROWS = 2000
ENDS_AFTER_S = 0.5


@dataclass(frozen=True)
class KafkaSettings:
    """A training run on a topic."""

    servers: str
    topic: str = "rows"
    batch_size: int = 8
    window_rows: int | None = 40  # None: the topic's rows at the start, in each epoch
    dry_s: float = 1.0
    max_epochs: int = -1
    max_steps: int = -1
    shuffle_rows: int = 0
    loader_workers: int = 0
    step_s: float = 0.3  # until the test lets the job hurry
    checkpoint_every: int = 0  # steps
    ckpt_path: str | None = None
    num_fits: int = 1


class KafkaModel(ToyModel):
    """Records each window, too, and can die at its end or beginning."""

    def record_share(self, batch: Any, batch_idx: int) -> None:
        self._share = {**self.where(), "epoch": self.trainer.current_epoch, "batch": batch_idx, "rows": self._num_rows}
        self.recorder.write("share", **self._share, ids=batch[2].tolist())

    @property
    def _num_rows(self) -> int:
        return len(self.trainer.train_dataloader.dataset)  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        found = {"rows": self._num_rows, "batches": int(self.trainer.num_training_batches)}
        self.recorder.write("window", **self.where(), epoch=self.trainer.current_epoch, **found)
        self.recorder.moment("window_start")

    def on_train_epoch_end(self) -> None:
        self.recorder.moment("window_end")


class Awaited(Kafka):
    """Ends soon after its last message once the test has no more of them to send."""

    folder: Path

    @property
    def dry_s(self) -> float:
        return ENDS_AFTER_S if all_sent(self.folder).exists() else self.__dict__["dry_s"]

    @dry_s.setter
    def dry_s(self, dry_s: float) -> None:
        self.__dict__["dry_s"] = dry_s


def all_sent(folder: Path) -> Path:
    """File in a job's folder that exists once the test has produced all messages."""
    return folder / "all_sent"


def train_kafka(recorder: Recorder, settings: KafkaSettings) -> None:
    L.seed_everything(SEED, verbose=False)
    callbacks = []
    if settings.checkpoint_every:
        saving = L.pytorch.callbacks.ModelCheckpoint(
            recorder.place.folder, filename="{step}", every_n_train_steps=settings.checkpoint_every, save_top_k=-1
        )
        callbacks.append(saving)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03),
        max_epochs=settings.max_epochs,
        max_steps=settings.max_steps,
        limit_val_batches=0,
        callbacks=callbacks,
        enable_checkpointing=bool(settings.checkpoint_every),
    )
    window = {"stop": "latest"} if settings.window_rows is None else {"stop": None, "window_rows": settings.window_rows}
    source: Any = kafka(settings.topic, settings.servers, value=json.loads, dry_s=settings.dry_s, **window)
    source.__class__, source.folder = Awaited, Path(recorder.place.folder)
    rows = stream(source, transform=_as_sample, shuffle_rows=settings.shuffle_rows, seed=SEED)
    recorder.write("looked", rows=len(rows))  # a worker that looks later finds more, and must train the others' rows
    loader = DataLoader(rows, settings.batch_size, num_workers=settings.loader_workers)
    model = KafkaModel(recorder, settings.step_s)
    for _ in range(settings.num_fits):
        trainer.fit(model, loader, ckpt_path=settings.ckpt_path)
        recorder.write("fitted")
    if settings.checkpoint_every:
        trainer.save_checkpoint(f"{recorder.place.folder}/end.ckpt")
    recorder.write("after_fit", step=trainer.global_step, weights=_sums(model.net), epochs=trainer.current_epoch)


def _as_sample(row: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    return torch.tensor(row["x"]), torch.tensor(row["y"]), row["id"]


def _sums(net: nn.Module) -> list[float]:
    return [float(parameter.detach().double().abs().sum()) for parameter in net.parameters()]


def produce(broker: Broker, stop: int, start: int = 0, topic: str = "rows") -> None:
    """Append the rows of the toy problem, unevenly over the partitions."""
    rows = Rows(MAX_ROWS)
    values = [json.dumps({"x": rows.x[n].tolist(), "y": rows.y[n].tolist(), "id": n}).encode() for n in range(start, stop)]
    broker.produce(topic, zip(map(_partition, range(start, stop)), values, strict=True))


def _partition(number: int) -> int:
    return number * number % 7 % (NUM_PARTITIONS - 1)


def places(stop: int, topic: str = "rows") -> list[tuple[str, int]]:
    """Return the partition and the offset of each row, if they were produced in their order."""
    partitions = [_partition(number) for number in range(stop)]
    return [(f"{topic}/{partition}", partitions[:number].count(partition)) for number, partition in enumerate(partitions)]


# --- what has to be true ------------------------------------------------------------------------------------------------------


def batches(job: Job, settings: KafkaSettings) -> dict[tuple[int, int], list[int]]:
    """Return the ids that made each global batch, in the order of ranks, by epoch and batch.

    All shares count that were computed in the round in which a worker completed the batch.
    """
    done: dict[tuple[int, int], Record] = {(r["epoch"], r["batch"]): r for r in job.records("done")}
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    shares = {(r["epoch"], r["batch"], r["round"], r["rank"]): r for r in job.records("share")}
    for (epoch, batch, number, rank), r in sorted(shares.items()):
        if (epoch, batch) in done and done[epoch, batch]["round"] == number:
            length = min(settings.batch_size, r["rows"] - batch * settings.batch_size)
            first, stop = share(length, rank, r["world"])
            found[epoch, batch] += r["ids"][: stop - first]
    return dict(sorted(found.items()))


def violations(job: Job, settings: KafkaSettings, ids: range, epochs: int = 1) -> list[str]:
    """Problems of a finished job. Empty if each id was trained as often as there were epochs, and all workers agreed."""
    trained = batches(job, settings)
    return [
        *_disagreements(job),
        *_bad_windows(job, settings, trained),
        *(f"{number} was trained {times} times" for number, times in _times(trained, ids).items() if times != epochs),
    ]


def _times(trained: dict[tuple[int, int], list[int]], ids: range) -> dict[int, int]:
    times = dict.fromkeys(ids, 0)
    for batch in trained.values():
        for number in batch:
            times[number] = times.get(number, 0) + 1
    return times


def _disagreements(job: Job) -> Iterator[str]:
    done: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for r in job.records("done"):
        done[r["epoch"], r["batch"]].append(r)
    for place, records in done.items():
        for field in ("step", "round", "world", "parameters", "optimizer"):
            if len({str(r[field]) for r in records}) > 1:
                yield f"{place}: {field} differs: {[(r['pid'], r['rank'], r[field]) for r in records]}"
    windows: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for r in job.records("window"):
        windows[r["epoch"]].add((r["rows"], r["batches"]))
    for epoch, found in windows.items():
        if epoch and len(found) > 1:  # before it is admitted, a joiner has the window of epoch 0
            yield f"epoch {epoch}: windows of {found}"
    steps = sorted({records[0]["step"] for records in done.values()})
    if steps and steps != list(range(steps[0], steps[0] + len(steps))):
        yield f"steps {steps}"


def _bad_windows(job: Job, settings: KafkaSettings, trained: dict[tuple[int, int], list[int]]) -> Iterator[str]:
    rows = {r["epoch"]: r["rows"] for r in job.records("share")}
    for (epoch, batch), ids in trained.items():
        length = min(settings.batch_size, rows[epoch] - batch * settings.batch_size)
        if len(ids) != length:
            yield f"epoch {epoch} batch {batch}: {len(ids)} of {length} rows"


def reference(job: Job, settings: KafkaSettings) -> list[float]:
    """Return what the weights of one process are that trains the same batches."""
    rows = Rows(MAX_ROWS)
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for ids in batches(job, settings).values():
        optimizer.zero_grad()
        nn.functional.mse_loss(net(rows.x[ids]), rows.y[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _sums(net)
