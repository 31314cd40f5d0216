"""Environment variables that describe the job to an agent's workers, which inherit them."""

from __future__ import annotations

import os

from lightning_dlrover.rdzv.agents.config import HandlerConfig
from lightning_dlrover.rdzv.group import left_state

__all__ = ["export"]


def export(config: HandlerConfig, agent_id: str, left_state_folder: str | None) -> None:
    """Export the location of the job's records to the workers, which inherit the agent's environment."""
    etcd, limits = config.etcd, config.limits
    values = {
        "DLROVER_ENDPOINT": etcd.endpoints,
        "DLROVER_PREFIX": config.key_prefix,
        "DLROVER_RUN_ID": config.run_id,
        "DLROVER_AGENT_ID": agent_id,
        "DLROVER_AGENT_PID": str(os.getpid()),
        "DLROVER_MIN_NODES": str(limits.min_nodes),
        "DLROVER_MAX_NODES": str(limits.max_nodes),
        "DLROVER_HISTORY_TTL_S": str(round(config.history_ttl_s)),
        left_state.VARIABLE: left_state_folder,
        **config.timeouts.to_environment(),
        **etcd.to_environment(),
    }
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)  # a variable left from an outer job would not fit this endpoint
        else:
            os.environ[name] = value
