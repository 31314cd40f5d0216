"""Scripts of other tests over NCCL and over its stand-in, with faults that can be planted into the product of one worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.live import recovery
from lightning_dlrover.rdzv.group import forming, world
from lightning_dlrover.rdzv.transport import process_groups, torch_names
from lightning_dlrover.rdzv.transport.process_groups import RoundEnd, RoundSockets
from lightning_dlrover.rdzv.transport.torch_names import is_in_backward
from tests.e2e.toy_job import Recorder, Script, ToyModel, ToySettings, train_toy
from tests.support import nccl_stand_in
from tests.support.nccl_stand_in import Quirks, StandIn


@dataclass(frozen=True)
class OverStandIn:
    """A script whose settings choose the stand-in as its backend."""

    script: Script
    settings: Any
    quirks: Quirks = field(default_factory=Quirks)
    fault: str = ""  # one of `FAULTS`


def run_over_stand_in(recorder: Recorder, over: OverStandIn) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torch's elastic agent does
    nccl_stand_in.install(over.quirks)
    _let_die_in_a_reduction(recorder)
    if over.fault:
        FAULTS[over.fault]()
    over.script(recorder, over.settings)


@dataclass(frozen=True)
class OnDevice:
    """A script that trains with all workers on one GPU over NCCL, or on the CPU over gloo."""

    script: Script
    settings: ToySettings
    device: str  # cuda or cpu


def run_on_device(recorder: Recorder, on: OnDevice) -> None:
    backend = "nccl" if on.device == "cuda" else "gloo"
    # Each worker is a host of its own to NCCL, which refuses two ranks of one host on one GPU.
    os.environ.update(NCCL_HOSTID=f"worker-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    limits = {**on.settings.limits, "accelerator": on.device, "devices": 1}
    on.script(recorder, replace(on.settings, ddp={"process_group_backend": backend}, limits=limits))


def _let_die_in_a_reduction(recorder: Recorder) -> None:
    """Let a worker die in a script's own reduction, after all that precedes it: the moment `reduction`."""
    reduce = StandIn.allreduce

    def allreduce(self: StandIn, tensors: Any, *options: Any) -> Any:
        # A barrier has no options, and communicators are warmed in another thread.
        if options and threading.current_thread() is threading.main_thread() and not is_in_backward():
            recorder.moment("reduction")
        return reduce(self, tensors, *options)

    StandIn.allreduce = allreduce  # type: ignore[assignment, method-assign]


class Synced(ToyModel):
    """Statistics over all workers' samples in the forward pass, as in SyncBatchNorm, which only exists for GPUs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums = batch[0].sum(0)
        if dist.is_initialized():
            dist.all_reduce(sums)
        self.mean = 0.9 * self.mean + 0.1 * sums
        x = batch[0] - self.mean
        return super().training_step((x, *batch[1:]), batch_idx)


def train_synced(recorder: Recorder, settings: ToySettings) -> None:
    train_toy(recorder, settings, Synced)


class Counted(ToyModel):
    """A script that reduces a value of its own after each validation."""

    def on_validation_epoch_end(self) -> None:
        num_workers = float(self.trainer.strategy.reduce(torch.ones(1), reduce_op="sum"))
        self.recorder.write("reduced", num_workers=num_workers, world=self.trainer.world_size)


def train_counted(recorder: Recorder, settings: ToySettings) -> None:
    train_toy(recorder, settings, Counted)


class Awaiting(ToyModel):
    """Records how often the host has waited for the device in each batch."""

    num_waits = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.waits_before = self.num_waits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.write("awaited", number=self.num_waits - self.waits_before, world=self.trainer.world_size)
        super().on_train_batch_end(outputs, batch, batch_idx)


def train_awaiting(recorder: Recorder, settings: ToySettings) -> None:
    synchronize = torch.cpu.synchronize

    def count_and_synchronize(device: Any = None) -> None:
        Awaiting.num_waits += threading.current_thread() is threading.main_thread()
        synchronize(device)

    torch.cpu.synchronize = count_and_synchronize
    train_toy(recorder, settings, Awaiting)


# --- planted faults -----------------------------------------------------------------------------------------------------------


def shut_down_instead_of_abort() -> None:
    def destroy_group(self: RoundSockets, is_agreed: bool) -> None:
        self.sever(self._member.number, quietly=True)
        self.end = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def shut_down(groups: Sequence[Any]) -> None:
        for group in groups:
            group.shutdown()

    RoundSockets.destroy_group = destroy_group  # type: ignore[method-assign]
    torch_names.abort = shut_down


def use_gradients_without_a_wait() -> None:
    process_groups.wait_for_device = lambda device: None


def leave_the_watchdog_on() -> None:
    world.prepare_environment = lambda environ: None  # type: ignore[attr-defined]


def abort_in_the_callers_thread() -> None:
    def begin(self: RoundEnd, end: Callable[[Sequence[Any]], None], *_: object) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                end(list(self._groups()))
                self._ended.set()

    RoundEnd._begin = begin  # type: ignore[assignment, method-assign]


def use_aborted_results_outside_of_steps() -> None:
    recovery.ResilientCollectives._checked = lambda self, run: run()  # type: ignore[method-assign]


def connect_in_the_first_collective() -> None:
    forming.slow_to_connect = lambda backend: {}  # type: ignore[attr-defined]


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(shut_down_instead_of_abort, use_gradients_without_a_wait, leave_the_watchdog_on, abort_in_the_callers_thread),
        *(use_aborted_results_outside_of_steps, connect_in_the_first_collective),
    )
}
