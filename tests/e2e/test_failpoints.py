"""A job ends as if undisturbed, whichever fault disturbs a worker at any of its writes into etcd.

By default a spread of writes and actions is tested; DLROVER_ALL_FAULTS=1 in the environment tests every action at every write.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.failpoints import Scenario, run_with_failpoint
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.history import History, history_violations
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.support.disturbed_writes import ACTIONS, Failpoint
from tests.support.nccl_stand_in import NAME

LEASE_TTL_S = 2
NUM_AT_ONCE = 6  # jobs at once, which mostly wait


def _writes(text: str) -> list[tuple[str, int]]:
    """Return each write of a list and its number among those of its name: `put events *2` are two."""
    found = [part.strip().partition(" *") for part in text.split(",")]
    return [(name, nth) for name, _, times in found for nth in range(1, int(times or 1) + 1)]


CONVENER = _writes(
    """
    LeaseGrant, LeaseKeepAlive, LeaseRevoke, delete addresses/own, delete drains/other, delete drains/own,
    delete plan, delete workers/own, put convener, put events *2, put job:finished, put job:starting,
    put job:training, put notice *2, put round:grow *2, put round:loss, put round:shrink, put round:start,
    put workers/own:active *5, put workers/own:reforming, put workers/own:starting
    """
)
"""Writes of the first worker of an undisturbed scenario. It coordinates all along."""

OTHERS = {
    "second": _writes(  # trains from the start, and is asked to leave
        """
        LeaseGrant, LeaseRevoke, delete addresses/own, delete drains/own, delete workers/own, put drains/own,
        put workers/own:active *2, put workers/own:starting
        """
    ),
    "third": _writes(  # joins, and is killed
        """
        LeaseGrant, put workers/own:active *3, put workers/own:ready, put workers/own:standby
        """
    ),
    "fourth": _writes(  # joins, and survives the loss
        """
        LeaseGrant, LeaseRevoke, delete addresses/own, delete drains/other, delete drains/own, delete plan,
        delete workers/own, put workers/own:active *2, put workers/own:ready, put workers/own:reforming,
        put workers/own:standby
        """
    ),
}

EITHER = {
    "delete addresses/other",
    "delete workers/other",
    "delete drains/other",
    "delete plan",
    "put job:finished",
    "LeaseKeepAlive",
    "put events",
    "put convener",
    "delete convener",
    "put workers/own:reforming",
}
"""Writes made by whichever worker comes first, or only in a slow scenario."""

KILLS = [Failpoint("first", write, nth, "kill") for write, nth in CONVENER]
ALL = [
    Failpoint(slot, write, nth, action)
    for slot, writes in {"first": CONVENER, **OTHERS}.items()
    for write, nth in writes
    for action in ACTIONS
]
# Eleven is prime to the number of actions, so the spread takes them in turn.
SPREAD = [point for point in ALL if point not in KILLS][::11]


def play_all(
    make_job: MakeJob,
    etcd: EmbeddedEtcd,
    points: Sequence[Failpoint | None],
    lease_ttl_s: int = LEASE_TTL_S,
    backend: str = "gloo",
) -> list[Scenario]:
    """Play scenarios to their end; assert that no step was lost, repeated or disputed."""
    scenarios = [
        Scenario(make_job(None, script=run_with_failpoint, min_workers=2, lease_ttl_s=lease_ttl_s), point, backend)
        for point in points
    ]

    def play(scenario: Scenario) -> str | None:
        history = History(etcd.endpoint, scenario.job.run_id)
        try:
            scenario.play()
            assert_everyone_counted_the_same(scenario.job, scenario.job.step)
            assert history_violations(history.finish(), history.keys) == []
        except AssertionError as error:
            return f"{scenario.point}: {error}"
        finally:
            history.close()
        return None

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        failures = [failure for failure in pool.map(play, scenarios) if failure is not None]
    assert not failures, "\n\n".join(failures)
    return scenarios


def assert_fired(scenarios: Sequence[Scenario]) -> None:
    silent = [s.point for s in scenarios if not s.has_fired and s.point is not None and s.point.write not in EITHER]
    assert not silent


def test_every_write_of_an_undisturbed_job_is_a_failpoint(make_job: MakeJob, etcd: EmbeddedEtcd) -> None:
    # The long lease keeps a slow machine from disturbing the job.
    (scenario,) = play_all(make_job, etcd, [None], lease_ttl_s=30)
    known = {(slot, write) for slot, writes in {"first": CONVENER, **OTHERS}.items() for write, _ in writes}
    assert {(slot, name) for slot, name in scenario.writes if name not in EITHER} <= known
    assert not scenario.ended


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", pytest.param(NAME, marks=pytest.mark.on_demand)])
def test_a_coordinator_may_be_killed_at_each_of_its_writes(backend: str, make_job: MakeJob, etcd: EmbeddedEtcd) -> None:
    assert_fired(play_all(make_job, etcd, KILLS, backend=backend))


@pytest.mark.on_demand
@pytest.mark.timeout(3600)
def test_any_write_may_be_the_last_one_or_be_delayed_or_fail(make_job: MakeJob, etcd: EmbeddedEtcd) -> None:
    assert_fired(play_all(make_job, etcd, ALL if os.environ.get("DLROVER_ALL_FAULTS") else SPREAD))
