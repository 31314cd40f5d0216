"""`dlrover stacks`: collect the stack traces of all workers of a job."""

from __future__ import annotations

import argparse
import time

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job
from lightning_dlrover.output import show
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.live.requests import ask_for_stacks, read_stacks
from lightning_dlrover.report.status import read_job


def stacks_command(options: argparse.Namespace) -> int:
    """Show the stack traces of all workers of a job."""
    with connected_job(options) as (place, client):
        view = read_job(client, place.keys).view
        if not view.survivors:
            raise UsageError(f"job {place.run_id!r} has no workers that train; `dlrover status {place.run_id}` shows why")
        journal = Journal(client, place.keys)
        deadline = time.monotonic() + options.timeout
        while (request := ask_for_stacks(journal, "dlrover stacks", "asked for by `dlrover stacks`")) is None:
            if time.monotonic() > deadline:
                raise UsageError(f"workers of job {place.run_id!r} ask each other again and again; try again in a moment")
        while True:
            answers = {w: a for w, a in read_stacks(journal).items() if a.request >= request.number}
            missing = [w for w in view.survivors if w not in answers]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    for answer in sorted(answers.values(), key=lambda a: a.global_rank):
        waits = ", waits for others in a collective" if answer.in_collective else ""
        show(
            f"{answer.worker_id} (rank {answer.global_rank}, {answer.host}:{answer.pid}, in {answer.phase} "
            f"since {answer.since_s:.1f} s{waits}) is at {answer.place}\n{answer.stacks}\n"
        )
    for worker in missing:
        show(f"{worker} has not answered within {options.timeout:g} s: it has no DLRoverCallback, was stopped, or runs C code")
    return EXIT_FAILED if missing else EXIT_OK
