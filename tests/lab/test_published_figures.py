"""Policies of papers give the figures of their papers, or of their artefacts as far as this simulator follows these."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_dlrover.lab.simulate.baselines import EXPONENT, make_elastic
from lightning_dlrover.lab.simulate.knowledge import run_elastic
from lightning_dlrover.lab.simulate.simulator import Arrival, Cluster, elastic_workload, simulate
from lightning_dlrover.lab.simulate.traces import read_applications, read_submissions
from lightning_dlrover.tuning.cluster import PolicySettings
from tests.support.elastic_jobs import Table, cluster, job

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DLROVER_SHARED_DATA", ROOT.parent / "shared" / "data"))
WORKLOAD = DATA / "job_traces" / "pollux" / "workload-1.csv"


@pytest.mark.skipif(not WORKLOAD.is_file(), reason=f"no {WORKLOAD}: set DLROVER_SHARED_DATA to the folder of job_traces")
@pytest.mark.parametrize("policy, hours_there, ratio", [("pollux", 0.58, 0.74), ("las", 0.69, 0.67), ("optimus", 1.14, 0.48)])
def test_mean_jct_of_the_first_workload_is_a_known_part_of_that_in_the_artefact_of_pollux(
    policy: str, hours_there: float, ratio: float
) -> None:
    """The artefact waits for full minutes and trains to a score; docs/lab/cluster_settings.md explains the differences."""
    applications, nodes = read_applications(DATA / "step_traces"), Cluster(16, 4)
    jobs = read_submissions(WORKLOAD.read_text().splitlines(), WORKLOAD.name, applications, nodes.num_devices)
    load = elastic_workload(jobs, applications, nodes, start_s=30.0, change_s=30.0)
    outcome = run_elastic(load, make_elastic(policy, PolicySettings(max_wait_s=math.inf)))
    assert outcome.mean_completion_s / 3600 / hours_there == pytest.approx(ratio, rel=0.06)


def test_hesrpt_has_the_total_completion_time_of_its_theorem() -> None:
    """With sizes x_1 >= ... >= x_m on n servers it is sum_k x_k (k^q - (k - 1)^q)^(1 - p) / n^p, with q = 1 / (1 - p)."""
    sizes, num_devices, q = np.array([9000.0, 5000.0, 2500.0, 1000.0]), 128, 1 / (1 - EXPONENT)
    k = np.arange(1, len(sizes) + 1)
    expected = float((sizes * (k**q - (k - 1) ** q) ** (1 - EXPONENT)).sum() / num_devices**EXPONENT)
    powers = Table(tuple(n**EXPONENT for n in range(1, num_devices + 1)))
    arrivals = [
        Arrival(job(f"j{size:g}", steps_left=size, scaling=powers, max_devices=num_devices, num_devices=1), size)
        for size in sizes
    ]
    outcome = simulate(
        arrivals,
        cluster(1, num_devices),
        make_elastic("hesrpt"),
        lambda one, devices, others: len(devices) ** EXPONENT,
        every_s=None,
    )
    assert sum(done.completion_s for done in outcome.finished) == pytest.approx(expected, rel=0.01)


def test_srtf_has_the_least_mean_completion_time_on_one_device() -> None:
    """Schrage's theorem, by hand: a job of 3 s that comes at 1 s passes one of 10 s, and one of 1 s passes both."""
    arrivals = [
        Arrival(job(name, steps_left=steps, submitted_s=at_s, scaling=Table((1.0, 1.0)), num_devices=1, max_devices=2), steps)
        for name, steps, at_s in (("long", 10.0, 0.0), ("short", 3.0, 1.0), ("shortest", 1.0, 2.0))
    ]
    outcome = simulate(arrivals, cluster(1, 1), make_elastic("srtf"), lambda one, devices, others: 1.0, every_s=None)
    assert {done.job.name: done.ended_s for done in outcome.finished} == {"shortest": 3, "short": 5, "long": 14}
