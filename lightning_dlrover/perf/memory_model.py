"""Peak memory of a worker and its loader workers, or of its GPU, with its uncertainty.

The prediction is a sum of named terms with non-negative coefficients, fitted by least squares in relative error, as in
`prior.py` for time. The planner decides on remedies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_dlrover.perf.columns import Columns, Configuration, Floats, configuration_of, windows_by_configuration
from lightning_dlrover.perf.samples import StepProfile

__all__ = ["GPU_TERMS", "MEMORY_TERMS", "MemoryModel", "MemoryPrediction", "MemoryTerm", "on_gpu"]

MIB = float(1 << 20)
NORMAL_WIDTH = 1.645  # standard deviations to either side that hold nine values of ten of a normal error
MIN_SIGMA = 0.03  # allocators keep freed memory, so the peaks of two equal runs differ by about this much
UNTESTED_SIGMA = 0.15  # uncertainty of terms fitted to too few configurations to hold any out
MIN_TESTED_CONFIGURATIONS = 4
MAX_FOLDS = 10
PULL = 0.03  # weight of a default, as a share of the peak: defaults decide only where samples do not


@dataclass(frozen=True)
class MemoryPrediction:
    """The highest resident set of a worker with its loader workers, or memory of its GPU, and its 90 % interval.

    Example:
        >>> prediction = MemoryPrediction(peak_bytes=900 * 2**20, low_bytes=800 * 2**20, high_bytes=1100 * 2**20)
        >>> prediction.high_bytes <= 2**30  # may not fit into 1 GiB
        False
    """

    peak_bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class MemoryTerm:
    """One cause of memory: bytes = coefficient x `amount`; the coefficient is fitted and never negative."""

    name: str
    source: str
    amount: Callable[[Columns], Floats]
    default: float  # coefficient in the absence of samples


MEMORY_TERMS: tuple[MemoryTerm, ...] = (
    MemoryTerm("process", "interpreter, libraries, and the data set held in memory", lambda c: np.ones(len(c)), 400 * MIB),
    MemoryTerm(
        "dense_state",
        "parameters, gradients, optimizer state and reduction buckets: 3 to 6 times the bytes of the dense parameters "
        "(ZeRO, Rajbhandari et al., SC 2020, section 3.1)",
        lambda c: c.dense_bytes,
        4.0,
    ),
    MemoryTerm(
        "activations",
        "what forward keeps for backward, once for each sample of the local batch (ZeRO, section 3.2)",
        lambda c: c.local_batch,
        0.0,
    ),
    MemoryTerm(
        "loader_processes",
        "pages that a loader worker does not share with its worker",
        lambda c: c.loader_workers,
        50 * MIB,
    ),
    MemoryTerm(
        "prefetched_batches",
        "each loader worker prepares prefetch_factor batches ahead (torch.utils.data.DataLoader: 2 by default)",
        lambda c: c.loader_workers * np.where(c.prefetch_factor > 0, c.prefetch_factor, 2.0) * c.local_batch,
        0.0,
    ),
    MemoryTerm(
        "tables",
        "table shards with their optimizer state, spread over the workers",
        lambda c: c.embedding_bytes / c.num_workers,
        1.5,
    ),
)


GPU_TERMS = tuple(term for term in MEMORY_TERMS if term.name in ("dense_state", "activations", "tables"))
"""Causes of memory on a worker's GPU; activations are those of one pass."""


