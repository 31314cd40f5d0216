"""`dlrover pool plan`: share a budget of cores or GPUs among running jobs."""

from __future__ import annotations

import argparse
import contextlib

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.cli.options import SETTINGS
from lightning_dlrover.cli.resize import check_can_be_planned, plan_by_hand, wanted_text
from lightning_dlrover.output import counted, number_text, show
from lightning_dlrover.planner.cluster.division import ClusterJob, divide, options_of
from lightning_dlrover.planner.plan import Decision
from lightning_dlrover.rdzv.job.events import DecisionMade, events_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.report.status import connect_to_job, read_job


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
                raise UsageError(
                    f"job {name!r} has not published any prediction: its planner, which needs a DLRoverCallback in the Trainer "
                    "and so never predicts for a loop of your own, decides for the first time after some steps"
                )
            decision = Decision.from_data(newest.document)
            able = options_of(decision)
            if not able:
                raise UsageError(f"job {name!r} does not know how many cores its workers have; it cannot share a budget")
            jobs.append(ClusterJob(name, able, weight))
            running[name] = place, client, view, decision.current
            devices[name] = "GPUs" if any(c.gpus for c in decision.candidates) else "cores"
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{name} {unit}" for name, unit in devices.items())
            raise UsageError(f"these jobs do not compete for the same: {listed}; divide those of one kind at a time")
        shares = divide(jobs, options.budget)
        for name, share in shares.items():
            check_can_be_planned(running[name][0], running[name][2], share.settings.num_workers)
        for job in jobs:
            share, (place, client, view, current) = shares[job.name], running[job.name]
            settings = {name: getattr(share.settings, name) for name in SETTINGS}
            wanted, unit = wanted_text(share.settings.num_workers, settings), devices[job.name]
            now = next((o for o in job.options if o.settings == current), None)
            beside = f", {share.samples_per_s / now.samples_per_s:.2f} times as many as now" if now else ""
            show(f"job {job.name}: {wanted}: {share.cost:g} {unit}, {number_text(share.samples_per_s)} samples/s{beside}")
            if options.apply:
                reason = f"its share of {options.budget:g} {unit} among {counted(len(jobs), 'job')}: {wanted}"
                plan_by_hand(client, place, view, share.settings.num_workers, settings, reason)
    if not options.apply:
        show("nothing was changed; --apply makes these the jobs' plans")
    return EXIT_OK
