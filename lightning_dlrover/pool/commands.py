"""`dlrover pool run`, `status`, `what-if` and `plan`: share a budget among jobs, show the shares, predict a change."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_dlrover.cli.control import check_can_be_planned, check_size, plan_by_hand, wanted_text
from lightning_dlrover.cli.errors import EXIT_OK, Interrupted, UsageError, signals_as_exceptions
from lightning_dlrover.cli.lookup import connected_job, etcd_access, find_place, notify_destinations
from lightning_dlrover.cli.options import SETTINGS
from lightning_dlrover.output import complain, counted, number_text, say, show, text_table, time_text
from lightning_dlrover.pool.admission import wait_text
from lightning_dlrover.pool.brain import PoolTimeouts, rules_of, run_brain, snapshot_of
from lightning_dlrover.pool.budget import Owners, Resources, held_by
from lightning_dlrover.pool.decisions import Rules, prospect, sizes_if
from lightning_dlrover.pool.view import Learned, PoolKeys, PoolView, SeenJob, Watch
from lightning_dlrover.rdzv.etcd.health import size_of
from lightning_dlrover.rdzv.job.events import DecisionMade, events_of
from lightning_dlrover.rdzv.job.folders import EtcdDefaults
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.report.metrics import TIMEOUT_S, Sample, serve_metrics
from lightning_dlrover.report.status import JobPlace, connect, connect_to_job, read_job
from lightning_dlrover.tuning.plan import Decision, Settings, pareto_front

if TYPE_CHECKING:
    from lightning_dlrover.pool.decisions import Prospect
    from lightning_dlrover.rdzv.etcd.client import EtcdClient


def brain_command(options: argparse.Namespace) -> int:
    """Decide on the sizes of a pool's jobs until a signal ends this process."""
    rules = Rules(
        Resources(**options.budget),
        options.policy,
        options.max_wait,
        Owners(dict(options.owner_weight), {owner: Resources(**quota) for owner, quota in options.quota}),
        counts_others=not options.ignore_unmanaged,
    )
    pool, hurry, notify = _pool(options), threading.Event(), notify_destinations(options)
    with signals_as_exceptions(hurry):
        try:
            with connected_pool(options) as client, contextlib.ExitStack() as stack:
                if options.metrics is not None:
                    metrics = stack.enter_context(PoolMetrics(connected_pool(options, TIMEOUT_S), pool))
                    say(f"metrics at {stack.enter_context(serve_metrics(options.metrics, metrics, POOL_READ_EVERY_S))}")
                timeouts = PoolTimeouts.of_lease(options.lease_ttl)
                run_brain(client, pool, rules, options.interval, say, timeouts=timeouts, notify=notify)
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.signal_number).name
            complain(f"the brain of pool {pool.pool} was ended by {name}; its jobs keep their sizes")
            return 128 + interrupted.signal_number
    return EXIT_OK


POOL_READ_EVERY_S = 10.0
"""Minimum seconds between two reads of a pool for its metrics, which take a few requests."""


class PoolMetrics:
    """The samples of a pool for Prometheus, read from etcd when they are asked for. Use as a context manager."""

    def __init__(self, client: EtcdClient, pool: PoolKeys) -> None:
        self._client = client
        self._pool = pool
        self._watch = Watch(client, pool)

    def __enter__(self) -> PoolMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def __call__(self) -> list[Sample]:
        """Read the pool. Raise EtcdError if etcd does not answer."""
        now = time.time()
        view = self._watch.look(now)
        return [Sample("dlrover_etcd_size_bytes", size_of(self._client.caller)), *pool_samples(self._pool.pool, view, now)]


