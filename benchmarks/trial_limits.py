"""Choose when a trial of threads is given up, from recorded step times.

    python benchmarks/trial_limits.py --data DIR --record [--rounds 4] [--seconds 4]
    python benchmarks/trial_limits.py --data DIR
    python benchmarks/trial_limits.py --quick

`--record` trains three models with one thread and with twice as many in turn, while other processes use the machine, and writes
the duration of each step to DIR: one file for each round, model and load. Without it, the files in DIR are judged.
`--quick` records little into a temporary folder and judges it, to show that the benchmark runs.

idle      no processes of ours beside the model
shared    one process that burns a core
busy      one for each core
bursts    one for each core, for 0.1 to 1 s at a time with such pauses

Two kinds of trials are cut from the recordings. A trial without a change is a stretch of one setting, compared with the 50
steps before it. A trial of threads is a stretch with twice the threads, compared with the last 50 steps before the change.
A trial is good if the median of all its steps is less than 1.1 times as long as those before it, and bad from 1.5 times. All
others are left out: whether they are given up hardly matters.

The limits are the number of newest steps whose median counts, the time that these must span, and the factor of the slowdown.
They are chosen on the even rounds: among limits that give up at most 10 % of good trials, those with the least time lost in bad
ones. Both these limits and those in force are reported on both sides.

The last line holds the chosen limits, then the figures of the chosen limits and of those in force on the odd rounds: the rate
of good trials that are given up, and the steps and seconds lost in a bad trial, in the mean. Seconds are lost against as many
steps before the trial.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

from busy_trials import BAD, STEPS_BEFORE, Burners
from jobs import describe_machine, result_line

from lightning_dlrover.planner.plan import Decision, Settings
from lightning_dlrover.planner.trial import FAR_OUT, PROOF_S, STEPS_OF_PROOF, TrialWatch

GOOD = 1.1  # maximum slowdown of a good trial
MAX_WRONG = 0.1  # fraction of good trials that limits may give up
MIN_STEPS = 3  # steps that a trial and the stretch before it must have
TRIAL_S = 6.0  # seconds of the windows that judge a trial which is not given up

LOADS = ("idle", "shared", "busy", "bursts")
MODELS = {"small": (64, 1, 48), "deep": (256, 16, 192), "dense": (640, 3, 240)}
"""Width, layers and batch size of a perceptron: steps below a millisecond, many barriers in a step, and large products."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps with one number of threads."""

    num_threads: int
    durations_s: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """Steps of a trial, and the usual step before it."""

    usual_s: float
    durations_s: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        return median(self.durations_s) / self.usual_s

    @property
    def is_good(self) -> bool:
        return self.slowdown < GOOD

    @property
    def is_bad(self) -> bool:
        return self.slowdown >= BAD

    def lost_s(self, num_steps: int) -> float:
        """Time that this many steps took beyond as many steps before the trial."""
        return sum(self.durations_s[:num_steps]) - num_steps * self.usual_s


@dataclass(frozen=True, order=True)
class Limits:
    """When a trial is given up, see `TrialWatch`."""

    num_steps: int
    span_s: float
    factor: float

    def steps_until(self, trial: Trial) -> int | None:
        """Return after how many steps a trial is given up; None: never."""
        home, chosen = Settings(1, 0, 1, 0), Settings(1, 0, 2, 0)
        # The watch compares with FAR_OUT times the break-even.
        even_s = trial.usual_s * self.factor / FAR_OUT
        decision = Decision(1, 0.0, home, chosen, "", (), even_s, even_s, explored=True, break_even_s=even_s)
        watch = TrialWatch(self.num_steps, self.span_s)
        alarms = (watch.step_ended(decision, chosen, duration_s) for duration_s in trial.durations_s)
        return next((number for number, alarm in enumerate(alarms, 1) if alarm is not None), None)


