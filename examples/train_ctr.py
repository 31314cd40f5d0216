"""Train a wide-and-deep click model: the script to copy. The two lines that make it elastic are marked.

    python examples/train_ctr.py                                      one worker, profiled
    dlrover run --workers 1:2 examples/train_ctr.py                   live elastic on this machine
    torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 --nproc-per-node=1 \\
        examples/train_ctr.py                                         live elastic, run it on every machine
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from ctr_data import DataError, collate, load
from ctr_model import WideAndDeep, measure_auc
from ctr_options import at_least
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class StopOnFile(Callback):
    """End training after the step at which a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if self.file.exists():
            trainer.should_stop = True  # one worker stops all of them


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    L.seed_everything(options.seed, workers=True, verbose=False)
    try:
        data = load(options.data, options.seed, options.rows)
    except DataError as error:
        print(f"train_ctr: {error}", file=sys.stderr)
        return 2

    model = WideAndDeep(data.cardinalities, data.num_numbers, width=options.width, learning_rate=options.lr)
    loader_workers = options.loader_workers
    train_loader = DataLoader(data.train, options.batch_size, shuffle=True, collate_fn=collate, num_workers=loader_workers)
    val_loader = DataLoader(data.val, options.batch_size, collate_fn=collate)

    stop = [StopOnFile(options.until)] if options.until is not None else []
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),  # workers may join and leave while it trains
        callbacks=[DLRoverCallback(), *stop],  # profiles every step and asks for the size that pays
        accelerator=options.accelerator,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    if trainer.is_global_zero:
        print(data.about, flush=True)
    trainer.fit(model, train_loader, val_loader)

    if trainer.is_global_zero:
        write_metrics(measure_auc(model, data.test), data, trainer, options.output)
    return 0


def write_metrics(test_auc: float, data: Any, trainer: L.Trainer, output: Path | None) -> None:
    """Print the metrics as one line of JSON, and write them into a folder if one is given."""
    metrics = {"test_auc": test_auc, "best_auc": data.best_auc, "data": data.name, "rows": len(data.test)}
    text = json.dumps({**metrics, "steps": trainer.global_step})
    print(text, flush=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "metrics.json").write_text(text + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a wide-and-deep click model, elastically.")
    data = "folder with the Adult files, or a Criteo-format TSV file (default: generated rows)"
    parser.add_argument("--data", type=Path, help=data)
    parser.add_argument("--rows", type=at_least(1), default=200_000, help="rows to generate, or the most to read from a TSV")
    parser.add_argument("--epochs", type=at_least(1), default=8)
    parser.add_argument("--max-steps", type=int, default=-1, help="end after this many steps (default: after the epochs)")
    parser.add_argument("--until", type=Path, help="end after the step at which this file exists")
    parser.add_argument("--batch-size", type=at_least(1), default=1024, help="samples per step, all workers together")
    parser.add_argument("--loader-workers", type=int, default=1, help="data-loading processes per worker")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--width", type=at_least(1), default=1024, help="hidden units; a step's cost grows with the square")
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads per worker")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for metrics.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
