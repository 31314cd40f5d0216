"""Time from the decision to add a worker until it trains, and its effect on the other workers.

    python benchmarks/deploy.py [--rounds N] [--workers N] [--spares 1] [--quick]
    python benchmarks/deploy.py --api [--quick]
    python benchmarks/deploy.py --in-place [--quick]

A job of `dlrover run` trains the model of `live_resize.py` with one worker. It runs in turn on this machine and on a real
Slurm started for it (one slurmctld, a slurmd per host, all here). Then its plan asks for two, as `dlrover scale` writes it:
the controller requests another node, whose agent and worker start while the first one trains on. With several workers before
(`--workers`), they share this machine's cores with the new one's imports. On a cluster they would not.

    plan seen        from the plan in etcd to the controller's recorded request for a node
    scheduler        from there to the node's first process: TorchX's local scheduler, or sbatch and Slurm
    agent            to the start of the worker's process: the imports of an elastic agent, and its rendezvous
    imports          to the worker's registration as a standby: torch, lightning, the script
    model and data   to its `ready`
    round            until the round with it is written
    switch           until the end of the first step in it, including that step

Decision to training is the sum of them all. Stall is as in `live_resize.py`: from the end of a survivor's last step before the
change to that of its first one after it, less one usual step. Two figures accompany it: the job's own `stall` event, and the
others' steps per second from the decision to their last step before the switch, as a share of those before the decision.

With `--spares 1` the job keeps a process that has imported the script's modules. Once it is ready, the job grows as above, and
then a worker gets SIGKILL. `spare_s` is the time from the decision to the end of the first step at full size. The decision is
the controller's request for another node, or SIGKILL where the worker's agent restarts it. The time from SIGKILL is printed,
too. `spare_mb` is the memory of one such process, where a page that n processes share counts as 1 / n (PSS).

`--api` counts the requests that `KubernetesTarget` makes for 100 nodes from their start on: lists, watches, and output.
Each node prints a line per second. The API server is that of the tests.

`--in-place` gives a training node 2 cores instead of 1 and more memory, on this machine and on the tests' cluster, whose pods
are processes in control groups. `in_place_stall_s` is the longest time between two steps around the change, less a usual step.
Then a job leaks more memory than its node has, on each of them. The run fails if a process is started, if the median stall is
longer than a step, or if a leaking job is killed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import in_place
import psutil
from jobs import ControlledJob, Workspace, describe_machine, result_line
from live_resize import FULL, QUICK, LiveResize, Size, Stall
from slurm_cluster import missing_packages

from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.rdzv.membership.rounds import read_view
from tests.support.kubernetes_cluster import kubernetes_cluster

PARTS = ("plan seen", "scheduler", "agent", "imports", "model and data", "round", "switch")
TARGETS = ("local", "slurm")

START_S = 120.0
"""Limit in seconds on the start of a worker, or of a spare process."""
BEFORE_S = 4.0
"""Seconds in which steps are counted before the decision, beside the wait for the first ones."""


@dataclass(frozen=True)
class Successor:
    """A worker in the place of a killed one."""

    target: str
    seconds: float  # from the decision to the end of the first step at full size
    since_kill_s: float  # from SIGKILL to the same
    spare_mb: float  # memory of a spare process, MiB


@dataclass(frozen=True)
class Growth:
    """One added worker; times in seconds."""

    target: str
    parts: dict[str, float]
    stall: Stall
    told_stall_s: float
    throughput: float  # throughput of the others meanwhile, as a share of that before

    @property
    def decision_to_training_s(self) -> float:
        return sum(self.parts.values())


class StandbyTimes:
    """Time of each worker's registration as a standby, seconds since the epoch. etcd holds only its newest state."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self.at: dict[str, float] = {}
        self._keys = Keys(run_id)
        self._client = EtcdClient(EtcdConfig(endpoint))
        self._mirror: Mirror | None = None
        self._mirror = Mirror(self._client, self._keys.live, on_change=self._look)

    def __enter__(self) -> StandbyTimes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mirror is not None:
            self._mirror.close()
        self._client.close()

    def _look(self) -> None:
        if self._mirror is None:
            return
        for worker_id, record in read_view(self._mirror.snapshot(), self._keys).workers.items():
            if record.state == "standby":
                self.at[worker_id] = record.since


