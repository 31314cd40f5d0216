"""Whether jobs finish when their processes are killed, and how soon the survivors agree, for our package and stock torchrun.

    python benchmarks/kill_recovery.py [--device cpu|cuda] [--backend NAME] [--jobs N] [--rounds N] [--quick]

Jobs have two or three agents with one worker each, and are of four kinds:

    lightning        our strategy, live. Three times a process is killed with SIGKILL: a worker (that trains, or that an agent
                     has just restarted) or one of its two loader workers, at a random step and a random time after it, now and
                     then right after the previous kill. Agents restart workers.
    plain-live       a loop of plain PyTorch that makes its steps with `World.steps`, killed in the same way
    plain-restart    a gloo script without our package, under `--rdzv-backend=etcd-v3`: one worker is killed once, and torchrun
                     restarts all from the checkpoint
    stock            the c10d backend of torchrun with the same kills: Lightning's DDPStrategy with a checkpoint every 20 steps
                     that a restart resumes, and the same gloo script

A job has finished when all agents end with 0 within the deadline and the last step was made. Live ones must also have had
equal parameters on all workers after every step, and no sample twice in one step.

Then jobs of three nodes, live and restarting, measure the time from the loss to the record of the next round:

    agree_s          a worker is killed, its agent lives
    node_lost_s      a host vanishes with agent and worker: its link is cut, so nothing refuses and nothing answers (`hosts.py`)

Both are the medians of the slower behaviour. The last line counts all of our jobs in `finished` and `of`. The exit code is 1 if
one of them has not finished.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from hosts import Host, Hosts
from jobs import (
    PLAIN_TRAINING,
    TRAINING,
    BenchmarkError,
    Job,
    Step,
    Workspace,
    add_device_options,
    describe_machine,
    device_arguments,
    free_endpoint,
    result_line,
)

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import AgentRound, Keys, RoundRecord, decode
from tests.support.processes import ends_of_logs

Kind = Literal["lightning", "plain-live", "plain-restart", "stock-lightning", "stock-plain"]
Behaviour = Literal["live", "restart"]

MAX_NODES = 3

LIGHTNING_ARGUMENTS = [
    "--batch-size=8",
    "--num-samples=1003",
    "--loader-workers=2",
    "--digests",
    "--step-floor-s=0.02",  # makes a job last for some restarts
    "--checkpoint-every=20",
]
PLAIN_ARGUMENTS = ["--step-floor-s=0.02", "--checkpoint-every=20"]


@dataclass(frozen=True)
class Kill:
    after_step: int  # step of the job after which to kill; at once if it is already made
    delay_s: float
    victim: Literal["worker", "loader worker"]
    draw: float  # choice of the victim, in [0, 1)


@dataclass(frozen=True)
class Scenario:
    num_agents: int
    num_steps: int
    kills: list[Kill]

    @staticmethod
    def draw(dice: random.Random, num_steps: int, num_kills: int, with_loader_workers: bool = True) -> Scenario:
        kills: list[Kill] = []
        for after_step in sorted(dice.sample(range(5, num_steps * 3 // 4), num_kills)):
            follows_closely = bool(kills) and dice.random() < 0.3
            kills.append(
                Kill(
                    after_step=kills[-1].after_step if follows_closely else after_step,
                    delay_s=dice.uniform(0.0, 1.0 if follows_closely else 0.2),
                    victim="loader worker" if dice.random() < 0.2 and with_loader_workers else "worker",
                    draw=dice.random(),
                )
            )
        return Scenario(dice.choice((2, 3)), num_steps, kills)


@dataclass(frozen=True)
class Outcome:
    name: str
    finished: bool
    seconds: float
    text: str

    def __str__(self) -> str:
        return f"{self.name:18} {'finished' if self.finished else 'FAILED':9}{self.seconds:7.1f} s  {self.text}"


def run(job: Job, agent_options: list[str], scenario: Scenario, deadline_s: float, checked: bool) -> Outcome:
    started_s = time.monotonic()
    victims: list[str] = []
    problem = ""
    try:
        for _ in range(scenario.num_agents):
            job.start_agent(agent_options)
        for kill in scenario.kills:
            victims.append(carry_out(kill, job, deadline_s - (time.monotonic() - started_s)))
        codes = job.wait_until_ended(deadline_s - (time.monotonic() - started_s))
        if any(codes):
            problem = f"agents ended with {codes}"
    except BenchmarkError as error:
        problem = str(error)
        job.dump_stacks()
    steps = job.steps()
    last = max((step.number for step in steps), default=0)
    if not problem and last != scenario.num_steps:
        problem = f"the last step is {last}, not {scenario.num_steps}"
    if not problem and checked:
        problem = "; ".join(disagreements(job))
    text = f"{scenario.num_agents} workers, {last} steps, killed {', '.join(victims)}" + (f": {problem}" if problem else "")
    return Outcome(job.name, not problem, time.monotonic() - started_s, text)


def carry_out(kill: Kill, job: Job, timeout_s: float) -> str:
    """Kill one process; return a description of it."""

    def look() -> bool | None:
        return True if max((step.number for step in job.steps()), default=0) >= kill.after_step else None

    job.wait_for(f"step {kill.after_step}, after which to kill a {kill.victim}", look, timeout_s)
    time.sleep(kill.delay_s)

    def choose() -> int | None:
        found = job.loader_worker_pids() if kill.victim == "loader worker" else job.worker_pids()
        return found[int(kill.draw * len(found))] if found else None

    while True:
        pid = job.wait_for(f"a {kill.victim} to kill", choose, timeout_s)
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
            return f"{kill.victim} {pid} after step {kill.after_step}"


def disagreements(job: Job) -> list[str]:
    """Differences between the records of one job's workers about the same step, and records that must not exist."""
    found = []
    made: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in job.steps():
        made[step.round_number, step.number].append(step)
    digests: dict[int, set[str]] = defaultdict(set)
    trained: set[int] = set()  # pids so far
    for (round_number, number), steps in sorted(made.items()):
        pids = {step.pid for step in job.steps() if step.round_number == round_number}
        if trained.isdisjoint(pids):
            digests.clear()  # all owners of the state were killed: steps since the checkpoint are made again, split differently
        trained |= {step.pid for step in steps}
        digests[number] |= {step.digest for step in steps}
        if len(digests[number]) > 1:
            found.append(f"after step {number} parameters differ")
        samples = [sample for step in steps for sample in step.samples or []]
        if len(samples) != len(set(samples)):
            found.append(f"step {number} of round {round_number} has samples twice")
    return found[:5]


