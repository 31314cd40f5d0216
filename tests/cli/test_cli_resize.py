"""`dlrover scale`, `divide` and `drain`."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import (
    ControllerRecord,
    DrainRecord,
    EventRecord,
    JobRecord,
    Keys,
    PlanRecord,
    RoundRecord,
    decode,
    encode,
)
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from tests.support.run_cli import RunCli
from tests.support.stored import stored


def test_scale_writes_a_binding_plan_and_an_event(dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys) -> None:
    output = dlrover.output("scale", *at, 3)
    assert "3 workers requested" in output
    plan = stored(client, PlanRecord, job.plan)
    assert (plan.num_workers, plan.source, plan.binding) == (3, "user", True)
    events = [decode(EventRecord, e.value, e.key) for e in client.get_prefix(job.events)[1]]
    assert [e.data for e in events if e.kind == "scale"] == [{"num_workers": 3, "source": "user"}]


def test_size_that_has_failed_is_named_until_it_is_asked_for_by_hand(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    record = stored(client, JobRecord, job.job)
    client.put(job.job, encode(dataclasses.replace(record, failed_sizes={"3": "3 workers failed where 2 had trained: Oh"})))
    again = f"not tried again: 3 workers failed where 2 had trained: Oh; `dlrover scale {job.run_id} 3` does"
    assert again in dlrover("status", *at)[1]
    assert "this size is tried again" not in dlrover("scale", *at, 2)[1]
    assert "this size is tried again, after 3 workers failed" in dlrover("scale", *at, 3)[1]
    assert "not tried again" not in dlrover("status", *at)[1]


@pytest.mark.parametrize(("asked", "move"), [(3, "use 2 or 4"), (7, "use 4"), (1, "use 2")])
def test_size_that_is_not_listed_is_refused_with_the_nearest_ones(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys, asked: int, move: str
) -> None:
    record = stored(client, JobRecord, job.job)
    client.put(job.job, encode(dataclasses.replace(record, max_workers=8, sizes=[2, 4])))
    problem = f"{asked} is not one of the --sizes 2,4 that job {job.run_id!r} was started with: {move}\n"
    assert dlrover.refused("scale", *at, asked).endswith(problem)
    assert dlrover.refused("pool", "what-if", *at, "--workers", asked).endswith(problem)
    assert "1 to 8 workers, sizes 2 or 4, etcd" in dlrover.output("status", *at)
    assert dlrover("scale", *at, 4)[0] == 0


def test_scale_changes_only_the_given_settings(dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys) -> None:
    def plan() -> PlanRecord:
        return dataclasses.replace(stored(client, PlanRecord, job.plan), created_at=0.0)

    scale = ("scale", *at)
    assert "0 loader workers, 2 threads requested" in dlrover.output(*scale, "--loader-workers", 0, "--threads", 2)
    reason = "set to 0 loader workers, 2 threads by hand"
    assert plan() == PlanRecord(2, "user", reason, True, loader_workers=0, intra_op_threads=2)
    assert dlrover(*scale, 3, "--prefetch", 4)[0] == 0
    reason = "set to 3 workers, 4 batches ahead each by hand"
    assert plan() == PlanRecord(3, "user", reason, True, loader_workers=0, intra_op_threads=2, prefetch_factor=4)
    text = dlrover("status", *at)[1]
    assert "plan: 3 workers, 0 loader workers, 2 threads, 4 batches ahead each, by user" in text


def test_a_setting_by_hand_leaves_the_number_of_workers_a_recommendation(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    """No person chose another size, so the existing workers must not be dismissed."""
    client.put(job.plan, encode(PlanRecord(1, "planner", "1 would do", False)))
    assert dlrover("scale", *at, "--threads", 1)[0] == 0
    plan = stored(client, PlanRecord, job.plan)
    assert (plan.num_workers, plan.binding, plan.intra_op_threads) == (1, False, 1)


def test_scale_auto_leaves_a_size_by_hand_to_the_planner_again(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    scale = ("scale", *at)
    assert dlrover(*scale, 3)[0] == 0
    assert dlrover(*scale, "--auto")[0] == 0
    plan = plan_of(client, job)
    assert plan is not None
    assert (plan.num_workers, plan.source, plan.binding) == (3, "planner", True)
    assert "no other option may be given" in dlrover.refused(*scale, 2, "--auto")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--threads", "-1"], "'-1' is not a number from 0 to 1024"),
        (["--loader-workers", "1025"], "'1025' is not a number from 0 to 1024"),
        (["--prefetch", "two"], "'two' is not a number from 0 to 1024"),
        (["2", "--cpus", "2"], "was started without --cpus, so the size of its nodes cannot change"),
        ([], "give a number of workers, or one of --loader-workers, --threads, --prefetch"),
    ],
)
def test_scale_refuses_settings_that_no_worker_can_have(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys, asked: list[str], message: str
) -> None:
    before = client.get(job.plan)
    assert message in dlrover.refused("scale", *at, *asked)
    assert client.get(job.plan) == before


@pytest.mark.parametrize("num_workers", [0, 4, -1])
def test_scale_refuses_sizes_that_the_job_was_not_started_for(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys, num_workers: int
) -> None:
    before = client.get(job.plan)
    assert "was started for 1 to 3 workers" in dlrover.refused("scale", *at, num_workers)
    assert client.get(job.plan) == before


def test_scale_refuses_a_job_that_is_over_or_unknown(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, at: tuple[str, ...], job: Keys
) -> None:
    client.put(job.job, encode(JobRecord("failed", True, 1, 3, "0")))
    assert "has failed" in dlrover.refused("scale", *at, 2)
    assert "holds no job 'unknown'" in dlrover.refused("scale", "--endpoint", etcd.endpoint, "unknown", 2)


def decided(client: EtcdClient, keys: Keys, rates: Sequence[float], gpus: int = 0) -> None:
    """A job of 1 to 3 workers of two cores each, that runs with one and predicts these rates."""
    candidates = tuple(
        Candidate(Settings(n, 0, 1, 0), 64 / r, 60 / r, 70 / r, r, 0.0, n == 1, True, cores=2.0 * n, gpus=gpus * n)
        for n, r in enumerate(rates, start=1)
    )
    alone = Settings(1, 0, 1, 0)
    decision = Decision(1, 1.0, alone, alone, "", candidates, 64 / rates[0], 64 / rates[0], False)
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0", global_batch_size=64)))
    client.put(f"{keys.events}{1:020d}-x", encode(EventRecord("decision", 1.0, "", decision.to_data())))


@pytest.fixture
def competitors(client: EtcdClient, keys: Keys) -> list[Keys]:
    """Two jobs: one hardly gains from a second worker, the other one does."""
    both = [Keys(f"{keys.run_id}-{name}") for name in ("flat", "steep")]
    decided(client, both[0], [100.0, 105.0, 106.0])
    decided(client, both[1], [10.0, 19.0, 27.0])
    return both


def plan_of(client: EtcdClient, keys: Keys) -> PlanRecord | None:
    entry = client.get(keys.plan)
    return decode(PlanRecord, entry.value, entry.key) if entry else None


def test_budget_is_divided_among_running_jobs_by_their_gains(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys]
) -> None:
    flat, steep = competitors
    divide = ("pool", "plan", "--endpoint", etcd.endpoint, flat.run_id, f"{steep.run_id}=1", "--budget", 8)
    code, output, _ = dlrover(*divide)
    assert (code, plan_of(client, flat), plan_of(client, steep)) == (0, None, None)
    assert f"{steep.run_id}: 3 workers" in output
    assert "2.70 times the present rate" in output
    _ = dlrover.output(*divide, "--apply")
    shares = [plan_of(client, keys) for keys in competitors]
    assert [(plan.num_workers, plan.binding, plan.source) for plan in shares if plan] == [(1, True, "user"), (3, True, "user")]
    dlrover("pool", "plan", "--endpoint", etcd.endpoint, f"{flat.run_id}=100", steep.run_id, "--budget", 8, "--apply")
    assert [plan.num_workers for keys in competitors if (plan := plan_of(client, keys))] == [3, 1]


@pytest.mark.parametrize(
    ("budget", "message"),
    [("3", "the cheapest settings of 2 jobs need 4, the budget is 3"), ("nan", "not a number of cores"), ("-1", "above 0")],
)
def test_a_budget_that_is_none_or_too_small_is_refused(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys], budget: str, message: str
) -> None:
    names = [keys.run_id for keys in competitors]
    assert message in dlrover.refused("pool", "plan", "--endpoint", etcd.endpoint, *names, f"--budget={budget}", "--apply")
    assert [plan_of(client, keys) for keys in competitors] == [None, None]


def test_jobs_that_do_not_compete_are_not_divided_and_none_is_changed(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, competitors: list[Keys], job: Keys
) -> None:
    names = [keys.run_id for keys in competitors]
    plan = ("pool", "plan", "--endpoint", etcd.endpoint, "--budget", 8, "--apply")
    assert "has not published any prediction" in dlrover.refused(*plan, *names, job.run_id)
    assert "have one name" in dlrover.refused(*plan, names[0], names[0])
    assert "'much' is not a weight" in dlrover.refused(*plan, f"{names[0]}=much")
    decided(client, competitors[1], [10.0, 19.0], gpus=1)
    assert "do not compete for the same resource" in dlrover.refused(*plan, *names)
    assert [plan_of(client, keys) for keys in competitors] == [None, None]


def test_drain_asks_one_worker_to_leave(dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys) -> None:
    assert dlrover("drain", *at, "w-b")[0] == 0
    assert stored(client, DrainRecord, f"{job.drains}w-b").worker_id == "w-b"
    assert "w-a, w-b, w-c" in dlrover.refused("drain", *at, "w-z")


def test_drain_replaces_a_worker_where_a_controller_starts_another(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    drain = ("drain", *at, "w-b", "--replace")
    client.delete(job.controller)
    code, _, errors = dlrover(*drain)
    assert (code, "no controller" in errors, client.get(f"{job.drains}w-b")) == (2, True, None)
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    assert "when another worker is ready" in dlrover.output(*drain)
    assert stored(client, DrainRecord, f"{job.drains}w-b").once_replaced
    assert "w-b" in dlrover("status", *at)[1]


def test_drain_at_a_time_is_a_notice_for_all_workers_of_a_node(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    began = time.time()
    assert "in time in any case" not in dlrover.output("drain", *at, "w-b", "--at=+5m")
    asked = stored(client, DrainRecord, f"{job.drains}w-b")
    assert asked.once_replaced
    assert asked.source == "dlrover drain"
    assert began + 300.0 <= asked.taken_at <= time.time() + 300.0
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    assert "in time in any case" in dlrover.output("drain", *at, "w-b", "--at=2099-01-31T14:30:00Z")
    assert stored(client, DrainRecord, f"{job.drains}w-b").taken_at == 4073553000.0
    text = dlrover("status", *at)[1]
    assert re.search(r"to be replaced, its node will be taken away at 2099-01-3\d [\d:]+ \(dlrover drain\): leaves when", text)
    assert "not allowed with" in dlrover.refused("drain", *at, "w-b", "--replace", "--at=+5")


def test_only_worker_is_drained_at_a_time_only_where_another_can_come(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    for worker in ("w-a", "w-c"):
        assert dlrover("drain", *at, worker)[0] == 0
    client.delete(job.controller)
    assert "the job would stop" in dlrover.refused("drain", *at, "w-b", "--at=+60")
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    assert dlrover("drain", *at, "w-b", "--at=+60")[0] == 0


def test_worker_that_leaves_at_once_does_not_wait_for_a_replacement(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    drain = ("drain", *at, "w-b")
    client.put(job.controller, encode(ControllerRecord("h", 1, "local")))
    assert dlrover(*drain)[0] == 0
    assert "asked to leave at once" in dlrover.refused(*drain, "--replace")
    assert not stored(client, DrainRecord, f"{job.drains}w-b").once_replaced


def test_drain_refuses_to_stop_the_job(dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys) -> None:
    client.put(job.round, encode(RoundRecord(5, ["w-b"], "", "shrink", True)))
    assert "the only worker" in dlrover.refused("drain", *at, "w-b")
    assert client.get(f"{job.drains}w-b") is None


def test_drain_refuses_the_last_one_that_stays(dlrover: RunCli, at: tuple[str, ...]) -> None:
    assert dlrover("drain", *at, "w-b")[0] == 0
    assert "the only worker" in dlrover.refused("drain", *at, "w-a")
