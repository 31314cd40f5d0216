"""All that we ask of TorchX, behind one small module: its Runner changes between releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torchx.specs as specs
from torchx.runner import get_runner

from lightning_dlrover.components.reconcile import AppStatus

__all__ = ["TorchXRunner"]

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
        # Made now: creating the local scheduler replaces the process's signal handlers, and ours must come after.
        self._runner.scheduler_run_opts(scheduler)

    def submit(self, app: specs.AppDef) -> str:
        """Handle of the submitted app."""
        # No workspace: TorchX would build an image of the current folder.
        return str(self._runner.run(app, self._scheduler, self._config, workspace=None))

    def status(self, handle: str) -> AppStatus:
        """An app that the scheduler does not know is `gone`."""
        status = self._runner.status(handle)
        return _STATES.get(status.state.name, "running") if status is not None else "gone"

    def cancel(self, handle: str) -> None:
        """End an app. The local scheduler returns once it has ended: SIGTERM, and SIGKILL after 10 s."""
        self._runner.cancel(handle)

    def close(self) -> None:
        """End all apps that the local scheduler has started."""
        self._runner.close()