def pool_samples(pool: str, view: PoolView, now: float) -> list[Sample]:
    """Return the values of a pool's metrics."""
    states = dict.fromkeys(("running", "waiting", "refused", "outside"), 0)
    for seen in view.jobs.values():
        is_refused = seen.grant is not None and seen.grant.state == "refused"
        state = "outside" if seen.is_outside else "refused" if is_refused else "waiting" if seen.job.is_waiting else "running"
        states[state] += 1
    waits = [now - seen.job.submitted_s for seen in view.jobs.values() if seen.job.is_waiting and seen.job.submitted_s]
    found = [Sample("dlrover_pool_jobs", count, (pool, state)) for state, count in states.items()]
    found += [Sample("dlrover_pool_used", each, (pool, name)) for name, each in vars(held_by(view.pool_jobs)).items()]
    found.append(Sample("dlrover_pool_longest_wait_seconds", max([0.0, *waits]), (pool,)))
    if (brain := view.brain) is not None:
        found += [
            Sample("dlrover_pool_budget", limit, (pool, name)) for name, limit in Resources.within(brain.budget).limits.items()
        ]
        found.append(Sample("dlrover_pool_decisions_total", brain.number, (pool,)))
    return found


def queue_command(options: argparse.Namespace) -> int:
    """Show the jobs of a pool: sizes of those that run, and the reason for each wait."""
    pool, now = _pool(options), time.time()
    with connected_pool(options) as client:
        view = Watch(client, pool).look(now)
    snapshot = snapshot_of(view, now)
    text = "\n".join(_queue_lines(pool.pool, snapshot, view.jobs, now))
    show(json.dumps({"pool": pool.pool, **snapshot}, indent=2) if options.json else text)
    return EXIT_OK


def connected_pool(options: argparse.Namespace, timeout_s: float = 5.0) -> EtcdClient:
    """Return a client of the pool's etcd. Raise UsageError if no etcd is named."""
    defaults = EtcdDefaults.of_this_process()
    endpoint = options.endpoint or defaults.endpoint
    if endpoint is None:
        raise UsageError("a pool is in an etcd that its jobs share: name it with --endpoint HOST:PORT, or DLROVER_ENDPOINT")
    place = JobPlace("pool", endpoint, options.key_prefix or defaults.prefix, etcd_access(options) or defaults.access)
    return connect(place, timeout_s)


def _pool(options: argparse.Namespace) -> PoolKeys:
    return PoolKeys(options.pool, options.key_prefix or EtcdDefaults.of_this_process().prefix)


def _queue_lines(pool: str, snapshot: dict[str, Any], jobs: Any, now: float) -> list[str]:
    brain = snapshot["brain"]
    lines = [
        f"pool {pool}: process {brain['pid']} on {brain['host']} decides, by policy {brain['policy']}"
        if brain
        else f"pool {pool}: no process decides; jobs keep their sizes, and waiting ones wait"
    ]
    if snapshot["budget"]:
        lines.append(f"budget: {snapshot['used']} of {snapshot['budget']} in use")
    if not snapshot["jobs"]:
        return [*lines, "no jobs"]
    rows: list[tuple[str, ...]] = [("JOB", "OWNER", "PRIORITY", "WORKERS", "HAS", "STATE")]
    for job in snapshot["jobs"]:
        size = f"{job['workers']} of {job['min_workers']} to {job['max_workers']}"
        rows.append((job["job"], job["owner"] or "-", str(job["priority"]), size, job["has"], job["state"]))
    head, *table = text_table("<<><<<", rows)
    lines.append(head)
    for job, line in zip(snapshot["jobs"], table, strict=True):
        lines.append(line)
        grant = jobs[job["job"]].grant
        if grant is not None and grant.state == "waiting":
            lines.append(f"      {wait_text(grant, now)}")
        elif job["reason"]:
            lines.append(f"      {job['reason']}")
    return lines


def what_if_command(options: argparse.Namespace) -> int:
    """Show the effects of another number of workers, another budget, or the absence of a job, on a job and its pool."""
    if options.workers is None and options.add is None and options.without is None:
        raise UsageError("nothing to compare: give --workers N, --add cores=16, or --without JOB")
    with connected_job(options) as (place, client):
        lines = what_if_lines(client, place, options.pool, options.workers, options.add, options.without)
    show("\n".join(lines).strip("\n"))
    return EXIT_OK


