"""Read a worker's place in its job from the environment that its elastic agent exports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, HISTORY_TTL_S
from lightning_dlrover.rdzv.live.admission import MembershipConfig
from lightning_dlrover.rdzv.live.rounds import RoundTimeouts
from lightning_dlrover.rdzv.timeouts import Timeouts

__all__ = ["WorldConfig", "is_in_job"]


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether the `etcd-v3` rendezvous handler has started this process."""
    return variables.RUN_ID in environ


@dataclass(frozen=True)
class WorldConfig:
    """Location of the job's records and identity of this worker, read once from the environment that the agent exports.

    Example:
        >>> WorldConfig.from_environment({}, version="0.1.0") is None  # not started by the rendezvous backend
        True
        >>> exported = {"DLROVER_RUN_ID": "ctr", "DLROVER_ENDPOINT": "etcd:2379", "DLROVER_AGENT_ID": "a1"}
        >>> config = WorldConfig.from_environment({**exported, "DLROVER_MAX_NODES": "4"}, version="0.1.0")
        >>> config.min_workers, config.max_workers
        (1, 4)
    """

    etcd: EtcdConfig
    run_id: str
    prefix: str
    agent_id: str
    local_rank: int
    min_workers: int
    max_workers: int
    version: str
    lease_ttl_s: float = 5.0  # this and the following timeouts are those of `Timeouts`
    form_timeout_s: float = 120.0
    wait_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    regroup_timeout_s: float = 120.0
    collective_timeout_s: float = 1800.0
    history_ttl_s: float = HISTORY_TTL_S  # seconds that the job's records outlast its last process
    left_state_folder: str = ""  # folder of this worker's agent, see `left_state`; empty if the agent has a single worker
    agent_pid: int = 0  # process id of this worker's agent; 0: unknown
    node: str = ""  # name of this worker's node; empty if `dlrover run` has not started it
    workers_per_node: int = 1  # workers of this worker's agent
    node_workers: int = 1  # workers of each node of `dlrover run`, which starts an agent for each; they come and go together
    pool: str = ""  # name of the pool that decides how many workers the job has; empty if none does

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], version: str) -> WorldConfig | None:
        """Return the configuration exported by the `etcd-v3` rendezvous handler, or None outside of such a job.

        Raises:
            ValueError: a variable is missing or malformed.
        """
        if not is_in_job(environ):
            return None
        number = functools.partial(variables.whole_number, environ)
        try:
            endpoints, agent_id = environ[variables.ENDPOINT], environ[variables.AGENT_ID]
        except KeyError as error:
            raise ValueError(
                f"environment variable {error} is missing though {variables.RUN_ID} is set; "
                "both come from torchrun --rdzv-backend=etcd-v3: start the script with it"
            ) from error
        workers_per_node = variables.local_world_size(environ)
        timeouts = dataclasses.asdict(Timeouts.from_environment(environ))
        return cls(
            etcd=EtcdConfig.from_environment(endpoints, environ, timeouts.pop("etcd_timeout_s")),
            run_id=environ[variables.RUN_ID],
            prefix=environ.get(variables.PREFIX, DEFAULT_PREFIX),
            agent_id=agent_id,
            local_rank=number("LOCAL_RANK", 0),
            min_workers=number(variables.MIN_NODES, 1) * workers_per_node,
            max_workers=number(variables.MAX_NODES, 1) * workers_per_node,
            version=version,
            history_ttl_s=number(variables.HISTORY_TTL_S, round(HISTORY_TTL_S)),
            left_state_folder=environ.get(variables.LEFT_STATE, ""),
            agent_pid=number(variables.AGENT_PID, 0),
            node=environ.get(variables.NODE, ""),
            workers_per_node=workers_per_node,
            node_workers=max(1, number(variables.WORKERS_PER_NODE, 1)),
            pool=environ.get(variables.POOL, ""),
            **timeouts,
        )

    def of_member(self, address: str, port: int) -> MembershipConfig:
        """Return the configuration of the job's membership, with the address at which this worker serves its store."""
        return MembershipConfig(
            run_id=self.run_id,
            prefix=self.prefix,
            agent_id=self.agent_id,
            local_rank=self.local_rank,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            version=self.version,
            address=address,
            port=port,
            workers_per_node=self.node_workers,
            lease_ttl_s=self.lease_ttl_s,
            history_ttl_s=self.history_ttl_s,
            timeouts=RoundTimeouts(self.start_timeout_s, self.regroup_timeout_s, return_s=2.0 * self.lease_ttl_s),
        )