def etcd_options(endpoint: str, name: str, behaviour: Behaviour, min_nodes: int = 1) -> list[str]:
    return [
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={name}",
        f"--nnodes={min_nodes}:{MAX_NODES}",
        "--nproc-per-node=1",
        "--max-restarts=50",
        *(["--rdzv-conf=live=1"] if behaviour == "live" else []),
    ]


def stock_options(name: str, num_agents: int) -> list[str]:
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={free_endpoint()}",
        f"--rdzv-id={name}",
        f"--nnodes=1:{num_agents}",
        "--nproc-per-node=1",
        "--max-restarts=20",
    ]


@dataclass(frozen=True)
class JobRunner:
    """Runs one job of any kind through a scenario."""

    space: Workspace
    etcd: EmbeddedEtcd
    options: argparse.Namespace

    def run(self, kind: Kind, number: int) -> Outcome:
        options = self.options
        name = f"{kind}-{number}"
        is_lightning, is_stock = kind.endswith("lightning"), kind.startswith("stock")
        dice = random.Random(f"{options.seed}/{kind.removeprefix('stock-')}/{number}")
        is_killed_once = kind in ("plain-restart", "stock-plain")
        num_kills, num_steps = (1, options.restart_steps) if is_killed_once else (options.kills, options.steps)
        scenario = Scenario.draw(dice, num_steps, num_kills, with_loader_workers=is_lightning)
        arguments = [f"--max-steps={num_steps}", f"--checkpoint={self.space.folder / f'{name}.ckpt'}"]
        arguments += device_arguments(options)
        if is_lightning:
            arguments += [*LIGHTNING_ARGUMENTS, f"--strategy={'ddp' if is_stock else 'dlrover'}"]
        else:
            arguments += [*PLAIN_ARGUMENTS, f"--behaviour={'live' if kind == 'plain-live' else 'restart'}"]
        behaviour: Behaviour = "restart" if kind == "plain-restart" else "live"
        torchrun = stock_options(name, scenario.num_agents) if is_stock else etcd_options(self.etcd.endpoint, name, behaviour)
        deadline_s = options.stock_deadline if is_stock else options.deadline
        with self.space.job(name, arguments, TRAINING if is_lightning else PLAIN_TRAINING) as job:
            outcome = run(job, torchrun, scenario, deadline_s, checked=not is_stock and behaviour == "live")
            if not outcome.finished and not is_stock:
                self.space.keep()
                print(ends_of_logs(job.folder), file=sys.stderr)
        print(outcome, flush=True)
        return outcome


