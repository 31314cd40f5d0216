"""Measure points, limits of the machine, energy and accuracy, in one worker."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlrover.lab.characterize.models import Batches, Clock, LocalTables, Model, ReferenceProgram, Tables
from lightning_dlrover.lab.characterize.points import Point
from lightning_dlrover.lightning_compat import package_of
from lightning_dlrover.tuning.nvml import handle_of, load_nvml
from lightning_dlrover.tuning.profiler import GpuPeak
from lightning_dlrover.tuning.resources import MemoryWatch

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the energy counters of all packages of the processors (RAPL), and of the GPU in use (NVML).

    A GPU without a counter gives no figure at all.
    """

    def __init__(self, cuda: bool, powercap: Path = POWERCAP) -> None:
        self._counters: list[Callable[[], float]] = [
            _Rapl(zone) for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1 and _is_readable(zone)
        ]
        if cuda:
            counter = _gpu_counter()
            self._counters = [*self._counters, counter] if counter else []

    def joules(self) -> float | None:
        """Return joules since some moment; None if the machine does not report them."""
        return sum(counter() for counter in self._counters) if self._counters else None


class _Rapl:
    """One package's counter, which wraps around."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range = float((zone / "max_energy_range_uj").read_text())
        self._last = float(self._file.read_text())
        self._sum = 0.0

    def __call__(self) -> float:
        now = float(self._file.read_text())
        self._sum += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._sum / 1e6


def _is_readable(zone: Path) -> bool:
    with suppress(OSError, ValueError):  # only root may read it, since it can reveal secrets of other processes
        float((zone / "energy_uj").read_text())
        float((zone / "max_energy_range_uj").read_text())
        return True
    return False


def _gpu_counter() -> Callable[[], float] | None:
    try:
        nvml = load_nvml()
        handle = handle_of(nvml)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, a slice of a GPU (MIG), or a GPU older than Volta
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


GPU = "gpu_"
"""Prefix of the names of a GPU's limits."""
BLOCK_S = 0.12
NUM_BLOCKS, NUM_DISK_BLOCKS = 5, 3
COPY_BYTES = 256 * 2**20
ROWS_BYTES = 512 * 2**20
ROW_VALUES = 32
DISK_BYTES = 64 * 2**20
ALL_REDUCE_BYTES = 16 * 2**20
MATRIX, GPU_MATRIX = 1536, 8192  # a smaller one does not fill a GPU
BAGS, LOOKUPS = 4096, 32
NUM_IDS = ROWS_BYTES // (4 * ROW_VALUES)
"""Different lookups: as many as the table has rows, so that they come back to a row only once it has left all caches."""


def measure_limit(name: str, threads: int, folder: Path) -> tuple[float, ...]:
    """Return the limit in each block, in the unit that `LIMITS` names.

    Raises:
        OSError: the disk refuses.
    """
    torch.set_num_threads(threads)
    device = torch.device("cuda" if name.startswith(GPU) else "cpu")
    with threadpool_limits(threads):
        return _MEASURES[name.removeprefix(GPU)](threads, folder, device)


