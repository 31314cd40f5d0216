"""The releases of other packages that this one was tested with, as data. Extend it when `make test-versions` passes on another.

The lowest releases are the requirements in `pyproject.toml`; this module holds the highest ones, and the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NCCL_FAILING", "TESTED", "TRIPLES", "Triple", "minor", "tested_text"]

TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.10", "3.11", "3.12", "3.13"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "lightning": ("2.5", "2.6"),
    "pytorch-lightning": ("2.5", "2.6"),
    "torchrec": ("1.7", "1.8", "1.9"),
    "torchx": ("0.7",),
}
"""Minor releases of Python and of distributions, in ascending order: those whose private or changing parts are in use."""


@dataclass(frozen=True)
class Triple:
    """Minor releases that are built for each other."""

    torchrec: str
    fbgemm: str  # fbgemm-gpu, and fbgemm-gpu-cpu for CPU builds of torch
    torch: str


TRIPLES: tuple[Triple, ...] = (
    Triple("1.7", "1.7", "2.12"),
    Triple("1.8", "1.8", "2.13"),
    Triple("1.9", "1.9", "2.14"),
)
"""Published triples of torchrec, fbgemm and torch, in ascending order."""

NCCL_FAILING: tuple[tuple[int, int, int], tuple[int, int, int]] = ((2, 28, 3), (2, 28, 8))
"""First and last release of NCCL that crashes when a process aborts its groups and forms others."""


def minor(version: str) -> str:
    """Return the minor release of a version: 2.13 of 2.13.0+cpu."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def tested_text(distribution: str) -> str:
    """Return the tested releases of a distribution for a message, such as "2.12 to 2.13"; empty if none is listed."""
    releases = TESTED.get(distribution, ())
    return releases[0] if len(releases) == 1 else " to ".join((releases[0], releases[-1])) if releases else ""
