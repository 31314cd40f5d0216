"""Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019), preemptive, sizes as asked.

Attained service is devices times seconds. Jobs below `THRESHOLD_DEVICE_S` are in the first queue, others in the second;
within a queue, first come first served. A job of the second queue that has waited `PROMOTE_KNOB` times as long as it ran goes
back to the first, where it stays until it has had another `THRESHOLD_DEVICE_S`. The threshold is that of the Tiresias in
Pollux's artefact.

Differences: service is weighed by a job's weight. The state holds the service of all of a job's runs, so the time that it ran
is that over its size. Queues are updated at each decision. Tiresias places skewed models only on few nodes, and lets others
be split; here all jobs have the shared placement. Its variant with Gittins indices is not there.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import first_fits

__all__ = ["PROMOTE_KNOB", "THRESHOLD_DEVICE_S", "las"]

THRESHOLD_DEVICE_S = 16 * 3600.0
"""Device seconds after which a job leaves the first queue."""

PROMOTE_KNOB = 8.0
"""Time waited over time run from which a job is promoted."""


def las(share: Share) -> Ints:
    """Return the sizes."""
    served = np.array([job.served_device_s for job in share.jobs])
    waits_since_s = np.array([job.waits_since_s for job in share.jobs])
    runs = share.present > 0
    since_start = np.where(runs, (share.now_s - share.since_s) * share.present, 0.0)
    ran_s = np.maximum(served - since_start, 0.0) / share.asked  # before the last wait
    waited_s = np.where(runs, share.since_s, share.now_s) - waits_since_s
    is_promoted = (ran_s > 0) & (waited_s >= PROMOTE_KNOB * ran_s) & (since_start < THRESHOLD_DEVICE_S * share.weights)
    in_second = (served >= THRESHOLD_DEVICE_S * share.weights) & ~is_promoted
    order = sorted(range(len(share.jobs)), key=lambda i: (bool(in_second[i]), share.jobs[i].submitted_s, share.jobs[i].name))
    return first_fits(share, order, share.asked)
