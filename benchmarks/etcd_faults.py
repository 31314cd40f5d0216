"""Cost of etcd's faults for a job of two workers: steps per second before, during and after a fault.

    python benchmarks/etcd_faults.py [--quick]

One job has two agents of one Lightning worker each. Its etcd is killed and restarted, or cut off for 1, 10 and 60 s (a lease
is 5 s). Another job's etcd is a cluster of three, and its leader is killed. A job is lost if its two workers are not the same
two from beginning to end. A step is lost if a worker repeats or skips it, if it is made in two rounds, or if the workers'
parameters differ after it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from faulty_etcd import EtcdCluster, EtcdProxy
from jobs import BenchmarkError, LiveJob, Step, Workspace, describe_machine, result_line

from tests.support.processes import ends_of_logs

ARGUMENTS = ["--batch-size=8", "--num-samples=10000000", "--digests", "--step-floor-s=0.01"]


@dataclass(frozen=True)
class Fault:
    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    seconds: float


@dataclass
class Outcome:
    """Observations of one job."""

    name: str
    is_lost: bool = False
    num_lost: int = 0  # steps


def lost_steps(steps: Sequence[Step], world_size: int) -> int:
    """Number of steps that were repeated, skipped, or different between workers. The newest ones may still be incomplete."""
    by_pid: dict[int, list[int]] = defaultdict(list)
    seen: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for step in steps:
        by_pid[step.pid].append(step.number)
        seen[step.number].add((step.round_number, step.digest))
    complete = min((numbers[-1] for numbers in by_pid.values()), default=0)
    lost = sum(len(seen[number]) != 1 for number in range(1, complete + 1))
    for numbers in by_pid.values():
        lost += sum(after != before + 1 for before, after in itertools.pairwise(numbers))
    return lost


def steps_per_s(steps: Sequence[Step], since_s: float, until_s: float) -> float:
    made = {step.number for step in steps if since_s <= step.ended_s < until_s}
    return len(made) / (until_s - since_s)


def endure(job: LiveJob, faults: Sequence[Fault], around_s: float) -> Outcome:
    """Start two workers and expose them to every fault."""
    outcome = Outcome(job.name)
    job.start_worker(), job.start_worker()
    job.wait_for_steps(20, world_size=2)
    began_s = time.monotonic()
    members = set(job.member_pids())
    try:
        for fault in faults:
            before = _train_for(job, around_s)
            from_s = time.monotonic()
            fault.begin()
            _train_for(job, max(0.0, from_s + fault.seconds - time.monotonic()))
            fault.end()
            during = steps_per_s(job.steps(), from_s, time.monotonic())
            after = _train_for(job, around_s)
            print(f"{fault.name:34} {before:8.1f} {during:8.1f} {after:8.1f}", flush=True)
        # Effects of the fault may appear only when leases expire or timeouts end.
        _train_for(job, 2 * around_s)
        job.wait_for_steps(20, world_size=2, since_s=time.monotonic())
    except BenchmarkError as error:
        print(f"{job.name}: {error}", file=sys.stderr)
        outcome.is_lost = True
    steps = job.steps()
    outcome.num_lost = lost_steps([s for s in steps if s.world_size == 2], 2)
    outcome.is_lost |= {step.pid for step in steps if step.ended_s > began_s} != members
    return outcome


def _train_for(job: LiveJob, seconds: float) -> float:
    """Train for `seconds`; return steps per second."""
    since_s = time.monotonic()
    time.sleep(seconds)
    if any(agent.poll() is not None for agent in job.agents):
        raise BenchmarkError(f"agents ended with {[agent.poll() for agent in job.agents]}")
    return steps_per_s(job.steps(), since_s, time.monotonic()) if seconds else 0.0


@contextmanager
def behind_proxy(space: Workspace, cuts_s: Sequence[float], dead_s: float) -> Iterator[tuple[str, list[Fault]]]:
    etcd = space.etcd()
    with EtcdProxy(etcd.endpoint) as proxy:
        faults = [Fault(f"etcd unreachable for {s:g} s", proxy.blackhole, proxy.heal, s) for s in cuts_s]
        faults.append(Fault(f"etcd killed, back after {dead_s:g} s", etcd.kill, etcd.restart, dead_s))
        yield proxy.endpoint, faults


@contextmanager
def cluster_of_three(dead_s: float) -> Iterator[tuple[str, list[Fault]]]:
    killed: list[int] = []

    def kill_leader() -> None:
        killed.append(cluster.leader())
        cluster.kill(killed[-1])

    with EtcdCluster() as cluster:
        fault = Fault(f"leader of 3 killed, back after {dead_s:g} s", kill_leader, lambda: cluster.restart(killed[-1]), dead_s)
        yield cluster.endpoint, [fault]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short outages, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    cuts_s, dead_s, around_s = ([1.0, 7.0], 2.0, 2.0) if options.quick else ([1.0, 10.0, 60.0], 10.0, 5.0)
    print(describe_machine(), flush=True)
    print(f"{'steps/s':34} {'before':>8} {'during':>8} {'after':>8}", flush=True)
    outcomes = []
    with Workspace("etcd-faults", options.keep) as space:
        for name, environment in (("one", behind_proxy(space, cuts_s, dead_s)), ("three", cluster_of_three(dead_s))):
            with environment as (endpoint, faults), space.live_job(f"etcd-{name}", endpoint, "1:2", ARGUMENTS) as job:
                outcomes.append(endure(job, faults, around_s))
                if outcomes[-1].is_lost or outcomes[-1].num_lost:
                    space.keep()
                    print(ends_of_logs(job.folder), file=sys.stderr)
    print(result_line({"jobs_lost": sum(o.is_lost for o in outcomes), "steps_lost": sum(o.num_lost for o in outcomes)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
