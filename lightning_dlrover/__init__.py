"""Live elastic training for PyTorch Lightning: profile, plan and resize a job while it runs.

Public names are loaded on first use: agents, controllers and the command line import this package too and must not pay for
importing torch and Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dlrover._version import __version__
from lightning_dlrover.packages import watch_imports

if TYPE_CHECKING:
    from lightning_dlrover.callback import DLRoverCallback
    from lightning_dlrover.strategy import DLRoverStrategy
    from lightning_dlrover.tables.snapshots import SnapshotConfig

__all__ = ["DLRoverCallback", "DLRoverStrategy", "SnapshotConfig", "__version__"]

_HOMES = {"DLRoverCallback": "callback", "DLRoverStrategy": "strategy", "SnapshotConfig": "tables.elastic"}

watch_imports()  # `strategy="dlrover"` works from here on; imports nothing


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
