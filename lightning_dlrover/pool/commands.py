"""`dlrover pool what-if`: time, money and their intervals, before anything is done."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from lightning_dlrover.brain.learned import Learned
from lightning_dlrover.brain.seen import SeenJob
from lightning_dlrover.brain.snapshot import rules_of
from lightning_dlrover.brain.watch import PoolView, Watch
from lightning_dlrover.brain.what_if import prospect, sizes_if
from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job
from lightning_dlrover.output import counted, number_text, show, time_text
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.rdzv.job.pool_records import PoolKeys
from lightning_dlrover.report.text_table import text_table

if TYPE_CHECKING:
    from lightning_dlrover.brain.what_if import Prospect
    from lightning_dlrover.report.status import JobPlace


def what_if_command(options: argparse.Namespace) -> int:
    """Show the effects of another number of workers, another budget, or the absence of a job, on a job and its pool."""
    if options.workers is None and options.add is None and options.without is None:
        raise UsageError("nothing is asked: give --workers N, --add cores=16, or --without JOB")
    now = time.time()
    with connected_job(options) as (place, client):
        view = Watch(client, PoolKeys(options.pool, place.prefix)).look(now)
        seen = view.jobs.get(place.run_id)
        learned = seen.learned if seen is not None else Learned()
        if seen is None:
            Learned.update_all(client, {place.keys: learned})
    lines = _of_job(place, seen, learned, options.workers, now) if options.workers is not None else []
    if options.add is not None or options.without is not None or (seen is not None and view.brain is not None):
        lines += ["", *_of_pool(place, view, options, now)]
    show("\n".join(lines).strip("\n"))
    return EXIT_OK


def _of_job(place: JobPlace, seen: SeenJob | None, learned: Learned, num_workers: int, now: float) -> list[str]:
    """Compare the rest of the job with its present size and with another one."""
    decision = learned.decision
    if decision is None:
        raise UsageError(
            f"job {place.run_id!r} has not published any prediction: its planner, which needs a DLRoverCallback in the Trainer "
            "and so never predicts for a loop of your own, decides for the first time after some steps"
        )
    job = seen.job if seen is not None else learned.as_job(place.run_id, now)
    rows: list[tuple[str, ...]] = [("workers", "samples/s", "to the end", "interval of 90 %", "cost", "")]
    found = []
    for size in dict.fromkeys((job.alive or decision.current_workers, num_workers)):
        expected = prospect(job, decision, size)
        if expected is None:
            known = f"{job.rates[0].num_workers} to {job.rates[-1].num_workers}" if job.rates else "none"
            raise UsageError(
                f"job {place.run_id!r} has no prediction for {counted(size, 'worker')}; its planner has looked at {known}, "
                "within the --workers of its start"
            )
        found.append(expected)
        rows.append(_row(expected))
    lines = [f"job {place.run_id}:", *text_table(">>>>><", rows, indent=2)]
    before, after = found[0], found[-1]
    if before is not after:
        lines += _difference(before, after)
    return lines


def _difference(now: Prospect, then: Prospect) -> list[str]:
    """Return by how much the job would end earlier or later, if the predictions can tell."""
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
    return [f"  it might end {change}; the intervals overlap, so the prediction cannot tell which is faster"]


def _row(expected: Prospect) -> tuple[str, ...]:
    interval = "-"
    if expected.low_s is not None and expected.high_s is not None:
        interval = f"{time_text(expected.low_s)} to {time_text(expected.high_s)}"
    return (
        str(expected.num_workers),
        number_text(expected.samples_per_s),
        time_text(expected.seconds) if expected.seconds is not None else "unknown",
        interval,
        number_text(expected.cost) if expected.cost is not None else "unknown",
        "measured" if expected.is_measured else "predicted",
    )


def _of_pool(place: JobPlace, view: PoolView, options: argparse.Namespace, now: float) -> list[str]:
    """Compare the sizes of all jobs of the pool."""
    rules = rules_of(view)
    if rules is None:
        if place.run_id not in view.jobs:
            raise UsageError(
                f"job {place.run_id!r} is not in pool {options.pool!r}: --add and --without are about one pool; ask with "
                "--workers, or name the job's --pool"
            )
        raise UsageError(
            f"no process decides on pool {options.pool!r}, so its budget is unknown; start `dlrover pool run` first"
        )
    if options.without is not None and options.without not in view.jobs:
        raise UsageError(f"pool {options.pool!r} has no job {options.without!r}; its jobs are {', '.join(view.jobs) or 'none'}")
    budget = rules.budget
    by_hand = place.run_id if options.workers is not None and place.run_id in view.jobs else ""
    more = Resources(**(options.add or {}))
    if min(vars(budget + more).values()) < 0:
        raise UsageError(f"--add takes away more than pool {options.pool!r} has: its budget is {budget.text}")
    jobs = view.pool_jobs
    before, after = sizes_if(jobs, rules, now, budget + more, options.without or "", by_hand, options.workers or 0)
    rows: list[tuple[str, ...]] = [("job", "workers now", "then", "to the end now", "then")]
    for job in jobs:
        new = after.get(job.name, 0)
        now_s, then_s = job.seconds_left(job.held or before.get(job.name, 0)), job.seconds_left(new)
        rows.append(
            (job.name, str(job.held), str(new), *(time_text(s) if s is not None else "unknown" for s in (now_s, then_s)))
        )
    lines = [f"pool {options.pool}, by policy {rules.policy}:", *text_table("<>>>>", rows, indent=2)]
    needed = sum((job.needs.times(after.get(job.name, 0)) for job in jobs), Resources())
    if not needed.fits(budget + more):
        has = (budget + more).text
        lines.append(f"  together they need {needed.text}, more than the budget of {has}: sizes set by hand may exceed it")
    return lines
