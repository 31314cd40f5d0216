"""The user's own LightningModule: found by name, and measured through a Trainer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning_dlrover.characterize.measure import Effort, Share
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.observe.gpu_memory import GpuPeak
from lightning_dlrover.observe.resources import MemoryWatch
from lightning_dlrover.packages import package_of

__all__ = ["check_users_model", "measure_users_model"]

WARM_STEPS = 3
MAX_STEPS = 2000


def check_users_model(name: str) -> None:
    """Check that a model can be made and has data.

    Raises:
        ValueError: it cannot; the message says what is missing.
    """
    module = _made(name)
    if not hasattr(module, "training_step") or not hasattr(module, "configure_optimizers"):
        raise ValueError(f"--model {name}: {type(module).__name__} is no LightningModule: it has no training_step")
    own = getattr(type(module), "train_dataloader", None)
    if own is None or "lightning" in own.__module__.partition(".")[0]:
        raise ValueError(
            f"--model {name}: {type(module).__name__} has no train_dataloader; define one, or a class of this kind around it: "
            "the measurement needs its batches"
        )


def _made(name: str) -> Any:
    place, _, class_name = name.rpartition(":")
    if not place or not class_name.isidentifier():
        raise ValueError(f"--model {name}: give MODULE:CLASS or FILE.py:CLASS, such as train.py:ClickModel")
    try:
        found = getattr(_module(place), class_name)
    except AttributeError as error:
        raise ValueError(f"--model {name}: {place} has no {class_name}") from error
    except Exception as error:
        raise ValueError(f"--model {name}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(found):
        raise ValueError(f"--model {name}: {class_name} is a {type(found).__name__}, not a class")
    try:
        return found()
    except Exception as error:
        raise ValueError(
            f"--model {name}: {class_name}() fails: {type(error).__name__}: {error}; it must take no arguments"
        ) from error


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))  # its neighbours, as for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def measure_users_model(point: Point, effort: Effort) -> Share:
    """Train the model for a while, and return its steps in blocks, with Lightning's parts of a step."""
    import torch

    torch.set_num_threads(point.threads)
    module = _made(point.model)
    lightning = importlib.import_module(package_of(module))
    watch = _watch(lightning, effort, point.device != "cpu")
    gpu_peak = GpuPeak(torch.device("cpu" if point.device == "cpu" else "cuda"))
    with MemoryWatch() as memory:
        trainer = lightning.Trainer(
            accelerator="gpu" if point.device != "cpu" else "cpu",
            devices=1,
            max_steps=MAX_STEPS,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        cpu_before, began = time.process_time(), time.perf_counter()
        trainer.fit(module)
        cpu = 100 * (time.process_time() - cpu_before) / (time.perf_counter() - began)
        peak = memory.take().peak_bytes
    if not watch.blocks:
        raise ValueError(f"its data ended before {WARM_STEPS + 1} steps")
    part_s = {name: seconds / watch.num_measured for name, seconds in watch.part_s.items()}
    return Share(tuple(watch.blocks), part_s, part_s["forward"], peak, cpu, gpu_peak.take(), None)


def _watch(lightning: Any, effort: Effort, cuda: bool) -> Any:
    """Return a callback that times steps in blocks, and stops after the last one."""
    import torch

    class Watch(lightning.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.blocks: list[float] = []
            self.part_s = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
            self.num_measured = 0
            self._num_steps = 0
            self._in_block = 0
            self._block_began = self._last = 0.0

        def _mark(self, part: str) -> None:
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self._num_steps > WARM_STEPS:
                self.part_s[part] += now - self._last
            self._last = now

        def on_train_batch_start(self, *_: Any) -> None:
            self._mark("data")

        def on_before_backward(self, *_: Any) -> None:
            self._mark("forward")

        def on_after_backward(self, *_: Any) -> None:
            self._mark("backward")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._mark("optimizer")
            self._num_steps += 1
            if self._num_steps <= WARM_STEPS:
                return
            if self._num_steps == WARM_STEPS + 1:
                self._block_began, self._in_block = self._last, 0
                return
            self._in_block += 1
            self.num_measured += 1
            if self._last - self._block_began >= effort.block_s:
                self.blocks.append((self._last - self._block_began) / self._in_block)
                self._block_began, self._in_block = self._last, 0
            trainer.should_stop = len(self.blocks) >= effort.num_blocks

    return Watch()
