"""Two workers, one of which is lost in the middle of a message, for `test_waits.py`.

    python broken_off.py SCENARIO FOLDER [drop]

Prints the outcome of the surviving worker as JSON. Both are forked before either has a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.transport import transfer, waits

NUM_VALUES = 1 << 27  # 512 MiB: the transfer lasts long enough to be interrupted


class Round:
    """The round of both workers."""

    cut_off_at: float | None = None

    def cut_off(self) -> None:
        self.cut_off_at = time.monotonic()

    def now(self) -> tuple[int, bool]:
        return 1, self.cut_off_at is not None


def join(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))


def once_begun(values: torch.Tensor, act: Callable[[], object]) -> None:
    """Act as soon as part of the values has arrived, but not all."""

    def watch() -> None:
        while values[0] == 0:
            pass
        if values[-1] == 0:
            act()

    threading.Thread(target=watch, daemon=True).start()


def lose(scenario: str) -> None:
    """Run the worker that is lost."""
    values = torch.zeros(NUM_VALUES)
    if scenario in ("broadcast", "of_host"):
        dist.broadcast(values.fill_(1), 1)
    elif scenario == "receive":
        dist.send(values.fill_(1), 0)
    elif scenario == "send":
        once_begun(values, lambda: os.kill(os.getpid(), signal.SIGKILL))
        dist.recv(values, 0)
    elif scenario == "gather":
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.ones(1, dtype=torch.int64))
    elif scenario == "gradients":
        gradients()
    time.sleep(600)


def wait_for_the_lost(scenario: str, peer: int, round_: Round, found: dict[str, Any]) -> None:
    if scenario == "gather":
        threading.Timer(0.5, round_.cut_off).start()  # the other worker sends a size, and nothing else
        transfer.all_gather("what all are told")
        return
    values = torch.zeros(NUM_VALUES)

    def kill() -> None:
        os.kill(peer, signal.SIGKILL)

    def cut_off() -> None:
        os.waitpid(peer, 0)
        time.sleep(0.5)  # time for gloo to report the loss, if it does
        round_.cut_off()

    if scenario in ("forward", "backward"):
        layers = [torch.nn.Linear(4, 4), *([torch.nn.BatchNorm1d(4)] if scenario == "forward" else [])]
        replica = DistributedDataParallel(torch.nn.Sequential(*layers), init_sync=False)
        waits.guard_replica(replica)
        threading.Timer(0.5, round_.cut_off).start()  # the other worker never joins this collective
        loss = replica(torch.ones(2, 4)).sum()
        found["forward"] = "done"
        loss.backward()
        return
    if scenario in ("broadcast", "of_host"):
        once_begun(values, kill)
        work = dist.broadcast(values, 1, async_op=True)
        assert work is not None
        waits.is_of_host(work)
        os.waitpid(peer, 0)
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            found["gloo"] = str(error)
        round_.cut_off()
        work.wait()
        return
    threading.Thread(target=cut_off, daemon=True).start()
    if scenario == "receive":
        once_begun(values, kill)
        dist.recv(values, 1)
    elif scenario == "send":
        dist.send(values.fill_(1), 1)


def gradients() -> list[list[float]]:
    """Gradients and buffers of one model on two workers with different samples: plain, guarded, then both as views."""
    found = []
    for is_guarded, as_view in ((False, False), (True, False), (False, True), (True, True)):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))]
        model = torch.nn.Sequential(*layers)
        replica = DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view)
        if is_guarded:
            waits.guard_replica(replica)
        torch.manual_seed(dist.get_rank())
        for i in range(4):
            with replica.no_sync() if i == 1 else contextlib.nullcontext():
                replica(torch.randn(8, 40)).square().sum().backward()
        values = [p.grad for p in model.parameters() if p.grad is not None] + [b.double() for b in model.buffers()]
        found.append([value for tensor in values for value in tensor.flatten().tolist()])
    return found


def outcome(scenario: str, peer: int, is_dropped: bool) -> dict[str, Any]:
    round_ = Round()
    waits.end_waits_with(
        weakref.WeakMethod(round_.now), all_waits=scenario not in ("gather", "of_host")
    )  # else as in jobs with NCCL
    found: dict[str, Any] = {}
    if scenario == "gradients":
        plain, guarded, plain_view, guarded_view = gradients()
        return {"equal": plain == guarded and plain_view == guarded_view, "num": len(plain)}
    try:
        wait_for_the_lost(scenario, peer, round_, found)
    except RuntimeError as error:
        found |= {"error": type(error).__name__, "text": str(error), "after_s": time.monotonic() - (round_.cut_off_at or 0.0)}
    assert dist.group.WORLD is not None
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    are_unused = threading.Event()
    keeper = waits.let_go([group], [], are_unused)
    del group
    dist.destroy_process_group()
    if is_dropped:  # true in a job that continues, false in a process that ends
        are_unused.set()
        keeper.join(0.5)
    return found


def main(scenario: str, folder: Path, is_dropped: bool) -> None:
    peer = os.fork()
    if peer == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    join(folder, 1 if peer == 0 else 0)
    if peer == 0:
        lose(scenario)
    print(json.dumps(outcome(scenario, peer, is_dropped)))
    with contextlib.suppress(ProcessLookupError):
        os.kill(peer, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), is_dropped=len(sys.argv) > 3)
