"""Restricts numerical libraries to the calling thread.

Beside a training job every core is busy. Threads that waited for each other at a barrier made a fit of 0.4 s take seconds of
processor time, or half a minute.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["one_blas_thread", "one_openmp_thread"]


def one_openmp_thread() -> AbstractContextManager[Any]:
    """Limit scikit-learn's trees, once they are imported; the calling thread's own setting is restored afterwards."""
    limits: AbstractContextManager[Any] = _openmp().limit(limits=1)
    return limits


def one_blas_thread() -> AbstractContextManager[Any]:
    """Limit numpy's and scipy's linear algebra; torch has its own."""
    limits: AbstractContextManager[Any] = _openblas().limit(limits=1)
    return limits


# Cached, because finding the loaded libraries takes 5 ms. threadpoolctl comes with scikit-learn, which uses it the same way.


@functools.cache
def _openmp() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="openmp")


@functools.cache
def _openblas() -> Any:
    import scipy.optimize  # noqa: F401  (brings an OpenBLAS of its own)
    from threadpoolctl import ThreadpoolController

    # torch may use other libraries (MKL), too, and their threads belong to training.
    return ThreadpoolController().select(internal_api="openblas")
