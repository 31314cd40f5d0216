"""Peak memory as estimated before the first step, against the measured peak of a process that trains.

    python benchmarks/colocation_memory.py                  # models that the estimator has not been tuned on
    python benchmarks/colocation_memory.py --models tuned
    python benchmarks/colocation_memory.py --models gru_adam lstm

Each model trains in a process of its own. The kernel records its peak; the peak before the first step does not count. The last
line gives the median error, and the largest underestimate as a share of the margin: 1 means that the margin was used up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

TIMEOUT_S = 180.0
NUM_STEPS = 5
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryResult:
    """One model's estimate and its measured peak, in bytes."""

    name: str
    estimate: int
    margin: int
    measured: int
    before: int  # resident before the first step
    source: str
    took_s: float
    parts: dict[str, int]

    @property
    def error(self) -> float:
        """Error of the estimate without its margin, as a share of the measured peak."""
        return self.estimate / self.measured - 1

    @property
    def error_of_added(self) -> float:
        """Error as a share of the memory that training adds to the process, which is what an estimate has to find."""
        return (self.estimate - self.measured) / max(1, self.measured - self.before)

    @property
    def margin_used(self) -> float:
        return max(0.0, (self.measured - self.estimate) / self.margin)


def memory_errors(names: Sequence[str] | None = None) -> dict[str, float]:
    """Train each model in a process of its own, print a line for each, and return the figures of the benchmark's last line.

    Args:
        names: of `colocation_models`; default: all that the estimator has not been tuned on.
    Raises:
        RuntimeError: a model could not be trained, or none has an estimate.
    """
    from colocation_models import HELD_OUT

    results = []
    without = 0
    for name in names or HELD_OUT:
        found = _in_a_process(name)
        if isinstance(found, str):
            without += 1
            print(f"{name:28} {found}", flush=True)
            continue
        results.append(found)
        estimate, margin, measured, before = (
            round(each / MIB) for each in (found.estimate, found.margin, found.measured, found.before)
        )
        print(
            f"{name:28} estimate {estimate:5} + {margin:3} MiB, measured {measured:5} MiB (before the first step {before:5}), "
            f"error {found.error:+6.1%}, of the added {found.error_of_added:+5.0%}, {found.source}, {found.took_s:.2f} s",
            flush=True,
        )
    if not results:
        raise RuntimeError("no model has an estimate")
    return {
        "memory_error": median(abs(each.error) for each in results),
        "memory_under": max(each.margin_used for each in results),
        "memory_error_of_added": median(abs(each.error_of_added) for each in results),
        "estimate_s": median(each.took_s for each in results),
        "without_estimate": without,
    }


def _in_a_process(name: str) -> MemoryResult | str:
    """Return the figures, or the reason why there is no estimate: a dispatcher would probe that job."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name} did not train {NUM_STEPS} steps within {TIMEOUT_S:g} s") from error
    if run.returncode:
        raise RuntimeError(f"{name} failed with status {run.returncode}: {run.stderr[-2000:]}")
    answer = json.loads(run.stdout.splitlines()[-1])
    return answer if isinstance(answer, str) else MemoryResult(**answer)


def _train(name: str) -> MemoryResult | str:
    """Estimate, train, and measure in this process."""
    import torch
    from colocation_models import HELD_OUT, TUNED

    from lightning_dlrover.colocate.peak_memory import LoaderShape, MemoryEstimate, estimate_peak, resident
    from lightning_dlrover.tuning.resources import MemoryWatch, forget_peak

    torch.manual_seed(0)
    work = {**TUNED, **HELD_OUT}[name]()
    loader = LoaderShape(work.loader.num_workers if work.loader is not None else 0)
    found = estimate_peak(work.module, work.optimizers, work.batch(), work.loss, loader=loader)
    if not isinstance(found, MemoryEstimate):
        return f"no estimate: {found.reason}"
    before = resident().now_bytes
    forget_peak()
    with MemoryWatch(sample_s=0.02) as watch:
        for batch in work.batches(NUM_STEPS):
            loss = work.loss(batch)
            if loss is not None:
                loss.backward()
                for optimizer in work.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        # Loader workers have peaks of their own, which only samples can add up.
        measured = max(resident().peak_bytes, watch.take().peak_bytes if work.loader is not None else 0)
    return MemoryResult(
        name, found.total_bytes, found.margin_bytes, measured, before, found.source, found.took_s, asdict(found.parts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="models by name, or 'tuned' (default: all that were not tuned on)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = _train(options.one)
        print(json.dumps(found if isinstance(found, str) else asdict(found)))
        return
    from colocation_models import TUNED
    from jobs import describe_machine, result_line

    print(describe_machine())
    print(result_line(memory_errors([*TUNED] if options.models == ["tuned"] else options.models)))


if __name__ == "__main__":
    main()