IN_FORCE = Limits(STEPS_OF_PROOF, PROOF_S, FAR_OUT)
# A single slow step proves nothing: it may have waited for a checkpoint, which no recording contains. After 2 s the first
# window of the trial judges it in any case.
CANDIDATES = [Limits(*each) for each in product((3, 5, 9), (0.25, 0.5, 1.0, 1.5, 2.0), (1.25, 1.5, 2.0, 3.0))]


# --- trials in recordings -----------------------------------------------------------------------------------------------------


def trials_of(stretches: Sequence[Stretch]) -> list[Trial]:
    """Return the trials in consecutive stretches: without a change, and of more threads."""
    found = []
    for stretch in stretches:
        before, after = stretch.durations_s[:STEPS_BEFORE], stretch.durations_s[STEPS_BEFORE:]
        if len(after) >= MIN_STEPS:
            found.append(Trial(median(before), _beginning(after)))
    for home, trial in pairwise(stretches):
        if trial.num_threads > home.num_threads and min(len(home.durations_s), len(trial.durations_s)) >= MIN_STEPS:
            found.append(Trial(median(home.durations_s[-STEPS_BEFORE:]), _beginning(trial.durations_s)))
    return found


def _beginning(durations_s: Sequence[float]) -> tuple[float, ...]:
    """Return the steps of a trial's windows."""
    kept, span_s = [], 0.0
    for duration_s in durations_s:
        if span_s >= TRIAL_S:
            break
        kept.append(duration_s)
        span_s += duration_s
    return tuple(kept)


@dataclass(frozen=True)
class Figures:
    """What limits do to the trials of one side."""

    num_good: int
    num_wrong: int  # good trials that are given up
    num_bad: int
    steps: float  # mean steps in a bad trial, until it is given up or its windows have ended
    lost_s: float  # mean time lost in it

    @property
    def wrong(self) -> float:
        return self.num_wrong / self.num_good if self.num_good else math.nan

    def __str__(self) -> str:
        return (
            f"{self.num_wrong} of {self.num_good} good trials given up, {self.steps:.1f} steps and {self.lost_s:.2f} s lost "
            f"in each of {self.num_bad} bad ones"
        )


def figures_of(limits: Limits, trials: Sequence[Trial]) -> Figures:
    good, bad = [trial for trial in trials if trial.is_good], [trial for trial in trials if trial.is_bad]
    wrong = sum(limits.steps_until(trial) is not None for trial in good)
    steps = [limits.steps_until(trial) or len(trial.durations_s) for trial in bad]
    lost_s = [trial.lost_s(number) for trial, number in zip(bad, steps, strict=True)]
    mean_steps, mean_lost_s = (fmean(each) if bad else math.nan for each in (steps, lost_s))
    return Figures(len(good), wrong, len(bad), mean_steps, mean_lost_s)


def best_of(candidates: Sequence[Limits], trials: Sequence[Trial]) -> Limits:
    """Return the limits with the least time lost in bad trials among those with few wrong ends, of all if none has few."""
    figures = {limits: figures_of(limits, trials) for limits in candidates}
    return min(candidates, key=lambda each: (max(MAX_WRONG, figures[each].wrong), figures[each].lost_s, each))


# --- recordings ---------------------------------------------------------------------------------------------------------------


