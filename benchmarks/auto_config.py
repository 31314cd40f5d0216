"""Quality of the planner's settings: three different jobs, each against every configuration of a grid.

    python benchmarks/auto_config.py [--jobs dense,embedding,input] [--save-grid FILE | --grid FILE] [--quick]

For each job (`auto_config_jobs.py`):

grid      Measures every configuration of workers x loader workers x threads x batches ahead. One live job switches between
          them by plans, in several rounds of shuffled order. The figure is the median over the rounds.
cold      `dlrover run` starts the job with one worker, as a careless user would, and without any history. The planner changes
          settings, and the controller adds and ends nodes, until the planner settles.
warm      Starts the same job again, with the history of the first one. The first plan is judged.
careful   Settings of a careful user: a worker per core, one thread each, two loader workers each.

The planner's choice, the best of the grid and the careful user's settings are then measured in turn, in the same job. A
fraction compares figures of the same minutes. The ablation replays the measured windows: planners that use a part of ours
start from the same configuration, and receive the grid's windows for their choices.

The last line holds the lowest fraction of the three jobs, cold and warm, and the largest number of configurations that a
cold start has visited, including its first one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from auto_config_jobs import GLOBAL_BATCH, JOBS
from jobs import (
    AUTO_CONFIG_JOBS,
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    BenchmarkError,
    LiveJob,
    Step,
    Workspace,
    describe_machine,
    result_line,
)
from planners import PLANNERS

from lightning_dlrover.codec import from_fields
from lightning_dlrover.tuning.candidates import PlanRequest
from lightning_dlrover.tuning.plan import Limits, Objective, Settings
from lightning_dlrover.tuning.samples import StepProfile

NAIVE = Settings(num_workers=1, loader_workers=0, intra_op_threads=1, prefetch_factor=0)
SETTLING_STEPS = 3
MAX_WAIT_S = 40.0  # seconds for one configuration to make enough steps


@dataclass(frozen=True)
class Size:
    """Extent of the measurement."""

    most_workers: int
    loader_workers: tuple[int, ...]
    threads: tuple[int, ...]
    ahead: tuple[int, ...]
    rounds: int
    measure_s: float
    min_steps: int
    window_s: float
    plan_every_s: float
    stays_s: float  # seconds without a change after which a planner has settled
    settle_timeout_s: float
    comparisons: int
    compare_s: float

    @property
    def grid(self) -> list[Settings]:
        """All configurations. Without loader workers no batch is fetched ahead."""
        workers = range(1, self.most_workers + 1)
        each = product(workers, self.loader_workers, self.threads, self.ahead)
        return sorted({Settings(w, loaders, threads, ahead if loaders else 0) for w, loaders, threads, ahead in each})


FULL = Size(3, (0, 1, 2), (1, 2), (2, 4), 3, 1.0, 6, 1.0, 4.0, 25.0, 240.0, 7, 2.0)
QUICK = Size(2, (0, 1), (1,), (2,), 1, 0.3, 4, 0.3, 1.0, 6.0, 40.0, 1, 0.3)


def careful_user(size: Size) -> Settings:
    """A worker per core, one thread each, two loader workers each."""
    cores = len(os.sched_getaffinity(0))
    loaders = min(2, size.loader_workers[-1])
    return Settings(min(cores, size.most_workers), loaders, 1, 2)


# --- jobs ---------------------------------------------------------------------------------------------------------------------


class Trial(LiveJob):
    """A live job that runs one configuration after the other, and is measured."""

    kind: str
    endpoint: str
    _end: Path

    @classmethod
    def of(cls, space: Workspace, endpoint: str, name: str, kind: str, size: Size, plan_every_s: float, history: str) -> Trial:
        folder = space.folder / name
        end = space.folder / f"{name}.end"
        arguments = [f"--job={kind}", f"--window-s={size.window_s}", f"--plan-every-s={plan_every_s}", f"--until={end}"]
        job = cls(name, folder, endpoint, f"1:{size.most_workers}", arguments, AUTO_CONFIG_JOBS)
        job.kind, job.endpoint, job._end = kind, endpoint, end
        job.environment["DLROVER_HISTORY"] = history
        return job

    def put_into(self, settings: Settings) -> float:
        """Write the plan; return when every member's newest step used it and the prefetched batches are consumed."""
        wanted = list(vars(settings).values())
        if settings.loader_workers == 0:
            self.plan(settings.num_workers, loader_workers=0, intra_op_threads=settings.intra_op_threads)
        else:
            self.plan(**asdict(settings))
        began = time.monotonic()

        def look() -> float | None:
            steps = list(self.recent(began))
            round_number = max((step.round_number for step in steps), default=0)  # ranks differ between rounds
            newest: dict[int, Step] = {step.global_rank: step for step in steps if step.round_number == round_number}
            if len(newest) < settings.num_workers or any(list(step.settings) != wanted for step in newest.values()):
                return None
            return max(step.ended_s for step in newest.values())

        since = self.wait_for(f"{settings} to be in force", look, START_TIMEOUT_S)
        settling = SETTLING_STEPS + settings.loader_workers * settings.prefetch_factor
        steps = self._await(since, settling, 0.0)
        return steps[-1].ended_s

    def measure(self, settings: Settings, size: Size) -> float:
        """Samples per second in this configuration."""
        return self.rate(self.put_into(settings), size)

    def rate(self, since: float, size: Size) -> float:
        steps = self._await(since, size.min_steps, size.measure_s)
        return (len(steps) - 1) * GLOBAL_BATCH[self.kind] / (steps[-1].ended_s - steps[0].ended_s)

    def recent(self, since: float) -> Iterator[Step]:
        return (step for step in self.steps() if step.ended_s >= since)

    def _await(self, since: float, min_steps: int, seconds: float) -> list[Step]:
        """Steps of one worker from `since` on."""

        def look() -> list[Step] | None:
            by_pid: dict[int, list[Step]] = {}
            for step in self.recent(since):
                by_pid.setdefault(step.pid, []).append(step)
            steps = max(by_pid.values(), key=len, default=[])
            long_enough = len(steps) > 1 and steps[-1].ended_s - steps[0].ended_s >= seconds
            return steps if len(steps) > min_steps and long_enough else None

        return self.wait_for(f"{min_steps} steps and {seconds} s", look, MAX_WAIT_S, poll_s=0.02)

    def windows(self) -> list[StepProfile]:
        return [from_fields(StepProfile, event.data, "a profile") for event in self.events("profile")]

    def finish(self) -> None:
        """Let the job end by itself."""
        self._end.touch()
        self.wait_until_ended(STEP_TIMEOUT_S)


