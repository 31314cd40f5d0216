"""The configuration of a worker's process group, and the timeouts of a job that agents and workers share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, HISTORY_TTL_S
from lightning_dlrover.rdzv.job.sizes import CONF_SEPARATOR, parse_sizes, sizes_within
from lightning_dlrover.rdzv.membership.membership import MembershipConfig
from lightning_dlrover.rdzv.membership.rounds import RoundTimeouts

_LONGEST_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a job in seconds, set with `--rdzv-conf`. The agent passes them to its workers in environment variables.

    The field `wait_timeout_s` is the key `wait_timeout` of `--rdzv-conf` and the variable `DLROVER_WAIT_TIMEOUT_S`.
    """

    lease_ttl_s: float = 5.0  # seconds without a keep-alive until an agent or worker counts as dead; etcd's minimum is 2
    wait_timeout_s: float = 600.0  # limit on waiting for enough workers; ignored while the job has a controller
    form_timeout_s: float = 120.0  # limit on forming a round; members may be saving a checkpoint before they enter it
    start_timeout_s: float = 60.0  # limit on waiting for announced workers before the job starts without them
    regroup_timeout_s: float = 120.0  # limit on waiting for a broken round's survivors before others continue without them
    collective_timeout_s: float = 1800.0  # limit on one collective of the training script
    etcd_timeout_s: float = 5.0  # limit on etcd's response to one request

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Timeouts:
        """Read the variables that `to_environment` wrote; those that are not set keep their defaults.

        Raises:
            ValueError: a variable is not a number of seconds or is out of range. The message names it.
        """
        values = {}
        for name in cls.names():
            if (text := environ.get(variables.timeout(name))) is not None:
                try:
                    values[f"{name}_s"] = seconds(name, text)
                except ValueError as error:
                    variable = variables.timeout(name)
                    raise ValueError(f"environment variable {variable}={text!r} cannot be used: {error}") from error
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        return {variables.timeout(name): f"{getattr(self, f'{name}_s'):g}" for name in self.names()}

    @classmethod
    def names(cls) -> list[str]:
        """Keys of `--rdzv-conf`."""
        return [each.name.removesuffix("_s") for each in fields(cls)]


def seconds(name: str, text: str) -> float:
    """Parse the value of a timeout.

    Raises:
        ValueError: the text is not a number, out of range, or a fraction where etcd counts whole seconds.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"it must be a number of seconds without a unit, such as {name}=60") from None
    if not 0 < value <= _LONGEST_S or math.isnan(value):
        raise ValueError(f"it must be a number of seconds above 0, and at most {_LONGEST_S:.0f} (30 days)")
    if name == "lease_ttl" and value != int(value):
        # All waits for a silent worker are multiples of the lease, so it must be the one that etcd grants.
        raise ValueError(f"it must be a whole number of seconds, as etcd counts leases in them, such as {math.ceil(value)}")
    return value


def sizes_from(environ: Mapping[str, str], fewest: int, most: int, per_node: int) -> tuple[int, ...]:
    """Return the numbers of workers that may be requested for a job of `fewest` to `most`; empty: any.

    Raises:
        ValueError: the sizes of `--rdzv-conf` contradict the limits.
    """
    if not (text := environ.get(variables.SIZES, "")):
        return ()
    try:
        return sizes_within(parse_sizes(text, CONF_SEPARATOR), fewest, most, per_node)
    except ValueError as error:
        raise ValueError(
            f"sizes={text} of --rdzv-conf cannot be used with these --nnodes and --nproc-per-node: {error}"
        ) from error


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether the `etcd-v3` rendezvous handler has started this process."""
    return variables.RUN_ID in environ


@dataclass(frozen=True)
class WorldConfig(MembershipConfig):
    """Configuration of a worker, read once from the environment that its agent exports.

    Example:
        >>> WorldConfig.from_environment({}, version="0.1.0") is None  # not started by the rendezvous backend
        True
        >>> exported = {"DLROVER_RUN_ID": "ctr", "DLROVER_ENDPOINT": "etcd:2379", "DLROVER_AGENT_ID": "a1"}
        >>> config = WorldConfig.from_environment({**exported, "DLROVER_MAX_NODES": "4"}, version="0.1.0")
        >>> config.min_workers, config.max_workers
        (1, 4)
    """

    etcd: EtcdConfig = field(kw_only=True)
    form_timeout_s: float = 120.0  # this and the following timeouts are those of `Timeouts`
    wait_timeout_s: float = 600.0
    collective_timeout_s: float = 1800.0
    left_state_folder: str = ""  # folder of this worker's agent, see `left_state`; empty if the agent has a single worker
    agent_pid: int = 0  # process id of this worker's agent; 0: unknown
    node: str = ""  # name of this worker's node; empty if `dlrover run` has not started it
    workers_per_node: int = 1  # workers of this worker's agent
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
        node_workers = max(1, number(variables.WORKERS_PER_NODE, 1))
        fewest, most = number(variables.MIN_NODES, 1) * workers_per_node, number(variables.MAX_NODES, 1) * workers_per_node
        sizes = sizes_from(environ, fewest, most, node_workers)
        timeouts = Timeouts.from_environment(environ)
        return cls(
            etcd=EtcdConfig.from_environment(endpoints, environ, timeouts.etcd_timeout_s),
            run_id=environ[variables.RUN_ID],
            prefix=environ.get(variables.PREFIX, DEFAULT_PREFIX),
            agent_id=agent_id,
            local_rank=number("LOCAL_RANK", 0),
            min_workers=fewest,
            max_workers=sizes[-1] if sizes else most,
            sizes=sizes,
            version=version,
            history_ttl_s=number(variables.HISTORY_TTL_S, round(HISTORY_TTL_S)),
            left_state_folder=environ.get(variables.LEFT_STATE, ""),
            agent_pid=number(variables.AGENT_PID, 0),
            node=environ.get(variables.NODE, ""),
            workers_per_node=workers_per_node,
            node_workers=node_workers,
            pool=environ.get(variables.POOL, ""),
            lease_ttl_s=timeouts.lease_ttl_s,
            form_timeout_s=timeouts.form_timeout_s,
            wait_timeout_s=timeouts.wait_timeout_s,
            collective_timeout_s=timeouts.collective_timeout_s,
            timeouts=RoundTimeouts(timeouts.start_timeout_s, timeouts.regroup_timeout_s, return_s=2.0 * timeouts.lease_ttl_s),
        )