def record(folder: Path, num_rounds: int, seconds: float, seed: int = 0) -> None:
    """Write the step times of each model under each load.

    Args:
        seconds: duration of a stretch with one number of threads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    for number in range(num_rounds):
        order = list(product(MODELS, LOADS))
        dice.shuffle(order)
        for model, load in order:
            with _load(load, dice.randrange(1 << 30)):
                stretches = _train(model, seconds)
            content = [{"num_threads": each.num_threads, "durations_s": each.durations_s} for each in stretches]
            (folder / f"{number}-{model}-{load}.json").write_text(json.dumps(content))
            medians = ", ".join(f"{each.num_threads}: {1e3 * median(each.durations_s):.2f} ms" for each in stretches)
            print(f"round {number}, {model}, {load}: {medians}", flush=True)


def _train(model: str, seconds: float) -> list[Stretch]:
    import torch
    from auto_config_jobs import NUM_FEATURES, Perceptron
    from torch import nn

    width, num_layers, batch_size = MODELS[model]
    torch.manual_seed(0)
    net = Perceptron(width, num_layers).net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch_size, NUM_FEATURES), torch.randn(batch_size, 1)
    stretches = []
    threads_before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            durations_s: list[float] = []
            end_s = time.perf_counter() + seconds
            while (began_s := time.perf_counter()) < end_s or len(durations_s) < MIN_STEPS:
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.mse_loss(net(inputs), targets))
                optimizer.step()
                durations_s.append(time.perf_counter() - began_s)
            stretches.append(Stretch(num_threads, tuple(durations_s)))
    finally:
        torch.set_num_threads(threads_before)
    # The first steps of a process are no steps of a job that runs.
    return [Stretch(1, stretches[0].durations_s[MIN_STEPS:] or stretches[0].durations_s), *stretches[1:]]


@contextmanager
def _load(name: str, seed: int) -> Iterator[None]:
    number = {"idle": 0, "shared": 1}.get(name, len(os.sched_getaffinity(0)))
    with Burners(number) as burners:
        if name != "bursts":
            burners.burn()
            yield
            return
        ended = threading.Event()
        dice = random.Random(seed)

        def alternate() -> None:
            while not ended.wait(dice.uniform(0.1, 1.0)):
                burners.burn()
                ended.wait(dice.uniform(0.1, 1.0))
                burners.pause()

        thread = threading.Thread(target=alternate)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def read(folder: Path) -> dict[int, list[list[Stretch]]]:
    """Return the recordings by round.

    Raises:
        SystemExit: there are none, or a file is no recording.
    """
    found: dict[int, list[list[Stretch]]] = {}
    for file in sorted(folder.glob("*-*-*.json")):
        try:
            stretches = [Stretch(each["num_threads"], tuple(each["durations_s"])) for each in json.loads(file.read_text())]
            found.setdefault(int(file.name.split("-")[0]), []).append(stretches)
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{file} is no recording of step times: {error!r}; remove it, or record to another folder"
            ) from error
    if not found:
        raise SystemExit(f"{folder} holds no recordings of step times: record some with --record")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of recorded step times")
    parser.add_argument("--record", action="store_true", help="record step times to DIR first")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of recording, at least 2; default %(default)s")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds with each number of threads; default %(default)s")
    parser.add_argument("--quick", action="store_true", help="record little, to a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None and not options.quick:
        parser.error("name the folder of recordings with --data DIR, or use --quick")
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: one round to choose and one to report are the least")
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="dlrover-trial-limits-") as temporary:
        folder = options.data or Path(temporary)
        if options.quick:
            record(folder, 2, 0.3, options.seed)
        elif options.record:
            record(folder, options.rounds, options.seconds, options.seed)
        rounds = read(folder)
    sides = [
        [
            trial
            for number, recordings in rounds.items()
            if number % 2 == odd
            for each in recordings
            for trial in trials_of(each)
        ]
        for odd in (0, 1)
    ]
    chosen = best_of(CANDIDATES, sides[0])
    for title, limits in (("chosen", chosen), ("in force", IN_FORCE)):
        print(f"{title}: median of {limits.num_steps} steps that span {limits.span_s:g} s, {limits.factor:g} times as slow")
        for name, trials in zip(("even rounds (choice)", "odd rounds (report)"), sides, strict=True):
            print(f"  {name}: {figures_of(limits, trials)}")
    values: dict[str, float | int] = {"steps": chosen.num_steps, "span_s": chosen.span_s, "factor": chosen.factor}
    for prefix, limits in (("", chosen), ("in_force_", IN_FORCE)):
        reported = figures_of(limits, sides[1])
        values |= {f"{prefix}wrong": reported.wrong, f"{prefix}bad_steps": reported.steps, f"{prefix}bad_s": reported.lost_s}
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
