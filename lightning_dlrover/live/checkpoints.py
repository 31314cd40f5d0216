"""Checkpoints of a live job, and the sharded embedding tables of its Trainer."""

from __future__ import annotations

import atexit
import glob
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_dlrover.rdzv.group.loop import model_fingerprint
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.tables.checkpoint import CheckpointError, save_tables
from lightning_dlrover.tables.elastic import ElasticTables, Restored
from lightning_dlrover.tables.sharded import ShardedTables, UsersOptimizers
from lightning_dlrover.tables.snapshots import SnapshotConfig
from lightning_dlrover.tables.torchrec_adapter import fused_states

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

# Checkpoints of a live job: files of Lightning's, folders where tables are sharded, and which of them can be read.

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
        FileNotFoundError: it is another folder.
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
    path: Any, save: Callable[[Any], None], shelf: Shelf, strategy: DDPStrategy, barrier: Callable[[], None]
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
    tables: ShardedTables, path: Any, save_rest: Callable[[Path], None], shelf: Shelf, strategy: DDPStrategy
) -> Save:
    """Return a function that writes a folder with tables, which appears only when it is complete.

    Args:
        save_rest: writes Lightning's file on rank 0.
        shelf: has the round of the workers that save together. Workers of a former round may still be writing.

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
    _remove(former)  # last, because it may take long, and this process may be killed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def record_when_written(checkpoint_io: Any, path: Any, shelf: Shelf, global_step: int) -> None:
    """Record a checkpoint once it exists, which may be later: a plugin may write it in its own thread."""
    found_at = absolute(path)
    executor = getattr(checkpoint_io, "_executor", None)
    if executor is None:
        shelf.saved(found_at, global_step)
        return

    def record_if_readable() -> None:
        if not unreadable(found_at):
            shelf.saved(found_at, global_step)

    # The plugin's executor has one thread, which runs tasks in order. It may have failed to write the file.
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


# The sharded tables of a Trainer's model: built, handed from one round and from one Trainer to the next, saved and loaded.

log = logging.getLogger(__name__)

SHARDED = "_dlrover_sharded"
"""Attribute of a module that this process has trained before. Its tables are sharded already."""

WrapDense = Callable[[nn.Module, list[str], bool], nn.Module]


@dataclass
class _Sharded:
    """A module's tables as they were last trained. A copy of the module gets none."""

    tables: ShardedTables | None = None
    model: Any = None
    elastic: ElasticTables | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class TablesSettings:
    """The strategy's arguments for tables."""

    constraints: Mapping[str, Any] | None
    sharders: Sequence[Any] | None
    snapshots: SnapshotConfig