def what_if_lines(
    client: EtcdClient,
    place: JobPlace,
    pool: str,
    workers: int | None,
    add: Mapping[str, float] | None = None,
    without: str | None = None,
) -> list[str]:
    """Describe the effects of another number of workers, another budget, or the absence of a job.

    Raises:
        UsageError: the planner has not predicted that yet, or the pool has no such job.
    """
    now = time.time()
    if workers is not None and (job := read_job(client, place.keys).view.job) is not None:
        check_size(place, job, workers)
    view = Watch(client, PoolKeys(pool, place.prefix)).look(now)
    seen = view.jobs.get(place.run_id)
    learned = seen.learned if seen is not None else Learned()
    if seen is None:
        Learned.update_all(client, {place.keys: learned})
    lines = _of_job(place, seen, learned, workers, now) if workers is not None else []
    if add is not None or without is not None or (seen is not None and view.brain is not None):
        lines += ["", *_of_pool(place, view, PoolChange(pool, workers, add, without), now)]
    return lines


@dataclass(frozen=True)
class PoolChange:
    """A change whose effects on a pool are asked for."""

    pool: str
    workers: int | None  # of the job
    add: Mapping[str, float] | None  # to the budget
    without: str | None  # a job


def _no_prediction(run_id: str) -> UsageError:
    return UsageError(
        f"job {run_id!r} has not published any prediction: its planner, which needs a DLRoverCallback in the Trainer and so "
        "never predicts for a loop of your own, decides for the first time after some steps"
    )


def _of_job(place: JobPlace, seen: SeenJob | None, learned: Learned, num_workers: int, now: float) -> list[str]:
    """Compare the rest of the job with its present size and with another one."""
    decision = learned.decision
    if decision is None:
        raise _no_prediction(place.run_id)
    job = seen.job if seen is not None else learned.as_job(place.run_id, now)
    rows: list[tuple[str, ...]] = [("workers", "samples/s", "to the end", "interval of 90 %", "cost", "")]
    found = []
    for size in dict.fromkeys((job.alive or decision.current_workers, num_workers)):
        expected = prospect(job, decision, size)
        if expected is None:
            known = f"{job.rates[0].num_workers} to {job.rates[-1].num_workers}" if job.rates else "none"
            raise UsageError(
                f"job {place.run_id!r} has no prediction for {counted(size, 'worker')}; its planner has considered {known}, "
                "within the --workers of its start"
            )
        found.append(expected)
        rows.append(_row(expected))
    lines = [f"job {place.run_id}:", *text_table(">>>>><", rows, indent=2)]
    return lines + (_difference(found[0], found[-1]) if len(found) > 1 else [])


def _difference(now: Prospect, then: Prospect) -> list[str]:
    """Return how much earlier or later the job would end, if the predictions allow an answer."""
    if now.seconds is None or then.seconds is None:
        return []
    sooner = now.seconds - then.seconds
    if sooner >= 0:
        is_clear = now.low_s is not None and then.high_s is not None and then.high_s < now.low_s
    else:
        is_clear = now.high_s is not None and then.low_s is not None and now.high_s < then.low_s
    change = f"{time_text(abs(sooner))} {'earlier' if sooner >= 0 else 'later'}"
    if is_clear:
        return [f"  it would end {change}"]
    return [f"  it might end {change}; the intervals overlap, so it is uncertain which is faster"]


def _row(expected: Prospect) -> tuple[str, ...]:
    interval = "-"
    if expected.low_s is not None and expected.high_s is not None:
        interval = f"{time_text(expected.low_s)} to {time_text(expected.high_s)}"
    size, speed = str(expected.num_workers), number_text(expected.samples_per_s)
    cost = number_text(expected.cost) if expected.cost is not None else "unknown"
    return size, speed, _time_or_unknown(expected.seconds), interval, cost, "measured" if expected.is_measured else "predicted"


