"""Train DLRM with sharded embedding tables, as `train_ctr.py` trains a dense model. The elastic lines are marked.

    python examples/train_dlrm.py                                     one worker, profiled
    dlrover run --workers 1:3 examples/train_dlrm.py                  live elastic on this machine
    torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 --nproc-per-node=1 \\
        examples/train_dlrm.py                                        live elastic, run it on every machine
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import torch
from ctr_data import ClickData, DataError, collate, load, load_generated
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.tables.torchrec_parts import (
    TorchrecMissingError,
    check_torchrec,
)


@dataclass(frozen=True)
class Options:
    data: Path | None
    rows: int
    epochs: int
    max_steps: int
    batch_size: int
    loader_workers: int
    learning_rate: float
    table_learning_rate: float
    width: int
    embedding_dim: int
    threads: int
    accelerator: str
    seed: int
    output: Path | None


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
        learning_rate=options.learning_rate,
        table_learning_rate=options.table_learning_rate,
    )
    loader_workers = options.loader_workers
    train_loader = DataLoader(data.train, options.batch_size, shuffle=True, collate_fn=collate, num_workers=loader_workers)
    # Sharded tables need all workers for a lookup, so the test rows are measured within fit, too.
    measured = [DataLoader(rows, options.batch_size, collate_fn=collate) for rows in (data.val, data.test)]

    trainer = L.Trainer(
        strategy=DLRoverStrategy(),  # shards the tables; workers may join and leave while it trains
        callbacks=[DLRoverCallback()],  # profiles every step and asks for the size that pays
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
        result = {
            "test_auc": float(trainer.callback_metrics["test_auc"]),
            "best_auc": data.best_auc,
            "data": data.name,
            "rows": len(data.test),
            "steps": trainer.global_step,
        }
        text = json.dumps(result)
        print(text, flush=True)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "metrics.json").write_text(text + "\n")
    return 0


def load_rows(options: Options) -> ClickData:
    """Load the rows of `--data`, else generate some: 26 categories show the tables best.

    Raises:
        DataError: the path or a row of it cannot be used.
    """
    if options.data is not None:
        return load(options.data, options.seed, options.rows)
    made = load_generated(options.seed, options.rows)
    about = (
        f"no --data given: generating {options.rows:,} rows in Criteo's schema (13 numbers, 26 categories, "
        f"seed {options.seed}); no model can beat a test AUC of {made.best_auc:.4f}"
    )
    return replace(made, about=about)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="Train DLRM with sharded embedding tables, elastically.")
    parser.add_argument(
        "--data", type=Path, help="Criteo-format TSV file, or a folder with the Adult files (default: generated rows)"
    )
    parser.add_argument("--rows", type=_at_least(100), default=500_000, help="rows to generate, or the most to read from a TSV")
    parser.add_argument("--epochs", type=_at_least(1), default=1, help="passes; on rare ids, a second one is learning by heart")
    parser.add_argument("--max-steps", type=int, default=-1, help="end after this many steps (default: after the epochs)")
    parser.add_argument("--batch-size", type=_at_least(1), default=1024, help="samples per step, all workers together")
    parser.add_argument("--loader-workers", type=int, default=1, help="data-loading processes per worker")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of the MLPs")
    parser.add_argument("--table-lr", type=float, default=0.02, help="learning rate of the embedding tables")
    parser.add_argument("--width", type=_at_least(1), default=256, help="hidden units; a step's cost grows with the square")
    parser.add_argument("--embedding-dim", type=_multiple_of_4, default=16, help="values per id, a multiple of 4")
    parser.add_argument("--threads", type=_at_least(1), default=1, help="CPU threads per worker")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for metrics.json")
    given = parser.parse_args()
    return Options(
        data=given.data,
        rows=given.rows,
        epochs=given.epochs,
        max_steps=given.max_steps,
        batch_size=given.batch_size,
        loader_workers=given.loader_workers,
        learning_rate=given.lr,
        table_learning_rate=given.table_lr,
        width=given.width,
        embedding_dim=given.embedding_dim,
        threads=given.threads,
        accelerator=given.accelerator,
        seed=given.seed,
        output=given.output,
    )


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} must be {least} or more")
        return number

    parse.__name__ = "int"  # argparse names the type when the text is not a number
    return parse


def _multiple_of_4(text: str) -> int:
    number = int(text)
    if number < 4 or number % 4:
        raise argparse.ArgumentTypeError(f"{text} must be a multiple of 4: fbgemm's kernels read four values at a time")
    return number


if __name__ == "__main__":
    sys.exit(main())
