"""All use of TorchX's Runner, behind one small module, because it changes between releases."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torchx.specs as specs
from torchx.runner import get_runner

from lightning_dlrover.components.targets.target import AppStatus

__all__ = ["TorchXRunner"]

log = logging.getLogger(__name__)

_STATES: dict[str, AppStatus] = {
    "UNSUBMITTED": "pending",
    "SUBMITTED": "pending",
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "UNKNOWN": "gone",
}


_MAX_APPS = 4096
"""Maximum number of apps in the local scheduler's cache. With its default of 100, the 101st node is refused while all run."""


class TorchXRunner:
    """Submit and watch apps on one scheduler."""

    def __init__(self, scheduler: str, config: Mapping[str, Any]) -> None:
        self._runner = get_runner(**({"cache_size": _MAX_APPS} if scheduler == "local_cwd" else {}))
        self._scheduler = scheduler
        self._config = dict(config)
        self._has_failed = False
        self._former_hook, threading.excepthook = threading.excepthook, self._on_failed_thread
        # The local scheduler replaces the process's signal handlers when it is created. What was there stays in force.
        former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._runner.scheduler_run_opts(scheduler)
        for number, handler in former.items():
            signal.signal(number, handler)

    def submit(self, app: specs.AppDef) -> str:
        """Submit an app and return its handle."""
        # No workspace: TorchX would build an image of the current folder.
        return str(self._runner.run(app, self._scheduler, self._config, workspace=None))

    def status(self, handle: str) -> AppStatus:
        """Return the state of an app; `gone` if the scheduler does not list it."""
        try:
            status = self._runner.status(handle)
        except (OSError, ValueError) as error:
            if self._scheduler == "local_cwd":
                return self._state_of_processes(handle, error)
            raise
        return _STATES.get(status.state.name, "running") if status is not None else "gone"

    def cancel(self, handle: str) -> None:
        """End an app. The local scheduler returns after the app has ended: SIGTERM, then SIGKILL after 10 s."""
        try:
            self._runner.cancel(handle)
        except (OSError, ValueError) as error:
            if self._scheduler != "local_cwd":
                raise
            self._report(error)

    def close(self) -> None:
        """End all apps that the local scheduler has started."""
        self._runner.close()
        if threading.excepthook == self._on_failed_thread:
            threading.excepthook = self._former_hook

    def _on_failed_thread(self, failed: threading.ExceptHookArgs) -> None:
        """Report a failed write of TorchX's tee threads.

        TorchX copies the nodes' output to a third file in threads. They end with a traceback when that file cannot be written.
        """
        frames = traceback.extract_tb(failed.exc_traceback)
        if isinstance(failed.exc_value, OSError) and frames and frames[-1].filename.endswith("torchx/schedulers/streams.py"):
            self._report(failed.exc_value)
        else:
            self._former_hook(failed)

    def _state_of_processes(self, handle: str, error: Exception) -> AppStatus:
        """Return the state of a local app from its processes when the scheduler cannot read or write its own log files.

        Neither a full disk nor an agent's half-written error file may end a job.
        """
        self._report(error)
        app = self._runner._scheduler(self._scheduler)._apps[handle.rsplit("/", 1)[-1]]
        processes = [replica.proc for replicas in app.role_replicas.values() for replica in replicas]
        codes = [process.poll() for process in processes]
        return "running" if None in codes else "failed" if any(codes) else "succeeded"

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            log.warning("TorchX cannot keep its own files among the nodes' logs, the job goes on: %s", error)
        self._has_failed = True
