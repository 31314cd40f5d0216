"""`dlrover pool status`, `what-if`, `explain` of sizes, and the options of pools."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterator

import pytest

from lightning_dlrover.pool import commands, plugin, policies
from lightning_dlrover.pool.brain import Brain, PoolTimeouts
from lightning_dlrover.pool.budget import Resources
from lightning_dlrover.pool.decisions import Prospect, Rules
from lightning_dlrover.pool.plugin import owner_weight, pool_budget, quota
from lightning_dlrover.pool.view import PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.events import SizeGiven, TrainingStalled, record_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.report.timeline import given_sizes, sizes_text
from tests.support.pool_jobs import PooledJobs
from tests.support.run_cli import RunCli

CURVED = [10.0, 14.0, 16.0, 17.0]


@pytest.fixture
def jobs(client: EtcdClient, run_id: str) -> Iterator[PooledJobs]:
    """A pool of four cores in which `a` runs with all, and `b` asks for three."""
    made = PooledJobs(client, PoolKeys(run_id), 4)
    with Brain(client, made.pool, Rules(Resources(4.0), counts_others=False), timeouts=PoolTimeouts(settle_s=0.0)) as brain:
        made.submit("a", (1, 4))
        for _ in range(8):
            brain.step()
            made.follow()
        made.decide("a", CURVED, left_s=1700.0)
        made.submit("b", (3, 3))
        brain.step()
        yield made


def test_queue_lists_who_has_what_who_waits_and_why(dlrover: RunCli, etcd: EmbeddedEtcd, jobs: PooledJobs) -> None:
    a, b = jobs.keys("a").run_id, jobs.keys("b").run_id
    output = dlrover.output("pool", "status", "--endpoint", etcd.endpoint, "--pool", jobs.pool.pool)
    assert f"process {os.getpid()} on {socket.gethostname()} decides, by policy jct" in output
    assert "budget: 4 cores of 4 cores in use" in output
    assert "shrinks" in output
    assert "number 1 of 1 in the queue" in output
    listed = json.loads(dlrover("pool", "status", "--json", "--endpoint", etcd.endpoint, "--pool", jobs.pool.pool)[1])
    assert [(job["job"], job["workers"], job["granted"]) for job in listed["jobs"]] == [(a, 4, 1), (b, 0, 0)]


def test_pool_without_jobs_or_brain_is_shown_as_such(dlrover: RunCli, etcd: EmbeddedEtcd) -> None:
    code, output, _ = dlrover("pool", "status", "--endpoint", etcd.endpoint, "--pool", "nothing")
    assert (code, output) == (0, "pool nothing: no process decides; jobs keep their sizes, and waiting ones wait\nno jobs\n")
    assert "cannot name a pool" in dlrover.refused("pool", "status", "--pool", "a/b", "--endpoint", etcd.endpoint)
    assert "name it with --endpoint" in dlrover.refused("pool", "status")


def test_list_does_not_take_pools_for_jobs(dlrover: RunCli, etcd: EmbeddedEtcd, jobs: PooledJobs) -> None:
    code, output, _ = dlrover("list", "--endpoint", etcd.endpoint)
    assert (code, ".pools" in output) == (0, False)
    assert jobs.keys("a").run_id in output


def test_what_if_shows_time_and_interval_of_another_size(dlrover: RunCli, etcd: EmbeddedEtcd, jobs: PooledJobs) -> None:
    ask = ("pool", "what-if", "--endpoint", etcd.endpoint, "--pool", jobs.pool.pool, jobs.keys("a").run_id)
    output = dlrover.output(*ask, "--workers", 1)
    lines = output.splitlines()
    assert lines[2].split() == ["4", "17", "28", "min", "27", "min", "to", "31", "min", "unknown", "measured"]
    assert lines[3].split()[:4] == ["1", "10", "48", "min"]
    assert "it would end 20 min later" in output
    assert f"pool {jobs.pool.pool}, by policy jct:" in output
    assert "more than the budget" not in output
    assert "together they need 4 cores, more than the budget of 3 cores" in dlrover.output(
        *ask, "--workers", 4, "--add", "cores=-1"
    )
    assert "has no prediction for 5 workers" in dlrover.refused(*ask, "--workers", 5)
    assert dlrover(*ask)[0] == 2


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ((60.0, 50.0, 80.0), "it would end 40 s earlier"),
        ((60.0, 30.0, 700.0), "it might end 40 s earlier; the intervals overlap"),
        ((160.0, 70.0, 700.0), "it might end 60 s later; the intervals overlap"),
        ((160.0, 150.0, 170.0), "it would end 60 s later"),
    ],
)
def test_difference_is_sure_only_where_intervals_do_not_overlap(then: tuple[float, float, float], text: str) -> None:
    now = Prospect(1, 10.0, 100.0, 90.0, 110.0, None, True)
    [line] = commands._difference(now, Prospect(2, 20.0, *then, None, False))
    assert text in line


def test_what_if_in_a_job_without_a_pool_does_not_name_a_brain(dlrover: RunCli, at: tuple[str, ...]) -> None:
    assert "is not in pool 'default'" in dlrover.refused("pool", "what-if", *at, "--add", "cores=1")


def test_what_if_shows_another_budget_and_a_pool_without_a_job(dlrover: RunCli, etcd: EmbeddedEtcd, jobs: PooledJobs) -> None:
    a, b = jobs.keys("a").run_id, jobs.keys("b").run_id
    ask = ("pool", "what-if", "--endpoint", etcd.endpoint, "--pool", jobs.pool.pool, a)

    def sizes(*question: str) -> dict[str, list[str]]:
        output = dlrover.output(*ask, *question)
        rows = [line.split() for line in output.splitlines()]
        return {row[0]: row[1:3] for row in rows if row and row[0] in (a, b)}

    assert sizes("--add", "cores=3") == {a: ["4", "4"], b: ["0", "3"]}
    assert sizes("--without", b) == {a: ["4", "4"], b: ["0", "0"]}
    assert f"--add takes away more than pool {jobs.pool.pool!r} has: its budget is 4 cores" in dlrover.refused(
        *ask, "--add", "cores=-5"
    )
    assert "'apples=16' is not part of a budget" in dlrover.refused(*ask, "--add", "apples=16")
    assert "has no job 'nobody'" in dlrover.refused(*ask, "--without", "nobody")


def test_explain_shows_for_whom_a_job_was_made_smaller_and_what_came_of_it(
    dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, jobs: PooledJobs
) -> None:
    keys = jobs.keys("a")
    stall = TrainingStalled(2, 0.3, "shrink", 4, 1)
    Journal(client, keys).append(record_of(stall, ""), "test")
    output = dlrover.output("explain", "--endpoint", etcd.endpoint, keys.run_id)
    assert f"size by pool {jobs.pool.pool} (policy jct)" in output
    assert f"changes in the same decision: {jobs.keys('b').run_id} 0 -> 3" in " ".join(output.split())
    assert "predicted: 17 -> 10 samples/s" in output
    assert "came out: never measured with 1 worker, after a pause of 0.3 s" in output


def test_outcome_of_a_size_is_the_median_of_its_windows() -> None:
    given = SizeGiven("p", "jct", 1, 2, 10.0, 18.0, 15.0, 21.0, 0.5, {})
    back = dataclasses.replace(given, workers_before=2, workers_after=1)
    [first, second] = given_sizes([record_of(given, "", at=100.0), record_of(back, "", at=200.0)], ())
    assert (first.measured_per_s, second.measured_per_s) == (None, None)
    text = sizes_text([dataclasses.replace(first, measured_per_s=17.1, pause_s=0.4)], started_at=90.0)
    assert "10 s after the start: 1 -> 2 workers" in text
    outcome = "came out: 17.1 samples/s, 0.95 times the prediction, inside of its interval, after a pause of 0.4 s"
    assert outcome in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool", "p"), "a pool is in an etcd that all its jobs share"),
        (("--priority", "3"), "--priority: only with --pool NAME"),
        (("--pool", "p", "--weight", "0"), "'0' is not a number above 0"),
        (("--pool", "", "--endpoint", "127.0.0.1:1"), "cannot name a pool"),
    ],
)
def test_run_refuses_options_of_pools_that_make_no_sense(dlrover: RunCli, options: tuple[str, ...], message: str) -> None:
    assert message in dlrover.refused("run", *options, "script.py")


def test_budgets_and_weights_are_parsed_or_refused() -> None:
    assert pool_budget("cores=64,memory=2G") == {"cores": 64.0, "gpus": float("inf"), "memory_mb": 2048}
    assert owner_weight("ads=2") == ("ads", 2.0)
    assert quota("ads=gpus=2,memory=2G") == ("ads", {"cores": float("inf"), "gpus": 2.0, "memory_mb": 2048})
    for wrong in ("ads", "cores=2", "=cores=2"):
        with pytest.raises(Exception, match="OWNER=LIST"):
            quota(wrong)
    for wrong in ("cores", "disk=3", "cores=1,cores=2", "cores=-1"):
        with pytest.raises(Exception, match=r"budget|twice|above 0|no value"):
            pool_budget(wrong)
    with pytest.raises(Exception, match="OWNER=WEIGHT"):
        owner_weight("2")


def test_parser_offers_every_policy_of_the_registry() -> None:
    assert tuple(policies.POOL_POLICIES) == plugin.POOL_POLICIES


def test_brain_refuses_a_policy_that_is_only_there_to_be_compared_with(dlrover: RunCli) -> None:
    errors = dlrover.refused("pool", "run", "--budget", "cores=2", "--policy", "las", "--endpoint", "127.0.0.1:1")
    said = " ".join(errors.split())
    assert "'las' cannot divide a pool: choose jct, sia, as-requested; `dlrover lab simulate --policy` has others" in said


def test_expected_start_is_shown_as_time_from_now(dlrover: RunCli, etcd: EmbeddedEtcd, jobs: PooledJobs) -> None:
    grant = jobs.granted("b")
    assert grant.expected_at == 0.0 or grant.expected_at >= time.time() - 5
