"""Streams of Parquet: no row lost or doubled, and the cost of that against readers that cannot change their workers.

    python benchmarks/stream.py [--parts schedules,content,speed,...] [--rounds N] [--quick]

    schedules   random resizes, losses and rollbacks of simulated jobs (`stream_schedules.py`), 1 to 16 workers with 0 to 4
                loader workers each; every row of every epoch is counted. The control does the same without handing over the
                position to joiners, and has to lose rows.
    content     global batches are bit-equal for 1, 2 and 3 workers with 0, 1 and 4 loader workers.
    speed       rows/s of whole epochs of batches of 512 rows, by itself on one core, and with 2 helpers: loader workers, or
                threads where a library has them. Measured are ours, unshuffled and shuffled; a plain IterableDataset over
                pyarrow; and others that are installed. All decode the same row groups into a dictionary with a tensor for
                each column, and transform nothing. `rows_ratio` is ours, unshuffled, over the plain reader with batches of
                the same kind, which are tensors of their own; the worse of 0 and 2 loader workers. Without helpers, the two
                take turns of 64 batches for it, as the machine's speed changes from epoch to epoch. `views_ratio` is the same
                of whole epochs, over the plain reader with views into Arrow's memory, which a training step must not write to.
                `others_ratio` is our fastest unshuffled reader over the fastest of the others with as many helpers, the
                worse of 0 and 2; nan if there are no others. The fastest others give views, so they copy less.
                `rows_cpu_ratio` and `others_cpu_ratio` are the same by rows in a second of CPU time, all threads and
                processes together, which other programs disturb less.
    seek        time from opening a lane at a random row of a large file to its first rows, minus the decoding of a row group.
    memory      resident memory of a process that reads without loader workers, ours and the plain reader; and of one that
                reads rows of 100 KB from tar archives and Parquet files, or a row group of 320 MB at a URL
                (with --quick 40 MB), with what docs/guide/data.md allows, `..._limit_mb`.
    auc         `examples/train_dlrm.py` on generated Parquet files through 1 -> 3 -> 2 workers with two kills, and undisturbed:
                the difference of the test AUCs. Both run at once.
    plan        time and memory until the first rows of 100,000 files with 10^10 rows in all are located. Files are not opened.

The files have 1 label, 13 float32 and 26 int64 columns, like those of Criteo. The others are not needed by our package:

    pip install datasets==5.2.0 torchdata==0.11.0 litdata==0.2.76 polars
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import logging
import math
import multiprocessing
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from accuracy import EXAMPLES, TRAINING_TIMEOUT_S, train_elastic, train_unresized
from jobs import BenchmarkError, Workspace, describe_machine, result_line
from stream_readers import OTHERS, OURS, READERS, Reader, plain
from stream_schedules import Numbered, SimulatedJob, Tally, follow, random_schedule
from torch.utils.data import DataLoader

from lightning_dlrover.data import Shard, files, parquet, stream
from lightning_dlrover.data.dataset import Positions
from lightning_dlrover.data.lane_plan import BLOCK_BYTES, CYCLE, MIN_SLOTS, Layout
from lightning_dlrover.data.parquet_source import PAGE_ROWS, PIECES_BYTES
from lightning_dlrover.live.loader import ElasticLoader
from tests.support.waiting import eventually

PARTS = ("schedules", "content", "speed", "seek", "memory", "plan", "auc")
SLOW_PARTS = ("memory", "auc")
"""Parts that start a process of their own for each reader, or train."""

HELPERS = (0, 2)
"""Numbers of loader workers, or of threads, beside the process that takes the batches."""

TURN_BATCHES = 64

MIB = 2**20
HEAVY_ROW = 100_000
"""Bytes of a large row, such as an image."""

HEAVY_GROUP = 1024
"""Such rows in a row group."""

URL_ROWS = 1_000_000
"""Rows of a row group at a URL, of 320 MB."""
NUM_PROCESSES = 2
"""Processes that run schedules at once."""


@dataclass(frozen=True)
class Size:
    num_schedules: int
    rows_per_schedule: int  # approximately, both epochs together
    schedules_with_loader_workers: int
    num_files: int
    rows_per_file: int
    row_group: int
    seek_rows: int  # rows of the large file
    seek_group: int
    num_seeks: int
    trained_rows: int  # rows behind the AUC
    max_steps: int


# In rows of an epoch, the row groups are as large as groups of 180,000 rows in the 45 million of Criteo.
FULL = Size(1000, 10_000, 16, 8, 250_000, 8_192, 12_600_000, 131_072, 20, 1_000_000, 1500)
QUICK = Size(20, 4_000, 1, 4, 50_000, 4_096, 262_144, 65_536, 5, 100_000, 700)

# --- files --------------------------------------------------------------------------------------------------------------------


def write_files(folder: Path, num_files: int, rows_per_file: int, row_group: int, seed: int = 0) -> list[str]:
    """Write files like those of Criteo and return their paths."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    dice = np.random.default_rng(seed)
    cardinalities = np.geomspace(4, 2**22, 26).astype(np.int64)
    paths = []
    for number in range(num_files):
        columns: dict[str, npt.NDArray[Any]] = {"label": dice.integers(0, 2, rows_per_file)}
        for i in range(13):
            columns[f"dense_{i}"] = np.log1p(dice.integers(0, 10 ** (1 + i % 5), rows_per_file)).astype(np.float32)
        for i, cardinality in enumerate(cardinalities):
            # Few values are frequent, as categories are.
            columns[f"category_{i}"] = (cardinality * dice.random(rows_per_file) ** 3).astype(np.int64)
        paths.append(str(folder / f"part-{number:03}.parquet"))
        pq.write_table(pa.table(columns), paths[-1], row_group_size=row_group, compression="snappy")
    return paths


