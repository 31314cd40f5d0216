"""Run a queue of jobs: the Python side of `dlrover colocate`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_dlrover.colocate.dispatcher import Dispatcher, Rules, end_former
from lightning_dlrover.colocate.gpus import GpuWatch, find_gpus
from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.journal import Added, Journal
from lightning_dlrover.colocate.knowledge import Knowledge
from lightning_dlrover.colocate.page import write_report
from lightning_dlrover.colocate.places import LocalDevice, gpus_of, places_of
from lightning_dlrover.colocate.schedule import Scheduler, jobs_per_core
from lightning_dlrover.colocate.summary import Summary, summarize
from lightning_dlrover.observe.nvml import load_nvml

__all__ = ["REPORT", "run_queue"]

log = logging.getLogger(__name__)

REPORT = "report.html"


def run_queue(
    jobs: Sequence[JobSpec],
    folder: Path,
    *,
    policy: str = "complementary",
    devices: Sequence[str] = ("cpu",),
    memory_bytes: int = 0,
    max_parallel: int = 0,
    profiles: Sequence[Path] = (),
    max_wait_s: float = 3600.0,
    seed: int = 0,
    rules: Rules | None = None,
    shown: Callable[[Dispatcher], None] = lambda _: None,
    hurry: threading.Event | None = None,
) -> Summary:
    """Run jobs side by side to their ends, and write `report.html` into the folder.

    A folder of an earlier call goes on: jobs that are done stay done. Call it from the main thread: the jobs end with it.

    Args:
        jobs: commands with their working folders and variables.
        folder: for the journal, the jobs' output and the report.
        policy: a name in `planner/cluster/policies`.
        devices: `cpu`, sets of cores such as `cpu:0-3`, or GPUs such as `gpu:0` or, with its cores, `gpu:0:0-7`.
        memory_bytes: host memory for all jobs; 0: most of the free memory.
        max_parallel: most jobs of a device at once; 0: twice its cores, or four times with `complementary`; on a GPU
            no more than 8, or 16.
        profiles: folders of earlier queues; their measurements count, too.
        max_wait_s: a job that waits longer goes first.
        seed: for the policy `random_sets`.
        shown: called after each look at the jobs.
        hurry: when set, jobs that end get no more grace period.

    Raises:
        ValueError: a device, the policy, a folder of an earlier queue or a changed job cannot be used.
        OSError: the folder cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from lightning_dlrover.colocate import read_jobs
        >>> jobs = read_jobs(Path("jobs.yaml"))  # doctest: +SKIP
        >>> summary = run_queue(jobs, Path("queue"), devices=["cpu:0-3"])  # starts the jobs' processes  # doctest: +SKIP
    """
    wanted = gpus_of(devices)
    nvml = load_nvml() if wanted else None
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(folder))
        end_former(journal.queue)  # their memory is free for this queue
        gpus = find_gpus(nvml, wanted) if nvml is not None else {}
        devices = _used_devices(devices, [*jobs, *(record.spec for record in journal.records if isinstance(record, Added))])
        places = places_of(devices, memory_bytes, max_parallel, jobs_per_core(policy), gpus=gpus)
        _refuse_too_large(jobs, places)
        knowledge = Knowledge(device_kinds={place.name: place.kind for place in places})
        for earlier in profiles:
            knowledge.read(earlier)
        shared = [place.gpu for place in places if place.gpu is not None]
        watch = stack.enter_context(GpuWatch(nvml, shared)) if shared else None
        knowledge.recall(journal.records)
        scheduler = Scheduler(policy, knowledge, seed, max_wait_s, max(place.most_jobs for place in places))
        dispatcher = Dispatcher(folder, journal, places, scheduler, knowledge, rules, shown, hurry, gpu_watch=watch)
        dispatcher.add(jobs)
        try:
            dispatcher.run()
        finally:
            shown(dispatcher)
            write_report(folder / REPORT, journal.records)
        return summarize(journal.records)


def _refuse_too_large(jobs: Sequence[JobSpec], places: Sequence[LocalDevice]) -> None:
    """Refuse a job whose stated memory no device has.

    Raises:
        ValueError: with both figures.
    """
    for job in jobs:
        able = [place for place in places if job.device in ("any", place.where)]
        for name, needed, has in (
            ("memory", job.memory_bytes, max((place.memory_bytes for place in able), default=0)),
            ("gpu_memory", job.gpu_memory_bytes, max((place.gpu_bytes for place in able), default=0)),
        ):
            if has and needed > has:
                raise ValueError(
                    f"job {job.name!r}: {name} is {needed >> 20} MiB, and the largest device has {has >> 20} MiB for jobs; "
                    "state the job's real peak, or run it elsewhere"
                )


def _used_devices(devices: Sequence[str], jobs: Sequence[JobSpec]) -> Sequence[str]:
    """Leave `cpu` out if all jobs ask for GPUs, which then get its share of the host."""
    if "cpu" not in devices or not gpus_of(devices) or any(job.device != "gpu" for job in jobs):
        return devices
    log.warning("all jobs have `device: gpu`: they get all cores")
    return [device for device in devices if device != "cpu"]
