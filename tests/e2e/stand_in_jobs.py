"""Scripts of other tests over the stand-in for NCCL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import nccl_stand_in
from nccl_stand_in import Quirks
from toy_job import Recorder, Script

__all__ = ["OverStandIn", "run_over_stand_in"]


@dataclass(frozen=True)
class OverStandIn:
    """A script whose settings choose the stand-in as its backend."""

    script: Script
    settings: Any
    quirks: Quirks = field(default_factory=Quirks)


def run_over_stand_in(recorder: Recorder, over: OverStandIn) -> None:
    nccl_stand_in.install(over.quirks)
    over.script(recorder, over.settings)