def on_gpu(samples: Sequence[StepProfile]) -> list[StepProfile]:
    """Return the windows with a figure of the GPU's memory, as windows of that memory and of the samples of one pass."""
    found = []
    for sample in samples:
        if sample.gpu_memory_bytes > 0:
            share = configuration_of(sample).local_batch
            at_once = min(share, sample.pass_limit or share)
            window = replace(sample, local_batch=at_once, global_batch=at_once * sample.num_workers)
            found.append(replace(window, peak_memory_bytes=sample.gpu_memory_bytes, memory_bytes=0))
    return found


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of one worker of one job; create it with `fit`.

    Example:
        >>> from lightning_dlrover.perf import configuration_of
        >>> model = MemoryModel.fit(windows)  # step profiles of one job
        >>> prediction = model.predict(configuration_of(windows[0]))
        >>> prediction.low_bytes < prediction.peak_bytes < prediction.high_bytes
        True
    """

    terms: Sequence[MemoryTerm]
    coefficients: Floats  # coefficients of the terms, in their order
    sigma: float  # deviation of the log error in a configuration that was not measured
    reach: Floats  # largest measured amount of each term

    @classmethod
    def fit(cls, samples: Sequence[StepProfile], terms: Sequence[MemoryTerm] = MEMORY_TERMS) -> MemoryModel:
        """Fit a model to the windows of one job; windows without a peak count with the resident set at their end.

        Args:
            terms: `GPU_TERMS` for windows by `on_gpu`.

        Raises:
            ValueError: no sample holds a figure above 0, or one holds a negative one.
        """
        for index, sample in enumerate(samples):
            for name in ("peak_memory_bytes", "memory_bytes"):
                if getattr(sample, name) < 0:
                    raise ValueError(
                        f"cannot fit a memory model: sample {index} (worker {sample.worker_id!r}, round {sample.round_number}, "
                        f"first step {sample.first_step}) has {name}={getattr(sample, name)!r}; leave this window out"
                    )
        used = [sample for sample in samples if _peak_bytes(sample) > 0]
        if not used:
            raise ValueError(
                f"cannot fit a memory model: none of {len(samples)} samples has peak_memory_bytes or memory_bytes above 0; "
                "wait for the first profile window of the job"
            )
        groups = windows_by_configuration(used, 0.0)
        amounts = _amounts(Columns.of([*groups]), terms)
        peaks = np.array([max(_peak_bytes(sample) for sample in group) for group in groups.values()], dtype=np.float64)
        sigma = UNTESTED_SIGMA
        if len(groups) >= MIN_TESTED_CONFIGURATIONS:
            order = np.random.default_rng(0).permutation(len(groups))
            num_folds = min(MAX_FOLDS, len(groups))
            errors = []
            for fold in range(num_folds):
                test, train = order[fold::num_folds], np.delete(order, np.s_[fold::num_folds])
                errors.append(np.log(peaks[test] / (amounts[test] @ _fit(amounts[train], peaks[train], terms))))
            sigma = math.sqrt(np.square(np.concatenate(errors)).mean() * (1 + 2 / len(groups)))
        return cls(terms, _fit(amounts, peaks, terms), max(sigma, MIN_SIGMA), amounts.max(axis=0))

    def predict(self, configuration: Configuration) -> MemoryPrediction:
        """Predict the peak in `configuration`; amounts beyond the measured ones widen the interval."""
        amounts = _amounts(Columns.of([configuration]), self.terms)[0]
        peak = max(1.0, float(amounts @ self.coefficients))
        beyond = float(np.maximum(0.0, amounts - self.reach) @ self.coefficients) / peak
        width = math.exp(NORMAL_WIDTH * math.hypot(self.sigma, UNTESTED_SIGMA * beyond))
        return MemoryPrediction(round(peak), round(peak / width), round(peak * width))


def _peak_bytes(sample: StepProfile) -> int:
    return max(sample.peak_memory_bytes, sample.memory_bytes)


def _amounts(columns: Columns, terms: Sequence[MemoryTerm]) -> Floats:
    return np.stack([term.amount(columns) for term in terms], axis=1)


def _fit(amounts: Floats, peaks: Floats, terms: Sequence[MemoryTerm]) -> Floats:
    """Return the coefficients, of shape ``(num_terms,)``."""
    from scipy.optimize import nnls  # import takes 0.3 s, which a reader of profiles need not pay

    rows = amounts / peaks[:, None]
    scale = np.sqrt((rows**2).mean(axis=0))
    seen = scale > 0
    coefficients = np.array([term.default for term in terms])
    pull = PULL * np.eye(int(seen.sum()))
    target = np.concatenate([np.ones(len(peaks)), PULL * coefficients[seen] * scale[seen]])
    coefficients[seen] = nnls(np.vstack([rows[:, seen] / scale[seen], pull]), target)[0] / scale[seen]
    return coefficients