# --- schedules ----------------------------------------------------------------------------------------------------------------


def schedules(size: Size, seed: int) -> dict[str, float | int]:
    began = time.perf_counter()
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, spawning, multiprocessing.set_start_method, ("fork", True)) as pool:
        rows = size.rows_per_schedule
        seeds = range(seed, seed + size.num_schedules)
        alone = list(pool.map(partial(run_schedule, rows, 16, (0,), True), seeds, chunksize=10))
        seeds = range(seed, seed + size.schedules_with_loader_workers)
        helped = list(pool.map(partial(run_schedule, rows, 3, (1, 2, 3, 4), True), seeds))
        control = list(
            pool.map(partial(run_schedule, rows, 16, (0,), False), range(seed, seed + 10 + size.num_schedules // 10))
        )
    kept, not_kept = sum([*alone, *helped], Tally()), sum(control, Tally())
    print(f"{'':28}{'schedules':>11}{'rows':>12}{'lost':>10}{'doubled':>10}")
    for label, tallies in [("handed over", [*alone, *helped]), ("control, not handed over", control)]:
        total = sum(tallies, Tally())
        print(f"{label:28}{len(tallies):11}{total.rows:12}{total.lost:10}{total.doubled:10}")
    print(f"{len(helped)} schedules had 1 to 4 loader workers; {time.perf_counter() - began:.0f} s", flush=True)
    if kept.lost or kept.doubled:
        raise BenchmarkError(f"{kept.lost} rows were lost and {kept.doubled} doubled")
    if not not_kept.lost:
        raise BenchmarkError("the control lost no row: the schedules test nothing")
    return {"lost": kept.lost, "doubled": kept.doubled, "control_lost": not_kept.lost}


def run_schedule(num_rows: int, max_workers: int, loader_workers: Sequence[int], hands_over: bool, seed: int) -> Tally:
    """Run one random job for at least two epochs and count its rows.

    Args:
        num_rows: of all its epochs, approximately.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    dice = random.Random(seed)
    cuts = sorted(dice.randrange(num_rows // 2) for _ in range(dice.randint(0, 8)))
    source = Numbered([b - a for a, b in zip([0, *cuts], [*cuts, num_rows // 2], strict=True)], chunk_rows=512)
    job = SimulatedJob(
        source,
        global_batch=dice.randint(max_workers // 2, 400),
        num_loader_workers=dice.choice(loader_workers),
        shuffle_rows=dice.choice((0, num_rows // 10, num_rows)),
        max_workers=max_workers,
        hands_over=hands_over,
    )
    schedule = random_schedule(dice, job.num_batches, max_workers)
    return sum((Tally.of(trained, source.num_rows) for trained in follow(job, schedule)), Tally())


# --- content ------------------------------------------------------------------------------------------------------------------


def content(folder: Path) -> None:
    """Compare the global batches of several worlds.

    Raises:
        BenchmarkError: two of them differ.
    """
    write_files(folder, num_files=3, rows_per_file=3_000, row_group=1_024)
    num_batches = 24
    for shuffle_rows in (0, 5_000):
        alone = list(global_batches(folder, shuffle_rows, 1, 0, num_batches))
        for world_size in (1, 2, 3):
            for num_workers in (0, 1, 4):
                for number, batch in enumerate(global_batches(folder, shuffle_rows, world_size, num_workers, num_batches)):
                    if not all(torch.equal(batch[name], alone[number][name]) for name in alone[number]):
                        raise BenchmarkError(
                            f"batch {number} of {world_size} workers with {num_workers} loader workers differs from that of "
                            f"one worker (shuffle_rows={shuffle_rows})"
                        )
    print(
        f"{num_batches} global batches of 252 rows and 40 columns are bit-equal for 1, 2, 3 workers with 0, 1, 4 loader "
        "workers, unshuffled and shuffled",
        flush=True,
    )


def global_batches(
    folder: Path, shuffle_rows: int, world_size: int, num_workers: int, num_batches: int
) -> Iterator[dict[str, torch.Tensor]]:
    loaders = [
        ElasticLoader(
            DataLoader(stream(parquet(str(folder)), shuffle_rows=shuffle_rows, seed=1), batch_size=1, num_workers=num_workers),
            global_batch_size=252,
            training=True,
            max_workers=4,
        )
        for _ in range(world_size)
    ]
    for rank, loader in enumerate(loaders):
        iter(loader)
        loader.reshard(rank, world_size)
    for _ in range(num_batches):
        parts = [loader.refetch() for loader in loaders]
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for loader in loaders:
        loader.close()


# --- speed --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """Rows in a second, and in a second of CPU time of all threads and loader workers."""

    per_s: float
    per_cpu_s: float


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def measure(reader: Reader, paths: Sequence[str], num_helpers: int, num_rows: int) -> Rate:
    """Read an epoch, or its first `num_rows` rows, from the making of the loader on.

    Processes that are spawned import all packages anew, so their time begins with their first batch, and does not count it.
    Their CPU time counts from their start.
    """
    gc.collect()
    with cores(1 if num_helpers == 0 else None):
        return _measured(reader, paths, num_helpers, num_rows)


@contextlib.contextmanager
def cores(number: int | None) -> Iterator[None]:
    """Keep all threads of this process on some cores: pyarrow decodes in threads of its own, for those who let it."""
    before = os.sched_getaffinity(0)
    _pin(sorted(before)[:number])
    try:
        yield
    finally:
        _pin(before)


def _pin(to: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), to)


def _measured(reader: Reader, paths: Sequence[str], num_helpers: int, num_rows: int) -> Rate:
    cpu_before, began = cpu_s(), time.perf_counter()
    loader = reader(paths, num_helpers)
    is_spawned = getattr(loader, "multiprocessing_context", None) is not None
    rows = not_counted = 0
    for batch in loader:
        rows += len(batch["label"])
        if is_spawned and not not_counted:
            began, not_counted = time.perf_counter(), rows
        if rows >= num_rows:
            break
    took_s = time.perf_counter() - began
    del loader
    gc.collect()  # loader workers end, and their CPU time counts
    if rows < num_rows:
        raise BenchmarkError(f"{reader} gave {rows} of {num_rows} rows")
    return Rate((rows - not_counted) / took_s, rows / (cpu_s() - cpu_before))


def speed(paths: Sequence[str], size: Size, rounds: int) -> dict[str, float | int]:
    num_rows = size.num_files * size.rows_per_file
    others = {name: entrant for name, entrant in OTHERS.items() if entrant.is_installed}
    everyone = READERS | others
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    measured: dict[tuple[str, int], list[Rate]] = {
        (name, n): [] for n in HELPERS for name, entrant in everyone.items() if n or not entrant.needs_helpers
    }
    measure(plain, paths, 0, num_rows)  # fills the page cache
    for number in range(rounds):
        order = list(measured)
        for name, num_helpers in order[:: 1 if number % 2 == 0 else -1]:
            entrant = everyone[name]
            rows = entrant.rows(num_rows, num_helpers)
            measured[name, num_helpers].append(measure(entrant.reader, paths, num_helpers, rows))
    per_s = {key: statistics.median(rate.per_s for rate in rates) for key, rates in measured.items()}
    per_cpu_s = {key: statistics.median(rate.per_cpu_s for rate in rates) for key, rates in measured.items()}
    print(f"{'reader':26}{'helpers':>9}{'rows/s':>12}{'min':>12}{'max':>12}{'of plain':>10}{'rows/CPU s':>12}")
    for (name, num_helpers), rates in measured.items():
        median = per_s[name, num_helpers]
        least, most = min(rate.per_s for rate in rates), max(rate.per_s for rate in rates)
        print(
            f"{name:26}{num_helpers:9}{median:12.0f}{least:12.0f}{most:12.0f}{median / per_s['plain', num_helpers]:10.3f}"
            f"{per_cpu_s[name, num_helpers]:12.0f}",
            flush=True,
        )
    with cores(1):
        in_turns = statistics.median(ratio_in_turns(paths) for _ in range(rounds))
    print(f"stream over plain, writable, in turns of {TURN_BATCHES} batches: {in_turns:.3f}", flush=True)
    return {
        "rows_ratio": min(in_turns, over_plain(per_s, "plain, writable", HELPERS[1:])),
        "others_ratio": over_others(per_s, list(others)),
        "views_ratio": over_plain(per_s, "plain"),
        "rows_cpu_ratio": over_plain(per_cpu_s, "plain, writable"),
        "others_cpu_ratio": over_others(per_cpu_s, list(others)),
    }


def ratio_in_turns(paths: Sequence[str]) -> float:
    """Return the rows per second of our reader over those of the plain one, of an epoch that both read at once."""
    gc.collect()
    names = ["stream", "plain, writable"]
    took_s = dict.fromkeys(names, 0.0)
    left = {name: iter(READERS[name].reader(paths, 0)) for name in names}
    while left:
        for name in [name for name in names if name in left]:
            began = time.perf_counter()
            num_batches = sum(1 for _ in islice(left[name], TURN_BATCHES))
            took_s[name] += time.perf_counter() - began
            if num_batches < TURN_BATCHES:
                del left[name]
        names.reverse()
    return took_s["plain, writable"] / took_s["stream"]


Rates = dict[tuple[str, int], float]
"""Rows per second by reader and number of helpers."""


def over_plain(rates: Rates, name: str, helpers: Sequence[int] = HELPERS) -> float:
    return min(rates["stream", n] / rates[name, n] for n in helpers)


def over_others(rates: Rates, others: Sequence[str]) -> float:
    def best(names: Sequence[str], num_helpers: int) -> float:
        return max((rates[name, num_helpers] for name in names if (name, num_helpers) in rates), default=math.nan)

    return min(best(OURS, n) / best(others, n) for n in HELPERS)


# --- seek ---------------------------------------------------------------------------------------------------------------------


def seek(folder: Path, size: Size, seed: int) -> dict[str, float | int]:
    import pyarrow.parquet as pq

    (path,) = write_files(folder, 1, size.seek_rows, size.seek_group)
    source = parquet(path)
    (shard,) = source.shards()
    dice = random.Random(seed)
    opened_ms, decoded_ms = [], []
    for _ in range(size.num_seeks):
        row = dice.randrange(shard.rows)
        began = time.perf_counter()
        with_rows = source.read(shard, row)
        next(with_rows)
        opened_ms.append(1e3 * (time.perf_counter() - began))
        with_rows.close()  # type: ignore[attr-defined]  # a generator
        with pq.ParquetFile(path) as file:
            began = time.perf_counter()
            file.read_row_group(min(row // size.seek_group, file.num_row_groups - 2), use_threads=False)
            decoded_ms.append(1e3 * (time.perf_counter() - began))
    opens, decodes = statistics.median(opened_ms), statistics.median(decoded_ms)
    print(
        f"open at a random row of a file of {Path(path).stat().st_size / MIB:.0f} MiB: median {opens:.1f} ms (max "
        f"{max(opened_ms):.1f}) of {size.num_seeks}; decoding one row group of {size.seek_group} rows: {decodes:.1f} ms",
        flush=True,
    )
    return {"seek_ms": opens - decodes}


# --- memory and plan: each in a fresh process ---------------------------------------------------------------------------------


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory(paths: Sequence[str]) -> None:
    mib = {name: apart(resident_mib, name, list(paths), 2 * entrant.needs_helpers) for name, entrant in READERS.items()}
    print("resident memory of a process that reads alone or with 2 threads, beyond that before the first batch:")
    for name, peak in mib.items():
        print(f"    {name:26}{peak:8.0f} MiB", flush=True)


def resident_mib(name: str, paths: Sequence[str], num_threads: int) -> float:
    """Return the largest resident memory within an epoch."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    import pyarrow.parquet  # noqa: F401  # its import is not counted

    process = psutil.Process()
    before = largest = process.memory_info().rss
    for number, _ in enumerate(READERS[name].reader(paths, num_threads)):
        if number % 16 == 0:
            largest = max(largest, process.memory_info().rss)
    return float(largest - before) / MIB


def write_heavy(folder: Path, num_files: int, rows_per_file: int) -> dict[str, list[str]]:
    """Write rows of `HEAVY_ROW` bytes as tar archives and as Parquet files; return the paths of each kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    dice = np.random.default_rng(0)
    paths: dict[str, list[str]] = {"tar": [], "parquet": []}
    for number in range(num_files):
        rows = [dice.bytes(HEAVY_ROW) for _ in range(rows_per_file)]
        paths["tar"].append(str(folder / f"{number}.tar"))
        with tarfile.open(paths["tar"][-1], "w") as archive:
            for row, content in enumerate(rows):
                member = tarfile.TarInfo(f"{row:06}.bin")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        paths["parquet"].append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table({"bin": rows}), paths["parquet"][-1], row_group_size=HEAVY_GROUP)
    return paths


def heavy_memory(folder: Path, is_quick: bool) -> dict[str, float | int]:
    """Read rows of 100 KB, and large row groups at a URL, with as many lanes as a worker has at most by default."""
    lanes = MIN_SLOTS * CYCLE
    paths = write_heavy(folder, 8, 512 if is_quick else 2048)
    found = {f"heavy_{kind}_mb": apart(resident_mib_of_heavy, kind, each) for kind, each in paths.items()}
    page = PAGE_ROWS * HEAVY_ROW
    blocks = lanes * BLOCK_BYTES
    limits = {"tar": blocks, "parquet": blocks + 4 * page}
    if importlib.util.find_spec("aiohttp") is not None:
        write_group(folder / "url", URL_ROWS // (8 if is_quick else 1))
        with served(folder / "url") as url:
            found["heavy_url_mb"] = apart(resident_mib_of_heavy, "url", [f"{url}/group.parquet"])
        limits["url"] = blocks + lanes * PIECES_BYTES
    found |= {f"heavy_{kind}_limit_mb": limit / MIB for kind, limit in limits.items()}
    for kind in limits:
        what = f"rows of {HEAVY_ROW} bytes" if kind != "url" else "a large row group"
        print(
            f"{kind}, {what}, {lanes} lanes: {found[f'heavy_{kind}_mb']:.0f} of {found[f'heavy_{kind}_limit_mb']:.0f} MiB",
            flush=True,
        )
    return found


def resident_mib_of_heavy(kind: str, paths: Sequence[str]) -> float:
    """Return the largest resident memory while an epoch is read, beyond that before the first batch."""
    import pyarrow.parquet  # noqa: F401  # its import is not counted

    logging.getLogger("lightning_dlrover.data").setLevel(logging.ERROR)  # it names such files
    data = stream(files(list(paths)) if kind == "tar" else parquet(list(paths)))
    layout = replace(data.layout_for(64), cycle=CYCLE)
    plan = data.plan(0, layout)
    process = psutil.Process()
    before = largest = process.memory_info().rss
    # At a URL, all lanes are open after a cycle. Going through such a row group 48 times takes minutes.
    for batch in range(plan.num_batches if kind != "url" else CYCLE):
        data.__getitems__(Positions(0, layout, ((64 * batch, min(64 * (batch + 1), plan.num_rows)),)))
        largest = max(largest, process.memory_info().rss)
    return float(largest - before) / MIB


def write_group(folder: Path, num_rows: int) -> None:
    """Write a Parquet file with one row group of 40 columns of random numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    dice = np.random.default_rng(0)
    columns = {f"x{number}": dice.random(num_rows) for number in range(40)}
    pq.write_table(pa.table(columns), folder / "group.parquet", row_group_size=num_rows, use_dictionary=False)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), port), daemon=True)
    server.start()
    try:
        what = f"the HTTP server of {folder} to listen on port {port}"
        eventually(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), what, 30, 0.05, error=BenchmarkError)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.join()


