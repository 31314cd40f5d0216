"""Workloads of other loads and sources: the same jobs with more or fewer arrivals, and jobs of ElasticFlow and Gavel.

ElasticFlow's traces name no model, so each job gets one of the known applications (see `workloads`). Gavel's jobs name models,
which are taken for the application that is most like them: `LIKE`. In both, a job makes the steps that its application would
have made in the job's duration with the devices that it asked for; Gavel's durations are its steps over its measured speed on
that number of V100. Only the first `NUM_JOBS` jobs of a file count, as many as in Pollux's workloads. Their arrivals are drawn
out or together evenly, so that the device seconds asked for are those of the cluster from the first arrival to the last.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs import BenchmarkError

from lightning_dlrover.lab.simulate.study import Inputs, Trace
from lightning_dlrover.lab.simulate.traces import USUAL_BATCHES, MeasuredApplication, Submission, read_submissions

NUM_JOBS = 160
DEVICE = "v100"
LIKE = {
    "ResNet-18": "cifar10",  # the same model and data
    "ResNet-50": "imagenet",  # the same model and data
    "Recommendation": "ncf",  # recommenders
    "Transformer": "bert",  # attention
    "LM": "deepspeech2",  # recurrent
    "CycleGAN": "yolov3",  # convolutions on images
    "A3C": "yolov3",
}
"""The application that each of Gavel's models is taken for."""


def first_jobs(trace: Trace, number: int) -> Trace:
    """Return a trace of the first jobs of one."""
    return replace(trace, submissions=trace.submissions[:number], digest=f"{trace.digest}, first {number}")


def at_load(trace: Trace, load: float) -> Trace:
    """Return the trace with so many times as many arrivals in the same time."""
    moved = tuple(replace(job, at_s=job.at_s / load) for job in trace.submissions)
    return Trace(f"{trace.name} x {load:g}", moved, f"{trace.digest}, load {load:g}")


def read_elsewhere(path: Path, inputs: Inputs) -> Trace:
    """Read a trace in ElasticFlow's form, or Gavel's `jobs-N.csv` with `throughputs.csv` in the same folder.

    Raises:
        BenchmarkError: the speed of one of Gavel's jobs is missing.
        ValueError: the trace cannot be used.
        OSError: a file cannot be read.
    """
    num_devices = inputs.cluster.num_devices
    if path.name.startswith("jobs-"):
        source, jobs = "gavel", _gavel(path, inputs)
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        source, jobs = "elasticflow", read_submissions(lines, str(path), inputs.applications, num_devices)[:NUM_JOBS]
    digest = f"{hashlib.sha256(path.read_bytes()).hexdigest()}, first {NUM_JOBS}"
    return Trace(f"{source}-{path.stem}", _spread(jobs, num_devices), digest)


def _gavel(path: Path, inputs: Inputs) -> list[Submission]:
    with (path.parent / "throughputs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == DEVICE]
    speeds = {(row["job"], row["num_devices"]): float(row["steps_per_s"]) for row in rows}
    jobs: list[Submission] = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if len(jobs) == NUM_JOBS:
                break
            speed = speeds.get((row["job"], row["num_devices"])) or speeds.get((row["job"], "1"))
            if not speed:
                raise BenchmarkError(f"{path}:{number + 2}: the speed of {row['job']!r} is not in throughputs.csv of {DEVICE}")
            application = LIKE[re.sub(r" \(.*", "", row["job"])]
            jobs.append(_submission(f"{application}-{number}", application, row, speed, inputs.applications[application]))
    return jobs


def _submission(name: str, like: str, row: dict[str, str], speed: float, application: MeasuredApplication) -> Submission:
    batch = max(USUAL_BATCHES[like])
    devices = min(int(row["num_devices"]), application.most_devices(batch))
    return Submission(name, like, float(row["arrival_s"]), devices, batch, float(row["total_steps"]) / speed)


def _spread(jobs: Sequence[Submission], num_devices: int) -> tuple[Submission, ...]:
    """Move arrivals so that the device seconds asked for are those of the cluster until the last one."""
    first, last = jobs[0].at_s, jobs[-1].at_s
    asked = sum(job.num_devices * (job.duration_s or 0.0) for job in jobs)
    factor = asked / num_devices / max(last - first, 1.0)
    return tuple(replace(job, at_s=(job.at_s - first) * factor) for job in jobs)