# --- time until the survivors agree -----------------------------------------------------------------------------------------


class RoundWatch:
    """Time at which each round of a job was observed, by watching etcd as its nodes do."""

    def __init__(self, endpoint: str, name: str, behaviour: Behaviour) -> None:
        self._client = EtcdClient(EtcdConfig(endpoint))
        keys = Keys(name)
        self._key = keys.round if behaviour == "live" else keys.agent_round
        self._record_type: type[RoundRecord] | type[AgentRound] = RoundRecord if behaviour == "live" else AgentRound
        self._heard_s: dict[int, float] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._mirror = Mirror(self._client, self._key, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if not hasattr(self, "_mirror") or (entry := self._mirror.snapshot().get(self._key)) is None:
            return
        record = decode(self._record_type, entry.value, entry.key)
        with self._lock:
            self._heard_s.setdefault(record.number, now)
            self._sizes[record.number] = len(record.members if isinstance(record, RoundRecord) else record.agents)

    def close(self) -> None:
        self._mirror.close()
        self._client.close()

    @property
    def newest(self) -> int:
        with self._lock:
            return max(self._heard_s, default=0)

    def size(self, number: int) -> int:
        with self._lock:
            return self._sizes[number]

    def heard_s(self, number: int) -> float | None:
        """Time on the monotonic clock; None: not yet."""
        with self._lock:
            return min((at for n, at in self._heard_s.items() if n >= number), default=None)


class Losses:
    """One job of three nodes that repeatedly loses a worker, then a host with all its processes."""

    def __init__(
        self, space: Workspace, behaviour: Behaviour, etcd: EmbeddedEtcd, hosts: Hosts, options: argparse.Namespace
    ) -> None:
        self.of_workers: list[float] = []  # seconds from each loss to the round that follows it
        self.of_hosts: list[float] = []
        self._behaviour = behaviour
        self._hosts = hosts
        self._deadline_s = options.deadline
        self._name = f"losses-{behaviour}"
        arguments = [
            *PLAIN_ARGUMENTS,
            *device_arguments(options),
            "--max-steps=1000000",
            f"--checkpoint={space.folder / self._name}.ckpt",
            f"--behaviour={behaviour}",
        ]
        self._job = space.job(self._name, arguments, PLAIN_TRAINING)
        self._options = etcd_options(etcd.endpoint, self._name, behaviour)
        self._endpoint = etcd.endpoint
        self._nodes: list[tuple[subprocess.Popen[bytes], Host]] = []

    def measure(self, num_rounds: int, dice: random.Random) -> None:
        with self._job as job, contextlib.closing(RoundWatch(self._endpoint, self._name, self._behaviour)) as watch:
            for _ in range(MAX_NODES):
                self._add_node(job)
            for number in range(num_rounds):
                if number:
                    self._add_node(job)
                before, place = self._at_any_moment(job, watch, dice)
                lost_s = time.monotonic()
                os.kill(job.worker_pids([self._nodes[place][0]])[0], signal.SIGKILL)
                self.of_workers.append(self._until_agreed("worker", lost_s, before, job, watch))

                before, place = self._at_any_moment(job, watch, dice)
                agent, host = self._nodes.pop(place)
                job.give_up(agent)
                pids = [agent.pid, *job.worker_pids([agent])]
                lost_s = time.monotonic()
                self._hosts.let_vanish(host, pids)
                self.of_hosts.append(self._until_agreed("host", lost_s, before, job, watch))

    def _at_any_moment(self, job: Job, watch: RoundWatch, dice: random.Random) -> tuple[int, int]:
        """Wait for a random moment; return the current round, and the place of the node to lose."""
        self._wait_until_complete(job, watch)
        time.sleep(dice.uniform(0.5, 2.5))  # at any moment of a step, and between two refreshes of a lease
        return watch.newest, dice.randrange(len(self._nodes))

    def _until_agreed(self, what: str, lost_s: float, before: int, job: Job, watch: RoundWatch) -> float:
        agreed_s = job.wait_for(f"the round after round {before}", lambda: watch.heard_s(before + 1), self._deadline_s)
        print(f"{self._name:16} {what:6} lost: round {before} -> {before + 1} after {agreed_s - lost_s:.3f} s", flush=True)
        return agreed_s - lost_s

    def _add_node(self, job: Job) -> None:
        host = self._hosts.add()
        self._nodes.append((job.start_agent(self._options, host=host), host))

    def _wait_until_complete(self, job: Job, watch: RoundWatch) -> None:
        """Wait until all nodes train together, in the newest round."""

        def look() -> bool | None:
            if watch.newest == 0 or watch.size(watch.newest) != MAX_NODES:
                return None
            since = watch.heard_s(watch.newest) or 0.0
            recent = [step for step in job.steps() if step.world_size == MAX_NODES and step.ended_s > since]
            return True if len({step.pid for step in recent}) == MAX_NODES and len(recent) >= 10 * MAX_NODES else None

        job.wait_for(f"{MAX_NODES} nodes that train together", look, self._deadline_s)


def medians_of_losses(space: Workspace, options: argparse.Namespace) -> dict[str, float]:
    """Return `agree_s` and `node_lost_s`: medians, of the slower behaviour."""
    dice = random.Random(options.seed)
    hosts = space.hosts()
    if not hosts.are_real:
        print("network namespaces are not permitted here: instead of a host that vanishes, processes are stopped", flush=True)
    etcd = space.etcd(hosts.address)
    of_workers, of_hosts = [], []
    behaviours: list[Behaviour] = ["live", "restart"]
    for behaviour in behaviours:
        losses = Losses(space, behaviour, etcd, hosts, options)
        losses.measure(options.rounds, dice)
        of_workers.append(statistics.median(losses.of_workers))
        of_hosts.append(statistics.median(losses.of_hosts))
    return {"agree_s": max(of_workers), "node_lost_s": max(of_hosts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_options(parser)
    parser.add_argument("--jobs", type=int, default=20, help="jobs with Lightning, and as many with restarted plain scripts")
    parser.add_argument("--plain-live-jobs", type=int, default=10)
    parser.add_argument("--stock-jobs", type=int, default=3, help="stock jobs with Lightning")
    parser.add_argument("--stock-plain-jobs", type=int, default=5, help="stock jobs with plain scripts")
    parser.add_argument("--rounds", type=int, default=7, help="losses of each kind that are timed; 0: none")
    parser.add_argument("--kills", type=int, default=3, help="kills per live job")
    parser.add_argument("--steps", type=int, default=600, help="steps per live job")
    parser.add_argument("--restart-steps", type=int, default=150, help="steps per restarted plain job")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds that a job may take")
    parser.add_argument("--stock-deadline", type=float, default=180.0, help="seconds that a stock job may take")
    parser.add_argument("--first", type=int, default=0, help="number of the first job, to repeat one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a short job of some kinds, about 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    if options.quick:
        options.jobs = options.stock_plain_jobs = options.rounds = 1
        options.plain_live_jobs = options.stock_jobs = 0
        options.steps, options.restart_steps, options.kills = 200, 60, 2
        options.stock_deadline = 10.0
    counts: dict[Kind, int] = {
        "lightning": options.jobs,
        "stock-lightning": options.stock_jobs,
        "plain-live": options.plain_live_jobs,
        "plain-restart": options.jobs,
        "stock-plain": options.stock_plain_jobs,
    }
    outcomes: list[Outcome] = []
    stock_outcomes: list[Outcome] = []
    print(describe_machine(), flush=True)
    with Workspace("kill-recovery", options.keep) as space:
        etcd = space.etcd()
        runner = JobRunner(space, etcd, options)
        for number in range(options.first, options.first + max(counts.values())):
            for kind, count in counts.items():
                if number < options.first + count:
                    (stock_outcomes if kind.startswith("stock") else outcomes).append(runner.run(kind, number))
        figures: dict[str, float | int] = {
            "finished": sum(outcome.finished for outcome in outcomes),
            "of": len(outcomes),
            "stock_finished": sum(outcome.finished for outcome in stock_outcomes),
            "stock_of": len(stock_outcomes),
        }
        if options.rounds:
            figures |= medians_of_losses(space, options)
    print(result_line(figures))
    return int(figures["finished"] < figures["of"])


if __name__ == "__main__":
    sys.exit(main())
