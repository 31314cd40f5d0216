"""Checkpoints of a live job: files of Lightning's, folders where tables are sharded, and which of them can be read."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from fsspec.core import url_to_fs

from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.tables.checkpoint import save_tables
from lightning_dlrover.tables.sharded import ShardedTables

__all__ = [
    "TABLES_FOLDER",
    "TRAINER_FILE",
    "WHOLE_TABLES",
    "PlainShelf",
    "Shelf",
    "absolute",
    "exists",
    "is_folder",
    "load_own_checkpoint",
    "replace_folder",
    "saving_file",
    "saving_folder",
    "trainer_file",
    "unreadable",
    "when_written",
]

Save = Callable[[], Any]
"""Writes a checkpoint, and returns the path at which rank 0 has written it."""

TRAINER_FILE = "trainer.ckpt"
TABLES_FOLDER = "tables"
"""Contents of a checkpoint folder with sharded tables: Lightning's own file, and a `torch.distributed.checkpoint` folder."""

WHOLE_TABLES = "dlrover_whole_tables"
"""Key of a loaded checkpoint of an unsharded model, as stock Lightning writes it: its tables are part of the module's state."""


def absolute(path: Any) -> str:
    """Return a path as other workers find it: a URL, or an absolute path."""
    return str(path) if "://" in str(path) else os.path.abspath(path)


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint is a folder, as of a model with sharded tables; stock Lightning writes one file."""
    return "://" not in str(path) and not Path(path).is_file()


class RankedStrategy(Protocol):
    """A strategy that knows its rank, which a loss may change while a checkpoint is saved."""

    @property
    def is_global_zero(self) -> bool: ...


class Shelf(Protocol):
    """Where checkpoints go, and which of them the job can continue from."""

    def place(self, path: Any) -> Any:
        """Return where a checkpoint may be written: its path, or another one where it must not replace what is there."""

    def round_number(self) -> int:
        """Return the round in which this worker trains; 0 before the first one."""

    def saved(self, path: str, global_step: int) -> None:
        """Record a checkpoint that is complete."""


class PlainShelf:
    """Checkpoints of a strategy outside of a live job: each has its place, and none is recorded."""

    def place(self, path: Any) -> Any:
        return path

    def round_number(self) -> int:
        return 0

    def saved(self, path: str, global_step: int) -> None:
        pass


def trainer_file(folder: Path) -> Path:
    """Return Lightning's file in a checkpoint with sharded tables.

    Raises:
        FileNotFoundError: it is no such checkpoint.
    """
    if not (folder / TRAINER_FILE).is_file():
        raise FileNotFoundError(
            f"checkpoint {folder}: there is no {TRAINER_FILE} in it; a model with sharded tables is saved as a folder "
            f"with {TRAINER_FILE} and {TABLES_FOLDER}"
        )
    return folder / TRAINER_FILE


def exists(path: Any) -> bool:
    """Return whether there is a checkpoint at a path or URL."""
    filesystem, local_path = url_to_fs(str(path))
    return bool(filesystem.exists(local_path))


def saving_file(
    path: Any, save: Callable[[Any], None], shelf: Shelf, strategy: RankedStrategy, barrier: Callable[[], None]
) -> Save:
    """Return a function that writes one file on rank 0. If that worker is lost while it writes, the next rank 0 writes it."""
    written: Any = None

    def save_on_rank_zero() -> Any:
        nonlocal written
        if strategy.is_global_zero and written is None:
            target = shelf.place(path)
            save(target)
            written = target
        barrier()
        return written

    return save_on_rank_zero


def saving_folder(
    tables: ShardedTables,
    path: Any,
    save_rest: Callable[[Path], None],
    shelf: Shelf,
    strategy: RankedStrategy,
) -> Save:
    """Return a function that writes a folder with tables, which appears only when it is complete.

    Args:
        save_rest: writes Lightning's file on rank 0.
        shelf: knows the round of the workers that save together. Workers of a former round may still be writing.

    Raises:
        ValueError: the path is a URL.
    """
    if "://" in str(path):
        raise ValueError(
            f"checkpoint {path}: all workers save a model with sharded tables into one folder, which cannot be a URL: "
            "set ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...) to a folder that all hosts share"
        )
    folder = Path(path)

    def save_together() -> Any:
        if not tables.is_built:
            return None
        written: Any = None
        unfinished = folder.with_name(f".{folder.name}.unfinished-{shelf.round_number()}")
        if strategy.is_global_zero:
            for left in folder.parent.glob(f".{glob.escape(folder.name)}.unfinished-*"):
                shutil.rmtree(left, ignore_errors=True)
            unfinished.mkdir(parents=True)
        transfer.barrier()
        save_tables(tables, unfinished / TABLES_FOLDER)
        save_rest(unfinished / TRAINER_FILE)
        transfer.barrier()
        if strategy.is_global_zero:
            written = shelf.place(folder)
            replace_folder(Path(written), unfinished)
        transfer.barrier()
        return written

    return save_together


def replace_folder(folder: Path, new: Path) -> None:
    """Replace a folder or a file by a new folder. Except for a moment, one of the two always exists."""
    former = folder.with_name(f".{folder.name}.former")
    _remove(former)
    with suppress(FileNotFoundError):
        folder.rename(former)
    new.rename(folder)
    _remove(former)  # last, because it may take long and this process may be killed meanwhile


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def when_written(checkpoint_io: Any, path: Any, shelf: Shelf, global_step: int) -> None:
    """Put a checkpoint on record once it exists, which may be later: a plugin may write it in its own thread.

    Args:
        shelf: records the path as other workers find it, a URL or an absolute path.
    """
    found_at = absolute(path)
    executor = getattr(checkpoint_io, "_executor", None)  # one thread, with which a plugin writes
    if executor is None:
        shelf.saved(found_at, global_step)
        return

    def record_if_readable() -> None:
        if not unreadable(found_at):
            shelf.saved(found_at, global_step)

    # The executor has one thread, which runs tasks in order. It may have failed to write the file.
    executor.submit(record_if_readable)


def load_own_checkpoint(load: Callable[..., dict[str, Any]], path: str, names: Collection[str]) -> dict[str, Any]:
    """Load a checkpoint that this job has written, by a path from the job's records.

    Args:
        load: the strategy's `load_checkpoint`.
        names: classes and functions that this script's own checkpoints refer to. Only these are loaded.

    Raises:
        UnpicklingError: the checkpoint holds others.
    """
    with torch.serialization.safe_globals(transfer.resolved(names)):
        return load(path, weights_only=True)


def unreadable(path: str) -> str:
    """Return why this worker cannot read a checkpoint of the job; empty if it can."""
    try:
        filesystem, local_path = url_to_fs(path)
        if not filesystem.exists(local_path):
            return "it does not exist on this host"
        if not filesystem.isdir(local_path):
            with filesystem.open(local_path, "rb") as file:
                file.read(1)
    except Exception as error:  # file systems of other libraries raise any exception
        return f"{type(error).__name__}: {error}"
    return ""
