"""Many jobs on one cluster: their places, neighbours and sizes. Pure, as all of `planner`."""

from lightning_dlrover.planner.cluster.jobs import HOST_RESOURCES, RESOURCES, Allocation, Device, Job, Profile, Running, State
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings, SpeedPredictor, Undisturbed

__all__ = [
    "HOST_RESOURCES",
    "RESOURCES",
    "Allocation",
    "Device",
    "Job",
    "Policy",
    "PolicySettings",
    "Profile",
    "Running",
    "SpeedPredictor",
    "State",
    "Undisturbed",
]
