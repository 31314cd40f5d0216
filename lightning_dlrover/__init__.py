"""Elastic training for PyTorch Lightning: profile a job, plan its size, and resize it while it runs.

`DLRoverStrategy` and `DLRoverCallback` make a Lightning script elastic, and `SnapshotConfig` sets how often its sharded tables
are copied. `WorldInfo` is what hooks of a changing job receive, and `show` draws a job in a notebook. Names are loaded on
first use: agents, controllers and the command line import this package too, and must not pay for importing torch and Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dlrover._version import __version__
from lightning_dlrover.lightning_compat import on_import, submodule, watch_imports

if TYPE_CHECKING:
    from lightning_dlrover.callback import DLRoverCallback
    from lightning_dlrover.live.hooks import WorldInfo
    from lightning_dlrover.report.notebook import show
    from lightning_dlrover.strategy import DLRoverStrategy
    from lightning_dlrover.tables.snapshots import SnapshotConfig

__all__ = ["DLRoverCallback", "DLRoverStrategy", "SnapshotConfig", "WorldInfo", "__version__", "show"]

_HOMES = {
    "DLRoverCallback": "callback",
    "DLRoverStrategy": "strategy",
    "SnapshotConfig": "tables.snapshots",
    "WorldInfo": "live.hooks",
    "show": "report.notebook",
}


def _register_strategy(package: str) -> None:
    """Make `strategy="dlrover"` work in Trainers of one of Lightning's packages."""
    registry = submodule(package, "strategies").StrategyRegistry
    if "dlrover" not in registry:
        registry.register(
            "dlrover",
            _make_strategy,
            description="Live elastic data-parallel training: workers join, leave and are replaced while the job runs",
        )


def _make_strategy(**kwargs: Any) -> Any:
    return __getattr__("DLRoverStrategy")(**kwargs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


watch_imports()
on_import(_register_strategy)
