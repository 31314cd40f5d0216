"""Faults around a running job: etcd, the network, the clock, or a worker that is stopped and continued.

Every job counts (`plain_loop.py`), so a lost or repeated step shows in its state. `history.py` checks every record that the
job ever wrote into etcd.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from faulty_etcd import EtcdCluster, EtcdProxy

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.harness import Job
from tests.e2e.history import History, history_violations
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.stand_in_jobs import OverStandIn, run_over_stand_in
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.e2e.toy_job import Recorder
from tests.support.nccl_stand_in import NAME, Quirks

OUTAGES_S = [1.0, 10.0, 60.0] if os.environ.get("DLROVER_ALL_FAULTS") else [1.0, 10.0]

SETTINGS = PlainSettings(num_steps=1_000_000)  # runs until the test ends it


class Watched:
    """A job of the plain loop and every record that it writes."""

    def __init__(self, job: Job, history: History) -> None:
        self.job = job
        self.history = history

    @property
    def num_rounds(self) -> int:
        return sum(change.key == self.history.keys.round for change in self.history.changes)

    def go_on_for(self, num_steps: int) -> None:
        self.job.wait_for_step(self.job.step + num_steps)

    def end(self) -> list[int]:
        """Exit codes of all workers, after checks that no step was lost, repeated or disputed."""
        codes = self.job.end()
        assert_everyone_counted_the_same(self.job, self.job.step)
        assert history_violations(self.history.finish(), self.history.keys) == []
        return codes


@pytest.fixture(params=["gloo", pytest.param(NAME, marks=pytest.mark.on_demand)])
def start(request: pytest.FixtureRequest, make_job: Callable[..., Job], etcd: EmbeddedEtcd) -> Iterator[Callable[..., Watched]]:
    """Start jobs of workers that already train together. `endpoint` is for the workers, `history_endpoint` for the test."""
    histories: list[History] = []

    def start(size: int = 2, script: Any = run_plain_loop, history_endpoint: str = "", **kwargs: Any) -> Watched:
        settings: Any = replace(SETTINGS, backend=request.param)
        if request.param == NAME:
            settings, script = OverStandIn(script, settings, Quirks(create_s=0.2, loss="either")), run_over_stand_in
        job = make_job(settings, script=script, min_workers=1, **kwargs)
        histories.append(History(history_endpoint or kwargs.get("endpoint", etcd.endpoint), job.run_id))
        job.start_all(size)
        job.wait_for_world(size)
        return Watched(job, histories[-1])

    yield start
    for history in histories:
        history.close()


@pytest.fixture
def proxy(etcd: EmbeddedEtcd) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.endpoint) as proxy:
        yield proxy


# --- etcd itself --------------------------------------------------------------------------------------------------------------


def test_training_continues_without_etcd_and_changes_resume_with_it(
    start: Callable[..., Watched], private_etcd: EmbeddedEtcd
) -> None:
    watched = start(endpoint=private_etcd.endpoint, lease_ttl_s=5)
    rounds = watched.num_rounds
    private_etcd.kill()
    watched.go_on_for(50)
    private_etcd.restart()
    watched.go_on_for(50)
    assert watched.num_rounds == rounds  # no worker was considered lost
    watched.job.start()
    watched.job.wait_for_world(3)
    assert watched.end() == [0, 0, 0]


@pytest.mark.parametrize("outage_s", OUTAGES_S)
def test_unreachable_etcd_costs_no_worker(start: Callable[..., Watched], etcd: EmbeddedEtcd, outage_s: float) -> None:
    """One job's etcd does not answer, the other one's refuses connections."""
    with EtcdProxy(etcd.endpoint) as silent, EtcdProxy(etcd.endpoint) as refusing:
        jobs = [start(endpoint=proxy.endpoint, history_endpoint=etcd.endpoint, lease_ttl_s=3) for proxy in (silent, refusing)]
        rounds = [watched.num_rounds for watched in jobs]
        silent.blackhole()
        refusing.refuse()
        healed_at = time.monotonic() + outage_s
        while time.monotonic() < healed_at:
            for watched in jobs:
                watched.go_on_for(10)
        silent.heal()
        refusing.heal()
        for watched, before in zip(jobs, rounds, strict=True):
            watched.job.start()
            watched.job.wait_for_world(3)
            assert watched.num_rounds == before + 1
            assert watched.end() == [0, 0, 0]


def test_change_requested_while_etcd_is_away_is_made_later(
    start: Callable[..., Watched], etcd: EmbeddedEtcd, proxy: EtcdProxy
) -> None:
    """A worker starts in one job, one is drained in another, and one is killed in the third."""
    grown, drained, broken = (start(endpoint=proxy.endpoint, history_endpoint=etcd.endpoint, lease_ttl_s=2) for _ in range(3))
    rounds = [watched.num_rounds for watched in (grown, drained, broken)]
    proxy.blackhole()
    for watched in (grown, drained, broken):
        watched.go_on_for(5)
    grown.job.start()
    drained.job.workers[1].terminate()
    broken.job.workers[1].kill()  # ends the round, and with it the step in flight
    steps = [watched.job.step + 50 for watched in (grown, drained)]
    for watched, step in zip((grown, drained), steps, strict=True):
        watched.job.wait_for_step(step)
    time.sleep(2.5)  # a starting worker waits 5 s for etcd; the leases expire meanwhile
    assert [watched.num_rounds for watched in (grown, drained, broken)] == rounds
    proxy.heal()
    for watched, size, codes in ((grown, 3, [0, 0, 0]), (drained, 1, [0, 0]), (broken, 1, [0, -9])):
        watched.job.wait_for_world(size)
        assert watched.end() == codes


# --- a cluster ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


def test_leader_of_the_cluster_may_die_in_training_and_in_a_change(start: Callable[..., Watched], cluster: EtcdCluster) -> None:
    watched = start(endpoint=cluster.endpoint, lease_ttl_s=5)
    rounds = watched.num_rounds
    leader = cluster.leader()
    cluster.kill(leader)
    watched.go_on_for(50)
    cluster.leader()
    assert watched.num_rounds == rounds
    cluster.restart(leader)
    job = watched.job
    job.start()
    job.wait_for_world(3)
    leader = cluster.leader()
    joiner = job.start()
    job.wait_until(lambda: joiner.output or joiner.records() or job.round_number > rounds + 1 or None, "a joiner", 5.0)
    cluster.kill(leader)
    job.wait_for_world(4)
    assert watched.end() == [0, 0, 0, 0]


def test_a_worker_starts_though_the_first_endpoint_of_its_cluster_is_dead(
    start: Callable[..., Watched], cluster: EtcdCluster
) -> None:
    cluster.kill(0)
    cluster.leader()
    assert start(endpoint=cluster.endpoint).end() == [0, 0]


# --- a worker that is stopped, a clock that jumps -----------------------------------------------------------------------------


def test_a_worker_stopped_for_less_than_its_lease_only_pauses_the_job(start: Callable[..., Watched]) -> None:
    watched = start(lease_ttl_s=30)
    rounds = watched.num_rounds
    watched.job.workers[1].stop()
    step = watched.job.step
    time.sleep(1.0)
    assert watched.job.step <= step + 1
    watched.job.workers[1].go_on()
    watched.go_on_for(50)
    assert watched.num_rounds == rounds
    assert watched.end() == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_stopped_beyond_its_lease_stays_out_when_it_resumes(start: Callable[..., Watched], rank: int) -> None:
    watched = start(size=3, lease_ttl_s=2)
    job = watched.job
    entry = next(r for r in job.records("done") if r["world"] == 3)
    stopped = next(w for w in job.workers if w.pid == entry["pid"]) if rank == 0 else job.workers[1]
    stopped.stop()
    job.wait_for_world(2)
    watched.go_on_for(10)
    rounds = watched.num_rounds
    stopped.go_on()
    assert stopped.wait() == 1
    assert "no longer part of the job" in stopped.output or "continues without worker" in stopped.output
    watched.go_on_for(30)
    assert watched.num_rounds == rounds
    assert sorted(watched.end()) == [0, 0, 1]
    last_of_three = max(r["step"] for r in job.records("done") if r["world"] == 3)
    assert max(r["step"] for r in stopped.records("done")) <= last_of_three


def run_with_a_jumping_clock(recorder: Recorder, settings: PlainSettings) -> None:
    """Run the plain loop with a wall clock that jumps by hours, forth and back, at every reading."""
    real, looks = time.time, iter(range(1 << 40))
    time.time = lambda: real() + (-1) ** next(looks) * 5 * 3600.0
    run_plain_loop(recorder, settings)


@pytest.mark.parametrize("start", ["gloo"], indirect=True)
def test_a_clock_that_jumps_by_hours_changes_nothing(start: Callable[..., Watched]) -> None:
    watched = start(size=1, script=run_with_a_jumping_clock, lease_ttl_s=2)
    job = watched.job
    job.start(), job.start(script=run_plain_loop)
    job.wait_for_world(3)
    watched.go_on_for(150)  # longer than the lease
    rounds = watched.num_rounds
    job.workers[2].kill()
    job.wait_for_world(2)
    assert watched.num_rounds == rounds + 1
    assert watched.end() == [0, 0, -9]
