"""Environment variables that describe the job to an agent's workers, which inherit them."""

from __future__ import annotations

import os

from lightning_dlrover import variables
from lightning_dlrover.home import give_home
from lightning_dlrover.rdzv.agents.config import HandlerConfig

__all__ = ["export"]


def export(config: HandlerConfig, agent_id: str, left_state_folder: str | None) -> None:
    """Export the location of the job's records to the workers, which inherit the agent's environment."""
    give_home()
    etcd, limits = config.etcd, config.limits
    values = {
        variables.ENDPOINT: etcd.endpoints,
        variables.PREFIX: config.key_prefix,
        variables.RUN_ID: config.run_id,
        variables.AGENT_ID: agent_id,
        variables.AGENT_PID: str(os.getpid()),
        variables.MIN_NODES: str(limits.min_nodes),
        variables.MAX_NODES: str(limits.max_nodes),
        variables.HISTORY_TTL_S: str(round(config.history_ttl_s)),
        variables.LEFT_STATE: left_state_folder,
        **config.timeouts.to_environment(),
        **etcd.to_environment(),
    }
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)  # a variable left from an outer job would not fit this endpoint
        else:
            os.environ[name] = value
