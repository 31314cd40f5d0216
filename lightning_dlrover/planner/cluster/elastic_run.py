"""One simulation of elastic jobs under a policy, and how fairly each of them was treated."""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic_jobs import ElasticTruth, ElasticWorkload
from lightning_dlrover.planner.cluster.knowledge import LearnedKnowledge, PerfectKnowledge
from lightning_dlrover.planner.cluster.outcome import SimulationOutcome
from lightning_dlrover.planner.cluster.policy import Floats, Policy
from lightning_dlrover.planner.cluster.simulator import simulate

__all__ = ["fairness_ratios", "run_elastic"]


def run_elastic(
    workload: ElasticWorkload, policy: Policy, *, every_s: float = 60.0, seed: int = 0, oracle: bool = False
) -> SimulationOutcome:
    """Simulate all jobs of a workload to their ends.

    Args:
        every_s: seconds between decisions, beside those when a job comes or ends.
        seed: of the noise in windows.
        oracle: let the policy know the real speed of every job at every size.
    Raises:
        SimulationError: the policy exceeds a limit, or leaves jobs waiting for ever.
    """
    knowledge: PerfectKnowledge | LearnedKnowledge
    if oracle:
        knowledge = PerfectKnowledge(workload.families, workload.cluster)
    else:
        knowledge = LearnedKnowledge(workload.families, workload.cluster, seed)
    return simulate(
        workload.arrivals,
        workload.cluster.devices(),
        policy,
        ElasticTruth(workload.families),
        every_s=every_s,
        knowledge=knowledge,
    )


def fairness_ratios(outcome: SimulationOutcome, workload: ElasticWorkload) -> Floats:
    """Return the finish-time fairness of each job, in the order of `outcome.finished` (Themis, Mahajan et al., NSDI 2020).

    It is the job's JCT over its JCT alone with a fair share. That share is the devices of the cluster over the mean number of
    jobs that were in the system during the job's life. Alone, the job has its best size within that share from its submission
    on. Above 1, sharing has made it slower than a partition of the cluster would have.

    Returns:
        Array of shape ``(num_jobs,)``.
    """
    finished = outcome.finished
    came = np.array([job.job.submitted_s for job in finished])
    ended = np.array([job.ended_s for job in finished])
    contention = _mean_in_system(came, ended)
    ratios = []
    for job, others in zip(finished, contention.tolist(), strict=True):
        family = workload.families[job.job.family]
        share = min(family.max_devices, max(1, int(outcome.num_devices / others)))
        fastest = max(family.steps_per_s(workload.cluster.packed(devices)) for devices in range(1, share + 1))
        ratios.append(job.completion_s / (job.job.start_s + job.steps / fastest))
    return np.array(ratios)


def _mean_in_system(came: Floats, ended: Floats) -> Floats:
    """Return the mean number of jobs in the system during the life of each."""
    times = np.concatenate([came, ended])
    changes = np.concatenate([np.ones(len(came)), -np.ones(len(ended))])
    order = np.argsort(times, kind="stable")
    times, present = times[order], np.cumsum(changes[order])
    job_seconds = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])
    total = np.interp(ended, times, job_seconds) - np.interp(came, times, job_seconds)
    mean: Floats = total / np.maximum(ended - came, 1e-9)
    return np.maximum(mean, 1.0)
