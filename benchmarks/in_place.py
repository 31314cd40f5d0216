"""A node that gets more cores and memory while it trains, and a leak that gets them before it is killed; see `deploy.py`.

On this machine a node has bound cores and a control group. On the tests' Kubernetes cluster its pod is resized, and the
cluster's kubelet limits the pod's processes by control groups.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
from jobs import TRAINING, BenchmarkError, ControlledJob, Workspace
from live_resize import Size
from memory_growth import SCRIPT as LEAKING_SCRIPT

from lightning_dlrover.components.targets.machine import MemoryGroups, NoMemoryGroupsError
from tests.support import pod_limits
from tests.support.kubernetes_cluster import kubernetes_cluster

TARGETS = ("local", "kubernetes")
SMALL_MIB, LARGE_MIB = 2000, 3000
LEAK_SIZES_MIB = (1200, 2600)
LEAK_MIB_PER_STEP, LEAK_STEPS = 3, 500  # 1500 MiB in addition to the 400 of Python and its libraries
LEAK_S = 300.0
CHANGE_S = 60.0


@dataclass(frozen=True)
class InPlace:
    """One change of a node's size; times in seconds."""

    target: str
    stall_s: float  # longest time between two steps around the change, less a usual step
    usual_step_s: float
    longest_before_s: float  # longest time between two steps of the same number before the change
    carried_out_s: float  # from the plan to the worker's computing with more threads

    def __str__(self) -> str:
        return (
            f"{self.target}: 1 -> 2 cores, {SMALL_MIB} -> {LARGE_MIB} MiB in {self.carried_out_s:.2f} s; "
            f"stall {self.stall_s:.3f} s (usual step {self.usual_step_s:.3f} s, longest of the steps before "
            f"{self.longest_before_s:.3f} s), no process started"
        )


@dataclass(frozen=True)
class Leak:
    """A job whose worker leaks memory."""

    target: str
    finished: bool
    peak_mib: float  # of the worker
    num_raised: int  # changes of its node's memory
    num_started: int  # workers and nodes started after the first one


def why_not() -> str:
    """Return why this machine cannot limit nodes and pods; empty if it can."""
    try:
        MemoryGroups().close()
    except NoMemoryGroupsError as error:
        return str(error)
    return pod_limits.why_not()


