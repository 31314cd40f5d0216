"""Memory copy and matrix multiply as `dlrover lab characterize` measures them, against other programs in the same minutes.

    python benchmarks/limit_references.py [--rounds N]

copy   a STREAM-like loop in C with OpenMP, compiled with gcc
gemm   scipy's BLAS, another build than numpy's

Each round measures all of them, in random order, with all cores. The speed of a shared machine changes by a factor of two
within minutes, so one measurement after the other compares two moments. The figures are medians over the rounds of the
ratio within a round. The last line holds `copy_error= gemm_error=`.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # equal to that of the command's workers; read when the library loads

import argparse
import ctypes
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jobs import describe_machine, result_line
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from lightning_dlrover.lab.characterize.measure import measure_limit
from lightning_dlrover.lab.characterize.points import whole_cores

COPY_VALUES = 32 << 20  # the number of bytes that the command copies
MATRIX = 1536
BLOCKS, CALLS = 5, 2

STREAM_COPY = r"""
#include <omp.h>
#include <stdlib.h>
static double *a, *b;
int prepare(long n) {
    a = malloc(8 * n);
    b = malloc(8 * n);
    if (!a || !b) return 1;
    #pragma omp parallel for
    for (long i = 0; i < n; i++) { a[i] = i; b[i] = 0; }
    return 0;
}
double copy_gb_per_s(long n, int calls) {
    double began = omp_get_wtime();
    for (int k = 0; k < calls; k++) {
        #pragma omp parallel for
        for (long i = 0; i < n; i++) b[i] = a[i];
    }
    return 16e-9 * n * calls / (omp_get_wtime() - began);
}
"""


def stream_copy(folder: Path) -> Callable[[], float]:
    """Return a function that measures GB/s, read and written, with all cores."""
    source, library = folder / "copy.c", folder / "copy.so"
    source.write_text(STREAM_COPY)
    subprocess.run(["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", source, "-o", library], check=True)
    program = ctypes.CDLL(str(library))
    program.copy_gb_per_s.restype = ctypes.c_double
    values = ctypes.c_long(COPY_VALUES)
    if program.prepare(values):
        raise MemoryError(f"no {16 * COPY_VALUES >> 20} MiB for the copy in C; end other programs")

    def measure() -> float:
        program.copy_gb_per_s(values, CALLS)  # another library's threads may still spin
        return statistics.median(float(program.copy_gb_per_s(values, CALLS)) for _ in range(BLOCKS))

    return measure


def scipy_multiply(threads: int) -> Callable[[], float]:
    """Return a function that measures GFLOP/s of scipy's BLAS."""
    from scipy.linalg.blas import sgemm

    one, other = (np.asfortranarray(np.random.default_rng(i).random((MATRIX, MATRIX), dtype=np.float32)) for i in range(2))

    def block() -> float:
        began = time.perf_counter()
        for _ in range(CALLS):
            sgemm(1.0, one, other)
        return 2e-9 * MATRIX**3 * CALLS / (time.perf_counter() - began)

    def measure() -> float:
        with threadpool_limits(threads):
            block()
            return statistics.median(block() for _ in range(BLOCKS))

    return measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each program (default: %(default)s)")
    rounds, threads, rng = parser.parse_args().rounds, whole_cores(), random.Random(0)
    print(describe_machine(), flush=True)
    values = {}
    with tempfile.TemporaryDirectory(prefix="dlrover-benchmark-") as temporary:
        folder = Path(temporary)

        def ours(name: str) -> Callable[[], float]:
            return lambda: statistics.median(measure_limit(name, threads, folder))

        pairs = {
            "copy": (ours("copy"), stream_copy(folder)),
            "gemm": (ours("multiply"), scipy_multiply(threads)),
        }
        for name, programs in pairs.items():
            found: list[tuple[float, float]] = []
            for _ in range(rounds):
                order = rng.sample(range(2), 2)
                rates = {place: programs[place]() for place in order}
                found.append((rates[0], rates[1]))
            ratios = sorted(mine / other for mine, other in found)
            mine, other = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"{name}: ours {mine:.1f}, the other {other:.1f}; ratios {ratios[0]:.2f} to {ratios[-1]:.2f}", flush=True)
            values[f"{name}_error"] = abs(statistics.median(ratios) - 1)
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
