"""Elastic jobs of `dlrover run` in a queue beside other jobs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lightning_dlrover.colocate.devices import families, tree_use
from lightning_dlrover.colocate.dispatcher import LOOK_S
from lightning_dlrover.colocate.journal import Ended, JobSpec, Journal, read_records
from lightning_dlrover.colocate.running import WatchedJob
from tests.support.colocated_jobs import MIB, dispatcher, place, seated
from tests.support.waiting import eventually, run_until

SCRIPT = Path(__file__).with_name("tiny_script.py")
FASTER_WITH_TWO = ("--global-batch", "8", "--sample-s", "0.03", "--step-s", "0.002", "--only-resizes")
OTHER_MIB, ALL_MIB = 1500, 4500
TIMEOUT_S = 120.0


def elastic(folder: Path, until: Path) -> JobSpec:
    run = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--rdzv-id", "elastic", "--run-dir", str(folder / "runs")]
    return JobSpec("elastic", (*run, "--workers", "1:2", str(SCRIPT), *FASTER_WITH_TWO, "--until", str(until)), str(folder))


def resident(job: WatchedJob) -> int:
    supervisor = job.supervised.supervisor_pid
    return tree_use(families([supervisor])[supervisor]).resident_bytes


@pytest.mark.slow
def test_elastic_job_that_outgrows_its_part_gives_a_worker_up_and_goes_on(tmp_path: Path) -> None:
    until = tmp_path / "until"
    other = seated("other", OTHER_MIB, 20, steps=1_000_000, step_s=0.1)
    with Journal(tmp_path) as journal:
        made = dispatcher(tmp_path, journal, [other, elastic(tmp_path, until)], devices=[place(ALL_MIB)])

        def step() -> None:
            made.look()
            time.sleep(LOOK_S)

        try:
            step()
            job = made.running["elastic"]
            run_until(step, lambda: job.num_processes == 2, "two workers, as the job's planner chooses", TIMEOUT_S)
            before = job.use.resident_bytes
            room = 0.88 * (ALL_MIB - OTHER_MIB) - before / MIB
            (tmp_path / "ballast").write_text(str(int(room / 2)))
            # A look in between would grant what the job has so far, and a quarter more.
            eventually(lambda: resident(job) > before + 0.9 * room * MIB, "its memory", TIMEOUT_S, LOOK_S)
            run_until(step, lambda: job.most_processes == 1, "more memory than there is room for", TIMEOUT_S)
            run_until(step, lambda: job.num_processes == 1, "one worker", TIMEOUT_S)
            steps = job.num_steps
            run_until(step, lambda: job.num_steps > steps + 5, "further steps", TIMEOUT_S)
            until.touch()
            run_until(step, lambda: "elastic" not in made.running, "the job's end", TIMEOUT_S)
        finally:
            made._stop()
    ended = {record.job: record for record in read_records(tmp_path) if isinstance(record, Ended)}
    assert (ended["elastic"].result, ended["elastic"].reason) == ("done", "")
    assert not [span for span in ended["elastic"].spans if span.phase == "paused"]
