"""Real jobs side by side on this machine: mixes of jobs, each queue under every policy, in interleaved rounds."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path
from statistics import geometric_mean, median, stdev

from jobs import BenchmarkError

from lightning_dlrover.colocate.journal import Ended, Profiled, Rates, read_records
from lightning_dlrover.colocate.report import summarize
from lightning_dlrover.colocate.scheduler import Knowledge
from lightning_dlrover.colocate.slowdown import Shares, equal_shares, thread_shares
from lightning_dlrover.tuning.cluster import Device, Job

JOB = Path(__file__).resolve().with_name("colocation_job.py")
MIXES: Mapping[str, Mapping[str, int]] = {
    "balanced": {"compute": 3, "memory": 3, "input": 3, "mixed": 3},
    "compute": {"compute": 8, "memory": 2, "input": 2},
    "memory": {"compute": 2, "memory": 8, "input": 2},
    "input": {"compute": 2, "memory": 2, "input": 8},
    "slow_steps": {"slow_compute": 2, "slow_memory": 2, "slow_input": 2, "slow_mixed": 2},
    "gpu": {"compute": 6, "memory": 6, "input": 6, "mixed": 6},
}
CALIBRATION: Mapping[str, Mapping[str, int]] = {
    "computes": {"compute": 5, "memory": 1, "input": 1, "mixed": 5},
    "waits": {"compute": 1, "memory": 5, "input": 5, "mixed": 1},
}
"""Mixes on which each policy's number of jobs at once was chosen (`colocation.py --tune`). No result is reported for them."""
ALL = {**MIXES, **CALIBRATION}
SLOW_MIX = "slow_steps"
"""Steps of 0.5 to 3 s, and jobs that are longer than the others, so that each has some steps."""
SLOW = "slow_"
LONGER = 2.0
GPU_MIX = "gpu"
"""The mix for a GPU, which has room for more jobs than two cores."""


@dataclass(frozen=True)
class Variant:
    """A policy, and the most jobs that run at once; 0: as `dlrover colocate` chooses."""

    policy: str
    at_once: int = 0


# On two cores, --tune finds 4 best for fifo, rmixer and muri, and 4 to 8 for ours: the numbers that `dlrover colocate` chooses.
POLICIES: Mapping[str, Variant] = {
    "sequential": Variant("sequential"),
    "fifo": Variant("fifo"),
    "random_pairs": Variant("random_sets", 2),
    "random_sets": Variant("random_sets"),
    "rmixer": Variant("rmixer"),
    "muri": Variant("muri"),
    "complementary": Variant("complementary"),
}
NUMBERS = (2, 3, 4, 5, 6, 8)
"""Jobs at once that are tried with each policy."""
OURS, SEQUENTIAL = "complementary", "sequential"
QUEUE_TIMEOUT_S = 1800.0
CALIBRATION_STEPS = {False: 100, True: 10}
"""Whether they are slow."""
LEAST_STEPS = {False: 20, True: 6}
NUM_CORES = len(os.sched_getaffinity(0))


def variant_of(name: str) -> Variant:
    """Return a policy of `POLICIES`, or, after an `@`, the same with another number of jobs at once.

    Raises:
        ValueError: there is no such policy, or no number.
    """
    policy, _, number = name.partition("@")
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}, such as fifo or fifo@3")
    return replace(POLICIES[policy], at_once=int(number)) if number else POLICIES[policy]


@dataclass(frozen=True)
class Length:
    """Size of a measurement.

    Args:
        rounds: most rounds of all mixes.
        job_s: time of one job's steps when it has the machine to itself.
        limit_s: no queues of another mix begin after this time.
        copies: jobs of each kind; None: as the mix has.
        is_cold: the policies know nothing of the jobs. Only ours measures them, at a cost that the makespans hold.
    """

    rounds: int
    job_s: float
    limit_s: float
    copies: int | None = None
    is_cold: bool = False


@dataclass(frozen=True)
class MixResult:
    """One queue under one policy."""

    mix: str
    policy: str
    number: int  # number of the round
    makespan_s: float
    jobs_cpu_s: float
    own_cpu_s: float  # CPU time of the dispatcher and the supervisors
    slowdown_errors: tuple[float, ...]
    num_out_of_memory: int


