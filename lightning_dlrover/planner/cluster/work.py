"""Work of an application: a fixed number of samples, the same for all policies. Traces do not hold it.

A job trains as many epochs as in Pollux's artefact (`simulator/applications.py` in github.com/petuum/adaptdl, branch
osdi21-artifact) on a data set of the size that its validation traces imply. That artefact lets the number of steps depend on
how much a batch teaches; here a global batch never changes, so an epoch is an epoch.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

__all__ = ["RESTART_S", "SAMPLES", "USUAL_BATCHES", "WorkError", "read_work"]

SAMPLES: Mapping[str, int] = {
    "bert": 2 * 88_641,  # SQuAD 1.1 in windows of 384 tokens
    "cifar10": 100 * 50_000,
    "deepspeech2": 80 * 7_135,  # utterances of CMU Arctic
    "imagenet": 90 * 1_281_167,
    "ncf": 10 * 4_970_845,  # MovieLens 1M with four negatives for each rating
    "yolov3": 50 * 16_551,  # PASCAL VOC 2007 and 2012
}
"""Samples that a job of each application reads before it ends: epochs times samples of its data set."""

MAX_SAMPLES = 10**11
"""Largest work of a job: a thousand times that of any here."""

RESTART_S: Mapping[str, float] = {
    "bert": 120.0,
    "cifar10": 30.0,
    "deepspeech2": 25.0,
    "imagenet": 250.0,
    "ncf": 15.0,
    "yolov3": 45.0,
}
"""Seconds that a restart from a checkpoint costs, as Sia's artefact takes them (Subramanya et al., SOSP 2023)."""

USUAL_BATCHES: Mapping[str, tuple[int, ...]] = {
    "bert": (384,),
    "cifar10": (2048, 4096),
    "deepspeech2": (320, 640),
    "imagenet": (3200, 6400),
    "ncf": (32768,),
    "yolov3": (64,),
}
"""Global batches that jobs of Pollux's workloads ask for, for traces that hold none."""


class WorkError(ValueError):
    """A file of work that cannot be used; the message names the line."""


def read_work(path: Path) -> dict[str, int]:
    """Read samples by application from a CSV file with the columns `application` and `samples`.

    Raises:
        WorkError: with file and line.
        OSError: the file cannot be read.
    """
    reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
    missing = [column for column in ("application", "samples") if column not in (reader.fieldnames or ())]
    if missing:
        raise WorkError(f"{path}:1: no column {' and '.join(missing)}; the columns are application and samples")
    found: dict[str, int] = {}
    for row in reader:
        try:
            samples = float(row["samples"])
        except (TypeError, ValueError):
            samples = math.nan
        if not (math.isfinite(samples) and samples >= 1):
            raise WorkError(f"{path}:{reader.line_num}: samples is {row['samples']!r}; it is a number above 0")
        if samples > MAX_SAMPLES:
            raise WorkError(f"{path}:{reader.line_num}: samples is {row['samples']}, and the largest is {MAX_SAMPLES:,}")
        if not row["application"]:
            raise WorkError(f"{path}:{reader.line_num}: the application has no name")
        found[row["application"]] = round(samples)
    return found
