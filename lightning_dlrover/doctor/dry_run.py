"""Run a script up to its first batch as the only worker of a job, and note which of its parts a job supports.

`python -m lightning_dlrover.doctor.dry_run FOLDER RECORD_AT MODULE SCRIPT ARGS...` is the worker.
The script's own files stay as they are:

| part of the script | in the dry run |
| --- | --- |
| another strategy than `DLRoverStrategy` | is replaced by it, and noted |
| `default_root_dir` | is a temporary folder |
| loggers, checkpoints, profilers | write nothing |
| a data loader that a job refuses | is noted, and replaced by one with its first batch |
| snapshots of sharded tables | are off: they take twice the tables' memory, and are not needed |
| other refusals | are noted; training continues where possible |
| code after the first batch, after the first step of `World.steps`, or after `fit` | does not run |

`doctor/report.py` starts the worker and reads its notes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import logging
import operator
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_dlrover.host import current_frames
from lightning_dlrover.output import Finding, counted, error, ok, warning

NOTES = "notes.jsonl"  # file with the notes in the folder of a dry run

_DEVICES_BY_DEFAULT = ("auto", 1, "1", -1, "-1", None)


class _DryRunEnded(SystemExit):
    """The first batch was trained; nothing of the script may run after it. Scripts do not catch SystemExit by accident."""


class Notes:
    """Findings of the dry run, in a file that is complete at any time.

    Args:
        file: JSON lines: findings, and the stages that the script has reached.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")
        self._began = time.perf_counter()
        self._seen: set[Finding] = set()

    def add(self, finding: Finding) -> None:
        if finding not in self._seen:
            self._seen.add(finding)
            self._write(finding=asdict(finding))

    def reached(self, stage: str) -> None:
        """Note a stage: start, trainer, fit or batch; or "at ...", a line of the script shortly before the deadline."""
        self._write(stage={"name": stage, "at_s": time.perf_counter() - self._began})

    def ended(self, how: str, text: str = "") -> None:
        self._write(end={"how": how, "text": text})

    def _write(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def dry_run(notes: Notes, folder: Path, module: str, script: str, arguments: list[str]) -> None:
    """Run the script in this process, which it may leave in any state.

    Args:
        folder: empty folder for the script's Trainers.
        module: name of the script's module, as for `python -m`; empty: it is run as a file.
    """
    logging.getLogger("lightning_dlrover").addHandler(_Warnings(notes))
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    from lightning_dlrover.lightning_compat import on_import, when_imported

    note_checks = functools.cache(lambda: _note_checks(notes))

    def observe(package: str) -> None:
        note_checks()
        _observe(package, notes, str(folder))

    on_import(observe)
    # The module imports torch, so only scripts that use it import it.
    when_imported(
        "lightning_dlrover.rdzv.group.world", lambda module: _wrap(module.World, "steps", lambda steps: _stepping(steps, notes))
    )
    notes.reached("start")
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        notes.ended("returned")
    except _DryRunEnded:
        notes.ended("dry run ended")
    except SystemExit as end:
        notes.ended("exited", str(end.code if end.code is not None else 0))
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        note_problem(notes, script, problem)


def note_problem(notes: Notes, script: str, problem: BaseException) -> None:
    """Note an exception that the script raised: a refusal of this package, or an error of the script."""
    text = f"{type(problem).__name__}: {problem}".strip()
    home = type(problem).__module__.partition(".")[0]
    frames = traceback.extract_tb(problem.__traceback__)
    own = next((f for f in reversed(frames) if os.path.realpath(f.filename) == os.path.realpath(script)), None)
    place = f"{Path(own.filename).name}:{own.lineno}" if own is not None else script
    if home == "lightning_dlrover" or (frames and "lightning_dlrover/checks" in frames[-1].filename):
        notes.add(error("refused", text, f"see {place} and docs/reference/compatibility.md"))
        notes.ended("refused", text)
    else:
        notes.ended("raised", f"{place}: {text}")


class _Warnings(logging.Handler):
    """Notes the warnings of this package, which name parts of the script that a job treats differently."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().splitlines()[0]
        # The warning begins with the job's name, which is meaningless here.
        text = text.partition(": ")[2] if text.startswith("run ") else text
        self._notes.add(warning("script", *_trouble_and_move(text)))


# --- checks that raise in a job ----------------------------------------------------------------------------------------------


def _note_checks(notes: Notes) -> None:
    """Note refusals of the strategy and continue, so that one run finds all of them."""
    from lightning_dlrover.checks import BackwardCheck, UnsupportedLoaderError, UnsupportedScriptError, check_step_signature
    from lightning_dlrover.lightning_compat import TrainerFn

    strategy: Any = importlib.import_module("lightning_dlrover.strategy")
    users_loaders: Any = importlib.import_module("lightning_dlrover.live.wiring")
    replaced: Any = users_loaders.UsersLoaders.replaced

    def replaced_or_noted(self: Any, dataloader: object, trainer: Any, *others: Any) -> object:
        if trainer.state.fn != TrainerFn.FITTING:
            return replaced(self, dataloader, trainer, *others)
        name = "training data" if trainer.training or trainer.state.stage == "train" else "validation data"
        try:
            made = replaced(self, dataloader, trainer, *others)
        except UnsupportedLoaderError as problem:
            notes.add(_refusal(name, problem))
            stand_in = _stand_in(dataloader)
            return replaced(self, stand_in, trainer, *others) if stand_in is not None else dataloader
        notes.add(ok(name, _described(dataloader)))
        return made

    def signature_or_note(takes_iterator: bool) -> None:
        with _noting(notes, "training_step", UnsupportedLoaderError):
            check_step_signature(takes_iterator)

    settings = strategy.TablesSettings
    strategy.TablesSettings = lambda constraints, sharders, snapshots: settings(
        constraints, sharders, replace(snapshots, interval_s=0.0)
    )
    users_loaders.UsersLoaders.replaced = replaced_or_noted
    users_loaders.check_step_signature = signature_or_note
    for check, of in (("check_optimizers", "optimizers"), ("check_hook_state", "strategy"), ("check_graphs", "model")):
        setattr(strategy, check, _or_noted(notes, of, UnsupportedScriptError, getattr(strategy, check)))
    optimizer_step = BackwardCheck.optimizer_step

    def step_or_note(self: BackwardCheck, optimizer: Any, closure: Any) -> None:
        with _noting(notes, "training_step", UnsupportedScriptError):
            optimizer_step(self, optimizer, closure)

    BackwardCheck.optimizer_step = step_or_note  # type: ignore[method-assign]


def _or_noted(notes: Notes, of: str, kind: type[Exception], check: Callable[[Any], None]) -> Callable[[Any], None]:
    def check_or_note(part: Any) -> None:
        with _noting(notes, of, kind):
            check(part)

    return check_or_note


@contextlib.contextmanager
def _noting(notes: Notes, check: str, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as problem:
        notes.add(_refusal(check, problem))


def _refusal(check: str, problem: Exception) -> Finding:
    return error(check, *_trouble_and_move(str(problem)))


def _trouble_and_move(text: str) -> tuple[str, str]:
    """Split a message of this package, which has the form "trouble: next move"."""
    for separator in (": use ", ": give ", ". Use ", ". Put ", ": call ", "; keep ", ". Give "):
        trouble, found, move = text.partition(separator)
        if found:
            return trouble, f"{separator.strip(': .;')} {move}"
    return text, "see docs/reference/compatibility.md"


def _stand_in(dataloader: object) -> Any | None:
    """Return a loader with only the first batch of a refused loader; None if it has none."""
    from torch.utils.data import DataLoader

    try:
        batches: Any = [next(iter(dataloader))]  # type: ignore[call-overload]
    except Exception:  # whatever the user's loader raises, the script would meet it without a job, too
        return None
    return DataLoader(batches, batch_size=1, collate_fn=operator.itemgetter(0))


def _described(dataloader: Any) -> str:
    from torch.utils.data import IterableDataset

    from lightning_dlrover.checks import batching_of
    from lightning_dlrover.data.iterable import has_state
    from lightning_dlrover.live.loader import ElasticLoader

    loader = dataloader.users_loader if isinstance(dataloader, ElasticLoader) else dataloader
    batching = batching_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        kind = "with a state" if has_state(loader.dataset) else "without a state, so joiners read an epoch from its first row"
        return f"{type(loader.dataset).__name__}, an IterableDataset {kind}; batches of {batching.batch_size}"
    return (
        f"{len(batching.sampler)} samples in batches of {batching.batch_size}, {type(batching.sampler).__name__}, "
        f"{counted(loader.num_workers, 'loader worker')}"
    )


# --- the Trainer -------------------------------------------------------------------------------------------------------------


def _observe(package: str, notes: Notes, folder: str) -> None:
    """Patch a package's Trainer: it writes nothing, and ends after its first batch."""
    from lightning_dlrover.lightning_compat import submodule

    trainer_class: Any = submodule(package, "trainer").Trainer
    callback_class: Any = submodule(package, "callbacks").Callback
    logger_class: Any = submodule(package, "loggers.logger").DummyLogger

    class Nowhere(logger_class):  # type: ignore[misc]
        """A logger that writes nothing, with the attributes of one that does."""

        @property
        def save_dir(self) -> str:
            return folder

        @property
        def log_dir(self) -> str:
            return folder

    class FirstBatch(callback_class):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            notes.reached("batch")
            _check_rest(trainer, notes)
            raise _DryRunEnded(0)

    _wrap(trainer_class, "__init__", lambda make: _making(make, notes, folder, FirstBatch, Nowhere))
    _wrap(trainer_class, "fit", lambda fit: _fitting(fit, notes))
    _wrap(trainer_class, "save_checkpoint", lambda save: lambda self, *_, **__: None)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _making(make: Any, notes: Notes, folder: str, first_batch: Any, logger: Any) -> Any:
    def make_observed(self: Any, *args: Any, **given: Any) -> None:
        notes.reached("trainer")
        arguments = {**given, "default_root_dir": folder, "enable_progress_bar": False, "profiler": None}
        arguments["strategy"] = _strategy(given.get("strategy", "auto"), notes)
        if given.get("devices", "auto") not in _DEVICES_BY_DEFAULT or given.get("num_nodes", 1) != 1:
            asked = f"devices={given.get('devices', 'auto')!r}, num_nodes={given.get('num_nodes', 1)}"
            move = "set the number of workers with `dlrover run --workers MIN:MAX`"
            notes.add(warning("trainer", f"Trainer({asked}) has no effect in a job", move))
        arguments |= {"devices": 1, "num_nodes": 1}
        callbacks = given.get("callbacks") or []
        users = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        arguments["callbacks"] = [*users, first_batch()]
        make(self, *args, **arguments)
        self.loggers = [logger() for _ in self.loggers]
        if self.num_sanity_val_steps not in (0, 1):
            self.num_sanity_val_steps = 1
        # The first callback ends the fit before those that save checkpoints or act on the batch.
        own = [callback for callback in self.callbacks if isinstance(callback, first_batch)]
        self.callbacks = [*own, *(callback for callback in self.callbacks if callback not in own)]

    return make_observed


def _strategy(given: Any, notes: Notes) -> Any:
    """Return the strategy for the dry run: the user's if it is ours, else a new one."""
    from lightning_dlrover.strategy import DLRoverStrategy

    if isinstance(given, DLRoverStrategy) or given == "dlrover":
        notes.add(ok("strategy", "DLRoverStrategy"))
        return given
    name = given if isinstance(given, str) else type(given).__name__
    move = "Trainer(strategy=DLRoverStrategy()), after `from lightning_dlrover import DLRoverStrategy`"
    if re.search("fsdp|deepspeed|model_?parallel", name.lower()):
        text = f"Trainer(strategy={name!r}) spreads one model over devices; a job needs the whole model on each worker"
    else:
        text = f"Trainer(strategy={name!r}) is not DLRoverStrategy: workers could neither join nor leave"
    notes.add(error("strategy", text, move))
    return DLRoverStrategy()


def _fitting(fit: Any, notes: Notes) -> Any:
    def fit_observed(self: Any, model: Any, *args: Any, **given: Any) -> None:
        from lightning_dlrover.callback import DLRoverCallback

        notes.reached("fit")
        if any(isinstance(callback, DLRoverCallback) for callback in self.callbacks):
            notes.add(ok("callback", "DLRoverCallback"))
        else:
            text = "without DLRoverCallback nothing is measured, planned or watched; resizing by hand works"
            notes.add(warning("callback", text, "Trainer(callbacks=[DLRoverCallback(), ...])"))
        given = {**given, "ckpt_path": None} if "ckpt_path" in given else given
        fit(self, model, *args, **given)
        notes.ended("no batch")
        raise _DryRunEnded(0)

    return fit_observed


def _stepping(steps: Any, notes: Notes) -> Any:
    """End a plain loop over `World.steps` after its first step."""

    def steps_observed(self: Any, num_steps: int, **given: Any) -> Iterator[Any]:
        notes.reached("fit")
        has_begun = False
        for step in steps(self, num_steps, **given):
            if has_begun:
                break
            has_begun = True
            yield step
        if not has_begun:
            notes.ended("no batch")
            raise _DryRunEnded(0)
        notes.reached("batch")
        state = ", ".join(name for name in given if name not in ("first_step", "check_interval_s"))
        notes.add(ok("loop", f"{counted(num_steps, 'step')} of World; joiners receive {state or 'no state'}"))
        raise _DryRunEnded(0)

    return steps_observed


def _check_rest(trainer: Any, notes: Notes) -> None:
    """Check the parts that the first batch has not touched."""
    from lightning_dlrover.live.state import parts_with_hparams
    from lightning_dlrover.rdzv.transport import transfer

    val_loop = trainer.fit_loop.epoch_loop.val_loop
    if trainer.enable_validation:
        try:
            val_loop.setup_data()
        except Exception as problem:  # the script's own error, as it would come at the first validation
            notes.add(error("validation data", f"{type(problem).__name__}: {problem}", "correct val_dataloader"))
    for part in parts_with_hparams(trainer):
        for name, value in dict(part.hparams).items():
            try:
                transfer.needed_names(value)
            except Exception as problem:  # an object's own methods are called
                text = f"hyperparameter {name!r} of {type(part).__name__} cannot be saved and loaded: {problem}"
                move = f"self.save_hyperparameters(ignore=[{name!r}])"
                notes.add(error("hyperparameters", text.splitlines()[0], move))
    parameters = sum(parameter.numel() for parameter in trainer.lightning_module.parameters())
    notes.add(ok("model", f"{type(trainer.lightning_module).__name__}, {parameters} parameters in the first worker"))


def _note_place(notes: Notes, script: str, main: int) -> None:
    """Note the innermost line of the script that the main thread runs."""
    for frame, line in traceback.walk_stack(current_frames().get(main)):
        if os.path.realpath(frame.f_code.co_filename) == os.path.realpath(script):
            notes.reached(f"at {Path(script).name}:{line}, in {frame.f_code.co_name}")
            break


def _main() -> None:
    folder, record_at, module, script, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no process outlives a doctor that was killed
    notes, root = Notes(Path(folder) / NOTES), Path(folder) / "root"
    root.mkdir()
    timer = threading.Timer(max(0.1, float(record_at) - time.monotonic()), _note_place, (notes, script, threading.get_ident()))
    timer.daemon = True
    timer.start()
    dry_run(notes, root, module, script, arguments)
    timer.cancel()


if __name__ == "__main__":
    _main()
