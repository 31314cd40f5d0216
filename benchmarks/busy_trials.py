"""Cost of the planner's trials on a machine that other programs use.

    python benchmarks/busy_trials.py [--rounds 3] [--seconds 30] [--loads idle,...] [--policies ours,...] [--quick]

A job of one worker (`deep` of `auto_config_jobs.py`, whose threads meet at many barriers in each step) trains for a fixed time.
Each round runs it under each load with each policy, in shuffled order.

idle      no processes of ours beside the job
busy      as many processes that burn a core as there are cores, from before the start
crowded   twice as many
sudden    as many as cores, from the moment at which the job first runs with more threads, or after a third of the time

ours      the planner as it is
blind     does not notice other programs, but gives trials up: what remains if load comes after a trial has begun
slow      the same, but gives a trial up after a whole window and a fit, and never within the predicted interval
careless  does not notice other programs and gives no trial up, as the first planner
none      no trials: the settings of the script

A trial's slowdown is the median of its steps over that of the steps before it. A trial is bad if it is 1.5 times slower, and
given up if it is left before the three windows that judge it. Progress is the number of steps made in the fixed time (under a
sudden load in two thirds of it, from its beginning), as a ratio to `none`, both as medians over the rounds.

The last line holds the figures of all loads but `idle` together: worst and median slowdown, steps in bad trials for each job,
bad trials, trials given up, their median and largest number of steps, and the smallest progress of a load; then the
progress on the idle machine. Those of the other policies follow.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

from auto_config_jobs import POLICIES
from jobs import AUTO_CONFIG_JOBS, START_TIMEOUT_S, STEP_TIMEOUT_S, LiveJob, Step, Workspace, describe_machine, result_line

from lightning_dlrover.planner.plan import Decision, Settings

NONE = "none"
BAD = 1.5  # minimum slowdown of a bad trial
STEPS_BEFORE = 50  # steps before a trial, for comparison
NUM_WINDOWS = 3  # windows that judge a trial which is not given up
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


@dataclass(frozen=True)
class Load:
    per_core: int  # processes for each core
    at_trial: bool = False  # only from the first step with more threads


LOADS = {"idle": Load(0), "busy": Load(1), "crowded": Load(2), "sudden": Load(1, at_trial=True)}


@dataclass(frozen=True)
class Size:
    loads: Sequence[str]
    rounds: int
    seconds: float
    window_s: float
    plan_every_s: float


FULL = Size(tuple(LOADS), 3, 30.0, 1.0, 3.0)
QUICK = Size(("busy",), 1, 6.0, 0.3, 1.0)


# --- what a job's steps show --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Steps with settings that were tried for the first time."""

    settings: Settings
    slowdown: float
    num_steps: int
    seconds: float
    is_left: bool  # other settings came after it

    @property
    def is_bad(self) -> bool:
        return self.slowdown >= BAD


Stints = Sequence[tuple[Settings, list[float]]]
"""Settings of a job, one after the other, with the durations of their steps."""


@dataclass(frozen=True)
class Run:
    trials: Sequence[Trial]
    num_steps: int  # made in the fixed time
    stints: Stints = ()


def stints_of(steps: Sequence[Step], decisions: Sequence[Decision]) -> Stints:
    """Return the settings of one worker's steps.

    A change of several settings takes a few steps. Those on the way count for the settings that follow.
    """
    chosen = {decision.chosen for decision in decisions} | {Settings(*step.settings) for step in steps[:1]}
    stints: list[tuple[Settings, list[float]]] = []
    on_the_way: list[float] = []
    for before, after in pairwise(steps):
        settings = Settings(*after.settings)
        on_the_way.append(after.ended_s - before.ended_s)
        if settings not in chosen:
            continue
        if not stints or stints[-1][0] != settings:
            stints.append((settings, []))
        stints[-1][1].extend(on_the_way)
        on_the_way = []
    changes = [decision.chosen for decision in decisions if decision.is_change]
    if on_the_way and changes:
        stints.append((changes[-1], on_the_way))  # the time has ended before the change
    return stints


