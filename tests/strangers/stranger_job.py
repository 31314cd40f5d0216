"""Run a script that is not written for these tests in a worker.

The script's Trainers get one more callback. It slows steps down while the test needs time for its changes, and records the
number of samples of each worker.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.e2e.toy_job import Place, Recorder

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class StrangerSettings:
    """One run of a script."""

    name: str
    package: str = "lightning.pytorch"
    paced: bool = True  # steps are slow until the test has made its changes


def work_folder(folder: Path) -> Path:
    """Directory in which all workers run the script."""
    return folder / "work"


def result_path(place: Place) -> Path:
    return Path(place.folder) / f"{place.agent_id}.json"


def run_stranger(recorder: Recorder, settings: StrangerSettings) -> None:
    """Run the script as `python NAME.py` would, in a freshly forked worker."""
    script = SCRIPTS / f"{settings.name}.py"
    place = recorder.place
    os.environ["STRANGER_RESULT"] = str(result_path(place))
    work_folder(Path(place.folder)).mkdir(exist_ok=True)
    os.chdir(work_folder(Path(place.folder)))
    _add_callback(recorder, settings)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    recorder.write("script_end")


def _add_callback(recorder: Recorder, settings: StrangerSettings) -> None:
    package: Any = importlib.import_module(settings.package)
    fit = package.Trainer.fit
    fits = 0

    @functools.wraps(fit)
    def fit_with_pace(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fits
        if fits == 0:
            kind = type("Pace", (_Pace, package.Callback), {})
            trainer.callbacks.insert(0, kind(recorder, settings.paced))
        fits += 1
        recorder.write("fit", number=fits)
        return fit(trainer, *args, **kwargs)

    package.Trainer.fit = fit_with_pace


class _Pace:
    """Slows steps down, more with every completed step, so that the script does not end before the changes are made."""

    def __init__(self, recorder: Recorder, paced: bool) -> None:
        self._recorder, self._paced = recorder, paced
        self._steps = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        training_step = trainer.strategy.training_step

        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            # Here rather than at the batch's end: a step that is redone has another share then, and has no second end
            # if its accumulation window was still open.
            formation = trainer.strategy.live.formation if trainer.strategy.live else None
            self._recorder.write(
                "share",
                epoch=trainer.current_epoch,
                batch=args[0] if args else trainer.fit_loop.epoch_loop.batch_idx,
                samples=_num_samples(batch),
                round=formation.round.number if formation else 0,
                rank=trainer.global_rank,
            )
            return training_step(batch, *args, **kwargs)

        trainer.strategy.training_step = counted

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._paced:
            self._recorder.pace(0.05 + 0.004 * self._steps)
        self._steps += 1

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._recorder.moment("backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        live = trainer.strategy.live
        formation = live.formation if live else None
        self._recorder.write(
            "done",
            step=trainer.fit_loop.epoch_loop.total_batch_idx + 1,  # batches: an accumulated step is several
            epoch=trainer.current_epoch,
            batch=batch_idx,
            round=formation.round.number if formation else 0,
            rank=trainer.global_rank,
            world=trainer.world_size,
        )


def _num_samples(batch: Any) -> int:
    """Length of the first tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    for part in batch.values() if isinstance(batch, dict) else batch:
        return _num_samples(part)
    raise ValueError(f"a batch without tensors: {batch!r}")
