"""Settings that a worker reads from the environment that its agent exports."""

from __future__ import annotations

import pytest

from lightning_dlrover.rdzv.group.config import Timeouts, WorldConfig
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX
from tests.rdzv.present import present

JOB = {"DLROVER_RUN_ID": "job", "DLROVER_ENDPOINT": "localhost:2379", "DLROVER_AGENT_ID": "agent"}


def test_outside_of_a_job_there_is_no_configuration() -> None:
    assert WorldConfig.from_environment({"RANK": "0", "WORLD_SIZE": "2"}, "1") is None


def test_limits_are_counted_in_workers_not_nodes() -> None:
    environ = {**JOB, "DLROVER_MIN_NODES": "2", "DLROVER_MAX_NODES": "3", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    config = present(WorldConfig.from_environment(environ, "1"))
    assert (config.min_workers, config.max_workers, config.local_rank) == (8, 12, 1)
    assert config.prefix == DEFAULT_PREFIX


@pytest.mark.parametrize("missing", ["DLROVER_ENDPOINT", "DLROVER_AGENT_ID"])
def test_missing_variable_is_named_with_the_next_move(missing: str) -> None:
    environ = {name: value for name, value in JOB.items() if name != missing}
    with pytest.raises(ValueError, match=f"{missing}.*torchrun --rdzv-backend=etcd-v3"):
        WorldConfig.from_environment(environ, "1")


def test_worker_inherits_its_etcd_credentials_from_its_agent() -> None:
    config = present(WorldConfig.from_environment({**JOB, "DLROVER_USER": "me", "DLROVER_PASSWORD_FILE": "/secret"}, "1"))
    assert config.etcd.access == {"user": "me", "password_file": "/secret"}


def test_timeouts_of_the_agent_reach_its_workers() -> None:
    timeouts = Timeouts(*(float(number) for number in range(11, 18)))
    config = present(WorldConfig.from_environment(JOB | timeouts.to_environment(), "1"))
    assert config.etcd.timeout_s == timeouts.etcd_timeout_s
    of_world = ("lease_ttl_s", "wait_timeout_s", "form_timeout_s", "collective_timeout_s")
    assert [getattr(config, name) for name in of_world] == [getattr(timeouts, name) for name in of_world]
    assert (config.timeouts.start_s, config.timeouts.regroup_s) == (timeouts.start_timeout_s, timeouts.regroup_timeout_s)
    assert config.timeouts.return_s == 2 * timeouts.lease_ttl_s


@pytest.mark.parametrize("value", ["10m", "0", "-1", "nan", "inf"])
def test_malformed_timeout_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=f"DLROVER_WAIT_TIMEOUT_S='{value}' cannot be used: it must be a number of seconds"):
        WorldConfig.from_environment(JOB | {"DLROVER_WAIT_TIMEOUT_S": value}, "1")


@pytest.mark.parametrize(
    ("text", "nodes", "per_agent", "sizes"),
    [("pow2", "1:6", 1, (1, 2, 4)), ("2+6+4", "1:6", 1, (2, 4, 6)), ("pow2", "2:3", 4, (8,)), ("", "1:6", 1, ())],
)
def test_sizes_end_at_the_job_s_limits(text: str, nodes: str, per_agent: int, sizes: tuple[int, ...]) -> None:
    fewest, most = nodes.split(":")
    environ = {**JOB, "DLROVER_MIN_NODES": fewest, "DLROVER_MAX_NODES": most, "LOCAL_WORLD_SIZE": str(per_agent)}
    config = present(WorldConfig.from_environment({**environ, "DLROVER_SIZES": text}, "1"))
    assert config.sizes == sizes
    assert config.max_workers == (sizes[-1] if sizes else int(most) * per_agent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2+9", "sizes=2\\+9 of --rdzv-conf .*: 9 is outside of the job's limits of 2 to 6 workers; leave it out"),
        ("3+6", "3 workers do not fill nodes of 2; give multiples of 2"),
        ("two", "'two' is not a number of workers above 0; give pow2, or sizes such as 1\\+2\\+4\\+8"),
    ],
)
def test_sizes_that_the_job_cannot_have_are_refused(text: str, message: str) -> None:
    environ = {**JOB, "DLROVER_MIN_NODES": "2", "DLROVER_MAX_NODES": "6", "DLROVER_WORKERS_PER_NODE": "2"}
    with pytest.raises(ValueError, match=message):
        WorldConfig.from_environment({**environ, "DLROVER_SIZES": text}, "1")
