"""Accuracy and cost of the resource-performance model on step times that were measured on clusters.

    python benchmarks/perf_model.py [--data DIR] [--seeds N] [--without-sync] [--history] [--quick]

Reads `MODEL-placements.csv` and `MODEL-scalability.csv` of each model from DIR/step_traces (DIR: $DLROVER_SHARED_DATA, else
../shared/data). Four splits of each:

    interp   a random quarter of the placements -> the rest
    extrap   placements with at most 8 workers -> those with more
    scale    all placements -> the larger worlds of the scalability file
    few      12 random samples -> the rest of the placements

Errors are mean absolute percentage errors of the step time, for the model, its physical prior alone, and boosted trees alone
(scikit-learn's defaults). Two errors published with the traces stand beside them (Pollux's analytic fit, and trees). The last
line holds the means of the models, the largest ratio of our error to the better published one, and the percentage of
predicted samples inside the 90 % interval, over all splits.

With --history, the splits `few` and `interp` are predicted with and without the placements of the other models as jobs on the
same hardware. The last line then holds the mean errors with them, the largest harm to a model and split in points, and the
coverage.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jobs import BenchmarkError, describe_machine, result_line

from lightning_dlrover.perf import Columns, StepProfile, StepTimeModel, configuration_of, population_of
from lightning_dlrover.perf.evaluation import Evaluation, evaluate
from lightning_dlrover.perf.traces import TraceError, read_trace

SHARED_DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SPLITS = ("interp", "extrap", "scale", "few")
NUM_FEW = 12

# Errors of Pollux's fit and of trees, by model and split, as published in the README of the traces.
PUBLISHED = {
    "ncf": ((16.9, 8.0), (11.1, 8.6), (12.8, 20.0), (14.7, 14.9)),
    "cifar10": ((7.7, 6.6), (9.5, 5.6), (9.7, 20.1), (11.0, 29.0)),
    "deepspeech2": ((8.1, 4.3), (8.4, 5.3), (30.6, 7.4), (8.0, 30.6)),
    "bert": ((6.9, 4.7), (3.9, 4.6), (7.3, 5.0), (11.5, 16.0)),
    "imagenet": ((6.9, 6.1), (7.0, 5.1), (8.8, 12.7), (10.5, 21.5)),
    "yolov3": ((8.8, 9.3), (5.3, 8.7), (25.0, 8.8), (10.0, 17.0)),
}


@dataclass(frozen=True)
class Score:
    """Means over the seeds of one model and split, percent."""

    mape: float
    prior: float
    trees: float
    coverage: float

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> Score:
        means = (statistics.fmean(getattr(e, n) for e in evaluations) for n in ("mape", "prior_mape", "trees_mape", "coverage"))
        return cls(*means)


Samples = Sequence[StepProfile]


def splits(split: str, placed: Samples, scaled: Samples, num_seeds: int) -> Iterator[tuple[Samples, Samples]]:
    """Samples for the fit, and samples to predict."""
    if split == "scale":
        yield placed, scaled
    elif split == "extrap":
        yield [s for s in placed if s.num_workers <= 8], [s for s in placed if s.num_workers > 8]
    else:
        for seed in range(num_seeds):
            mixed = random.Random(seed).sample(placed, len(placed))
            known = NUM_FEW if split == "few" else len(mixed) // 4
            yield mixed[:known], mixed[known:]


def read(folder: Path, model: str, kind: str, with_sync: bool) -> Samples:
    trace = read_trace(folder / f"{model}-{kind}.csv")
    for remark in trace.remarks:
        print(remark, file=sys.stderr)
    if with_sync:
        return trace.samples
    return [without_parts(sample) for sample in trace.samples]


def without_parts(sample: StepProfile) -> StepProfile:
    return replace(sample, forward_s=0.0, communication_s=0.0)


def with_history(folder: Path, num_seeds: int, with_sync: bool) -> None:
    """Print how other jobs on the same hardware change the errors of each model."""
    placed = {model: read(folder, model, "placements", with_sync) for model in PUBLISHED}
    errors: dict[str, list[float]] = {"few": [], "interp": []}
    inside: list[float] = []
    harm: list[float] = []
    print(f"{'model':12} {'split':7}" + "".join(f"{name:>9}" for name in ("without", "with", "harm", "inside")))
    for model in PUBLISHED:
        population = population_of([samples for other, samples in placed.items() if other != model])
        for split in errors:
            cases = list(splits(split, placed[model], (), num_seeds))
            alone = Score.of([evaluate(train, test) for train, test in cases])
            helped = Score.of([evaluate(train, test, population) for train, test in cases])
            errors[split].append(helped.mape)
            inside.append(helped.coverage)
            harm.append(helped.mape - alone.mape)
            print(f"{model:12} {split:7}{alone.mape:9.2f}{helped.mape:9.2f}{harm[-1]:9.2f}{helped.coverage:9.1f}", flush=True)
    means = {f"{split}_history": statistics.fmean(of_models) for split, of_models in errors.items()}
    print(result_line({**means, "worst_harm": max(harm), "coverage": statistics.fmean(inside)}))


def cost() -> tuple[float, float]:
    """Processor seconds of a fit to 2,000 samples, and of 100,000 predictions."""
    rng = random.Random(0)

    def sample(step: int) -> StepProfile:
        workers, batch = rng.randint(1, 64), rng.randint(8, 512)
        nodes = -(-workers // 4)
        step_s = (0.005 + 1e-4 * batch + 0.001 * workers + 0.01 * (nodes > 1)) * rng.lognormvariate(0, 0.05)
        return StepProfile(
            *("w", 1, 0, workers, nodes, step, 50, batch * workers, batch, rng.randint(0, 2), rng.randint(1, 4), 4.0, "cpu"),
            *(step_s, 0.0, step_s / 3, step_s / 3, step_s / 3, 0.0, 0.0, batch * workers / step_s, 1 << 28, 100.0),
        )

    samples = [sample(step) for step in range(2000)]
    asked = Columns.of([configuration_of(sample(step)) for step in range(100_000)])
    StepTimeModel.fit(samples[:100]).predict_columns(asked.rows(np.arange(2)))  # run the imports before the clock starts
    started = time.process_time()
    model = StepTimeModel.fit(samples)
    fitted = time.process_time()
    model.predict_columns(asked)
    return fitted - started, time.process_time() - fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="folder that holds step_traces (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="random splits of each model (default: %(default)s)")
    parser.add_argument("--without-sync", action="store_true", help="drop the separate measurements of synchronization")
    parser.add_argument("--history", action="store_true", help="the other models are jobs on the same hardware")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    options = parser.parse_args()
    folder, num_seeds = options.data / "step_traces", 2 if options.quick else options.seeds
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} does not exist: name the folder that holds step_traces with --data")
    print(describe_machine())
    if options.history:
        with_history(folder, num_seeds, not options.without_sync)
        return

    scores: dict[tuple[str, str], Score] = {}
    ratios: dict[tuple[str, str], float] = {}
    inside: list[float] = []
    print(
        f"{'model':12} {'split':7}"
        + "".join(f"{name:>9}" for name in ("ours", "prior", "trees", "Pollux*", "trees*", "ratio*", "inside"))
    )
    for model, published in PUBLISHED.items():
        placed, scaled = (read(folder, model, kind, not options.without_sync) for kind in ("placements", "scalability"))
        for split, references in zip(SPLITS, published, strict=True):
            score = Score.of([evaluate(train, test) for train, test in splits(split, placed, scaled, num_seeds)])
            scores[model, split], ratios[model, split] = score, score.mape / min(references)
            inside.append(score.coverage)
            print(
                f"{model:12} {split:7}{score.mape:9.1f}{score.prior:9.1f}{score.trees:9.1f}"
                f"{references[0]:9.1f}{references[1]:9.1f}{ratios[model, split]:9.2f}{score.coverage:9.1f}",
                flush=True,
            )
    print("* as published")
    for split in SPLITS:
        of_split = [scores[model, split] for model in PUBLISHED]
        means = {name: statistics.fmean(getattr(s, name) for s in of_split) for name in ("mape", "prior", "trees", "coverage")}
        print(f"{split:7} " + ", ".join(f"{name} {mean:.1f} %" for name, mean in means.items()))
    fit_s, predict_s = cost()
    print(f"processor time: {fit_s:.2f} s to fit 2,000 samples, {predict_s:.2f} s for 100,000 predictions")
    mean = {split: statistics.fmean(scores[model, split].mape for model in PUBLISHED) for split in SPLITS}
    print(result_line({**mean, "worst_ratio": max(ratios.values()), "coverage": statistics.fmean(inside)}))


if __name__ == "__main__":
    try:
        main()
    except (BenchmarkError, TraceError) as error:
        sys.exit(f"error: {error}")
