"""Train DLRM with sharded embedding tables, as `train_ctr.py` trains a dense model. The elastic lines are marked.

    python examples/train_dlrm.py                                     one worker, profiled
    dlrover run --workers 1:3 examples/train_dlrm.py                  live elastic on this machine
    torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 --nproc-per-node=1 \\
        examples/train_dlrm.py                                        live elastic, run it on every machine

With `--data FOLDER` it reads Parquet files as streams; `criteo_to_parquet.py` makes the folder of TSV files. The rows may need
more space than there is memory, and each is trained once per epoch while workers come and go.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from ctr_data import ClickData, DataError, collate, load, load_generated
from ctr_options import at_least
from ctr_parquet import ClickStreams, is_click_folder, load_streams
from torch.utils.data import DataLoader
from train_ctr import StopOnFile, write_metrics

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.tables.torchrec_adapter import TorchrecMissingError, check_torchrec


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    L.seed_everything(options.seed, workers=True, verbose=False)
    try:
        check_torchrec()
        data = load_rows(options)
    except (TorchrecMissingError, DataError) as error:
        print(f"train_dlrm: {error}", file=sys.stderr)
        return 2
    from dlrm_model import DLRM  # only after the check that torchrec is installed

    model = DLRM(
        data.cardinalities,
        data.num_numbers,
        width=options.width,
        embedding_dim=options.embedding_dim,
        learning_rate=options.lr,
        table_learning_rate=options.table_lr,
    )
    train_loader, measured = make_loaders(data, options)

    stop = [StopOnFile(options.until)] if options.until is not None else []
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),  # shards the tables; workers may join and leave while it trains
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
    trainer.fit(model, train_loader, measured)

    if trainer.is_global_zero:
        write_metrics(float(trainer.callback_metrics["test_auc"]), data, trainer, options.output)
    return 0


def make_loaders(data: ClickData | ClickStreams, options: argparse.Namespace) -> tuple[DataLoader[Any], list[DataLoader[Any]]]:
    """Return the loader of the training rows, and those of the validation and the test rows."""
    size, loader_workers = options.batch_size, options.loader_workers
    if isinstance(data, ClickStreams):  # shuffles its rows itself
        train_loader = DataLoader(data.train, size, collate_fn=data.collate, num_workers=loader_workers)
    else:
        train_loader = DataLoader(data.train, size, shuffle=True, collate_fn=collate, num_workers=loader_workers)
    # Sharded tables need all workers for a lookup, so the test rows are measured within fit, too.
    collate_fn = data.collate if isinstance(data, ClickStreams) else collate
    return train_loader, [DataLoader(rows, size, collate_fn=collate_fn) for rows in (data.val, data.test)]


def load_rows(options: argparse.Namespace) -> ClickData | ClickStreams:
    """Load the rows of `--data` or open them as streams, else generate some: 26 categories show the tables best.

    Raises:
        DataError: the path or a row of it cannot be used.
    """
    if options.data is not None and is_click_folder(options.data):
        return load_streams(options.data, options.shuffle_rows)
    if options.data is not None:
        return load(options.data, options.seed, options.rows)
    made = load_generated(options.seed, options.rows)
    about = (
        f"no --data given: generating {options.rows:,} rows in Criteo's schema (13 numbers, 26 categories, "
        f"seed {options.seed}); no model can beat a test AUC of {made.best_auc:.4f}"
    )
    return replace(made, about=about)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train DLRM with sharded embedding tables, elastically.")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder that criteo_to_parquet.py wrote, Criteo-format TSV file, or folder with the Adult files "
        "(default: generated rows)",
    )
    parser.add_argument("--rows", type=at_least(100), default=500_000, help="rows to generate, or the most to read from a TSV")
    parser.add_argument("--epochs", type=at_least(1), default=1, help="passes; on rare ids, a second one would memorise them")
    parser.add_argument("--max-steps", type=int, default=-1, help="end after this many steps (default: after the epochs)")
    parser.add_argument("--until", type=Path, help="end after the step at which this file exists")
    parser.add_argument(
        "--shuffle-rows",
        type=at_least(0),
        default=200_000,
        help="rows of a Parquet folder that are shuffled together, in the memory of all workers; 0: no shuffling",
    )
    parser.add_argument("--batch-size", type=at_least(1), default=1024, help="samples per step, all workers together")
    parser.add_argument("--loader-workers", type=int, default=1, help="data-loading processes per worker")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of the MLPs")
    parser.add_argument("--table-lr", type=float, default=0.02, help="learning rate of the embedding tables")
    parser.add_argument("--width", type=at_least(1), default=256, help="hidden units; a step's cost grows with the square")
    parser.add_argument("--embedding-dim", type=_multiple_of_4, default=16, help="values per id, a multiple of 4")
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads per worker")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for metrics.json")
    return parser.parse_args()


def _multiple_of_4(text: str) -> int:
    number = int(text)
    if number < 4 or number % 4:
        raise argparse.ArgumentTypeError(f"{text} must be a multiple of 4: fbgemm's kernels read four values at a time")
    return number


if __name__ == "__main__":
    sys.exit(main())