def trials_of(stints: Stints, decisions: Sequence[Decision]) -> list[Trial]:
    """Return the trials among the settings, in order."""
    explored = {decision.chosen for decision in decisions if decision.explored and decision.is_change}
    found = []
    seen = {settings for settings, _ in stints[:1]}
    for index in range(1, len(stints)):
        settings, durations_s = stints[index]
        if settings in explored and settings not in seen:
            slowdown = median(durations_s) / median(stints[index - 1][1][-STEPS_BEFORE:])
            found.append(Trial(settings, slowdown, len(durations_s), sum(durations_s), index + 1 < len(stints)))
        seen.add(settings)
    return found


@dataclass
class Tally:
    """Runs of one load with one policy."""

    window_s: float
    runs: list[Run] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        return [trial for run in self.runs for trial in run.trials]

    @property
    def bad(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.is_bad]

    @property
    def given_up(self) -> list[Trial]:
        return [trial for trial in self.bad if trial.is_left and trial.seconds < NUM_WINDOWS * self.window_s]

    @property
    def num_steps(self) -> float:
        return median(run.num_steps for run in self.runs)

    def values(self) -> dict[str, float | int]:
        slowdowns = [trial.slowdown for trial in self.trials]
        given_up = [trial.num_steps for trial in self.given_up]
        return {
            "trials": len(slowdowns),
            "worst": max(slowdowns, default=math.nan),
            "median": median(slowdowns) if slowdowns else math.nan,
            "bad": len(self.bad),
            "bad_steps": fmean(sum(trial.num_steps for trial in run.trials if trial.is_bad) for run in self.runs),
            "bad_s": fmean(sum(trial.seconds for trial in run.trials if trial.is_bad) for run in self.runs),
            "given_up": len(given_up),
            "given_up_after": median(given_up) if given_up else math.nan,
            "given_up_after_max": max(given_up, default=math.nan),
        }


Tallies = dict[tuple[str, str], Tally]


def summary(tallies: Tallies, window_s: float) -> dict[str, float | int]:
    """Return the figures of the last line."""
    values: dict[str, float | int] = {}
    loads = dict.fromkeys(load for load, _ in tallies)
    strained = [load for load in loads if load != "idle"]
    for policy in dict.fromkeys(policy for _, policy in tallies if policy != NONE):
        prefix = "" if policy == "ours" else f"{policy}_"
        together = Tally(window_s, [run for load in strained for run in tallies[load, policy].runs])
        values |= {f"{prefix}{name}": value for name, value in together.values().items()}
        progress = [tallies[load, policy].num_steps / tallies[load, NONE].num_steps for load in strained]
        values[f"{prefix}progress"] = min(progress, default=math.nan)
        if "idle" in loads:
            values[f"{prefix}idle_progress"] = tallies["idle", policy].num_steps / tallies["idle", NONE].num_steps
    return values


# --- jobs ---------------------------------------------------------------------------------------------------------------------


