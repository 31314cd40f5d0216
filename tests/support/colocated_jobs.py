"""Small jobs for a dispatcher: Python without torch, with an admission client or without one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_dlrover.colocate.dispatcher import Dispatcher, Rules, end_former
from lightning_dlrover.colocate.journal import JobSpec, Journal
from lightning_dlrover.colocate.scheduler import Knowledge, Scheduler
from lightning_dlrover.colocate.tenants import LocalDevice

MIB = 1 << 20

SEATED = textwrap.dedent(
    """
    import dataclasses, os, sys, time
    from lightning_dlrover.colocate.admission_client import AdmissionClient, AdmissionReport
    estimate_mib, used_mib, steps, step_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    client = AdmissionClient.from_environment(os.environ, 0)
    gpu = int(os.environ.get("GPU_ESTIMATE_MIB", 0)) << 20, int(os.environ.get("GPU_MIB", 0)) << 20
    client.ask(AdmissionReport(os.getpid(), time.monotonic(), estimate_bytes=estimate_mib << 20, gpu_estimate_bytes=gpu[0]))
    if "FAKE_GPU" in os.environ:
        with open(os.path.join(os.environ["FAKE_GPU"], str(os.getpid())), "w") as stream:
            stream.write(str(gpu[1]))
    used = bytearray(used_mib << 20)
    used[::4096] = b"x" * len(used[::4096])
    for step in range(steps):
        if len(sys.argv) > 5 and os.path.exists(sys.argv[5]):
            break
        time.sleep(step_s)
        client.step_ended(0.0)
        if client.is_due:
            client.report(steps - step - 1, 1, gpu_bytes=(gpu[1], gpu[1]))
    """
)
"""A job that asks for some memory, takes some, and makes steps, or fewer once a file exists. Variables name its GPU memory."""


def seated(
    name: str,
    estimate_mib: int,
    used_mib: int,
    steps: int = 20,
    step_s: float = 0.01,
    priority: int = 0,
    until: Path | None = None,
) -> JobSpec:
    """Return a job that asks for some memory and uses as much or more."""
    arguments = [*map(str, (estimate_mib, used_mib, steps, step_s)), *([str(until)] if until is not None else [])]
    return JobSpec(name, (sys.executable, "-c", SEATED, *arguments), "/", priority=priority)


def on_gpu(spec: JobSpec, folder: Path, estimate_mib: int, used_mib: int) -> JobSpec:
    """Return a seated job that also asks for memory of a GPU, and takes it from the first one of a `FakeNvml`."""
    (folder / "0").mkdir(parents=True, exist_ok=True)
    variables = {"GPU_ESTIMATE_MIB": str(estimate_mib), "GPU_MIB": str(used_mib), "FAKE_GPU": str(folder / "0")}
    return replace(spec, env=variables, device="gpu")


def python(name: str, program: str, priority: int = 0, memory_bytes: int = 0) -> JobSpec:
    """Return a job that runs a program of Python and reports nothing."""
    return JobSpec(name, (sys.executable, "-c", program), "/", priority=priority, memory_bytes=memory_bytes)


def place(memory_mib: int = 4096, most_jobs: int = 4, num_cores: float = 2.0, name: str = "cpu") -> LocalDevice:
    """Return a place on any core."""
    return LocalDevice(name, "cpu", (), num_cores, memory_mib * MIB, most_jobs)


def dispatcher(
    folder: Path,
    journal: Journal,
    specs: Sequence[JobSpec],
    policy: str = "fifo",
    devices: Sequence[LocalDevice] = (),
    rules: Rules | None = None,
) -> Dispatcher:
    """Return a dispatcher with these jobs in its queue, as `run_queue` makes it."""
    end_former(journal.queue)
    knowledge = Knowledge()
    knowledge.recall(journal.records)
    rules = rules or Rules(probe_s=0.2, grace_s=1.0)
    made = Dispatcher(folder, journal, devices or [place()], Scheduler(policy, knowledge), knowledge, rules)
    made.add(specs)
    return made
