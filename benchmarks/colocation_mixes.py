"""Real jobs side by side on this machine: mixes of jobs, each queue under every policy, in interleaved rounds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jobs import BenchmarkError

from lightning_dlrover.colocate.journal import Ended, Rates, read_records
from lightning_dlrover.colocate.summary import summarize

__all__ = ["MIXES", "POLICIES", "MixResult", "measure_mixes"]

JOB = Path(__file__).resolve().with_name("colocation_job.py")
KINDS = ("compute", "memory", "input", "mixed")
MIXES: Mapping[str, Mapping[str, int]] = {
    "balanced": {"compute": 3, "memory": 3, "input": 3, "mixed": 3},
    "compute": {"compute": 8, "memory": 2, "input": 2},
    "memory": {"compute": 2, "memory": 8, "input": 2},
    "input": {"compute": 2, "memory": 2, "input": 8},
}
POLICIES = ("sequential", "fifo", "random_sets", "rmixer", "complementary")
OURS = "complementary"
QUEUE_TIMEOUT_S = 1800.0
CALIBRATION_STEPS = 60


@dataclass(frozen=True)
class MixResult:
    """One queue under one policy."""

    mix: str
    policy: str
    makespan_s: float
    slowdown_errors: tuple[float, ...]
    num_out_of_memory: int


def measure_mixes(mixes: Sequence[str], rounds: int, job_s: float, seed: int = 0) -> list[MixResult]:
    """Run each mix under each policy, `rounds` times, in an order that changes from round to round.

    Args:
        job_s: time of one job's steps when it has the machine to itself.

    Raises:
        BenchmarkError: a queue did not end, or a job of it failed.
    """
    order = random.Random(seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="dlrover-colocation-") as folder:
        steps, learned = _calibrate(Path(folder), job_s)
        for number in range(rounds):
            for mix in mixes:
                for policy in order.sample(POLICIES, len(POLICIES)):
                    queue = Path(folder) / f"{mix}-{policy}-{number}"
                    results.append(_run(queue, mix, policy, steps, learned, number))
                    print(f"round {number + 1}  {mix:10}{policy:15}{results[-1].makespan_s:8.1f} s", flush=True)
    return results


def figures(results: Sequence[MixResult]) -> dict[str, float]:
    """Return the figures of the last line: ratios of medians over the rounds."""
    times: dict[tuple[str, str], float] = {}
    for mix in dict.fromkeys(result.mix for result in results):
        for policy in POLICIES:
            times[mix, policy] = median(r.makespan_s for r in results if (r.mix, r.policy) == (mix, policy))
    mixes = dict.fromkeys(result.mix for result in results)
    found = {"balanced": times["balanced", "sequential"] / times["balanced", OURS]} if "balanced" in mixes else {}
    found["worst_vs_others"] = min(
        times[mix, policy] / times[mix, OURS] for mix in mixes for policy in POLICIES if policy != OURS
    )
    if "balanced" in mixes:
        found["vs_random"] = times["balanced", "random_sets"] / times["balanced", OURS]
    errors = [error for result in results for error in result.slowdown_errors]
    found["ooms"] = sum(result.num_out_of_memory for result in results)
    found["slowdown_error"] = median(errors) if errors else float("nan")
    return found


def _calibrate(folder: Path, job_s: float) -> tuple[dict[str, int], Path]:
    """Run one job of each kind alone. Return the steps that take `job_s`, and the queue's folder, which has the profiles."""
    queue = folder / "alone"
    _dispatch(queue, [(kind, kind, CALIBRATION_STEPS) for kind in KINDS], "sequential", None, 0)
    steps = {}
    for record in read_records(queue):
        if isinstance(record, Ended):
            trained_s = sum(span.ended - span.began for span in record.spans if span.phase == "running")
            steps[record.job] = max(20, round(CALIBRATION_STEPS * job_s / max(0.1, trained_s)))
    print("steps of each job:", ", ".join(f"{kind} {count}" for kind, count in steps.items()), flush=True)
    alone = folder / "known"
    _dispatch(alone, [(kind, kind, steps[kind]) for kind in KINDS], "sequential", None, 0)
    return steps, alone


def _run(queue: Path, mix: str, policy: str, steps: Mapping[str, int], learned: Path, number: int) -> MixResult:
    jobs = [(f"{kind}-{copy}", kind, steps[kind]) for kind, count in MIXES[mix].items() for copy in range(count)]
    random.Random(f"{mix}-{number}").shuffle(jobs)  # the same order for all policies of a round
    _dispatch(queue, jobs, policy, learned, number)
    records = read_records(queue)
    failed = [r.reason for r in records if isinstance(r, Ended) and r.result == "failed"]
    if failed:
        raise BenchmarkError(f"{len(failed)} jobs of {queue.name} failed: {failed[0]}")
    ooms = sum(isinstance(r, Ended) and (r.result == "evicted" or r.code == 137) for r in records)
    return MixResult(mix, policy, summarize(records).makespan_s, tuple(_slowdown_errors(queue, learned)), ooms)


def _slowdown_errors(queue: Path, learned: Path) -> list[float]:
    """Return errors of predicted speeds of sets of jobs, each predicted before the set was first seen."""
    from lightning_dlrover.colocate.knowledge import Knowledge
    from lightning_dlrover.planner.cluster import Device, Job

    knowledge = Knowledge()
    knowledge.read(learned)
    errors: list[float] = []
    seen: set[tuple[str, ...]] = set()
    device = Device("cpu", "cpu", "cpu", 1 << 40, {"cores": 2.0}, 8)
    for record in read_records(queue):
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


def _dispatch(queue: Path, jobs: Sequence[tuple[str, str, int]], policy: str, learned: Path | None, seed: int) -> None:
    queue.mkdir(parents=True)
    file = queue / "jobs.yaml"
    commands = [
        {"name": name, "command": [sys.executable, str(JOB), kind, steps], "folder": str(JOB.parent)}
        for name, kind, steps in jobs
    ]
    file.write_text(json.dumps({"jobs": commands}))
    command = [sys.executable, "-m", "lightning_dlrover.cli", "colocate", str(file), "--out", str(queue), "--policy", policy]
    command += ["--seed", str(seed), *(["--learn-from", str(learned)] if learned is not None else [])]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUEUE_TIMEOUT_S)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchmarkError(f"{queue.name} ended with {done.returncode} after {time.monotonic() - began:.0f} s: {last}")