def serve(folder: str, port: int) -> None:
    from aiohttp import web

    app = web.Application()
    app.add_routes([web.static("/", folder)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


class Listed:
    """A source of many files that are never read."""

    def __init__(self, num_files: int, rows_per_file: int) -> None:
        self._num_files, self._rows_per_file = num_files, rows_per_file

    def shards(self) -> list[Shard]:
        return [Shard(f"/data/day/part-{i:06}.parquet", self._rows_per_file, "1 1") for i in range(self._num_files)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        raise NotImplementedError


def plan() -> dict[str, float | int]:
    plan_s, plan_mb = apart(plan_cost)
    print(
        f"plan of 100,000 files with 10^10 rows, up to the places of the first batch: {plan_s:.2f} s, {plan_mb:.0f} MB",
        flush=True,
    )
    return {"plan_s": plan_s, "plan_mb": plan_mb}


def plan_cost() -> tuple[float, float]:
    """Return seconds and MB for a process that begins an epoch in its middle."""
    process = psutil.Process()
    data = stream(Listed(100_000, 100_000), shuffle_rows=1_000_000)
    before = process.memory_info().rss
    began = time.perf_counter()
    layout = Layout(8192, slots=16)
    order = data.plan(0, layout)
    middle = order.num_rows // 2
    pieces = list(order.pieces(middle, middle + layout.batch_size))
    places = [
        list(order.intervals(piece.lane, *order.block(piece.lane, order.block_of(piece.lane, piece.first)))) for piece in pieces
    ]
    took_s = time.perf_counter() - began
    if len(data) != 10**10 or not all(places):
        raise BenchmarkError(f"the plan has {len(data)} rows")
    return took_s, (process.memory_info().rss - before) / 1e6


# --- auc ----------------------------------------------------------------------------------------------------------------------


def auc(space: Workspace, size: Size, seed: int) -> dict[str, float | int]:
    files, script = space.folder / "criteo", EXAMPLES / "train_dlrm.py"
    convert = [sys.executable, str(EXAMPLES / "criteo_to_parquet.py"), "--generate", str(size.trained_rows), str(files)]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL, timeout=TRAINING_TIMEOUT_S)
    arguments = [f"--data={files}", "--epochs=1000", f"--max-steps={size.max_steps}", f"--seed={seed + 1}"]
    folder = space.folder / "resized"
    with (
        ThreadPoolExecutor(1) as pool,
        space.live_job("resized", space.etcd(), "1:4", [*arguments, f"--output={folder}"], script=script) as job,
    ):
        other = pool.submit(train_unresized, script, space.folder / "unresized", arguments)
        resized, num_rounds = train_elastic(job, folder, with_tables=True)
        unresized = other.result(TRAINING_TIMEOUT_S)
    if resized["steps"] != unresized["steps"]:
        raise BenchmarkError(f"{resized['steps']} steps of the resized run against {unresized['steps']}")
    print(
        f"test AUC of DLRM on Parquet after {resized['steps']} steps: {resized['test_auc']:.5f} in {num_rounds} rounds "
        f"with two kills, {unresized['test_auc']:.5f} undisturbed",
        flush=True,
    )
    return {"auc_difference": abs(resized["test_auc"] - unresized["test_auc"])}


# --- command line -------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    without = " and ".join(SLOW_PARTS)
    parser.add_argument("--parts", help=f"parts to run, separated by commas; by default all, with --quick without {without}")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement of speed")
    parser.add_argument("--quick", action="store_true", help="few and small, a minute and a half on two idle cores")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    default = [part for part in PARTS if part not in SLOW_PARTS or not options.quick]
    parts = options.parts.split(",") if options.parts else default
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    size, rounds = (QUICK, 2) if options.quick else (FULL, options.rounds)
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    values: dict[str, float | int] = {} if options.parts else {"auc_difference": math.nan}
    with Workspace("stream") as space:
        if "schedules" in parts:
            values |= schedules(size, options.seed)
        if "content" in parts:
            content(space.folder / "content")
        paths = []
        if {"speed", "memory"} & set(parts):
            paths = write_files(space.folder / "files", size.num_files, size.rows_per_file, size.row_group)
            bytes_ = sum(Path(path).stat().st_size for path in paths)
            print(
                f"{len(paths)} files, {size.num_files * size.rows_per_file} rows in row groups of {size.row_group}, "
                f"{bytes_ / MIB:.0f} MiB",
                flush=True,
            )
        if "speed" in parts:
            values |= speed(paths, size, rounds)
        if "seek" in parts:
            values |= seek(space.folder / "seek", size, options.seed)
        if "memory" in parts:
            memory(paths)
            values |= heavy_memory(space.folder / "heavy", options.quick)
        if "plan" in parts:
            values |= plan()
        if "auc" in parts:
            values |= auc(space, size, options.seed)
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
