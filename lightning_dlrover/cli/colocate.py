"""`dlrover colocate`: run a queue of training commands side by side on this machine."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK
from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions
from lightning_dlrover.colocate.dispatcher import Rules
from lightning_dlrover.colocate.jobs_file import read_jobs
from lightning_dlrover.colocate.journal import JournalError, Started, read_records
from lightning_dlrover.colocate.queue import REPORT, run_queue
from lightning_dlrover.colocate.summary import summarize, summary_text
from lightning_dlrover.colocate.table import LiveTable
from lightning_dlrover.output import complain, counted, show


def colocate_command(options: argparse.Namespace) -> int:
    """Run all jobs of a file to their ends, and write the report."""
    jobs = read_jobs(options.jobs)
    hurry = threading.Event()
    exit_code = EXIT_OK
    num_starts = _num_starts(options.out)
    with LiveTable() as table:
        try:
            with signals_as_exceptions(hurry):
                run_queue(
                    jobs,
                    options.out,
                    policy=options.policy,
                    devices=options.devices,
                    memory_bytes=(options.memory or 0) << 20,
                    max_parallel=options.max_parallel,
                    profiles=options.profiles,
                    max_wait_s=options.max_wait,
                    seed=options.seed,
                    rules=Rules(probe_s=options.probe, grace_s=options.grace, hang_s=options.hang_after),
                    shown=table.shown,
                    hurry=hurry,
                )
        except Interrupted as interrupted:
            exit_code = 128 + interrupted.signal_number
    summary = summarize(read_records(options.out))
    if exit_code != EXIT_OK:
        left = sum(not job.result for job in summary.jobs)
        have = "has" if left == 1 else "have"
        complain(f"interrupted; the same command continues with {counted(left, 'job')} that {have} not ended")
    show(summary_text(summary))
    if exit_code == EXIT_OK and _num_starts(options.out) == num_starts:
        show("nothing was left to do: all jobs had ended before; another --out runs them again")
    show(f"report: {options.out / REPORT}")
    if exit_code == EXIT_OK and summary.num_done < len(summary.jobs):
        return EXIT_FAILED
    return exit_code


def _num_starts(folder: Path) -> int:
    try:
        return sum(isinstance(record, Started) for record in read_records(folder))
    except JournalError:
        return 0