def measure_mixes(
    mixes: Sequence[str],
    policies: Sequence[str],
    length: Length,
    keep: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> list[MixResult]:
    """Run each mix under each policy, several times, in an order that changes from round to round.

    One job at a time takes the longest and varies least, so it runs in the first round only.

    Args:
        keep: folder for the queues' journals; None: they are removed.
        device: as `dlrover colocate --devices` takes it.

    Raises:
        BenchmarkError: a queue did not end, or a job of it failed.
    """
    order = random.Random(seed)
    results = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlrover-colocation-") as temporary:
        folder = keep or Path(temporary)
        counts = {mix: {kind: length.copies or count for kind, count in ALL[mix].items()} for mix in mixes}
        kinds = [*dict.fromkeys(kind for count in counts.values() for kind in count)]
        steps, known = _calibrate(folder, kinds, length.job_s, device)
        learned = None if length.is_cold else known
        for number in range(length.rounds):
            of_round = [policy for policy in policies if number == 0 or policy != SEQUENTIAL]
            for mix in mixes:
                if time.monotonic() - began > length.limit_s:
                    print(f"round {number + 1}  {mix:11}is left out: {length.limit_s:.0f} s have passed", flush=True)
                    continue
                for policy in order.sample(of_round, len(of_round)):
                    result = _run(folder / f"{mix}-{policy}-{number}", mix, counts[mix], policy, steps, learned, number, device)
                    results.append(result)
                    cpu = f"CPU time: jobs {result.jobs_cpu_s:6.1f} s, dispatcher {result.own_cpu_s:4.1f} s"
                    print(f"round {number + 1}  {mix:11}{policy:15}{result.makespan_s:8.1f} s   {cpu}", flush=True)
    return results


def _ratios(results: Sequence[MixResult], mix: str, policy: str) -> list[float]:
    """Return how many times ours each makespan of a policy is, both of one round: the machine's speed changes meanwhile."""
    times = {(result.policy, result.number): result.makespan_s for result in results if result.mix == mix}
    return [time_s / times[OURS, number] for (of, number), time_s in times.items() if of == policy and (OURS, number) in times]


def table(results: Sequence[MixResult]) -> list[str]:
    """Return a line for each mix and policy: the median makespan, and how many times ours it is.

    The latter is the geometric mean over the rounds, with its standard error.
    """
    lines = []
    for mix, policy in dict.fromkeys((result.mix, result.policy) for result in results):
        makespan_s = median(result.makespan_s for result in results if (result.mix, result.policy) == (mix, policy))
        ratios = _ratios(results, mix, policy)
        line = f"{mix:11}{policy:15}{makespan_s:8.1f} s"
        if ratios:
            line += f"{geometric_mean(ratios):8.3f}"
        if len(ratios) > 1:
            line += f" +- {geometric_mean(ratios) * stdev(map(log, ratios)) / sqrt(len(ratios)):.3f}"
        lines.append(line)
    return lines


def figures(results: Sequence[MixResult]) -> dict[str, float]:
    """Return the figures of the last line: geometric means over the rounds. Those without a measurement are absent."""
    found: dict[str, float] = {}
    pairs = dict.fromkeys((result.mix, result.policy) for result in results if result.policy != OURS)
    means = {pair: geometric_mean(ratios) for pair in pairs if (ratios := _ratios(results, *pair))}
    wanted = {"balanced": ("balanced", SEQUENTIAL), "vs_random": ("balanced", "random_pairs"), "gpu": (GPU_MIX, SEQUENTIAL)}
    found |= {name: means[pair] for name, pair in wanted.items() if pair in means}
    if means:
        found["worst_vs_others"] = min(means.values())
    errors = [error for result in results for error in result.slowdown_errors]
    slow = [ratio for (mix, _), ratio in means.items() if mix == SLOW_MIX]
    if slow:
        found[SLOW_MIX] = min(slow)
    found["ooms"] = sum(result.num_out_of_memory for result in results)
    if errors:
        found["slowdown_error"] = median(errors)
    return found


def _calibrate(folder: Path, kinds: Sequence[str], job_s: float, device: str) -> tuple[dict[str, int], Path]:
    """Return the steps of each kind, and the folder of a queue that has run each kind so, with its profiles.

    They take `job_s` alone, or more if steps are slow.
    """
    steps = {}
    for kind in kinds:
        is_slow = kind.startswith(SLOW)
        steps[kind] = max(LEAST_STEPS[is_slow], round((LONGER if is_slow else 1.0) * job_s * _steps_per_s(kind, device)))
    print("steps of each job:", ", ".join(f"{kind} {count}" for kind, count in steps.items()), flush=True)
    known = folder / "known"
    _dispatch(known, [(kind, kind, steps[kind]) for kind in kinds], SEQUENTIAL, None, 0, device)
    num_profiled = len({record.job_kind for record in read_records(known) if isinstance(record, Profiled)})
    if num_profiled < len(kinds):
        raise BenchmarkError(f"{num_profiled} of {len(kinds)} kinds of jobs were measured alone; give more --job-seconds")
    return steps, known


def _steps_per_s(kind: str, device: str) -> float:
    """Return the speed of a job that has the machine to itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(NUM_CORES), "OMP_WAIT_POLICY": "passive"}
    environment["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device.partition(":")[2]
    command = [sys.executable, str(JOB), kind, str(CALIBRATION_STEPS[kind.startswith(SLOW)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=QUEUE_TIMEOUT_S)
    if done.returncode:
        raise BenchmarkError(f"a job of kind {kind} ended with {done.returncode}: {done.stderr[-500:]}")
    return float(done.stdout.split()[-2])


def _run(
    queue: Path,
    mix: str,
    counts: Mapping[str, int],
    policy: str,
    steps: Mapping[str, int],
    learned: Path | None,
    number: int,
    device: str,
) -> MixResult:
    jobs = [(f"{kind}-{copy}", kind, steps[kind]) for kind, count in counts.items() for copy in range(count)]
    random.Random(f"{mix}-{number}").shuffle(jobs)  # the same order for all policies of a round
    cpu_s = _dispatch(queue, jobs, policy, learned, number, device)
    records = read_records(queue)
    ended = [record for record in records if isinstance(record, Ended)]
    failed = [record.reason for record in ended if record.result == "failed"]
    if failed:
        raise BenchmarkError(f"{len(failed)} jobs of {queue.name} failed: {failed[0]}")
    ooms = sum(record.result == "evicted" or record.code == 137 for record in ended)
    jobs_cpu_s = sum(record.cpu_s for record in ended)
    on_cores = device == "cpu"  # speeds on a GPU are predicted by another model, from the first pairs on
    errors = tuple(_slowdown_errors(queue, learned, thread_shares if policy == OURS else equal_shares)) if on_cores else ()
    return MixResult(mix, policy, number, summarize(records).makespan_s, jobs_cpu_s, cpu_s - jobs_cpu_s, errors, ooms)


def _slowdown_errors(queue: Path, learned: Path | None, shares: Shares) -> list[float]:
    """Return errors of predicted speeds of sets of jobs, each predicted before the set was first seen."""
    knowledge = Knowledge(shares)
    if learned is not None:
        knowledge.recall(read_records(learned))
    errors: list[float] = []
    seen: set[tuple[str, ...]] = set()
    device = Device("cpu", "cpu", "cpu", 1 << 40, {"cores": float(NUM_CORES)}, 8)
    for record in read_records(queue):
        if isinstance(record, Profiled):
            knowledge.learn(record)
        if not isinstance(record, Rates):
            continue
        jobs = []
        for number, kind in enumerate(record.kinds):
            profile = knowledge.profile(kind, "cpu")
            if profile is not None:
                jobs.append(Job(f"{kind}-{number}", {"cpu": profile}, family=kind))
        if record.kinds not in seen and len(jobs) == len(record.kinds):
            seen.add(record.kinds)
            (predicted,) = knowledge.relative_speeds([jobs], device)
            errors += [abs(p / record.speeds[kind] - 1) for p, kind in zip(predicted, record.kinds, strict=True)]
        knowledge.learn(record)
    return errors


def _dispatch(
    queue: Path, jobs: Sequence[tuple[str, str, int]], policy: str, learned: Path | None, seed: int, device: str
) -> float:
    """Run a queue to its end; return the CPU time of all its processes."""
    queue.mkdir(parents=True)
    file = queue / "jobs.yaml"
    commands = [
        {"name": name, "command": [sys.executable, str(JOB), kind, steps], "folder": str(JOB.parent)}
        for name, kind, steps in jobs
    ]
    file.write_text(json.dumps({"jobs": commands}))
    command = [sys.executable, "-m", "lightning_dlrover.cli", "colocate", str(file), "--out", str(queue), "--devices", device]
    variant = variant_of(policy)
    command += ["--policy", variant.policy, *(["--max-parallel", str(variant.at_once)] if variant.at_once else [])]
    command += ["--seed", str(seed), *(["--profiles", str(learned)] if learned is not None else [])]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUEUE_TIMEOUT_S)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchmarkError(f"{queue.name} ended with {done.returncode} after {time.monotonic() - began:.0f} s: {last}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
