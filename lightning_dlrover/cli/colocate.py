"""`dlrover colocate`: run a queue of training commands side by side on this machine."""

from __future__ import annotations

import argparse
import threading

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK
from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions
from lightning_dlrover.colocate.dispatcher import Dispatcher, Rules
from lightning_dlrover.colocate.jobs_file import read_jobs
from lightning_dlrover.colocate.journal import Journal
from lightning_dlrover.colocate.knowledge import Knowledge
from lightning_dlrover.colocate.page import write_report
from lightning_dlrover.colocate.places import places_of
from lightning_dlrover.colocate.schedule import Scheduler
from lightning_dlrover.colocate.summary import summary_text
from lightning_dlrover.colocate.table import LiveTable
from lightning_dlrover.output import complain, show


def colocate_command(options: argparse.Namespace) -> int:
    """Run all jobs of a file to their ends, and write the report."""
    specs = read_jobs(options.jobs)
    places = places_of(options.devices, options.memory << 20 if options.memory else 0, options.at_once)
    exit_code = EXIT_OK
    with Journal(options.out) as journal, LiveTable() as table:
        knowledge = Knowledge()
        for folder in options.learn_from:
            knowledge.read(folder)
        knowledge.recall(journal.records)
        scheduler = Scheduler(options.policy, knowledge, seed=options.seed, wait_s=options.longest_wait)
        rules = Rules(probe_s=options.probe, grace_s=options.grace, hang_s=options.hang_after)
        dispatcher = Dispatcher(options.out, journal, places, scheduler, knowledge, rules, table.shown)
        dispatcher.add(specs)
        try:
            with signals_as_exceptions(threading.Event()):
                dispatcher.run()
        except Interrupted as interrupted:
            exit_code = 128 + interrupted.signal_number
            complain(f"interrupted; the same command goes on with the {len(dispatcher.waiting())} jobs that have not ended")
        table.shown(dispatcher)
    show(summary_text(journal.records))
    report = options.out / "report.html"
    write_report(report, journal.records)
    show(f"report: {report}")
    if exit_code == EXIT_OK and any(ended.result != "done" for ended in dispatcher.ended.values()):
        return EXIT_FAILED
    return exit_code
