"""The file of finished simulations: one record for each, on disk as soon as it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.record_file import RecordFile, RecordForm

__all__ = ["BY_MODEL", "FILE_NAME", "LIVE", "Results", "ResultsError", "Simulated"]

FILE_NAME = "simulations.jsonl"
BY_MODEL: Literal["by-model"] = "by-model"
LIVE: Literal["live"] = "live"
"""Costs of a resize that are no number of seconds."""
FORMAT = 1


class ResultsError(ValueError):
    """A folder of simulations that cannot be continued."""


@dataclass(frozen=True)
class Header:
    """First line of the file."""

    format: int


@dataclass(frozen=True)
class Simulated:
    """One finished simulation. Lists of jobs are in the order of their ends; times are seconds of the simulation.

    Args:
        key: of all inputs.
        cost: seconds of a resize, `by-model`, or `live`.
        fairness: JCT of each job over its JCT alone with a fair share.
        spans: number of a job in the lists, begin, end, number of devices; for each stretch on the same devices.
    """

    key: str
    trace: str
    policy: str
    cost: str
    seed: int
    num_devices: int
    busy_device_s: float
    decisions: int
    jobs: list[str]
    applications: list[str]
    submitted: list[float]
    started: list[float]
    ended: list[float]
    resizes: list[int]
    fairness: list[float]
    spans: list[list[float]]

    @property
    def shown_cost(self) -> str:
        """The cost with its unit, if it has one."""
        return self.cost if self.cost in (BY_MODEL, LIVE) else f"{self.cost} s"

    @property
    def completions_s(self) -> NDArray[np.float64]:
        """JCT of each job, shape ``(num_jobs,)``."""
        completions: NDArray[np.float64] = np.array(self.ended) - np.array(self.submitted)
        return completions

    @property
    def mean_completion_s(self) -> float:
        return float(self.completions_s.mean())

    @property
    def median_completion_s(self) -> float:
        return float(np.median(self.completions_s))

    @property
    def p99_completion_s(self) -> float:
        return float(np.quantile(self.completions_s, 0.99))

    @property
    def makespan_s(self) -> float:
        return max(self.ended) - min(self.submitted)

    @property
    def utilisation(self) -> float:
        """Fraction of the devices' time in which a job had them."""
        return self.busy_device_s / (self.num_devices * self.makespan_s) if self.makespan_s else 0.0

    @property
    def resizes_per_job(self) -> float:
        return sum(self.resizes) / len(self.resizes)

    @property
    def unfairness(self) -> float:
        """Largest ratio of a job's JCT to its JCT alone with a fair share."""
        return max(self.fairness)


FORM: RecordForm[Header] = RecordForm(
    header=Header,
    records={"simulated": Simulated},
    format=FORMAT,
    file_of="simulations",
    line_of="a record of a simulation",
    user="dlrover lab simulate",
    error=ResultsError,
)


class Results(RecordFile[Header]):
    """The finished simulations of a folder by key. Use as a context manager.

    Raises:
        ResultsError: another process adds to the folder, or its file has another form.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, FORM, Header(FORMAT))
        self._by_key = {record.key: record for record in self.records}

    @property
    def by_key(self) -> Mapping[str, Simulated]:
        return self._by_key

    def add(self, record: Simulated) -> None:
        super().add(record)
        self._by_key[record.key] = record
