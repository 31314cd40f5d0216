"""Real processes that play one case after another. The fixture `fork_server` must be in use."""

from __future__ import annotations

import faulthandler
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_WORKERS = 4
START_TIMEOUT_S = 60.0  # seconds for the imports, on a busy machine
WORKERS = [f"w{i}" for i in range(NUM_WORKERS)]


@dataclass(frozen=True)
class Worker:
    """Arguments of a case in each process."""

    name: str
    store: dist.Store  # type: ignore[name-defined]  # of this case


class PoolError(AssertionError):
    """A case that raised, hung or ended its process."""


class WorkerPool:
    """`NUM_WORKERS` processes, started for the first case and again after a case that broke them."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._processes: dict[str, tuple[BaseProcess, Connection]] = {}
        self._cases = 0

    def play(
        self, case: Callable[..., Any], *args: object, timeout_s: float = 110.0, may_die: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the result of `case(worker, *args)` in each process, by worker; without those that may die and did.

        Raises:
            PoolError: a case failed; contains the traceback of the worker.
        """
        if not self._processes:
            self._start()
        self._cases += 1
        for _, pipe in self._processes.values():
            pipe.send((self._cases, timeout_s, case, args))
        results: dict[str, Any] = {}
        errors: list[str] = []
        waiting = {pipe: name for name, (_, pipe) in self._processes.items()}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for each in ready:
                assert isinstance(each, Connection)
                pipe = each
                name = waiting.pop(pipe)
                try:
                    result, error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    error = "its process ended"
                    if name in may_die:
                        self._processes[name][0].join()
                        continue
                if error:
                    errors.append(f"{name}: {error}")
                    deadline = min(deadline, time.monotonic() + 1.0)  # the others may wait for it for ever
                else:
                    results[name] = result
        errors += [f"{name}: no answer" for name in waiting.values()]
        if errors:
            self.close()
            raise PoolError("\n".join(errors))
        if len(results) < NUM_WORKERS:
            self._start()
        return results

    def _start(self) -> None:
        """Start the missing processes."""
        context = mp.get_context("forkserver")  # the fixture `fork_server` has imported torchrec there
        started = []
        for name in WORKERS:
            if name in self._processes and self._processes[name][0].is_alive():
                continue
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[name] = process, ours
            started.append(ours)
        for pipe in started:
            assert pipe.poll(START_TIMEOUT_S), "a process did not start"
            pipe.recv()

    def close(self) -> None:
        for process, pipe in self._processes.values():
            process.kill()
            process.join()
            pipe.close()
        self._processes = {}


def _serve(name: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    pipe.send("ready")
    while True:
        try:
            number, timeout_s, case, args = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.9 * timeout_s, exit=True)
        try:
            pipe.send((case(Worker(name, dist.PrefixStore(f"case{number}", store)), *args), None))  # type: ignore[attr-defined]
        except Exception:
            pipe.send((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
