"""Whether a job finishes when its workers are killed again and again: ours, and stock torchrun beside it.

    python benchmarks/kill_recovery.py [--jobs N] [--stock-jobs N] [--quick]

Each job has two or three agents with one worker each and two loader workers per worker. Three times a process is killed with
SIGKILL at random: a worker (one that trains, or one that an agent has just started again) or a loader worker, at a random step
and a random time after it, now and then right after the kill before. Agents start workers again. A job has finished when all
agents end with 0 within the deadline and the last step was made; ours must also have had equal parameters on all workers after
every step, and no sample twice in one step.

Stock: torchrun with the c10d backend, Lightning's DDPStrategy, a checkpoint every 20 steps that a restart resumes, and the
same kills.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from jobs import BenchmarkError, Job, Step, Workspace, describe_machine, result_line

from lightning_dlrover.rdzv.server import EmbeddedEtcd

ARGUMENTS = [
    "--batch-size=8",
    "--num-samples=1003",
    "--loader-workers=2",
    "--digests",
    "--step-floor-s=0.02",  # a job must last for some restarts
    "--checkpoint-every=20",
]


@dataclass(frozen=True)
class Kill:
    after_step: int  # of the job, or at once where it is made already
    delay_s: float
    victim: Literal["worker", "loader worker"]
    draw: float  # which of them, in [0, 1)


@dataclass(frozen=True)
class Scenario:
    num_agents: int
    num_steps: int
    kills: list[Kill]

    @staticmethod
    def draw(dice: random.Random, num_steps: int, num_kills: int) -> Scenario:
        kills: list[Kill] = []
        for after_step in sorted(dice.sample(range(5, num_steps * 3 // 4), num_kills)):
            follows_closely = bool(kills) and dice.random() < 0.3
            kills.append(
                Kill(
                    after_step=kills[-1].after_step if follows_closely else after_step,
                    delay_s=dice.uniform(0.0, 1.0 if follows_closely else 0.2),
                    victim="loader worker" if dice.random() < 0.2 else "worker",
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
        return f"{self.name:10} {'finished' if self.finished else 'FAILED':9}{self.seconds:7.1f} s  {self.text}"


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
    """Kill one process; returns which."""

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
    """What the workers of one job say differently about the same step, or must not say at all."""
    found = []
    made: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in job.steps():
        made[step.round_number, step.number].append(step)
    digests: dict[int, set[str]] = defaultdict(set)
    trained: set[int] = set()  # pids so far
    for (round_number, number), steps in sorted(made.items()):
        pids = {step.pid for step in job.steps() if step.round_number == round_number}
        if trained.isdisjoint(pids):
            digests.clear()  # all that held the state were killed: steps since the checkpoint are made again, split differently
        trained |= {step.pid for step in steps}
        digests[number] |= {step.digest for step in steps}
        if len(digests[number]) > 1:
            found.append(f"after step {number} parameters differ")
        samples = [sample for step in steps for sample in step.samples or []]
        if len(samples) != len(set(samples)):
            found.append(f"step {number} of round {round_number} has samples twice")
    return found[:5]


def live_options(etcd: EmbeddedEtcd, name: str) -> list[str]:
    return [
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={etcd.endpoint}",
        f"--rdzv-id={name}",
        "--nnodes=1:3",
        "--nproc-per-node=1",
        "--max-restarts=20",
        "--rdzv-conf=live=1",
    ]


def stock_options(name: str, num_agents: int) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={name}",
        f"--nnodes=1:{num_agents}",
        "--nproc-per-node=1",
        "--max-restarts=20",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--stock-jobs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="per job")
    parser.add_argument("--steps", type=int, default=600, help="per job")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds that a job may take")
    parser.add_argument("--stock-deadline", type=float, default=180.0, help="seconds that a stock job may take")
    parser.add_argument("--first", type=int, default=0, help="number of the first job, to repeat one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one short job of each, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.stock_jobs, options.steps, options.kills = 1, 1, 200, 2
        options.stock_deadline = 25.0
    outcomes: list[Outcome] = []
    stock_outcomes: list[Outcome] = []
    print(describe_machine(), flush=True)
    with Workspace("kill-recovery", options.keep) as space:
        etcd = space.etcd()
        for number in range(options.first, options.first + options.jobs):
            scenario = Scenario.draw(random.Random(f"{options.seed}/{number}"), options.steps, options.kills)
            ways = [("live", "dlrover"), *([("stock", "ddp")] if len(stock_outcomes) < options.stock_jobs else [])]
            for kind, strategy in ways:
                name = f"{kind}-{number}"
                checkpoint = space.folder / f"{name}.ckpt"
                arguments = [*ARGUMENTS, f"--strategy={strategy}", f"--max-steps={options.steps}", f"--checkpoint={checkpoint}"]
                is_live = kind == "live"
                with space.job(name, arguments) as job:
                    torchrun = live_options(etcd, name) if is_live else stock_options(name, scenario.num_agents)
                    deadline_s = options.deadline if is_live else options.stock_deadline
                    outcome = run(job, torchrun, scenario, deadline_s, checked=is_live)
                    if not outcome.finished and is_live:
                        space.keep()
                        print("\n".join(job.ends_of_logs()), file=sys.stderr)
                (outcomes if is_live else stock_outcomes).append(outcome)
                print(outcome, flush=True)
    print(
        result_line(
            {
                "finished": sum(outcome.finished for outcome in outcomes),
                "of": len(outcomes),
                "stock_finished": sum(outcome.finished for outcome in stock_outcomes),
                "stock_of": len(stock_outcomes),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