def _time_or_unknown(seconds: float | None) -> str:
    return time_text(seconds) if seconds is not None else "unknown"


def _of_pool(place: JobPlace, view: PoolView, change: PoolChange, now: float) -> list[str]:
    """Compare the sizes of all jobs of the pool."""
    rules = rules_of(view)
    if rules is None and place.run_id not in view.jobs:
        raise UsageError(
            f"job {place.run_id!r} is not in pool {change.pool!r}, which --add and --without need; give --workers only, or "
            "the job's --pool"
        )
    if rules is None:
        raise UsageError(
            f"no process decides on pool {change.pool!r}, so its budget is unknown; start `dlrover pool run` first"
        )
    if change.without is not None and change.without not in view.jobs:
        raise UsageError(f"pool {change.pool!r} has no job {change.without!r}; its jobs are {', '.join(view.jobs) or 'none'}")
    budget = rules.budget
    by_hand = place.run_id if change.workers is not None and place.run_id in view.jobs else ""
    more = Resources(**(change.add or {}))
    if min(vars(budget + more).values()) < 0:
        raise UsageError(f"--add takes away more than pool {change.pool!r} has: its budget is {budget.text}")
    jobs = view.pool_jobs
    before, after = sizes_if(jobs, rules, now, budget + more, change.without or "", by_hand, change.workers or 0)
    rows: list[tuple[str, ...]] = [("job", "workers now", "then", "to the end now", "then")]
    for job in jobs:
        new = after.get(job.name, 0)
        now_s, then_s = job.seconds_left(job.held or before.get(job.name, 0)), job.seconds_left(new)
        rows.append((job.name, str(job.held), str(new), _time_or_unknown(now_s), _time_or_unknown(then_s)))
    lines = [f"pool {change.pool}, by policy {rules.policy}:", *text_table("<>>>>", rows, indent=2)]
    needed = sum((job.needs.times(after.get(job.name, 0)) for job in jobs), Resources())
    if not needed.fits(budget + more):
        has = (budget + more).text
        lines.append(f"  together they need {needed.text}, more than the budget of {has}: sizes set by hand may exceed it")
    return lines


@dataclass(frozen=True)
class Option:
    """Settings that a job could have."""

    settings: Settings
    cost: float  # unit of the budget, such as cores
    samples_per_s: float


@dataclass(frozen=True)
class ClusterJob:
    """A job that competes for resources; it runs with one of its options."""

    name: str
    options: tuple[Option, ...]
    weight: float = 1.0  # importance of its relative gain compared with others'; remaining work is one choice

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(f"job {self.name!r} has no settings to choose from")
        if not self.weight > 0 or any(o.cost <= 0 or o.samples_per_s <= 0 for o in self.options):
            raise ValueError(f"job {self.name!r}: weight, costs and rates must be above 0")

    def gain(self, option: Option) -> float:
        """Return weighted throughput as a fraction of the job's best, so that jobs with different samples can be compared."""
        return self.weight * option.samples_per_s / max(o.samples_per_s for o in self.options)

    def slope(self, small: Option, large: Option) -> float:
        """Return the gain for each unit of resources from one option to a larger one."""
        return (self.gain(large) - self.gain(small)) / (large.cost - small.cost)


def options_of(decision: Decision) -> tuple[Option, ...]:
    """Return the options that a job's own planner found feasible, in cores, or in GPUs where the job has some."""
    able = [c for c in decision.candidates if c.feasible and (c.gpus or c.cores)]
    return tuple(Option(c.settings, float(c.gpus or c.cores), c.samples_per_s) for c in able)