class Burners:
    """Processes that each keep a core busy until the block ends."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Burners:
        for _ in range(self._number):
            process = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
            self._processes.append(process)
            process.send_signal(signal.SIGSTOP)
        return self

    def burn(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _job(space: Workspace, endpoint: str, name: str, policy: str, size: Size) -> Iterator[LiveJob]:
    plan_every_s = 0.0 if policy == NONE else size.plan_every_s
    arguments = [
        "--job=deep",
        f"--window-s={size.window_s}",
        f"--plan-every-s={plan_every_s}",
        f"--until={space.folder / 'never'}",
    ]
    if policy != NONE:
        arguments.append(f"--policy={policy}")
    with space.live_job(name, endpoint, "1:1", arguments, AUTO_CONFIG_JOBS) as job:
        job.environment["DLROVER_HISTORY"] = "off"
        yield job  # it is ended by force: steps may take seconds


def run(space: Workspace, endpoint: str, name: str, policy: str, load: Load, size: Size) -> Run:
    cores = len(os.sched_getaffinity(0))
    with Burners(cores * load.per_core) as burners, _job(space, endpoint, name, policy, size) as job:
        if not load.at_trial:
            burners.burn()
        job.start_worker()
        first = job.wait_for("the first step", lambda: next(iter(job.steps()), None), START_TIMEOUT_S)
        home, start_s = Settings(*first.settings), first.ended_s
        if load.at_trial:
            # A job without trials would make the first one after three windows.
            burn_at_s = start_s + ((NUM_WINDOWS + 1) * size.window_s if policy == NONE else size.seconds / 3)
            while time.monotonic() < burn_at_s:
                if Settings(*job.steps()[-1].settings).intra_op_threads > home.intra_op_threads:
                    break
                time.sleep(0.01)
            start_s = time.monotonic()
            burners.burn()
        end_s = start_s + size.seconds * (2 / 3 if load.at_trial else 1)
        while (left_s := end_s - time.monotonic()) > 0:
            newest = job.steps()[-1]
            job.wait_for("the next step", lambda: True if job.steps()[-1] != newest else None, STEP_TIMEOUT_S)  # noqa: B023
            time.sleep(min(0.1, left_s))
        decisions = [Decision.from_data(event.data) for event in job.events("decision")]
        steps = [step for step in job.steps() if step.ended_s <= end_s]
    stints = stints_of(steps, decisions)
    found = Run(trials_of(stints, decisions), sum(step.ended_s >= start_s for step in steps), stints)
    changes = "; ".join(
        f"{trial.settings.short} {trial.slowdown:.2f} times slower for {trial.num_steps} steps, {trial.seconds:.1f} s"
        for trial in found.trials
    )
    print(f"{name}: {found.num_steps} steps; {changes or 'no trial'}", flush=True)
    return found


def table(tallies: Tallies) -> str:
    names = [*Tally(0.0, [Run((), 0)]).values()]
    lines = [f"{'load':8} {'policy':9}{''.join(f'{name:>19}' for name in names)}{'progress':>19}"]
    for (load, policy), tally in tallies.items():
        progress = tally.num_steps / tallies[load, NONE].num_steps
        figures = "".join(f"{value:19.3g}" for value in (*tally.values().values(), progress))
        lines.append(f"{load:8} {policy:9}{figures}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--seconds", type=float, help=f"seconds of each job, default {FULL.seconds:g}")
    parser.add_argument("--loads", help=f"of {', '.join(LOADS)}; default all")
    parser.add_argument("--policies", default="ours,blind,careless", help=f"of {', '.join(POLICIES)}; default %(default)s")
    parser.add_argument("--quick", action="store_true", help="one round of short jobs under one load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    loads = tuple(options.loads.split(",")) if options.loads else size.loads
    if unknown := sorted({*loads} - {*LOADS}):
        parser.error(f"--loads names {unknown}, the loads are {', '.join(LOADS)}")
    policies = options.policies.split(",")
    if unknown := sorted({*policies} - {*POLICIES}):
        parser.error(f"--policies names {unknown}, the policies are {', '.join(POLICIES)}")
    size = replace(size, loads=loads, rounds=options.rounds or size.rounds, seconds=options.seconds or size.seconds)
    print(describe_machine(), flush=True)
    dice = random.Random(options.seed)
    tallies: Tallies = {(load, policy): Tally(size.window_s) for load in loads for policy in (*policies, NONE)}
    with Workspace("busy-trials", options.keep) as space:
        endpoint = space.etcd().endpoint
        for number in range(size.rounds):
            order = [*tallies]
            dice.shuffle(order)
            for load, policy in order:
                name = f"{load}-{policy}-{number}"
                tallies[load, policy].runs.append(run(space, endpoint, name, policy, LOADS[load], size))
            print(table(tallies), flush=True)
    print(result_line(summary(tallies, size.window_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
