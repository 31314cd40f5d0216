"""The needs that are expected of later jobs of a kind."""

from __future__ import annotations

import pytest

from lightning_dlrover.colocate.journal import Ended, JobSpec
from lightning_dlrover.colocate.scheduler import Knowledge

GIB = 1 << 30
SPEC = JobSpec("job", ("train",), "/", device="gpu")


def ended(result: str, host_gib: float, gpu_gib: float) -> Ended:
    peaks = int(host_gib * GIB), int(gpu_gib * GIB)
    return Ended("job", 1, result, 0, "", 0.0, 1.0, 0.0, 1.0, peaks[0], gpu_peak_bytes=peaks[1], where="gpu")


def test_job_that_was_evicted_for_one_memory_still_fits_into_the_other() -> None:
    knowledge = Knowledge()
    knowledge.learn_end(SPEC, ended("evicted", 3.0, 8.5))
    assert knowledge.need_bytes(SPEC, "gpu", "gpu", (0, 0), GIB, 10 * GIB) == 10 * GIB
    assert knowledge.need_bytes(SPEC, "gpu", "host", (0, 0), GIB, 10 * GIB) == int(1.25 * 3 * GIB)


def test_margin_alone_makes_no_job_too_large() -> None:
    assert Knowledge().need_bytes(SPEC, "gpu", "gpu", (8 * GIB, 3 * GIB), GIB, 10 * GIB) == 10 * GIB
    assert Knowledge().need_bytes(SPEC, "gpu", "gpu", (11 * GIB, 3 * GIB), GIB, 10 * GIB) == 14 * GIB


def test_peaks_of_the_memories_are_kept_apart() -> None:
    knowledge = Knowledge()
    assert not knowledge.knows(SPEC, "gpu", "gpu")
    knowledge.learn_end(SPEC, ended("done", 2.0, 4.0))
    assert knowledge.knows(SPEC, "gpu", "gpu")
    assert knowledge.expected(SPEC, "gpu") == {"host": pytest.approx(2.1 * GIB), "gpu": pytest.approx(4.2 * GIB)}
