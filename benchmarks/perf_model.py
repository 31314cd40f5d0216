"""Accuracy and cost of the resource-performance model on step times that were measured on clusters.

    python benchmarks/perf_model.py [--data DIR] [--seeds N] [--without-sync] [--without-bytes] [--history] [--quick]
    python benchmarks/perf_model.py --layers [--data DIR] [--seeds N] [--quick]

Reads `MODEL-placements.csv` and `MODEL-scalability.csv` of each model from DIR/step_traces (DIR: $DLROVER_SHARED_DATA, else
../shared/data). Six splits of each:

    interp        a random quarter of the rows -> the rest; a third of these have a configuration of the fit, measured again
    by_placement  the rows of a random quarter of the placements -> those of the rest: no configuration is in both
    extrap        placements with at most 8 workers -> those with more
    scale         all placements -> the larger worlds of the scalability file
    few           12 random samples -> the rest of the placements
    off_node      placements on one node -> those on two to four nodes

In `off_node` the gradient bytes of a step are known, as a job's profiler knows them (`NUM_PARAMETERS`); --without-bytes leaves
them out there. The other splits have none, because the files have none.

Errors are mean absolute percentage errors of the step time, for the model and its physical prior alone; for boosted trees on
logs with leaves of two samples or more (scikit-learn) and a ridge regression of logs. Two errors published with the traces
stand beside them (Pollux's analytic fit, and trees). The last line holds the means of the models, the largest ratio of our
error to the better published one, the percentage of predicted samples inside the 90 % interval over all splits but `off_node`,
and that of `off_node`. The table above it has the coverage of each split.

With --history, the splits `few`, `interp`, `by_placement` and `off_node` are predicted with and without the placements of the
other models as jobs on the same hardware. The last line then holds the mean errors with them, the largest harm to a model and
split in points, and the coverages.

--layers fits the model without one of its layers at a time, and prints by how many points the errors of each split grow. Layers
that need other jobs are left out of a model that has them, in the splits of --history. `inside` is the coverage of `off_node`
without the layer. The last line holds the growth of the error from 12 samples; `shapes` is that against the best single shape.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from jobs import BenchmarkError, describe_machine, result_line

from lightning_dlrover.lab.evaluate import Evaluation, evaluate
from lightning_dlrover.lab.simulate.traces import TraceError, read_trace
from lightning_dlrover.tuning import (
    Columns,
    PhysicalPrior,
    Population,
    StepProfile,
    StepTimeModel,
    configuration_of,
    population_of,
)
from lightning_dlrover.tuning.population import SHAPES, TERMS, terms_of
from lightning_dlrover.tuning.prior import Shape

SHARED_DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PUBLISHED_SPLITS = ("interp", "extrap", "scale", "few")
SPLITS = (*PUBLISHED_SPLITS, "by_placement", "off_node")
WITH_HISTORY = ("few", "interp", "by_placement", "off_node")
NUM_FEW = 12
ERRORS = ("mape", "prior", "trees", "ridge")

# Errors of Pollux's fit and of trees, by model and split, as published in the README of the traces.
PUBLISHED = {
    "ncf": ((16.9, 8.0), (11.1, 8.6), (12.8, 20.0), (14.7, 14.9)),
    "cifar10": ((7.7, 6.6), (9.5, 5.6), (9.7, 20.1), (11.0, 29.0)),
    "deepspeech2": ((8.1, 4.3), (8.4, 5.3), (30.6, 7.4), (8.0, 30.6)),
    "bert": ((6.9, 4.7), (3.9, 4.6), (7.3, 5.0), (11.5, 16.0)),
    "imagenet": ((6.9, 6.1), (7.0, 5.1), (8.8, 12.7), (10.5, 21.5)),
    "yolov3": ((8.8, 9.3), (5.3, 8.7), (25.0, 8.8), (10.0, 17.0)),
}


# Parameters of the models, from their source beside the traces (benchmark/models of petuum/adaptdl); each sends 4 bytes a step.
NUM_PARAMETERS = {
    "ncf": 1_602_657,  # NeuMF of MovieLens 1M, 32 factors, 3 layers
    "cifar10": 11_173_962,  # ResNet-18 for 32 x 32 pixels
    "deepspeech2": 41_187_968,  # five bidirectional GRUs of 800
    "bert": 109_483_778,  # BERT base, questions and answers
    "imagenet": 25_557_032,  # ResNet-50
    "yolov3": 61_626_049,  # with the 20 classes of VOC
}


@dataclass(frozen=True)
class Score:
    """Means over the seeds of one model and split, percent."""

    mape: float
    prior: float
    trees: float
    ridge: float
    coverage: float

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> Score:
        names = ("mape", "prior_mape", "trees_mape", "ridge_mape", "coverage")
        return cls(*(statistics.fmean(getattr(e, name) for e in evaluations) for name in names))


Samples = Sequence[StepProfile]


def splits(split: str, placed: Samples, scaled: Samples, num_seeds: int) -> Iterator[tuple[Samples, Samples]]:
    """Yield samples for the fit, and samples to predict."""
    if split == "scale":
        yield placed, scaled
    elif split == "extrap":
        yield [s for s in placed if s.num_workers <= 8], [s for s in placed if s.num_workers > 8]
    elif split == "off_node":
        yield [s for s in placed if s.num_nodes == 1], [s for s in placed if s.num_nodes > 1]
    elif split == "by_placement":
        placements = sorted({placement_of(sample) for sample in placed})
        for seed in range(num_seeds):
            known = set(random.Random(seed).sample(placements, len(placements) // 4))
            yield [s for s in placed if placement_of(s) in known], [s for s in placed if placement_of(s) not in known]
    else:
        for seed in range(num_seeds):
            mixed = random.Random(seed).sample(placed, len(placed))
            count = NUM_FEW if split == "few" else len(mixed) // 4
            yield mixed[:count], mixed[count:]


def placement_of(sample: StepProfile) -> tuple[int, ...]:
    """Return all that the model reads of a placement: nodes in another order are the same placement."""
    return sample.num_nodes, sample.num_workers, sample.fullest_node, sample.emptiest_node


def with_bytes(model: str, samples: Samples) -> Samples:
    return [replace(sample, dense_bytes=4 * NUM_PARAMETERS[model]) for sample in samples]


def read(folder: Path, model: str, kind: str, with_sync: bool) -> Samples:
    trace = read_trace(folder / f"{model}-{kind}.csv")
    for remark in trace.remarks:
        print(remark, file=sys.stderr)
    if with_sync:
        return trace.samples
    return [without_parts(sample) for sample in trace.samples]


def without_parts(sample: StepProfile) -> StepProfile:
    return replace(sample, forward_s=0.0, communication_s=0.0)


def with_history(folder: Path, num_seeds: int, with_sync: bool, know_bytes: bool) -> None:
    """Print how other jobs on the same hardware change the errors of each model."""
    plain = {model: read(folder, model, "placements", with_sync) for model in PUBLISHED}
    described = {model: with_bytes(model, samples) for model, samples in plain.items()} if know_bytes else plain
    helped: dict[tuple[str, str], Score] = {}
    harm: list[float] = []
    print(f"{'model':12} {'split':13}" + "".join(f"{name:>9}" for name in ("without", "with", "harm", "inside")))
    for model in PUBLISHED:
        for split in WITH_HISTORY:
            jobs = described if split == "off_node" else plain
            population = population_of([samples for other, samples in jobs.items() if other != model])
            cases = list(splits(split, jobs[model], (), num_seeds))
            alone = Score.of([evaluate(train, test) for train, test in cases])
            score = helped[model, split] = Score.of([evaluate(train, test, population) for train, test in cases])
            harm.append(score.mape - alone.mape)
            figures = (alone.mape, score.mape, harm[-1], score.coverage)
            print(f"{model:12} {split:13}" + "".join(f"{figure:9.2f}" for figure in figures), flush=True)
    print_means(WITH_HISTORY, helped)
    means = mean_of(WITH_HISTORY, helped, "mape")
    coverage = mean_of(WITH_HISTORY, helped, "coverage")
    figures_off = {"off_node": means.pop("off_node"), "off_node_coverage": coverage.pop("off_node")}
    named = {f"{split}_history": mean for split, mean in means.items()}
    print(result_line({**named, "worst_harm": max(harm), "coverage": statistics.fmean(coverage.values()), **figures_off}))


def mean_of(of_splits: Sequence[str], scores: Mapping[tuple[str, str], Score], name: str) -> dict[str, float]:
    """Return the mean over the models of one figure, by split."""
    return {split: statistics.fmean(getattr(scores[model, split], name) for model in PUBLISHED) for split in of_splits}


def print_means(of_splits: Sequence[str], scores: Mapping[tuple[str, str], Score]) -> None:
    """Print means over the models, and the standard deviation between models of our error."""
    means = {name: mean_of(of_splits, scores, name) for name in (*ERRORS, "coverage")}
    for split in of_splits:
        spread = statistics.stdev(scores[model, split].mape for model in PUBLISHED)
        print(
            f"{split:13}"
            + ", ".join(f"{name} {mean[split]:.2f} %" for name, mean in means.items())
            + f", models +-{spread:.2f}"
        )


# --- layers -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """How to fit the model without one of its layers."""

    name: str
    left_out: Callable[[], AbstractContextManager[object]] = nullcontext
    population: Callable[[Population], Population | None] = lambda population: population
    model: Callable[[StepTimeModel], StepTimeModel] = lambda model: model


def _constant(owner: type, name: str, value: object) -> AbstractContextManager[object]:
    """Replace a constant or function of the module that holds a class."""
    return mock.patch.object(sys.modules[owner.__module__], name, value)


def _without_terms(names: frozenset[str]) -> AbstractContextManager[object]:
    kept = np.array([term.name not in names for term in TERMS])
    return _constant(Shape, "terms_of", lambda kind: terms_of(kind) & kept)


@contextmanager
def _one_shape(kind: int) -> Iterator[None]:
    fit = PhysicalPrior.fit

    def fitted(*measured: object, **options: object) -> PhysicalPrior:
        prior = fit(*measured, **options)  # type: ignore[arg-type]
        shapes = tuple(shape for shape, of_kind in zip(prior.shapes, prior.kinds, strict=True) if of_kind == kind)
        return replace(prior, shapes=shapes, weights=np.full(len(shapes), 1 / len(shapes)), kinds=(kind,) * len(shapes))

    with mock.patch.object(PhysicalPrior, "fit", staticmethod(fitted)):
        yield


WHOLE = Layer("nothing")
SINGLE_SHAPES = [Layer(f"only shape {kind}", partial(_one_shape, kind)) for kind in range(len(SHAPES))]
PAIR = Layer("pair_of_nodes", partial(_without_terms, frozenset({"pair_of_nodes"})))
LAYERS = (
    Layer("step_overhead", partial(_without_terms, frozenset({"step_overhead"}))),
    Layer("neighbours", partial(_without_terms, frozenset({"neighbours", "neighbours_per_sample"}))),
    Layer("rings", partial(_without_terms, frozenset({"ring_inside_node", "ring_between_nodes"}))),
    Layer("network", partial(_without_terms, frozenset({"network"}))),
    Layer("growth", partial(_without_terms, frozenset({"latency_of_workers", "stages"}))),
    PAIR,
    Layer("overlap", lambda: _constant(PhysicalPrior, "OVERLAPS", (1.0,))),
    *SINGLE_SHAPES,
    Layer("trees", lambda: _constant(StepTimeModel, "MIN_TREE_SAMPLES", math.inf)),
    Layer("measured", model=lambda model: replace(model, evidence=())),
)
"""Layers of the model of a job that knows no other. `growth` is that of synchronisation with workers."""

OF_HISTORY = (
    Layer("population", population=lambda population: None),
    Layer("residual_gp", population=lambda population: replace(population, residual_gp=None)),
    Layer("leaving_width", population=lambda population: replace(population, leaving_width=1.0)),
    PAIR,
)
"""Layers of the model of a job that knows others on the same hardware."""


def without_layers(folder: Path, num_seeds: int) -> None:
    """Print by how much errors grow without each layer."""
    plain = {model: read(folder, model, "placements", True) for model in PUBLISHED}
    scaled = {model: read(folder, model, "scalability", True) for model in PUBLISHED}
    described = {model: with_bytes(model, samples) for model, samples in plain.items()}
    values: dict[str, float] = {}
    for of_splits, layers, prefix in ((SPLITS, LAYERS, ""), (WITH_HISTORY, OF_HISTORY, "history_")):
        whole: dict[str, float] = {}
        print(f"\n{prefix + 'without':20}" + "".join(f"{split:>13}" for split in of_splits) + f"{'inside':>9}", flush=True)
        for layer in (WHOLE, *layers):
            errors: dict[str, float] = {}
            for split in of_splits:
                jobs = described if split == "off_node" else plain
                found = [
                    errors_without(
                        layer,
                        list(splits(split, jobs[model], scaled[model], num_seeds)),
                        [samples for other, samples in jobs.items() if other != model] if prefix else [],
                    )
                    for model in PUBLISHED
                ]
                # The last split of both is `off_node`.
                errors[split], inside = (statistics.fmean(column) for column in zip(*found, strict=True))
            whole = whole or errors
            figures = errors if layer is WHOLE else {split: error - whole[split] for split, error in errors.items()}
            print(f"{layer.name:20}" + "".join(f"{figure:13.2f}" for figure in figures.values()) + f"{inside:9.1f}", flush=True)
            if layer in SINGLE_SHAPES:
                values["shapes"] = min(figures["few"], values.get("shapes", math.inf))
            elif layer is not WHOLE:
                values[f"{prefix}{layer.name}"] = figures["few"]
    print(result_line(values))


def errors_without(layer: Layer, cases: Sequence[tuple[Samples, Samples]], others: Sequence[Samples]) -> tuple[float, float]:
    """Return the mean error and the coverage over the cases, percent."""
    errors, insides = [], []
    with layer.left_out():
        known = population_of(others) if others else None
        population = layer.population(known) if known else None
        for train, test in cases:
            model = layer.model(StepTimeModel.fit(train, population=population))
            found = model.predict_columns(Columns.of([configuration_of(sample) for sample in test]))
            measured_s = np.array([sample.step_time_s for sample in test])
            errors.append(float(100 * np.abs(found.step_time_s / measured_s - 1).mean()))
            insides.append(float(100 * ((found.low_s <= measured_s) & (measured_s <= found.high_s)).mean()))
    return statistics.fmean(errors), statistics.fmean(insides)


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
    parser.add_argument("--without-bytes", action="store_true", help="off_node: jobs do not know their gradient bytes")
    parser.add_argument("--history", action="store_true", help="the other models are jobs on the same hardware")
    parser.add_argument("--layers", action="store_true", help="print what each layer of the model brings")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    options = parser.parse_args()
    folder, num_seeds = options.data / "step_traces", 2 if options.quick else options.seeds
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} does not exist: name the folder that holds step_traces with --data")
    print(describe_machine())
    if options.layers:
        without_layers(folder, num_seeds)
        return
    if options.history:
        with_history(folder, num_seeds, not options.without_sync, not options.without_bytes)
        return

    scores: dict[tuple[str, str], Score] = {}
    ratios: list[float] = []
    print(f"{'model':12} {'split':13}" + "".join(f"{name:>9}" for name in ("ours", *ERRORS[1:], "inside", "Pollux*", "trees*")))
    for model, published in PUBLISHED.items():
        placed, scaled = (read(folder, model, kind, not options.without_sync) for kind in ("placements", "scalability"))
        described = placed if options.without_bytes else with_bytes(model, placed)
        for split in SPLITS:
            rows = described if split == "off_node" else placed
            score = Score.of([evaluate(train, test) for train, test in splits(split, rows, scaled, num_seeds)])
            scores[model, split] = score
            figures = (*(getattr(score, name) for name in ERRORS), score.coverage)
            if split in PUBLISHED_SPLITS:
                references = published[PUBLISHED_SPLITS.index(split)]
                ratios.append(score.mape / min(references))
                figures += references
            print(f"{model:12} {split:13}" + "".join(f"{figure:9.1f}" for figure in figures), flush=True)
    print("* as published")
    print_means(SPLITS, scores)
    fit_s, predict_s = cost()
    print(f"processor time: {fit_s:.2f} s to fit 2,000 samples, {predict_s:.2f} s for 100,000 predictions")
    means, coverage = mean_of(SPLITS, scores, "mape"), mean_of(SPLITS, scores, "coverage")
    off_node, off_node_coverage = means.pop("off_node"), coverage.pop("off_node")
    of_all = {"worst_ratio": max(ratios), "coverage": statistics.fmean(coverage.values())}
    print(result_line({**means, **of_all, "off_node": off_node, "off_node_coverage": off_node_coverage}))


if __name__ == "__main__":
    try:
        main()
    except (BenchmarkError, TraceError) as error:
        sys.exit(f"error: {error}")