def grow(job: ControlledJob, endpoint: str, target: str, size: Size, dice: random.Random) -> Growth:
    """Add one worker to a training job."""
    num_before = len(job.member_pids())
    known = set(job.nodes())
    job.wait_for_steps(size.steady_steps, num_before, since_s=time.monotonic() + BEFORE_S)
    live = LiveResize(job, size, dice)
    with StandbyTimes(endpoint, job.name) as standby:
        live.grow()
    to_monotonic = time.monotonic() - time.time()
    view = job.view()
    assert view.round is not None
    assert view.plan is not None
    [joiner] = [view.workers[worker] for worker in view.survivors if worker in standby.at]
    [node] = [record for name, record in job.nodes().items() if name not in known]
    written = next(e for e in job.events("round") if e.data["number"] == view.round.number)
    told = next(e for e in job.events("stall") if e.data["round"] == view.round.number)
    first, worker = _first_process(joiner.pid, job.agents[0].pid), psutil.Process(joiner.pid)
    steps = job.steps()
    trained_s = min(s.ended_s for s in steps if s.round_number == view.round.number)
    times = [
        view.plan.created_at,
        node.asked_at,
        _started_at(first),
        _started_at(worker),
        standby.at[joiner.worker_id],
        written.at - written.data["decided_s"],
        written.at,
        trained_s - to_monotonic,
    ]
    parts = dict(zip(PARTS, (after - before for before, after in pairwise(times)), strict=True))
    survivor = next(s.pid for s in steps if s.pid != joiner.pid)
    ended_s = [s.ended_s for s in steps if s.pid == survivor and s.round_number < view.round.number]
    decided_s = view.plan.created_at + to_monotonic
    before = [at for at in ended_s if decided_s - BEFORE_S < at <= decided_s]
    after = [at for at in ended_s if at > decided_s]
    throughput = len(after) / (after[-1] - decided_s) / (len(before) / BEFORE_S)
    return Growth(target, parts, live.stalls[0], float(told.data["seconds"]), throughput)


def wait_for_spare(job: ControlledJob) -> None:
    """Wait until a spare process is ready: the controller's, or one of each agent."""
    job.wait_for("a spare process", lambda: bool(_ready_spares(job)) or None, START_S)


def spare_bytes(job: ControlledJob) -> float:
    """Mean memory of the job's spare processes that workers have not been forked from yet."""
    found = _ready_spares(job)
    return sum(found) / len(found)


def _ready_spares(job: ControlledJob) -> list[int]:
    """Memory of the controller's spare process, or of those of all agents; empty while one is not ready."""
    if (controller := job.controller()) is not None and controller.spare:
        return [controller.spare_bytes] if controller.spare == "ready" else []
    agents = list(job.view().agents.values())
    return [agent.spare_bytes for agent in agents] if all(agent.spare == "ready" for agent in agents) else []


def succeed(job: ControlledJob, target: str, size: Size, dice: random.Random, spare_mb: float) -> Successor:
    """Kill a worker of a training job, and wait until it trains at full size again."""
    wait_for_spare(job)
    known = set(job.nodes())
    before, round_ = job.member_pids(), job.view().round
    assert round_ is not None
    job.wait_for_steps(size.steady_steps, len(before), since_s=time.monotonic())
    killed_at = time.monotonic()
    os.kill(dice.choice(before), signal.SIGKILL)

    def look() -> float | None:
        steps = [step for step in job.steps() if step.round_number > round_.number]
        return min((step.ended_s for step in steps if step.world_size == len(before)), default=None)

    trained_at = job.wait_for("a successor", look, START_S)
    to_monotonic = time.monotonic() - time.time()
    asked_at = [record.asked_at + to_monotonic for name, record in job.nodes().items() if name not in known]
    return Successor(target, trained_at - max([killed_at, *asked_at]), trained_at - killed_at, spare_mb)


def _first_process(pid: int, controller_pid: int) -> psutil.Process:
    """First process that the scheduler started for a worker's node."""
    process = psutil.Process(pid)
    while (parent := process.parent()) and parent.pid != controller_pid and not parent.name().startswith("slurmstepd"):
        process = parent
    return process


def _started_at(process: psutil.Process) -> float:
    """Seconds since the epoch, to 0.01 s. psutil adds the boot time, which the kernel reports in whole seconds."""
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


NUM_NODES = 100


def api_requests_per_s(duration_s: float) -> float:
    """Return the requests per second for `NUM_NODES` running nodes on Kubernetes, without those that create the nodes."""
    spec = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, NUM_NODES)
    with tempfile.TemporaryDirectory() as folder, kubernetes_cluster(Path(folder), runs_pods=False) as cluster:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        target = KubernetesTarget(spec, KubernetesOptions(image="trainer:1"), Path(folder) / "logs")
        target.open("0123456789")
        nodes = [f"node{number}" for number in range(NUM_NODES)]
        handles = {node: target.start(node) for node in nodes}
        for node in nodes:
            cluster.logs[node] = ""
            cluster.set_pod(node, "Running")
        began, before, num_lines = time.monotonic(), len(cluster.requests), 0
        while (passed_s := time.monotonic() - began) < duration_s:
            while num_lines <= passed_s:
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                cluster.logs.update({node: f"{text}{now} line {num_lines}\n" for node, text in cluster.logs.items()})
                num_lines += 1
            target.apps()
            assert {target.status(handle) for handle in handles.values()} == {"running"}
            time.sleep(0.2)  # as often as a controller looks
        found = (len(cluster.requests) - before) / passed_s
        num_copied = sum(file.stat().st_size > 0 for node in nodes for file in target.logs(handles[node]))
        print(f"{found:.2f} requests per second in the first {passed_s:.0f} s; output of {num_copied} nodes was copied")
        target.close()
    return found