def divide(jobs: Sequence[ClusterJob], budget: float) -> dict[str, Option]:
    """Return an option for each job, by name, so that together they stay within `budget` and gain much.

    Uses DLRover-RM's weighted greedy on marginal gain (Wang et al., PVLDB 17(12), 2024): the job that gains most for a unit of
    resources gets it first. Options below the concave hull of a job's Pareto front would never be chosen this way; they only
    use the resources left at the end.

    Raises:
        ValueError: not even the cheapest options fit, or two jobs have one name.
    """
    fronts = {job.name: _front(job) for job in jobs}
    if len(fronts) != len(jobs):
        raise ValueError(f"two of the jobs {sorted(job.name for job in jobs)} have one name")
    chosen = {name: front[0] for name, front in fronts.items()}
    left = budget - sum(option.cost for option in chosen.values())
    if left < 0:
        raise ValueError(f"the cheapest settings of {len(jobs)} jobs need {budget - left:g}, the budget is {budget:g}")
    for on_hull in (True, False):
        while True:
            steps = [
                (job.slope(now, option), job.name, option)
                for job in jobs
                for now in (chosen[job.name],)
                for option in (_hull(job, fronts[job.name]) if on_hull else fronts[job.name])
                if now.cost < option.cost <= now.cost + left and job.gain(option) > job.gain(now)
            ]
            if not steps:
                break
            _, name, option = max(steps, key=lambda step: (step[0], step[1]))
            left -= option.cost - chosen[name].cost
            chosen[name] = option
    return chosen


def _front(job: ClusterJob) -> list[Option]:
    gains, costs = np.array([job.gain(o) for o in job.options]), np.array([o.cost for o in job.options])
    return [job.options[i] for i in pareto_front(gains, costs)]


def _hull(job: ClusterJob, front: Sequence[Option]) -> list[Option]:
    """Return the upper concave hull of a front, ascending in cost."""
    hull: list[Option] = []
    for option in front:
        while len(hull) > 1 and job.slope(hull[-2], hull[-1]) <= job.slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def divide_command(options: argparse.Namespace) -> int:
    """Share a budget of cores or GPUs among running jobs."""
    with contextlib.ExitStack() as stack:
        jobs, running, devices = [], {}, {}
        for name, weight in options.jobs:
            place = find_place(name, options)
            client = stack.enter_context(connect_to_job(place, options.run_dir))
            view = read_job(client, place.keys).view
            check_can_be_planned(place, view, None)
            events = Journal(client, place.keys).events()
            newest = next((made for _, made in events_of(reversed(events), DecisionMade)), None)
            if newest is None:
                raise _no_prediction(name)
            decision = Decision.from_data(newest.document)
            able = options_of(decision)
            if not able:
                raise UsageError(f"job {name!r} does not know how many cores its workers have; it cannot share a budget")
            jobs.append(ClusterJob(name, able, weight))
            running[name] = place, client, view, decision.current
            devices[name] = "GPUs" if any(c.gpus for c in decision.candidates) else "cores"
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{name} {unit}" for name, unit in devices.items())
            raise UsageError(f"these jobs do not compete for the same resource: {listed}; divide those of one kind at a time")
        shares = divide(jobs, options.budget)
        for name, share in shares.items():
            check_can_be_planned(running[name][0], running[name][2], share.settings.num_workers)
        for job in jobs:
            share, (place, client, view, current) = shares[job.name], running[job.name]
            settings = {name: getattr(share.settings, name) for name in SETTINGS}
            wanted, unit = wanted_text(share.settings.num_workers, settings), devices[job.name]
            now = next((o for o in job.options if o.settings == current), None)
            change = f", {share.samples_per_s / now.samples_per_s:.2f} times the present rate" if now else ""
            show(f"job {job.name}: {wanted}: {share.cost:g} {unit}, {number_text(share.samples_per_s)} samples/s{change}")
            if options.apply:
                reason = f"its share of {options.budget:g} {unit} among {counted(len(jobs), 'job')}: {wanted}"
                plan_by_hand(client, place, view, share.settings.num_workers, settings, reason)
    if not options.apply:
        show("nothing was changed; --apply makes these the jobs' plans")
    return EXIT_OK
