"""How much memory a worker and its loader workers need at their peak, and how sure that is.

A sum of named terms with non-negative coefficients, fitted by least squares in relative error, as `prior.py` does for
time. What to do about it is the planner's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Configuration, configuration_of
from lightning_dlrover.perf.samples import StepProfile

__all__ = ["MEMORY_TERMS", "MemoryModel", "MemoryPrediction", "MemoryTerm"]

Floats = NDArray[np.float64]

MIB = float(1 << 20)
INTERVAL_SIGMAS = 1.645
MIN_SIGMA = 0.03  # allocators keep what they like: peaks of the same run twice differ by about this much
UNTESTED_SIGMA = 0.15  # of terms fitted to so few configurations that none can be held out


@dataclass(frozen=True)
class MemoryPrediction:
    """The highest resident set of a worker with its loader workers, and the interval that should hold nine of ten."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class MemoryTerm:
    """One cause of memory: bytes = coefficient x `amount`, the coefficient fitted and never negative."""

    name: str
    source: str
    amount: Callable[[Configuration], float]
    default: float  # the coefficient until samples say otherwise


MEMORY_TERMS: tuple[MemoryTerm, ...] = (
    MemoryTerm("process", "interpreter, libraries, and the data set held in memory", lambda c: 1.0, 400 * MIB),
    MemoryTerm(
        "dense_state",
        "parameters, gradients, optimizer state and reduction buckets: 3 to 6 times the bytes of the dense parameters "
        "(ZeRO, Rajbhandari et al., SC 2020, section 3.1)",
        lambda c: float(c.dense_bytes),
        4.0,
    ),
    MemoryTerm(
        "activations",
        "what forward keeps for backward, once for each sample of the local batch (ZeRO, section 3.2)",
        lambda c: float(c.local_batch),
        0.0,
    ),
    MemoryTerm("loader_processes", "pages that a loader worker does not share", lambda c: float(c.loader_workers), 50 * MIB),
    MemoryTerm(
        "prefetched_batches",
        "each loader worker prepares prefetch_factor batches ahead",
        lambda c: float(c.loader_workers * max(1, c.prefetch_factor) * c.local_batch),
        0.0,
    ),
    MemoryTerm("tables", "table shards, spread over the workers", lambda c: c.embedding_bytes / c.num_workers, 1.5),
)


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of one worker of one job; make it with `fit`."""

    coefficients: tuple[float, ...]  # of `MEMORY_TERMS`, in their order
    sigma: float  # of the log error in a configuration that was not measured

    @classmethod
    def fit(cls, samples: Sequence[StepProfile]) -> MemoryModel:
        """The model of windows of one job; those without a peak count with the resident set at their end.

        Raises:
            ValueError: no sample holds a figure above 0.
        """
        used = [s for s in samples if _peak_bytes(s) > 0]
        if not used:
            raise ValueError(
                f"cannot fit a memory model: none of {len(samples)} samples has peak_memory_bytes or memory_bytes above 0; "
                "wait for the first profile window of the job"
            )
        configurations = [configuration_of(s) for s in used]
        peaks = np.array([_peak_bytes(s) for s in used], dtype=np.float64)
        coefficients = _fit(configurations, peaks)
        groups: dict[Configuration, list[int]] = {}
        for index, configuration in enumerate(configurations):
            groups.setdefault(configuration, []).append(index)
        sigma = UNTESTED_SIGMA
        if len(groups) > 3:
            errors: list[float] = []
            for held_out in groups.values():
                train = [i for i in range(len(used)) if i not in set(held_out)]
                left_out = _fit([configurations[i] for i in train], peaks[train])
                errors.extend(math.log(peaks[i] / _bytes(left_out, configurations[i])) for i in held_out)
            sigma = float(np.sqrt(np.mean(np.square(errors)) * (1 + 2 / len(groups))))
        return cls(tuple(float(k) for k in coefficients), max(sigma, MIN_SIGMA))

    def predict(self, configuration: Configuration) -> MemoryPrediction:
        peak = _bytes(np.array(self.coefficients), configuration)
        width = math.exp(INTERVAL_SIGMAS * self.sigma)
        return MemoryPrediction(round(peak), round(peak / width), round(peak * width))

    def parts_bytes(self, configuration: Configuration) -> dict[str, float]:
        """Bytes of each term, by its name."""
        return {t.name: k * t.amount(configuration) for t, k in zip(MEMORY_TERMS, self.coefficients, strict=True)}


def _peak_bytes(sample: StepProfile) -> int:
    return max(sample.peak_memory_bytes, sample.memory_bytes)


def _bytes(coefficients: Floats, configuration: Configuration) -> float:
    return max(1.0, float(sum(k * t.amount(configuration) for t, k in zip(MEMORY_TERMS, coefficients, strict=True))))


def _fit(configurations: Sequence[Configuration], peaks: Floats) -> Floats:
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    amounts = np.array([[t.amount(c) for t in MEMORY_TERMS] for c in configurations])
    rows = amounts / peaks[:, None]
    scale = np.sqrt((rows**2).mean(axis=0))
    seen = scale > 0
    coefficients = np.array([t.default for t in MEMORY_TERMS])
    # Weighs a hundredth of a window: what the samples leave open, the defaults decide.
    pull = 0.1 * np.eye(int(seen.sum()))
    target = np.concatenate([np.ones(len(peaks)), 0.1 * coefficients[seen] * scale[seen]])
    coefficients[seen] = nnls(np.vstack([rows[:, seen] / scale[seen], pull]), target)[0] / scale[seen]
    return coefficients