def table(growths: Sequence[Growth], targets: Sequence[str]) -> str:
    def row(name: str, values: list[list[float]]) -> str:
        shown = "".join(f"{median(v):10.3f}  ({min(v):.3f} to {max(v):.3f})".ljust(34) for v in values)
        return f"{name:24}{shown}".rstrip()

    of_target = [[g for g in growths if g.target == target] for target in targets]
    return "\n".join(
        [
            f"{'median (least to most)':24}{''.join(f'{target:>10}'.ljust(34) for target in targets)}".rstrip(),
            *(row(f"{part}, s", [[g.parts[part] for g in each] for each in of_target]) for part in PARTS),
            row("decision to training, s", [[g.decision_to_training_s for g in each] for each in of_target]),
            row("stall, s", [[g.stall.seconds for g in each] for each in of_target]),
            row("stall, as told, s", [[g.told_stall_s for g in each] for each in of_target]),
            row("usual step, s", [[g.stall.usual_step_s for g in each] for each in of_target]),
            row("others' throughput", [[g.throughput for g in each] for each in of_target]),
        ]
    )


def run_in_place(options: argparse.Namespace) -> int:
    """Change sizes of nodes in place; see `in_place.py`."""
    print(describe_machine(), flush=True)
    if why := in_place.why_not():
        print(f"nodes of this machine cannot be limited: {why}", flush=True)
        return 1
    with Workspace("deploy", options.keep) as space:
        # Steps of the small model are so short that a busy machine's own pauses are longer.
        found = in_place.measure(space, FULL, 1 if options.quick else options.rounds)
    print(result_line(found))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="jobs on each target")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="before the growth (default 1)")
    parser.add_argument("--spares", type=int, choices=(0, 1), default=0, help="as for `dlrover run`; 1: kill a worker, too")
    parser.add_argument("--quick", action="store_true", help="one job on each target, with a small model, under 60 s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    parser.add_argument("--api", action="store_true", help="only the requests to a Kubernetes API server")
    parser.add_argument("--in-place", action="store_true", help="only sizes of nodes that change in place, and leaks")
    options = parser.parse_args()
    if options.in_place:
        return run_in_place(options)
    if options.api:
        print(result_line({"api_rps_100": api_requests_per_s(30.0 if options.quick else 120.0)}))
        return 0
    size = QUICK if options.quick else FULL
    dice = random.Random(options.seed)
    print(describe_machine(), flush=True)
    targets = list(TARGETS)
    if missing := missing_packages():
        print(f"Slurm is left out: {missing}", flush=True)
        targets.remove("slurm")
    growths: list[Growth] = []
    successors: list[Successor] = []
    with Workspace("deploy", options.keep) as space:
        endpoint = space.etcd().endpoint
        environment = space.slurm(options.workers + 1).environment if "slurm" in targets else {}
        for number in range(1 if options.quick else options.rounds):
            for target in targets:
                with space.controlled_job(f"{target}-{number}", endpoint, size.arguments) as job:
                    job.environment |= environment
                    job.start(options.workers, options.workers + 1, "--target", target, "--spares", str(options.spares))
                    job.wait_for_steps(size.steady_steps, options.workers)
                    if options.spares:
                        wait_for_spare(job)
                        spare_mb = spare_bytes(job) / 2**20
                    growth = grow(job, endpoint, target, size, dice)
                    growths.append(growth)
                    print(f"{target}: {growth.decision_to_training_s:.2f} s from decision to training", flush=True)
                    if options.spares:
                        successor = succeed(job, target, size, dice, spare_mb)
                        successors.append(successor)
                        print(
                            f"{target}: {successor.seconds:.2f} s from decision to training after a kill, "
                            f"{successor.since_kill_s:.2f} s from SIGKILL; a spare process takes {successor.spare_mb:.0f} MiB",
                            flush=True,
                        )
    print(table(growths, targets))
    of_target = {target: [g for g in growths if g.target == target] for target in TARGETS}
    stalls = {f"{t}_stall_s": median(g.stall.seconds for g in each) if each else math.nan for t, each in of_target.items()}
    times = {
        f"{t}_decision_to_training_s": median(g.decision_to_training_s for g in each) if each else math.nan
        for t, each in of_target.items()
    }
    spares = {
        "spare_s": median(s.seconds for s in successors) if successors else math.nan,
        "spare_mb": median(s.spare_mb for s in successors) if successors else math.nan,
    }
    spares = {"in_place_stall_s": math.nan, **spares}
    requests = {"api_rps_100": api_requests_per_s(30.0 if options.quick else 120.0)}
    print(result_line({**stalls, **times, **spares, **requests}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