class TablesOfTrainer:
    """The tables of one module.

    Args:
        wrap_dense: makes the module data-parallel, except for the named parameters. Its last argument is true unless all
            workers have equal parameters already, or are about to receive them.
    """

    def __init__(
        self, module: L.LightningModule, device: torch.device, settings: TablesSettings, wrap_dense: WrapDense
    ) -> None:
        self._module = module
        self._settings = settings
        self._wrap_dense = wrap_dense
        self._has_dense_state = False  # whether all workers have equal dense parameters
        self.folder_to_load: Path | None = None  # tables that belong to the next loaded state dict
        self.model: Any = None  # the module to call, its tables sharded and the rest wrapped; None before the first build
        self.elastic: ElasticTables | None = None  # None outside of a live job, and once it has ended
        self.fingerprint = ""  # identity of the model before sharding; empty if an earlier Trainer has sharded it
        former: _Sharded | None = module.__dict__.get(SHARDED)
        self.is_new = former is None or former.tables is None
        if former is not None and former.tables is not None:
            self.sharded = former.tables  # another Trainer of this script has trained the module
            self.take_over()
        else:
            self.fingerprint = model_fingerprint(module)
            self.sharded = ShardedTables(module, device, settings.constraints, settings.sharders)
            self._dense_to_device(device)
        self.optimizers = UsersOptimizers(self.sharded)

    def _dense_to_device(self, device: torch.device) -> None:
        if device.type == "cpu":
            return
        tables = self.parameter_names()
        for path, part in self._module.named_modules():
            if not any(name.startswith(f"{path}.") and path for name in tables):
                part._apply(lambda t: t.to(device), recurse=False)

    # --- names -----------------------------------------------------------------------------------------------------------

    def parameter_names(self) -> set[str]:
        """Return names of the parameters that are torchrec's tables."""
        return self.sharded.parameter_names()

    def sharded_names(self) -> set[str]:
        """Return names of the parameters that differ between workers."""
        return self.parameter_names() - self._whole().keys()

    def _whole(self) -> dict[str, nn.Parameter]:
        """Return the tables that every worker holds whole, by their names in the state dict."""
        names = self.sharded.data_parallel_names() if self.sharded.is_built else set()
        return {name: p for name, p in self._module.named_parameters() if name in names}

    # --- building --------------------------------------------------------------------------------------------------------

    def build_in_job(self, world: World, formation: Formation | None) -> ElasticTables:
        """Build the tables with all members of the job's first round. A joiner gets its shards when it is admitted."""
        self.elastic = ElasticTables(self.sharded, world, self._settings.snapshots, self._wrap)
        if formation is not None:
            self.model = self.elastic.start(formation, torch.initial_seed())
        return self.elastic

    def build(self, device: torch.device) -> None:
        """Build the tables outside of a live job."""
        if not dist.is_initialized():
            # torchrec's collectives need a group, even with one worker. The tables need it for as long as they are used.
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            atexit.register(_leave_group)
        members = [str(rank) for rank in range(dist.get_world_size())]
        self.model = self.sharded.build(self.sharded.first_plan(members), members, self._wrap)
        names, given = sorted(self.sharded.plan or ()), self.sharded.given()
        firsts = torch.tensor([torch.initial_seed() % 2**63, *(name in given for name in names)], device=device)
        dist.broadcast(firsts, 0)  # the first worker's count
        seed, *are_given = firsts.tolist()
        given = [name for name, is_given in zip(names, are_given, strict=True) if is_given]
        me, group = str(dist.get_rank()), dist.group.WORLD if len(members) > 1 else None
        self.sharded.initialise(seed, given, group, members, me)
        self.sharded.forget_given()

    def _wrap(self, module: nn.Module, sharded: list[str]) -> nn.Module:
        return self._wrap_dense(module, sharded, not self._has_dense_state)

    def start(self, formation: Formation, optimizers: Sequence[Any]) -> None:
        """Build new tables with all members of a round in which no worker has any."""
        assert self.elastic is not None
        self._has_dense_state = False
        self.model = self.elastic.start(formation, torch.initial_seed())
        self.optimizers.hold_whole_tables(optimizers)

    def reshard(self, formation: Formation, standing: Sequence[str], optimizers: Sequence[Any]) -> None:
        """Bring the tables over from the former round's workers, which are all present."""
        assert self.elastic is not None
        self._has_dense_state = True
        self.model = self.elastic.reshard(formation, standing)
        self.optimizers.hold_whole_tables(optimizers)

    def roll_back(self, formation: Formation, batch: int, optimizers: Sequence[Any]) -> Restored | None:
        """Take the tables from the newest complete snapshot at or after a batch; None if there is none."""
        assert self.elastic is not None
        self._has_dense_state = True
        rolled_back = self.elastic.roll_back(formation, batch)
        if rolled_back is None:
            return None
        self.model, restored = rolled_back
        self.optimizers.hold_whole_tables(optimizers)
        return restored

    # --- saving and loading ----------------------------------------------------------------------------------------------

    def state_dict(self, of_module: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state without sharded tables, which checkpoints hold in another form."""
        with self.sharded.aside():
            state = of_module()
        return {**state, **{name: parameter.detach() for name, parameter in self._whole().items()}}

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool) -> None:
        """Load what `state_dict` has returned."""
        state = dict(saved)
        with torch.no_grad():
            for name, parameter in self._whole().items():
                if name in state:
                    parameter.copy_(state.pop(name))
        with self.sharded.aside():
            self._module.load_state_dict(state, strict=strict)

    def load_stock_state_dict(self, saved: Mapping[str, Any], strict: bool) -> None:
        """Load the state of an unsharded module. Each worker takes its own part of the tables, which it has read whole.

        Raises:
            CheckpointError: a table is missing, or has another size.
        """
        state, names = dict(saved), self.sharded.all_names()
        whole = self._whole().keys()
        missing = [name for name in names if name not in state]
        if missing and strict:
            raise CheckpointError(
                f"the checkpoint does not have {', '.join(missing)}: it is of another model, or only the file "
                f"{TRAINER_FILE} of a checkpoint with sharded tables, whose folder must be given"
            )
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, others in names.items():
            for other in others:
                if other != name or name not in whole:
                    values = state.pop(other, None)
                    if other == name and values is not None:
                        found[name] = {"weight": values}
        try:
            self.sharded.growing.load_whole(state)
            self.sharded.load_whole(found)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error}") from error
        self.load_state_dict(state, strict)

    def load_stock_optimizers(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take the tables' part of an unsharded run's optimizer states, and return the rest.

        Raises:
            TableOptimizerError: a table had another optimizer.
        """
        rest, of_tables = self.optimizers.split_states(saved)
        states: dict[str, dict[str, torch.Tensor]] = {}
        steps: dict[str, int] = {}
        tables = self.sharded.tables_by_name()
        for name, state in of_tables.items():
            if (optimizer := self.sharded.optimizers.get(name)) is not None and name not in self.sharded.frozen:
                states[name], steps[tables[name]] = fused_states(name.removesuffix(".weight"), optimizer, state)
        self.sharded.load_whole(states)
        self.sharded.set_counters(steps)
        if without := sorted((self.sharded_names() & self.sharded.with_states()) - states.keys()):
            log.warning(
                "the checkpoint has no optimizer states of the tables %s, as their optimizer is applied in the backward pass: "
                "they start again, as without sharding",
                ", ".join(name.removesuffix(".weight") for name in without),
            )
        return rest

    def close(self, has_finished: Callable[[], bool]) -> None:
        """End this worker's part in a live job. `has_finished` returns whether the job has ended; it is called last."""
        if self.elastic is not None:
            self.elastic.close(has_finished)
            self.elastic = None

    def keep_on_module(self) -> None:
        """Let a later Trainer of the script take over the tables. They hold the module themselves: both live equally long."""
        self._module.__dict__[SHARDED] = _Sharded(self.sharded, self.model, self.elastic)

    def take_over(self) -> None:
        """Continue with the tables as the script's newest Trainer has left them."""
        former: _Sharded | None = self._module.__dict__.get(SHARDED)
        if former is not None and former.tables is self.sharded:
            self.model, self.elastic = former.model, former.elastic
            if self.elastic is not None:
                self.elastic.wrap_with(self._wrap)  # another Trainer's strategy no longer follows the rounds


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