def family() -> set[int]:
    """Return the ids of all processes below this one: the job's command, its nodes, pods, workers and their children."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextlib.contextmanager
def nodes_of(
    target: str,
    space: Workspace,
    endpoint: str,
    name: str,
    arguments: Sequence[str],
    script: Path = TRAINING,
    memory_mib: tuple[int, int] = (SMALL_MIB, LARGE_MIB),
) -> Iterator[ControlledJob]:
    """Start a job of one worker on a node of one core that may have two, and more memory."""
    sizes = ("--cpus", "1:2", "--mem", f"{memory_mib[0]}M:{memory_mib[1]}M")
    with contextlib.ExitStack() as stack:
        options: tuple[str, ...] = ("--target", target, *sizes)
        if target == "kubernetes":
            folder = space.folder / f"{name}-cluster"
            folder.mkdir()
            cluster = stack.enter_context(kubernetes_cluster(folder, limits_pods=True))
            cluster.environment["OMP_NUM_THREADS"] = "1"
            options = (*options, "--image", "trainer:1")
        job = stack.enter_context(space.controlled_job(name, endpoint, arguments, script))
        if target == "kubernetes":
            job.environment["KUBECONFIG"] = str(cluster.kubeconfig)
        job.start(1, 1, *options)
        yield job


def change(target: str, space: Workspace, endpoint: str, name: str, size: Size) -> InPlace:
    """Double a training node's cores and memory.

    Raises:
        BenchmarkError: a process was started, or the node was not enlarged.
    """
    with nodes_of(target, space, endpoint, name, size.arguments) as job:
        job.wait_for_steps(3 * size.steady_steps, 1)
        before = family()
        asked_s = time.monotonic()
        job.plan(1, node_cpus=2, node_memory_mb=LARGE_MIB, intra_op_threads=0)

        def with_two_threads() -> float | None:
            at = [event.at for event in job.events("settings") if event.data["intra_op_threads"] == 2]
            return min(at) - time.time() + time.monotonic() if at else None

        done_s = job.wait_for("two threads", with_two_threads, CHANGE_S, poll_s=0.1)
        job.wait_for("its record", lambda: _is_large(job) or None, CHANGE_S)
        job.wait_for_steps(size.steady_steps, 1, since_s=time.monotonic())
        if started := family() - before:
            raise BenchmarkError(f"{name}: processes {sorted(started)} were started")
        if len(job.nodes()) != 1 or len({step.pid for step in job.steps()}) != 1:
            raise BenchmarkError(f"{name}: another node or worker was started: {job.nodes()}")
        ended = sorted(step.ended_s for step in job.steps())
        gaps = [(later, later - earlier) for earlier, later in pairwise(ended)]
        num_around = sum(asked_s <= at <= done_s for at, _ in gaps) + 2
        before_s = [gap for at, gap in gaps if at < asked_s][-num_around:]
        after_s = [gap for at, gap in gaps if at > done_s]
        # Each step is compared with others of its number of threads.
        changing = [gap - median(before_s) for at, gap in gaps if asked_s <= at <= done_s]
        changing += [gap - median(after_s) for gap in after_s[:2]]
        return InPlace(target, max(0.0, *changing), median(before_s), max(before_s), done_s - asked_s)


def _is_large(job: ControlledJob) -> bool:
    return [(record.cpus, record.memory_mb) for record in job.nodes().values()] == [(2, LARGE_MIB)]


def leak(target: str, space: Workspace, endpoint: str, name: str) -> Leak:
    """Run a job whose worker takes more memory than its node has at first, to its end."""
    finished = space.folder / f"{name}.finished"
    arguments = ["--what", "leak", "--bytes-per-step", str(LEAK_MIB_PER_STEP << 20), "--max-steps", str(LEAK_STEPS)]
    arguments += ["--finished", str(finished)]
    with nodes_of(target, space, endpoint, name, arguments, LEAKING_SCRIPT, LEAK_SIZES_MIB) as job:
        pids: set[int] = set()
        peak = 0

        def look() -> bool | None:
            nonlocal peak
            if finished.exists() or job.agents[0].poll() is not None:
                return True
            for pid in job.member_pids():
                pids.add(pid)
                with contextlib.suppress(psutil.Error):
                    peak = max(peak, psutil.Process(pid).memory_info().rss)
            return None

        job.wait_for("the end of the leaking job", look, LEAK_S, poll_s=0.2)
        made = int(finished.read_text()) if finished.exists() else 0
        for event in [*job.events("memory"), *job.events("node_size")]:
            print(f"  {event.text}", flush=True)
        num_raised = sum(event.data["act"] == "resized" for event in job.events("node_size"))
        num_started = len(pids) - 1 + len(job.nodes()) - 1
    return Leak(target, made == LEAK_STEPS, peak / 2**20, num_raised, num_started)


def measure(space: Workspace, size: Size, num_rounds: int) -> dict[str, float]:
    """Return the figures for the last line of `deploy.py`; print each change.

    Raises:
        BenchmarkError: a process was started, a stall was longer than a step, or a leak was killed.
    """
    endpoint = space.etcd().endpoint
    stalls: dict[str, float] = {}
    for target in TARGETS:
        changes = []
        for number in range(num_rounds):
            changes.append(change(target, space, endpoint, f"{target}-in-place-{number}", size))
            print(changes[-1], flush=True)
        stalls[target] = median(each.stall_s for each in changes)
        if stalls[target] > (step_s := median(each.usual_step_s for each in changes)):
            raise BenchmarkError(f"{target}: the stall of {stalls[target]:.3f} s is longer than a step of {step_s:.3f} s")
    for target in TARGETS:
        found = leak(target, space, endpoint, f"{target}-leak")
        print(
            f"{target}: a leak {'finished' if found.finished else 'did not finish'} with {found.peak_mib:.0f} MiB on a node "
            f"that had {LEAK_SIZES_MIB[0]}; its memory was raised {found.num_raised} times, and {found.num_started} nodes or "
            "workers were started for it",
            flush=True,
        )
        if not found.finished or found.num_started or found.peak_mib < LEAK_SIZES_MIB[0]:
            raise BenchmarkError(f"{target}: the leak has not finished in place: {found}")
    named = {f"{target}_in_place_stall_s": stall_s for target, stall_s in stalls.items()}
    return {**named, "leaks_finished": float(len(TARGETS)), "in_place_stall_s": max(stalls.values())}