class Controlled(Trial):
    """A job that `dlrover run` starts, adds nodes to and ends nodes of."""

    def start(self, most_workers: int) -> None:
        run = [sys.executable, "-m", "lightning_dlrover.cli", "run", f"--workers=1:{most_workers}", f"--rdzv-id={self.name}"]
        run += [f"--endpoint={self.endpoint}", f"--run-dir={self.folder / 'runs'}", *self._arguments]
        with (self.folder / "agent-run.log").open("wb") as log:
            # The job's nodes end with it.
            process = subprocess.Popen(
                run,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.agents.append(process)

    def close(self) -> None:
        for run in self.agents:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(20.0)
        super().close()

    def decisions(self) -> list[dict[str, Any]]:
        return [event.data for event in self.events("decision")]

    def changes(self) -> list[Settings]:
        """Configurations that the planner has chosen, in order."""
        return [Settings(**d["chosen"]) for d in self.decisions() if d["chosen"] != d["current"]]

    def in_force(self) -> Settings | None:
        newest = max(self.steps(), key=lambda step: step.ended_s, default=None)
        return Settings(*newest.settings) if newest is not None else None

    def wait_until_settled(self, size: Size) -> Settings:
        """The configuration that the planner has kept for `stays_s`."""
        deadline = time.monotonic() + size.settle_timeout_s
        last: tuple[Settings | None, int] = (None, 0)
        since = time.monotonic()
        self.wait_for("the first step", lambda: self.steps() or None, START_TIMEOUT_S)
        while time.monotonic() - since < size.stays_s and time.monotonic() < deadline:
            now, changes = self.in_force(), self.changes()
            if (now, len(changes)) != last or (changes and now != changes[-1]):  # a node may be on its way
                last, since = (now, len(changes)), time.monotonic()
            if self.agents[0].poll() is not None:
                raise BenchmarkError(f"job {self.name}: `dlrover run` ended with {self.agents[0].returncode}")
            time.sleep(0.2)
        settings = self.in_force()
        assert settings is not None
        if time.monotonic() >= deadline:
            print(f"  the planner had not settled after {size.settle_timeout_s:.0f} s", flush=True)
        return settings


# --- the grid -----------------------------------------------------------------------------------------------------------------


@dataclass
class Grid:
    """Measurements of one job."""

    rates: dict[Settings, list[float]] = field(default_factory=dict)  # samples per second
    windows: dict[Settings, list[StepProfile]] = field(default_factory=dict)

    def median(self, settings: Settings) -> float:
        return statistics.median(self.rates[settings])

    @property
    def best(self) -> Settings:
        return max(self.rates, key=self.median)

    def fraction(self, settings: Settings) -> float:
        return self.median(settings) / self.median(self.best)

    def table(self, careful: Settings) -> str:
        lines = [f"  {'workers':>7}{'loaders':>8}{'threads':>8}{'ahead':>6}{'samples/s':>11}{'of best':>9}{'spread':>8}"]
        for settings in sorted(self.rates, key=self.median, reverse=True):
            rates = self.rates[settings]
            note = " naive" if settings == NAIVE else " careful user" if settings == careful else ""
            numbers = "".join(f"{value:>{width}}" for value, width in zip(vars(settings).values(), (9, 8, 8, 6), strict=True))
            spread = (max(rates) - min(rates)) / self.median(settings)
            lines.append(f"{numbers}{self.median(settings):11.1f}{self.fraction(settings):9.3f}{spread:8.1%}{note}")
        return "\n".join(lines)

    def to_data(self) -> list[dict[str, Any]]:
        return [
            {"settings": asdict(s), "rates": self.rates[s], "windows": [asdict(w) for w in self.windows.get(s, [])]}
            for s in self.rates
        ]

    @classmethod
    def from_data(cls, data: Sequence[dict[str, Any]]) -> Grid:
        grid = cls()
        for each in data:
            settings = Settings(**each["settings"])
            grid.rates[settings] = each["rates"]
            grid.windows[settings] = [from_fields(StepProfile, window, "a window") for window in each["windows"]]
        return grid


def measure_grid(space: Workspace, endpoint: str, kind: str, size: Size, dice: random.Random) -> Grid:
    """Measure every configuration `rounds` times, with more workers and then with fewer: workers that left start anew."""
    grid = Grid()
    with contextlib.closing(Trial.of(space, endpoint, f"grid-{kind}", kind, size, plan_every_s=0.0, history="off")) as job:
        for number in range(size.rounds):
            sizes = list(range(1, size.most_workers + 1))
            if number % 2:
                sizes.reverse()
            else:
                job.plan(1)
                missing = size.most_workers - (len(job.member_pids()) if number else 0)
                for _ in range(missing):
                    job.start_worker()
                job.wait_for(f"{kind} to train", lambda: job.steps() or None, START_TIMEOUT_S)
                job.wait_for_ready(size.most_workers - 1)
            for num_workers in sizes:
                settings_of_size = [s for s in size.grid if s.num_workers == num_workers]
                dice.shuffle(settings_of_size)
                for settings in settings_of_size:
                    grid.rates.setdefault(settings, []).append(job.measure(settings, size))
            job.agents = [agent for agent in job.agents if agent.poll() is None]  # drop the workers that have left
        for window in job.windows():
            settings = Settings(*(getattr(window, name) for name in asdict(NAIVE)))
            grid.windows.setdefault(settings, []).append(window)
    return grid


# --- the planner --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Result of a planner on one job."""

    chosen: Settings
    visited: list[Settings]
    fraction: float  # fraction of the best configuration's rate, in the same minutes
    of_careful: float  # fraction of the careful user's rate, likewise


def compare(job: Trial, chosen: Settings, grid: Grid, size: Size, careful: Settings) -> tuple[float, float]:
    """Rates of the planner's choice as fractions of those of the grid's best and of the careful user's, measured in turn."""
    size = replace(size, measure_s=size.compare_s)
    rates: dict[Settings, list[float]] = {settings: [] for settings in (chosen, grid.best, careful)}
    for number in range(size.comparisons if len(rates) > 1 else 0):
        for settings in list(rates) if number % 2 == 0 else list(rates)[::-1]:
            rates[settings].append(job.measure(settings, size))
    if len(rates) == 1:
        return 1.0, 1.0
    medians = {settings: statistics.median(found) for settings, found in rates.items()}
    return medians[chosen] / medians[grid.best], medians[chosen] / medians[careful]


def plan_live(space: Workspace, endpoint: str, kind: str, size: Size, grid: Grid, history: Path, *, is_warm: bool) -> Outcome:
    name = f"{'warm' if is_warm else 'cold'}-{kind}"
    job = Controlled.of(space, endpoint, name, kind, size, plan_every_s=size.plan_every_s, history=str(history))
    assert isinstance(job, Controlled)
    careful = careful_user(size)
    with contextlib.closing(job):
        job.start(size.most_workers)
        if is_warm:
            job.wait_for("the first decision", lambda: job.decisions() or None, START_TIMEOUT_S)
            chosen = Settings(**job.decisions()[0]["chosen"])
        else:
            chosen = job.wait_until_settled(size)
        visited = list(dict.fromkeys([NAIVE, *job.changes()]))
        reasons = [f"  {d['reason']}" for d in job.decisions()]
        fraction, of_careful = compare(job, chosen, grid, size, careful)
        job.finish()
    print("\n".join(reasons), flush=True)
    outcome = Outcome(chosen, visited, fraction, of_careful)
    print(
        f"{name}: {_brief(chosen)}, {fraction:.3f} of the best ({_brief(grid.best)}), {of_careful:.3f} of the careful user's; "
        f"visited {len(visited)}: {', '.join(map(_brief, visited))}",
        flush=True,
    )
    return outcome


def _brief(settings: Settings) -> str:
    return "/".join(str(value) for value in vars(settings).values())


def replay(name: str, grid: Grid, size: Size, num_visits: int = 12) -> tuple[Settings, int]:
    """Where a planner ends that is given the windows of the grid, and how many configurations it has visited."""
    limits = Limits(1, size.most_workers, size.loader_workers, size.threads, size.ahead)
    cores = float(os.cpu_count() or 1)
    at = Settings(**asdict(NAIVE))
    windows: list[StepProfile] = []
    decisions: list[Any] = []
    visited = [at]
    for _ in range(num_visits):
        windows += grid.windows.get(at, [])[-3:]
        request = PlanRequest(windows, node_cores=cores, past=decisions)
        decision = PLANNERS[name](request, limits, Objective(), len(decisions) + 1, float(len(decisions)))
        decisions.append(decision)
        if not decision.is_change:
            break
        at = decision.chosen
        visited.append(at)
    return at, len(set(visited))


def ablation(kind: str, grid: Grid, size: Size) -> None:
    for name in PLANNERS:
        end, num_visited = replay(name, grid, size)
        print(f"replay of {kind}: {name:12} {_brief(end):10} {grid.fraction(end):.3f} of the best after {num_visited} visited")


# --- all of it ----------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--save-grid", type=Path, help="also write what was measured of the grid into this file")
    parser.add_argument("--grid", type=Path, help="take the grid from a file that --save-grid has written")
    parser.add_argument("--grid-only", action="store_true", help="stop when the grid is measured")
    parser.add_argument("--rounds", type=int, help="measurements of each configuration")
    parser.add_argument("--quick", action="store_true", help="one job, a small grid, about a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.rounds:
        size = replace(size, rounds=options.rounds)
    kinds = ["input"] if options.quick else options.jobs.split(",")
    if unknown := sorted({*kinds} - {*JOBS}):
        parser.error(f"--jobs names {unknown}, the jobs are {', '.join(JOBS)}")
    grids = {k: Grid.from_data(v) for k, v in json.loads(options.grid.read_text()).items()} if options.grid else {}
    careful = careful_user(size)
    print(describe_machine(), flush=True)
    print(
        f"{len(size.grid)} configurations: workers/loader workers/threads/batches ahead; the careful user's: {_brief(careful)}"
    )
    dice = random.Random(options.seed)
    cold: list[Outcome] = []
    warm: list[Outcome] = []
    with Workspace("auto-config", options.keep) as space:
        endpoint = space.etcd().endpoint
        for kind in kinds:
            if kind not in grids:
                began = time.monotonic()
                grids[kind] = measure_grid(space, endpoint, kind, size, dice)
                print(f"{kind}: {size.rounds} rounds of the grid in {time.monotonic() - began:.0f} s", flush=True)
                if options.save_grid:
                    options.save_grid.write_text(json.dumps({k: grid.to_data() for k, grid in grids.items()}))
            print(grids[kind].table(careful), flush=True)
            if options.grid_only:
                continue
            ablation(kind, grids[kind], size)
            history = space.folder / f"{kind}.sqlite"
            cold.append(plan_live(space, endpoint, kind, size, grids[kind], history, is_warm=False))
            warm.append(plan_live(space, endpoint, kind, size, grids[kind], history, is_warm=True))
    if cold:
        values: dict[str, float | int] = {
            "cold_min": min(outcome.fraction for outcome in cold),
            "warm_min": min(outcome.fraction for outcome in warm),
            "visited_max": max(len(outcome.visited) for outcome in cold),
        }
        print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
