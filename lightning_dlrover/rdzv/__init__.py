"""Membership of a job: the etcd rendezvous backend of TorchElastic, and elastic process groups for any PyTorch loop.

`World` joins a job, and `World.steps` yields its steps across changes of workers; docs/guide/plain_pytorch.md shows their use.
Names are loaded on first use, because agents and the command line import this package too and must not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.group.config import WorldConfig
    from lightning_dlrover.rdzv.group.failures import is_group_failure
    from lightning_dlrover.rdzv.group.loop import Step
    from lightning_dlrover.rdzv.group.world import World
    from lightning_dlrover.rdzv.membership.member import EvictedError, Formation, LeftOutError, MembershipError, WorldError

__all__ = [
    "EvictedError",
    "Formation",
    "JobClosedError",
    "LeftOutError",
    "MembershipError",
    "Step",
    "World",
    "WorldConfig",
    "WorldError",
    "is_group_failure",
]

_HOMES = {
    **dict.fromkeys(("EvictedError", "Formation", "LeftOutError", "MembershipError", "WorldError"), "membership.member"),
    "World": "group.world",
    "WorldConfig": "group.config",
    "is_group_failure": "group.failures",
    "JobClosedError": "membership.membership",
    "Step": "group.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
