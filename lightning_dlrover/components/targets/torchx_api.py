"""All that we ask of TorchX, behind one small module: its Runner changes between releases."""

from __future__ import annotations

import logging
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


class TorchXRunner:
    """Submits and watches apps on one scheduler.

    Args:
        scheduler: TorchX's name of it.
        config: its run options.
    """

    def __init__(self, scheduler: str, config: Mapping[str, Any]) -> None:
        self._runner = get_runner()
        self._scheduler = scheduler
        self._config = dict(config)
        self._has_failed = False
        self._former_hook, threading.excepthook = threading.excepthook, self._on_failed_thread
        # Made now: creating the local scheduler replaces the process's signal handlers, and ours must come after.
        self._runner.scheduler_run_opts(scheduler)

    def submit(self, app: specs.AppDef) -> str:
        """Handle of the submitted app."""
        # No workspace: TorchX would build an image of the current folder.
        return str(self._runner.run(app, self._scheduler, self._config, workspace=None))

    def status(self, handle: str) -> AppStatus:
        """An app that the scheduler does not know is `gone`."""
        try:
            status = self._runner.status(handle)
        except (OSError, ValueError) as error:
            if self._scheduler == "local_cwd":
                return self._state_of_processes(handle, error)
            raise
        return _STATES.get(status.state.name, "running") if status is not None else "gone"

    def cancel(self, handle: str) -> None:
        """End an app. The local scheduler returns once it has ended: SIGTERM, and SIGKILL after 10 s."""
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
        """TorchX copies the nodes' output to a third file, in threads that end with a traceback when it cannot be written."""
        frames = traceback.extract_tb(failed.exc_traceback)
        if isinstance(failed.exc_value, OSError) and frames and frames[-1].filename.endswith("torchx/schedulers/streams.py"):
            self._report(failed.exc_value)
        else:
            self._former_hook(failed)

    def _state_of_processes(self, handle: str, error: Exception) -> AppStatus:
        """The state of an app of the local scheduler, which fails when it cannot write or read files of its own in the logs.

        A disk that is full ends no job, nor does a file with an agent's error that is half written.
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
