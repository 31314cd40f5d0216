"""Findings of a characterization: sentences with numbers, each computed by a rule that is shown with it. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_dlrover.lab.characterize.points import Point, Study
from lightning_dlrover.lab.characterize.results import Result
from lightning_dlrover.output import counted

WORDS = {
    "data": "waiting for data",
    "embedding": "table lookups",
    "bottom_mlp": "the bottom MLP",
    "interaction": "the interaction",
    "top_mlp": "the top MLP",
    "communication": "communication",
    "optimizer": "the optimizer",
}
ENOUGH = 0.95  # fraction of the best throughput that counts as reached
NOTABLE = 1.15  # factor below which two figures are called equal
CLOSE_TO_LIMIT = 0.6  # fraction of a limit above which it is called the bottleneck
SMALL_WAIT = 0.05  # fraction of a step
CACHE_DROP = 1.25
UNSURE = 0.3  # median width of the intervals above which no finding should be trusted


@dataclass(frozen=True)
class Finding:
    study: str
    text: str
    rule: str  # how the sentence follows from the measurements


@dataclass(frozen=True)
class Evidence:
    """Inputs of the rules."""

    studies: Sequence[Study]
    results: Mapping[Point, Result]
    limits: Mapping[tuple[str, int], float]
    cores: int

    def of(self, name: str) -> list[Result]:
        """Results of a study that measure time, in the order of its points."""
        points = [point for study in self.studies if study.name == name for point in study.points]
        return [self.results[point] for point in points if point in self.results and not point.measures_loss]

    def by_workload(self, name: str) -> Iterator[tuple[str, list[Result]]]:
        """Yield each workload of a study with its results."""
        found = self.of(name)
        for workload in dict.fromkeys(r.point.workload for r in found):
            yield workload, [r for r in found if r.point.workload == workload]

    def losses(self) -> list[Result]:
        points = [point for study in self.studies for point in study.points if point.measures_loss]
        return [self.results[point] for point in points if point in self.results]


def findings(evidence: Evidence) -> list[Finding]:
    """Apply all rules. A rule without its measurements finds nothing."""
    return [finding for rule in RULES for finding in rule(evidence)]


def _busy_machine(evidence: Evidence) -> Iterator[Finding]:
    spreads = [result.spread for result in evidence.results.values() if not result.point.measures_loss]
    if spreads and (width := statistics.median(spreads)) > UNSURE:
        yield Finding(
            "all",
            f"The speed of this machine changed while it was measured: the intervals are {width:.0%} of their figures wide, so "
            "the findings below may be chance. Measure again in a new folder while no other program runs.",
            f"median width of the intervals above {UNSURE:.0%}",
        )


def _where_time_goes(evidence: Evidence) -> Iterator[Finding]:
    for result in evidence.of("devices"):
        if result.point.model or not result.part_s:
            continue
        part = result.largest_part
        yield Finding(
            "devices",
            f"The {result.point.workload} model on {_device(result.point)} spends {result.share(part):.0%} of a step in "
            f"{WORDS[part]} ({_ms(result.part_s[part])} of {_ms(result.parts_s)} ms) and trains "
            f"{result.samples_per_s:,.0f} samples/s.",
            "largest of the measured parts of a step",
        )


def _bandwidth(evidence: Evidence) -> Iterator[Finding]:
    for result in evidence.of("devices"):
        attainable = evidence.limits.get(("gpu_rows" if result.point.device == "cuda" else "rows", evidence.cores))
        # Tables on the CPU of a model on the GPU also wait for the link, which the limit leaves out.
        if attainable is None or result.point.device == "mix" or result.lookup_bytes_per_s is None:
            continue
        fraction = result.lookup_bytes_per_s / 1e9 / attainable
        share = result.share("embedding") + result.share("optimizer")
        text = (
            f"On {_device(result.point)}, tables of the {result.point.workload} model move "
            f"{result.lookup_bytes_per_s / 1e9:.2g} GB/s of rows, {fraction:.0%} "
            f"of the {attainable:.2g} GB/s that random lookups read there, in {share:.0%} of a step"
        )
        if result.num_visits < 2:
            text += "."  # one visit cannot identify the bottleneck
        elif fraction >= CLOSE_TO_LIMIT:
            text += ": they are bandwidth-bound, so more cores will not help, fewer or shorter lookups will."
        else:
            text += ": they are bound by instructions per lookup, not by memory, so fused kernels would help."
        yield Finding(
            "devices",
            text,
            f"bytes of rows read twice and written once, per second; bound by memory from {CLOSE_TO_LIMIT:.0%} on",
        )


def _multiply(evidence: Evidence) -> Iterator[Finding]:
    best, torchs = (evidence.limits.get((name, evidence.cores)) for name in ("multiply", "multiply_torch"))
    if best is not None and torchs is not None and torchs < best / 1.1:
        yield Finding(
            "mlp",
            f"Torch's matrix multiply reaches {torchs:.0f} of the {best:.0f} GFLOP/s that another BLAS reaches on this "
            f"processor: a torch built with that BLAS would gain up to {best / torchs - 1:.0%} in large MLPs.",
            "the faster of torch.mm and numpy's product, against torch.mm alone",
        )
    measured = [r for r in evidence.of("mlp") if r.mlp_flops_per_s]
    if not measured:
        return
    small, large = (choose(measured, key=lambda r: r.point.width * 1000 + r.point.depth) for choose in (min, max))
    assert small.mlp_flops_per_s is not None
    assert large.mlp_flops_per_s is not None
    # The study runs on one device.
    limit = evidence.limits.get(("gpu_multiply" if large.point.device == "cuda" else "multiply_torch", evidence.cores))
    if limit is not None:
        yield Finding(
            "mlp",
            f"MLPs of width {large.point.width} and depth {large.point.depth} on {_device(large.point)} reach "
            f"{large.mlp_flops_per_s / 1e9:.0f} GFLOP/s, {large.mlp_flops_per_s / 1e9 / limit:.0%} of torch's matrix "
            f"multiply; at width {small.point.width} and depth {small.point.depth} it is "
            f"{small.mlp_flops_per_s / 1e9 / limit:.0%}. Throughput falls by a factor of "
            f"{small.samples_per_s / large.samples_per_s:.1f} between the two.",
            "FLOPs of both MLPs over the time of their parts",
        )


def _features(evidence: Evidence) -> Iterator[Finding]:
    found = evidence.of("features")
    for name, other, text in (("num_dense", "num_sparse", "dense features"), ("num_sparse", "num_dense", "tables")):
        least = min((getattr(r.point, other) for r in found), default=None)
        line = sorted((r for r in found if getattr(r.point, other) == least), key=lambda r: float(getattr(r.point, name)))
        if len(line) > 1:
            first, last = line[0], line[-1]
            growth = getattr(last.point, name) / getattr(first.point, name)
            yield Finding(
                "features",
                f"{growth:.0f} times as many {text} ({getattr(first.point, name)} to {getattr(last.point, name)}) make a step "
                f"{last.median / first.median:.1f} times as long.",
                f"steps at both ends of the sweep, with the fewest {'tables' if other == 'num_sparse' else 'dense features'}",
            )


def _batch(evidence: Evidence) -> Iterator[Finding]:
    line = sorted(evidence.of("batch"), key=lambda r: r.point.batch)
    if len(line) < 2:
        return
    best = max(line, key=lambda r: r.samples_per_s)
    enough = next(r for r in line if r.samples_per_s >= ENOUGH * best.samples_per_s)
    last = line[-1]
    if enough is not last:
        shape = f"beyond, throughput is flat or falls ({last.samples_per_s / best.samples_per_s:.0%} at {last.point.batch})"
        study = "the HPCA'21 study's shape for CPUs, a peak at small batches, appears"
    else:
        growth = last.samples_per_s / line[0].samples_per_s
        shape = f"it still grows up to the largest batch, {growth:.1f} times from {line[0].point.batch}"
        study = (
            "the HPCA'21 study's shape for CPUs, a peak at small batches, does not appear: a step's fixed cost, about "
            f"{_ms(_fixed_s(line))} ms, is large on this machine"
        )
    if last.point.device != "cpu":
        study = f"a step's fixed cost is about {_ms(_fixed_s(line))} ms"
    yield Finding(
        "batch",
        f"A batch of {enough.point.batch} reaches {ENOUGH:.0%} of the best throughput ({best.samples_per_s:,.0f} "
        f"samples/s); {shape}; {study}.",
        f"smallest batch with {ENOUGH:.0%} of the best; the fixed cost is where the line through the two smallest meets zero",
    )


def _fixed_s(line: Sequence[Result]) -> float:
    one, two = line[:2]
    slope = (two.median - one.median) / (two.point.batch - one.point.batch)
    return max(0.0, one.median - slope * one.point.batch)


def _loss(evidence: Evidence) -> Iterator[Finding]:
    found = evidence.losses()
    if len(found) < 3:
        return
    smallest = min(found, key=lambda r: r.point.batch)
    largest = max(r.point.batch for r in found)
    at_largest = sorted((r for r in found if r.point.batch == largest), key=lambda r: r.point.learning_rate)
    kept, tuned = at_largest[0], min(at_largest, key=lambda r: r.median)
    lost, left = (100 * (r.median / smallest.median - 1) for r in (kept, tuned))
    yield Finding(
        "batch",
        f"On planted data, a batch of {largest} in place of {smallest.point.batch} raises the normalized entropy by "
        f"{lost:.1f} % with the same learning rate, and by {left:.1f} % with {tuned.point.learning_rate:.2g} in place of "
        f"{smallest.point.learning_rate:.2g}: "
        + ("most of the loss comes back." if left < lost / 2 else "tuning brings little back."),
        "test loss over the base rate's entropy after one pass over the same rows, median of three seeds",
    )


def _rows(evidence: Evidence) -> Iterator[Finding]:
    line = sorted(evidence.of("rows"), key=lambda r: r.point.rows)
    if len(line) < 2:
        return
    drops = [(b.median / a.median, a, b) for a, b in itertools.pairwise(line)]
    clear = [drop for drop in drops if drop[2].low > drop[1].high]
    factor, before, after = max(clear or drops, key=lambda drop: drop[0])
    sizes = [r.point.rows * r.point.num_sparse * r.point.dim * 4 / 2**20 for r in (before, after)]
    if factor >= CACHE_DROP and not clear:
        text = (
            f"Steps become {factor:.1f} times as long between {sizes[0]:,.0f} and {sizes[1]:,.0f} MiB of tables, but within "
            "their intervals: this run does not show where the tables leave the caches."
        )
    elif factor >= CACHE_DROP:
        text = (
            f"Steps become {factor:.1f} times as long between {sizes[0]:,.0f} and {sizes[1]:,.0f} MiB of tables: there the "
            f"tables leave the caches. From {line[0].point.rows:,} to {line[-1].point.rows:,} rows they become "
            f"{line[-1].median / line[0].median:.1f} times as long."
        )
    else:
        text = (
            f"Steps take the same time from {line[0].point.rows:,} to {line[-1].point.rows:,} rows: none of the sweep's is "
            f"{CACHE_DROP} times as long as the one before."
        )
    memory = max(r.peak_memory_bytes for r in line) / 2**30
    yield Finding(
        "rows",
        f"{text} The largest tables took {memory:.1f} GiB with the process.",
        f"largest step of the sweep beyond both intervals, from a factor of {CACHE_DROP} on",
    )


def _lookups(evidence: Evidence) -> Iterator[Finding]:
    found = evidence.of("lookups")
    skews = sorted({r.point.skew for r in found})
    most = max((r.point.lookups for r in found), default=0)
    by_skew = {r.point.skew: r for r in found if r.point.lookups == most}
    uniform = sorted((r for r in found if r.point.skew == 0), key=lambda r: r.point.lookups)
    if len(uniform) > 1:
        one, many = uniform[0], uniform[-1]
        yield Finding(
            "lookups",
            f"{many.point.lookups} lookups per table in place of {one.point.lookups} make a step "
            f"{many.median / one.median:.1f} times as long; table lookups and their update then take "
            f"{many.share('embedding') + many.share('optimizer'):.0%} of it.",
            "steps at both ends of the sweep with uniform ids",
        )
    if len(skews) > 1 and {skews[0], skews[-1]} <= by_skew.keys():
        gain = by_skew[skews[0]].median / by_skew[skews[-1]].median
        yield Finding(
            "lookups",
            f"With ids of skew {skews[-1]} in place of uniform ones, a step with {most} lookups is {gain:.2f} times as fast: "
            + ("hot rows stay in the caches." if gain > NOTABLE else "the caches gain little from hot rows here."),
            f"step times at the most lookups; a gain counts from a factor of {NOTABLE} on",
        )


def _placement(evidence: Evidence) -> Iterator[Finding]:
    for workload, found in evidence.by_workload("placement"):
        ranked = sorted(found, key=lambda r: r.median)
        if len(ranked) < 2:
            continue
        best, worst = ranked[0], ranked[-1]
        yield Finding(
            "placement",
            f"Over {best.point.num_workers} workers, the tables of the {workload} model train fastest "
            f"{_words(best.point.placement)} ({best.samples_per_s:,.0f} samples/s, {best.share('communication'):.0%} of a "
            f"step in communication) and slowest {_words(worst.point.placement)} ({worst.samples_per_s:,.0f}).",
            "median step times of the measured placements, with the same batch over all workers",
        )


def _workers(evidence: Evidence) -> Iterator[Finding]:
    for workload, mine in evidence.by_workload("workers"):
        alone = next((r for r in mine if (r.point.num_workers, r.point.threads, r.point.loader_workers) == (1, 1, 0)), None)
        if alone is None or len(mine) < 2:
            continue
        best = max(mine, key=lambda r: r.samples_per_s)
        speedup = best.samples_per_s / alone.samples_per_s
        cores = min(best.point.num_workers * best.point.threads, evidence.cores)
        workers, threads = counted(best.point.num_workers, "worker"), counted(best.point.threads, "thread")
        yield Finding(
            "workers",
            f"The {workload} model runs best with {workers} of {threads} and "
            f"{counted(best.point.loader_workers, 'loader worker')} each: {speedup:.2f} times one thread's throughput, "
            f"{speedup / cores:.0%} of a linear gain over {counted(cores, 'core')}.",
            "best of the measured combinations, with the same batch over all workers",
        )


def _loader(evidence: Evidence) -> Iterator[Finding]:
    found = [r for r in evidence.of("loader") if r.point.num_workers == 1]
    for name in dict.fromkeys(r.point.data for r in found):
        line = sorted((r for r in found if r.point.data == name), key=lambda r: r.point.loader_workers)
        if len(line) < 2 or line[0].point.loader_workers:
            continue
        best = max(line, key=lambda r: r.samples_per_s)
        enough = next((r for r in line if r.share("data") < SMALL_WAIT), None)
        wait = f"a step waits for data for {line[0].share('data'):.0%} of its time without loader workers"
        wait += (
            f", and for less than {SMALL_WAIT:.0%} from {enough.point.loader_workers} on"
            if enough is not None
            else f", and still for {line[-1].share('data'):.0%} with {line[-1].point.loader_workers}"
        )
        yield Finding(
            "loader",
            f"With {_format(name)}, {wait}; the fastest has {counted(best.point.loader_workers, 'loader worker')} "
            f"({best.samples_per_s:,.0f} samples/s).",
            f"time until the next batch is there; below {SMALL_WAIT:.0%} counts as none",
        )


def _devices(evidence: Evidence) -> Iterator[Finding]:
    for workload, found in evidence.by_workload("devices"):
        mine = {r.point.device: r for r in found}
        if "cpu" in mine and len(mine) > 1:
            best = max(mine.values(), key=lambda r: r.samples_per_s)
            yield Finding(
                "devices",
                f"The {workload} model trains fastest on {_device(best.point)}: "
                f"{best.samples_per_s / mine['cpu'].samples_per_s:.1f} times "
                "the CPU's throughput.",
                "median step times with the same batch",
            )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2g}"


def _device(point: Point) -> str:
    return {"cpu": "the CPU", "cuda": "the GPU", "mix": "both (tables on the CPU, MLPs on the GPU)"}[point.device]


def _words(placement: str) -> str:
    return {"remote": "with all tables on one remote worker"}.get(placement, placement.replace("_", "-"))


def _format(data: str) -> str:
    return {"rows": "rows in memory", "parquet": "Parquet", "packed": "compressed rows from a slow store"}.get(data, data)


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _busy_machine,
    _where_time_goes,
    _bandwidth,
    _devices,
    _features,
    _batch,
    _loss,
    _rows,
    _multiply,
    _lookups,
    _placement,
    _workers,
    _loader,
)
"""All rules, in the order of their findings in a report."""
