"""Run several jobs on one machine at the same time (docs/colocate/colocation.md).

Public names are loaded on first use: training processes import a module of this package, and must not pay for the dispatcher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_dlrover.colocate.journal import JobSpec, read_jobs
    from lightning_dlrover.colocate.queue import run_queue

__all__ = ["JobSpec", "read_jobs", "run_queue"]

_HOMES = {"JobSpec": "journal", "read_jobs": "journal", "run_queue": "queue"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
