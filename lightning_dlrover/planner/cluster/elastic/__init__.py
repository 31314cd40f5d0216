"""Policies for elastic jobs by name. Each chooses sizes in one file; `make_elastic` adds the rules that all keep.

That is: the bound on waiting, deadlines, priorities, weights of owners, limits of jobs, and one placement.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dlrover.planner.cluster.elastic.afs import afs
from lightning_dlrover.planner.cluster.elastic.as_requested import as_requested
from lightning_dlrover.planner.cluster.elastic.autopilot import autopilot
from lightning_dlrover.planner.cluster.elastic.dlrover import dlrover
from lightning_dlrover.planner.cluster.elastic.dlrover_rm import dlrover_rm
from lightning_dlrover.planner.cluster.elastic.elastic_srtf import elastic_srtf
from lightning_dlrover.planner.cluster.elastic.hesrpt import hesrpt
from lightning_dlrover.planner.cluster.elastic.jct import jct
from lightning_dlrover.planner.cluster.elastic.las import las
from lightning_dlrover.planner.cluster.elastic.optimus import INTERVAL_S as OPTIMUS_EVERY_S
from lightning_dlrover.planner.cluster.elastic.optimus import optimus
from lightning_dlrover.planner.cluster.elastic.pollux import INTERVAL_S as POLLUX_EVERY_S
from lightning_dlrover.planner.cluster.elastic.pollux import pollux
from lightning_dlrover.planner.cluster.elastic.share import SizePolicy
from lightning_dlrover.planner.cluster.elastic.sia import INTERVAL_S as SIA_EVERY_S
from lightning_dlrover.planner.cluster.elastic.sia import sia
from lightning_dlrover.planner.cluster.elastic.sizes import with_placement
from lightning_dlrover.planner.cluster.elastic.srtf import srtf
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings

__all__ = ["ELASTIC_POLICIES", "make_elastic"]

ELASTIC_POLICIES: Mapping[str, SizePolicy] = {
    "as-requested": SizePolicy(as_requested, preempts=False, rigid=True),
    "srtf": SizePolicy(srtf, rigid=True),
    "elastic-srtf": SizePolicy(elastic_srtf),
    "las": SizePolicy(las, rigid=True),
    "dlrover": SizePolicy(dlrover, preempts=False),
    "dlrover-rm": SizePolicy(dlrover_rm),
    "autopilot": SizePolicy(autopilot, preempts=False),
    "optimus": SizePolicy(optimus, every_s=OPTIMUS_EVERY_S),
    "afs": SizePolicy(afs),
    "hesrpt": SizePolicy(hesrpt),
    "pollux": SizePolicy(pollux, every_s=POLLUX_EVERY_S),
    "sia": SizePolicy(sia, every_s=SIA_EVERY_S),
    "jct": SizePolicy(jct),
}


def make_elastic(name: str, settings: PolicySettings | None = None) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in ELASTIC_POLICIES:
        raise ValueError(f"there is no policy {name!r} for elastic jobs; choose one of {', '.join(ELASTIC_POLICIES)}")
    return with_placement(ELASTIC_POLICIES[name], settings or PolicySettings())