def _copy(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """Bytes read and written by a copy, as STREAM counts them."""
    if device.type == "cuda":
        source = torch.ones(COPY_BYTES // 4, device=device)
        target = torch.empty_like(source)
        return _rates(lambda: target.copy_(source), 2 * COPY_BYTES / 1e9, device)
    # Torch's memory, because numpy asks the kernel for huge pages, which tables do not get.
    arrays, targets = ([torch.ones(COPY_BYTES // 4 // threads).numpy() for _ in range(threads)] for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:  # numpy copies without Python's lock
        return _rates(lambda: [*pool.map(np.copyto, targets, arrays)], 2 * COPY_BYTES / 1e9, device)


def _rows(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """Bytes of random table rows that lookups read."""
    table = torch.ones(NUM_IDS, ROW_VALUES, device=device)
    ids = torch.randint(NUM_IDS, (NUM_IDS // LOOKUPS, LOOKUPS), generator=torch.Generator().manual_seed(0)).to(device)
    # The start of a GPU's kernel takes longer than a small one.
    batches = itertools.cycle([ids] if device.type == "cuda" else torch.split(ids, BAGS))
    num_read = NUM_IDS if device.type == "cuda" else BAGS * LOOKUPS
    with torch.no_grad():
        return _rates(lambda: F.embedding_bag(next(batches), table, mode="sum"), num_read * ROW_VALUES * 4 / 1e9, device)


def _multiply(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """The faster of the libraries at hand: torch's own may suit other makes of processors better than this one."""
    own = _multiply_in_torch(threads, folder, device)
    if device.type == "cuda":
        return own
    one, other = (np.random.default_rng(0).random((MATRIX, MATRIX), dtype=np.float32) for _ in range(2))
    numpys = _rates(lambda: one @ other, 2 * MATRIX**3 / 1e9, device)
    return max(own, numpys, key=lambda blocks: sorted(blocks)[len(blocks) // 2])


def _multiply_in_torch(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    size = GPU_MATRIX if device.type == "cuda" else MATRIX
    one, other = (torch.rand(size, size, device=device) for _ in range(2))
    return _rates(lambda: torch.mm(one, other), 2 * size**3 / 1e9, device)


def _all_reduce(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    values = torch.ones(ALL_REDUCE_BYTES // 4)
    return _rates(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX), ALL_REDUCE_BYTES / 1e9, device, num_calls=6)


def _all_reduce_latency(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    values = torch.ones(2)
    rates = _rates(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX), 1.0, device, num_calls=300)
    return tuple(1e6 / rate for rate in rates)


def _disk(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Write a file through to the disk, drop it from the page cache, and read it. Return both rates of each block."""
    file = folder / f"disk-{os.getpid()}"
    data = os.urandom(2**20)
    written, read = [], []
    try:
        for _ in range(NUM_DISK_BLOCKS):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                began = time.perf_counter()
                for _ in range(DISK_BYTES // len(data)):
                    os.write(descriptor, data)
                os.fsync(descriptor)
                written.append(DISK_BYTES / 1e9 / (time.perf_counter() - began))
                with suppress(AttributeError):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.lseek(descriptor, 0, os.SEEK_SET)
                began = time.perf_counter()
                while os.read(descriptor, 2**20):
                    pass
                read.append(DISK_BYTES / 1e9 / (time.perf_counter() - began))
            finally:
                os.close(descriptor)
    finally:
        file.unlink(missing_ok=True)
    return tuple(written), tuple(read)


def _rates(call: Callable[[], object], amount: float, device: torch.device, num_calls: int | None = None) -> tuple[float, ...]:
    """Return the amount per second in each block.

    Args:
        num_calls: calls of a block, where workers must make the same number.
    """

    def seconds(calls: int) -> float:
        _settle(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _settle(device)
        return time.perf_counter() - began

    seconds(2)
    calls = num_calls or max(2, round(BLOCK_S / seconds(1)))
    return tuple(calls * amount / seconds(calls) for _ in range(NUM_BLOCKS))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


_MEASURES: dict[str, Callable[[int, Path, torch.device], tuple[float, ...]]] = {
    "copy": _copy,
    "rows": _rows,
    "multiply": _multiply,
    "multiply_torch": _multiply_in_torch,
    "all_reduce": _all_reduce,
    "all_reduce_latency": _all_reduce_latency,
    "disk_write": lambda threads, folder, device: _disk(folder)[0],
    "disk_read": lambda threads, folder, device: _disk(folder)[1],
}
LIMITS = {
    "copy": ("memory copy, read and written", "GB/s"),
    "rows": ("random table rows read", "GB/s"),
    "multiply": ("matrix multiply, best library", "GFLOP/s"),
    "multiply_torch": ("matrix multiply, torch", "GFLOP/s"),
    "all_reduce": ("all-reduce of 16 MiB, two workers", "GB/s"),
    "all_reduce_latency": ("all-reduce of 8 bytes, two workers", "us"),
    "disk_write": ("disk, written through", "GB/s"),
    "disk_read": ("disk, read without cache", "GB/s"),
    "gpu_copy": ("GPU memory copy, read and written", "GB/s"),
    "gpu_rows": ("random table rows read by the GPU", "GB/s"),
    "gpu_multiply": ("matrix multiply on the GPU, 32-bit", "GFLOP/s"),
}
"""Meaning and unit of each limit."""

NEEDS_WORKERS = {"all_reduce": 2, "all_reduce_latency": 2}
"""Limits that take more than one worker."""


MIN_WARM_STEPS = 2
MIN_BLOCK_STEPS, MAX_BLOCK_STEPS = 2, 400
STEPS_PER_LOADER = 4
"""Steps of a block for each loader worker: their batches come in bursts, which a shorter block would see in part."""


@dataclass(frozen=True)
class Effort:
    """Extent of one visit."""

    warm_s: float = 0.06
    block_s: float = 0.1  # time of whole steps; cut steps take as long
    num_blocks: int = 2  # few, so that the time suffices for more visits, minutes apart


@dataclass(frozen=True)
class Share:
    """One worker's part of a visit."""

    blocks: tuple[float, ...]
    part_s: dict[str, float]
    forward_s: float
    peak_memory_bytes: int
    cpu_percent: float
    gpu_memory_bytes: int
    joules_per_step: float | None
    reference_s: tuple[float, ...] = ()  # seconds of the reference program within each block


def measure(point: Point, global_rank: int, effort: Effort, folder: Path) -> Share:
    """Measure a point together with the other workers of the default process group.

    After a warm-up, whole steps and cut steps run in turn, in blocks.
    """
    try:
        return _measured(point, global_rank, effort, folder)
    finally:
        gc.collect()  # a large table must not count against the next point


def _measured(point: Point, global_rank: int, effort: Effort, folder: Path) -> Share:
    torch.set_num_threads(point.threads)
    torch.manual_seed(0)
    cuda = point.device != "cpu"
    dense_device = torch.device("cuda" if cuda else "cpu")
    table_device = torch.device("cuda" if point.device == "cuda" else "cpu")
    local_batch = point.batch // point.num_workers
    gpu_peak = GpuPeak(dense_device)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(MemoryWatch())
        batches = stack.enter_context(contextlib.closing(Batches(point, local_batch, global_rank, folder)))
        tables = _tables(point, table_device, stack)
        model = Model(point, dense_device, tables)

        def step() -> None:
            model.step(next(batches).to(dense_device, table_device))

        def cut_step(clock: Clock) -> None:
            batch = next(batches).to(dense_device, table_device)
            clock.mark("data")
            model.cut_step(batch, clock)

        reference = ReferenceProgram(dense_device)
        return _run(point, effort, step, cut_step, reference, memory, gpu_peak, cuda)


def _tables(point: Point, device: torch.device, stack: contextlib.ExitStack) -> Tables | None:
    if not point.num_sparse:
        return None
    if point.placement in ("local", "replicated"):
        return LocalTables(point, device)
    from lightning_dlrover.lab.characterize.models import TablesOverWorkers

    return stack.enter_context(contextlib.closing(TablesOverWorkers(point, device)))


def _run(
    point: Point,
    effort: Effort,
    step: Callable[[], None],
    cut_step: Callable[[Clock], None],
    reference: ReferenceProgram,
    memory: MemoryWatch,
    gpu_peak: GpuPeak,
    cuda: bool,
) -> Share:
    num_steps = _warm_up(point, effort, step, cut_step, cuda)
    energy = EnergyMeter(cuda)
    whole, parts, reference_s, reference_total_s = [], [], [], 0.0
    reference.seconds()
    with _no_collection():
        began, cpu_before, spent_before = _synced(point, cuda), _cpu_s(), energy.joules()
        for _ in range(effort.num_blocks):
            clock, whole_s, runs_s = Clock(cuda), 0.0, []
            for number in range(2 * num_steps):
                if number % max(1, num_steps // 4) == 0:  # the same steps on every worker, so that no worker waits for another
                    runs_s.append(reference.seconds())
                if number.bit_count() % 2:  # both kinds in turn, in an order (Thue, Morse) without a period: loaders have one
                    clock.begin()
                    cut_step(clock)
                else:
                    started = _now(cuda)
                    step()
                    whole_s += _now(cuda) - started
            whole.append(whole_s / num_steps)
            parts.append(clock.seconds())
            reference_s.append(statistics.fmean(runs_s))
            reference_total_s += sum(runs_s)
        took_s = _synced(point, cuda) - began
        cpu_s, spent = _cpu_s() - cpu_before, energy.joules()
    part_s, forward_s = _relative_parts(whole, parts, num_steps)
    per_step = None
    if spent is not None and spent_before is not None:
        of_steps = max(0.0, 1 - reference_total_s / took_s)  # the reference program takes its share
        per_step = of_steps * (spent - spent_before) / (2 * effort.num_blocks * num_steps)
    return Share(
        blocks=tuple(whole),
        part_s=part_s,
        forward_s=forward_s,
        peak_memory_bytes=memory.take().peak_bytes,
        cpu_percent=100 * cpu_s / took_s,
        gpu_memory_bytes=gpu_peak.take(),
        joules_per_step=per_step,
        reference_s=tuple(reference_s),
    )


def _relative_parts(
    whole: Sequence[float], parts: Sequence[tuple[dict[str, float], float]], num_steps: int
) -> tuple[dict[str, float], float]:
    """Return seconds per step of each part, and of the forward pass, as they relate to the median of whole steps.

    Whole and cut steps of a block ran in turn, under the same conditions, so the block with the median ratio of both counts.
    """
    step_s = statistics.median(whole)
    ordered = sorted(zip(whole, parts, strict=True), key=lambda block: sum(block[1][0].values()) / block[0])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    scales = [step_s / (whole_s * num_steps * len(middle)) for whole_s, _ in middle]
    part_s = {
        part: sum(scale * block[0][part] for scale, (_, block) in zip(scales, middle, strict=True)) for part in middle[0][1][0]
    }
    return part_s, sum(scale * block[1] for scale, (_, block) in zip(scales, middle, strict=True))


def _warm_up(point: Point, effort: Effort, step: Callable[[], None], cut_step: Callable[[Clock], None], cuda: bool) -> int:
    """Warm up, and return the number of steps of a block. All workers make the same number of steps."""
    least = MIN_WARM_STEPS + 2 * point.loader_workers  # batches fetched ahead would look like a fast loader
    cut_step(Clock(cuda))
    step()
    began = _synced(point, cuda)
    for _ in range(least):
        step()
    step_s = _agreed((_synced(point, cuda) - began) / least, point)
    more = math.ceil(effort.warm_s / step_s) - least
    for _ in range(min(more, MAX_BLOCK_STEPS)):
        step()
    if more > 0:
        began = _synced(point, cuda)
        for _ in range(least):
            step()
        step_s = _agreed((_synced(point, cuda) - began) / least, point)
    fewest = max(MIN_BLOCK_STEPS, STEPS_PER_LOADER * point.loader_workers)
    return min(MAX_BLOCK_STEPS, max(fewest, round(effort.block_s / step_s / 2) * 2))


def _agreed(seconds: float, point: Point) -> float:
    if point.num_workers == 1:
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _synced(point: Point, cuda: bool) -> float:
    if point.num_workers > 1:
        dist.barrier()
    return _now(cuda)


def _cpu_s() -> float:
    """CPU time of this worker and of its loader workers."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:2])
    for child in own.children():
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return float(total)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


NUM_SAMPLES, NUM_TEST = 48_000, 16_000
INIT_STD = 0.05


def normalized_entropy(point: Point, seed: int) -> float:
    """Train once over planted data, clicks drawn from a known model. Return the test loss over that of the base rate.

    Equal seeds give equal results.
    """
    torch.set_num_threads(point.threads)
    generator = torch.Generator().manual_seed(seed)
    dense, ids, clicks = _planted(point, generator)
    torch.manual_seed(seed)
    table = nn.Embedding(point.num_sparse * point.rows, point.dim)
    nn.init.normal_(table.weight, std=INIT_STD)
    net = nn.Sequential(
        nn.Linear(point.num_dense + point.num_sparse * point.dim, point.width), nn.ReLU(), nn.Linear(point.width, 1)
    )
    optimizer = torch.optim.Adagrad([*table.parameters(), *net.parameters()], lr=point.learning_rate)
    offsets = torch.arange(point.num_sparse) * point.rows

    def loss(rows: slice) -> Tensor:
        inputs = torch.cat([dense[rows], table(ids[rows] + offsets).flatten(1)], 1)
        return F.binary_cross_entropy_with_logits(net(inputs).squeeze(1), clicks[rows])

    for first in range(0, NUM_SAMPLES, point.batch):
        optimizer.zero_grad()
        loss(slice(first, min(first + point.batch, NUM_SAMPLES))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        test = slice(NUM_SAMPLES, NUM_SAMPLES + NUM_TEST)
        rate = float(clicks[test].mean())
        base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return float(loss(test)) / base


def _planted(point: Point, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    total = NUM_SAMPLES + NUM_TEST
    dense = torch.randn(total, point.num_dense, generator=generator)
    ids = torch.randint(point.rows, (total, point.num_sparse), generator=generator)
    weights = torch.randn(point.num_sparse, point.rows, generator=generator)
    of_ids = torch.stack([weights[i][ids[:, i]] for i in range(point.num_sparse)], 1).sum(1)
    logits = of_ids + dense @ torch.randn(point.num_dense, generator=generator) / math.sqrt(point.num_dense) - 1.0
    return dense, ids, torch.bernoulli(torch.sigmoid(logits), generator=generator)


WARM_STEPS = 3
MAX_STEPS = 2000


def check_users_model(name: str) -> None:
    """Check that a model can be made and has data.

    Raises:
        ValueError: it cannot; the message names the missing part.
    """
    module = _made(name)
    if not hasattr(module, "training_step") or not hasattr(module, "configure_optimizers"):
        raise ValueError(f"--model {name}: {type(module).__name__} is not a LightningModule: it has no training_step")
    own = getattr(type(module), "train_dataloader", None)
    if own is None or "lightning" in own.__module__.partition(".")[0]:
        raise ValueError(
            f"--model {name}: {type(module).__name__} has no train_dataloader; define one, or a class of this kind around it: "
            "the measurement needs its batches"
        )


def _made(name: str) -> Any:
    source, _, class_name = name.rpartition(":")
    if not source or not class_name.isidentifier():
        raise ValueError(f"--model {name}: give MODULE:CLASS or FILE.py:CLASS, such as train.py:ClickModel")
    try:
        found = getattr(_module(source), class_name)
    except AttributeError as error:
        raise ValueError(f"--model {name}: {source} has no {class_name}") from error
    except Exception as error:
        raise ValueError(f"--model {name}: {source} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(found):
        raise ValueError(f"--model {name}: {class_name} is a {type(found).__name__}, not a class")
    try:
        return found()
    except Exception as error:
        raise ValueError(
            f"--model {name}: {class_name}() fails: {type(error).__name__}: {error}; it must take no arguments"
        ) from error


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    path = Path(source).resolve()
    sys.path.insert(0, str(path.parent))  # its neighbours, as for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def measure_users_model(point: Point, effort: Effort) -> Share:
    """Train the user's model for a while, and return its steps in blocks, with Lightning's parts of a step."""
    torch.set_num_threads(point.threads)
    module = _made(point.model)
    lightning = importlib.import_module(package_of(module))
    watch = _watch(lightning, effort, point.device != "cpu")
    gpu_peak = GpuPeak(torch.device("cpu" if point.device == "cpu" else "cuda"))
    with MemoryWatch() as memory:
        trainer = lightning.Trainer(
            accelerator="gpu" if point.device != "cpu" else "cpu",
            devices=1,
            max_steps=MAX_STEPS,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        cpu_before, began = time.process_time(), time.perf_counter()
        trainer.fit(module)
        cpu = 100 * (time.process_time() - cpu_before) / (time.perf_counter() - began)
        peak = memory.take().peak_bytes
    if not watch.blocks:
        raise ValueError(f"its data ended before {WARM_STEPS + 1} steps")
    part_s = {name: seconds / watch.num_measured for name, seconds in watch.part_s.items()}
    return Share(tuple(watch.blocks), part_s, part_s["forward"], peak, cpu, gpu_peak.take(), None)


def _watch(lightning: Any, effort: Effort, cuda: bool) -> Any:
    """Return a callback that times steps in blocks, and stops after the last one."""

    class Watch(lightning.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.blocks: list[float] = []
            self.part_s = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
            self.num_measured = 0
            self._num_steps = 0
            self._in_block = 0
            self._block_began = self._last = 0.0

        def _mark(self, part: str) -> None:
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self._num_steps > WARM_STEPS:
                self.part_s[part] += now - self._last
            self._last = now

        def on_train_batch_start(self, *_: Any) -> None:
            self._mark("data")

        def on_before_backward(self, *_: Any) -> None:
            self._mark("forward")

        def on_after_backward(self, *_: Any) -> None:
            self._mark("backward")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._mark("optimizer")
            self._num_steps += 1
            if self._num_steps <= WARM_STEPS + 1:
                self._block_began = self._last
                return
            self._in_block += 1
            self.num_measured += 1
            if self._last - self._block_began >= effort.block_s:
                self.blocks.append((self._last - self._block_began) / self._in_block)
                self._block_began, self._in_block = self._last, 0
            trainer.should_stop = len(self.blocks) >= effort.num_blocks

    return Watch()
