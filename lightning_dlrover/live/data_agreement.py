"""Check that all workers train on the same data: fingerprints of datasets, opened streams, rows of iterable datasets."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import math
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import SubsetRandomSampler

from lightning_dlrover.codec import from_fields, to_json
from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import FitPosition, HandedOut, IterableOrder, IterableSettings, StreamOrder
from lightning_dlrover.rdzv.job.events import IterableOpened, StreamOpened
from lightning_dlrover.rdzv.membership.member import MembershipError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.report.streams import described, described_iterable

if TYPE_CHECKING:
    import lightning as L

# Check whether all workers train on the same data: lengths, and a few samples as far as they can be compared.
#
# A sample is compared by its integers, its texts, and a few of its other numbers, these with a tolerance, because other
# processors and decoders give other last digits. Of an object it is what pickle would keep. Samples that draw random
# numbers, change between fetches, or cannot be pickled are not compared.

log = logging.getLogger(__name__)

FETCHES_PER_SAMPLE = 3
"""Fetches of each sample. An image that is flipped at random is the same three times in one of four cases."""

MIN_DIFFERENT_SAMPLES = 2
"""Minimum number of samples that must differ to show another dataset. One may be chance; a single equal one rules it out."""

PROBING_S = 2.0
"""Seconds after which no further sample is fetched."""

OFFSETS = "offsets "
"""Prefix of a digest of what a stream reads, if that is a range of each partition of a topic."""

MAX_TEXTS = 5000
"""Parts of a sample above which it is not compared."""

MAX_ARRAYS, NUM_PIECES, PIECE_LENGTH = 16, 8, 16
TOLERANCE = 0.02
"""Share by which means of an array's pieces may differ, and numbers of 16 bits: audio, and images from a decoder."""

SINGLE_TOLERANCE = 1e-6
"""Share by which a single number of at least 32 bits may differ. Neighbours in a time series differ by little."""

ABSOLUTE_TOLERANCE = 1e-9
"""Difference up to which two single numbers are equal: where the result should be 0, all digits are last digits."""

LARGEST = 1e18
"""Largest absolute value that is compared. Larger ones count as this."""

EXACT_BYTES = 4
"""Minimum size of integers that are compared exactly, as those of texts' tokens. Smaller ones may be pixels and sound."""


@dataclass(frozen=True)
class Sketch:
    """Summary of a sample."""

    kind: str  # digest of its structure and texts
    arrays: list[list[float]]  # deviation and means of some pieces of each array, or its only number

    def __str__(self) -> str:
        return f"{self.kind} {[x for array in self.arrays for x in array[1:] or array][:4]}"


@dataclass(frozen=True)
class LoaderFingerprint:
    num_samples: int | None  # None for an `IterableDataset`
    sketches: list[Sketch | None]  # the same places on every worker; None: not known, or not comparable
    shards: str = ""  # digest of what a stream reads


@dataclass(frozen=True)
class DataFingerprint:
    """Fingerprint of one worker's data."""

    train: list[LoaderFingerprint]
    val: list[int] | None  # numbers of samples; None: validation loaders do not exist yet

    def encode(self) -> str:
        return to_json(self).decode()

    @staticmethod
    def decode(text: str) -> DataFingerprint:
        """Return the decoded fingerprint.

        Raises:
            ValueError: `text` is not one.
        """
        try:
            return from_fields(DataFingerprint, json.loads(text), "a fingerprint of data")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{text!r:.80} is not a fingerprint of data: {error}") from error


class _UncomparableError(Exception):
    """A sample holds something that cannot be compared."""


def difference(own: DataFingerprint, other: DataFingerprint) -> str:
    """Describe how this worker's data differ from another's; empty if no difference is known."""
    if len(own.train) != len(other.train):
        return f"{len(own.train)} training loaders here, {len(other.train)} there"
    for number, (mine, theirs) in enumerate(zip(own.train, other.train, strict=True), 1):
        name = "the training data" if len(own.train) == 1 else f"training loader {number}"
        if mine.num_samples != theirs.num_samples:
            if None in (mine.num_samples, theirs.num_samples):
                return f"{name}: an IterableDataset {'here' if mine.num_samples is None else 'there'} only"
            return f"{name}: {mine.num_samples} samples here, {theirs.num_samples} there"
        if mine.shards != theirs.shards:
            if mine.shards.startswith(OFFSETS):
                return f"{name}: other topics or offsets; a start or stop that depends on now differs from worker to worker"
            return f"{name}: {mine.num_samples} rows in each, but files of other names or lengths"
        pairs = [
            (i, a, b)
            for i, (a, b) in enumerate(zip(mine.sketches, theirs.sketches, strict=False))
            if a is not None and b is not None
        ]
        if len(pairs) >= MIN_DIFFERENT_SAMPLES and not any(_alike(a, b) for _, a, b in pairs):
            place, a, b = pairs[0]
            where = ("first", "middle", "last")[place] if place < 3 else "next"
            return f"{name}: {mine.num_samples} samples, the {where} one being {a} here, {b} there"
    if own.val is not None and other.val is not None and own.val != other.val:
        return f"the validation data: {own.val} samples here, {other.val} there"
    return ""


def refuse_other_data(own: DataFingerprint, encoded: str, mine: str, theirs: str, consequence: str) -> None:
    """Refuse this worker if its data differ from another's.

    Args:
        encoded: the other worker's fingerprint.
        mine, theirs: names of the two data in the error.

    Raises:
        MembershipError: they differ, or `encoded` cannot be read.
    """
    try:
        found = difference(own, DataFingerprint.decode(encoded))
    except ValueError as error:
        raise MembershipError(f"{mine} cannot be compared with {theirs}: {error}") from error
    if found:
        raise MembershipError(
            f"{mine} differ from {theirs}: {found}. Likely the data are split or shuffled with no fixed seed, files have "
            "changed, or each worker was given a part of its own: fix the seed, and give every worker all of the data. "
            f"{consequence}. If samples are to differ from worker to worker, as with augmentation by rank, "
            "DLRoverStrategy(compare_data=False) compares their number alone"
        )


def refuse_different_data(encoded: Sequence[str], run: str) -> None:
    """Refuse to train if the data of any two workers differ. All workers compare all pairs, so all have one result.

    Args:
        encoded: fingerprints by rank.
        run: name of the run for the error.

    Raises:
        MembershipError: two differ, or one cannot be read.
    """
    first_ranks: dict[str, int] = {}
    for rank, text in enumerate(encoded):
        first_ranks.setdefault(text, rank)
    for (one, rank), (other, other_rank) in itertools.combinations(first_ranks.items(), 2):
        mine = f"{run}: the data of rank {rank}"
        try:
            fingerprint = DataFingerprint.decode(one)
        except ValueError as error:
            raise MembershipError(f"{mine} cannot be compared with others: {error}") from error
        refuse_other_data(fingerprint, other, mine, f"rank {other_rank}'s", "The job ends")


def fingerprint_data(
    train: Sequence[ElasticLoader], val: Sequence[ElasticLoader] | None, compare_samples: bool
) -> DataFingerprint:
    """Fingerprint the data of a worker; fetches some samples if they are to be compared."""
    return DataFingerprint(
        [_fingerprint_of(loader, compare_samples) for loader in train],
        None if val is None else [loader.split.num_samples for loader in val],
    )


def _fingerprint_of(loader: ElasticLoader, compare_samples: bool) -> LoaderFingerprint:
    if loader.iterable is not None:  # its rows are compared as they are read, see `compare_next_batches`
        return LoaderFingerprint(None, [], loader.order.shards)
    if isinstance(loader.order, StreamOrder) and loader.order.grows:
        # The rows are fixed by a record, and those of the first window may be gone by now.
        return LoaderFingerprint(0, [], OFFSETS + loader.order.name)
    shards = loader.order.shards if loader.order.window is None else OFFSETS + loader.order.shards
    return LoaderFingerprint(loader.order.num_samples, _sketches(loader) if compare_samples else [], shards)


def sketch(sample: object) -> Sketch | None:
    """Return a summary of a sample; None if it holds objects of which nothing is known."""
    texts: list[str] = []
    arrays: list[list[float]] = []
    try:
        _collect(sample, texts, arrays)
    except (_UncomparableError, RecursionError):
        return None
    return Sketch(hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()[:12], arrays)


def described_row(row: object) -> tuple[str, list[list[float]]] | None:
    """Return a sample's sketch as plain data, which loader workers send and checkpoints keep."""
    found = sketch(row)
    return None if found is None else (found.kind, found.arrays)


def are_same_row(one: tuple[str, list[list[float]]], other: tuple[str, list[list[float]]]) -> bool:
    """Return whether two descriptions are of one row, apart from last digits."""
    return _alike(Sketch(*one), Sketch(*other))


class _Sketcher:
    """Collates a single sample to its sketch, and a flag: the process has drawn random numbers since the sample before."""

    def __init__(self) -> None:
        self._before: object = None

    def __call__(self, samples: list[Any]) -> tuple[Sketch | None, bool]:
        name, key, *place = np.random.get_state()  # its text would take milliseconds
        now = (random.getstate(), (name, np.asarray(key).tobytes(), place), torch.get_rng_state().numpy().tobytes())
        has_drawn, self._before = now != self._before, now
        return sketch(samples[0]), has_drawn


def _sketches(loader: ElasticLoader) -> list[Sketch | None]:
    """Return sketches of the first, the middle and the last sample that can be drawn."""
    indices = _indices(loader)
    found: list[Sketch | None] = []
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        for each in _comparable(loader, indices):
            found.append(each)
    except Exception as error:  # the user's own error; it is raised again if training ever reaches that sample
        log.debug("no more samples of the training data can be compared: %s", error)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    return found + [None] * (len(indices) - len(found))


def _comparable(loader: ElasticLoader, indices: Sequence[int]) -> Iterator[Sketch | None]:
    """Yield a sketch of each sample, or None if it cannot be compared; as many as time allows."""
    # The first fetch only records the state of the random numbers, so that the second one shows whether it has drawn any.
    each_often = [index for index in indices for _ in range(FETCHES_PER_SAMPLE)]
    fetched = loader.workers.fetch_apart(each_often[:1] + each_often, _Sketcher())
    next(fetched, None)
    deadline = time.monotonic() + PROBING_S
    for _ in indices:
        seen: list[tuple[Sketch | None, bool]] = []
        while len(seen) < FETCHES_PER_SAMPLE:
            if time.monotonic() > deadline:
                return
            seen.append(next(fetched))
        is_same = all(each == seen[0][0] and not has_drawn for each, has_drawn in seen)
        yield seen[0][0] if is_same else None


def _indices(loader: ElasticLoader) -> list[int]:
    drawn: Any = range(len(loader.dataset)) if hasattr(type(loader.dataset), "__len__") else range(loader.order.num_samples)
    if type(loader.sampler) is SubsetRandomSampler:
        drawn = loader.sampler.indices
    return [int(drawn[place]) for place in (0, len(drawn) // 2, len(drawn) - 1)] if len(drawn) >= 3 else []


def _collect(value: Any, texts: list[str], arrays: list[list[float]]) -> None:
    is_short = getattr(value, "dtype", None) == torch.bfloat16
    if isinstance(value, torch.Tensor):
        try:
            value = (value.float() if is_short else value).detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise _UncomparableError from error
    elif isinstance(value, bool | int | float | np.generic) or hasattr(value, "__array_interface__"):
        value = np.asarray(value)  # the array interface is that of an image, for example
    elif isinstance(value, list | tuple) and value and all(type(x) in (int, float) for x in value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            texts.append(f"{value.dtype.kind}{value.shape}")
            if value.dtype.kind != "f" and (not value.ndim or value.dtype.itemsize >= EXACT_BYTES):
                texts.append(hashlib.sha256(value.astype("<i8").tobytes()).hexdigest())
            if len(arrays) < MAX_ARRAYS:
                is_single = value.size == 1 and value.dtype.itemsize >= EXACT_BYTES and not is_short
                arrays.append([float(f"{_finite(value).item():.9g}")] if is_single else _pieces(value))
        elif value.dtype.kind in "SU":
            texts.extend(map(str, value.ravel()[:PIECE_LENGTH]))
        else:
            raise _UncomparableError
    elif isinstance(value, str):
        texts.append(value.rsplit("/", 1)[-1])  # a path may differ from host to host
    elif isinstance(value, bytes):
        texts.append(hashlib.sha256(value).hexdigest())
    elif value is None:
        texts.append("None")
    elif isinstance(value, Mapping):
        texts.append(f"mapping of {len(value)}")
        for key in sorted(value, key=str):
            texts.append(str(key))
            _collect(value[key], texts, arrays)
    elif isinstance(value, list | tuple | deque):
        texts.append(f"sequence of {len(value)}")
        for each in value:
            _collect(each, texts, arrays)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name), texts, arrays)
    else:
        _collect_object(value, texts, arrays)


def _collect_object(value: Any, texts: list[str], arrays: list[list[float]]) -> None:
    """Collect what pickle would keep of an object of any class."""
    if isinstance(value, PurePath):
        return _collect(str(value), texts, arrays)
    if isinstance(value, type):
        return texts.append(value.__qualname__)
    if isinstance(value, set | frozenset) and all(isinstance(each, str | int) for each in value):
        return texts.append(f"set {sorted(map(str, value))}")
    if len(texts) > MAX_TEXTS or isinstance(value, set | frozenset | io.IOBase | torch.nn.Module):
        raise _UncomparableError
    try:
        how = value.__reduce_ex__(2)
        function, args, state, items, pairs = (how, (), None, None, None) if isinstance(how, str) else (*how, *[None] * 3)[:5]
        parts = [args, state, list(items or ()), dict(pairs or ())]
    except Exception as error:  # the object's own
        raise _UncomparableError from error
    if all(isinstance(each, type) for each in args) and not any(
        part is not None and part not in ([], {}) for part in parts[1:]
    ):
        raise _UncomparableError  # nothing is known of it but its class
    texts.append(getattr(function, "__qualname__", str(function)))
    for part in parts:
        _collect(part, texts, arrays)


def _pieces(array: np.ndarray[Any, Any]) -> list[float]:
    """Return the deviation of some pieces of an array, and the mean of each, to four digits."""
    flat = array.ravel()
    length = max(1, min(PIECE_LENGTH, len(flat) // NUM_PIECES))
    starts = np.linspace(0, len(flat) - length, min(NUM_PIECES, len(flat))).astype(int) if len(flat) else ()
    pieces = [_finite(flat[start : start + length]) for start in starts]
    deviation = float(np.std(np.concatenate(pieces))) if pieces else 0.0
    return [float(f"{x:.4g}") for x in (deviation, *(piece.mean() for piece in pieces))]


def _finite(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values within the limits of a record's numbers."""
    finite: np.ndarray[Any, Any] = np.nan_to_num(array.astype(np.float64)).clip(-LARGEST, LARGEST)
    return finite


def _alike(one: Sketch, other: Sketch) -> bool:
    return (
        one.kind == other.kind
        and len(one.arrays) == len(other.arrays)
        and all(_close(a, b) for a, b in zip(one.arrays, other.arrays, strict=True))
    )


def _close(one: list[float], other: list[float]) -> bool:
    if len(one) == len(other) == 1:
        return math.isclose(one[0], other[0], rel_tol=SINGLE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    scale = max(one[:1] + other[:1], default=0.0)
    return len(one) == len(other) and all(
        abs(a - b) <= TOLERANCE * max(abs(a), abs(b), scale) for a, b in zip(one, other, strict=True)
    )


# Record the streams that a fit reads, from which users find out which rows were trained when.

MAX_SOURCE_LENGTH = 2000
"""Characters of a source's expression above which only its type is recorded."""

MAX_RANGES = 100
"""Partitions above which their offsets are not recorded: a job may have thousands of windows."""


def opened_streams(
    trainer: L.Trainer, loaders: Sequence[ElasticLoader], fit: int, begins_epoch: bool = False
) -> list[tuple[StreamOpened, str]]:
    """Return records of the training loaders that read streams, and their lines of the history.

    Args:
        fit: number of the script's `fit`.
        begins_epoch: whether the Trainer is about to begin an epoch, and still has the counts of the one before.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    in_epoch, accumulate = 0 if begins_epoch else progress.current.ready, _accumulated(trainer)
    streams = []
    for number, loader in enumerate(loaders):
        layout, stream = loader.order.layout, loader.dataset
        if layout is None or not isinstance(stream, Stream):
            continue
        source = repr(stream.source)
        ranges = stream.window_as_data
        opened = StreamOpened(
            fit=fit,
            number=number,
            source=source if len(source) <= MAX_SOURCE_LENGTH else type(stream.source).__name__,
            folder=os.getcwd(),
            num_shards=len(stream.shards),
            num_rows=len(stream),
            digest=stream.fingerprint,
            own_batches=len(loader),
            epoch_batches=loader.num_epoch_batches,
            cycles=loader.split.cycles,
            epoch=trainer.current_epoch,
            batches_before=progress.total.ready - in_epoch,
            steps_before=max(0, trainer.global_step - in_epoch // max(1, accumulate)),
            accumulate=accumulate,
            **asdict(layout),
            ranges=ranges if ranges is None or len(ranges) <= MAX_RANGES else None,
            grows=stream.grows or None,
            seed=loader.order.seed % 2**64 if stream.shuffle_rows else None,  # orders take so many bits, and no sign
        )
        streams.append((opened, f"reads {described(opened)}"))
    return streams


def _accumulated(trainer: L.Trainer) -> int:
    """Return the global batches of an optimizer update; 0 if they vary."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    scheduled = any(hasattr(callback, "scheduling") and callback.scheduling != {0: 1} for callback in callbacks)
    return 0 if scheduled or not trainer.lightning_module.automatic_optimization else trainer.accumulate_grad_batches


# Keep the workers of a fit that reads an `IterableDataset` together: the same rows, and the same end.
#
# Each worker reads the dataset by itself. One that splits itself by rank, draws numbers that no seed fixes, or depends on
# the clock would give each worker rows of its own. So workers compare the lengths of global batches and the first rows of
# most: those of the next batch before a fit begins and when a worker joins, those of all others with the votes between
# steps.


def settings_for(
    trainer: Any, training: bool, global_batch_size: int, max_catch_up_s: float, compare_data: bool
) -> IterableSettings:
    """Return how a loader of a Trainer reads its `IterableDataset`."""
    limit = None if training else trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
    return IterableSettings(
        max_catch_up_s=max_catch_up_s,
        max_rows=limit * global_batch_size if isinstance(limit, int) and not isinstance(limit, bool) else None,
        describe=described_row,
        are_alike=are_same_row,
        compares_rows=compare_data,
        fit_loop=trainer.fit_loop if training else None,
    )


def iterables_of(loaders: Sequence[ElasticLoader]) -> list[IterableOrder]:
    return [loader.iterable for loader in loaders if loader.iterable is not None]


def opened_iterables(loaders: Sequence[ElasticLoader], fit: int) -> list[tuple[IterableOpened, str]]:
    """Return records of the training loaders that read an `IterableDataset`, and their lines of the history.

    Args:
        fit: number of the script's `fit`.
    """
    found = []
    for number, loader in enumerate(loaders):
        if (order := loader.iterable) is None:
            continue
        opened = IterableOpened(fit, number, order.name, order.is_stateful, order.settings.max_catch_up_s)
        found.append((opened, f"reads {described_iterable(opened)}"))
        if order.unused_loader_workers:
            log.warning(
                "num_workers=%d of the loader of %s is used as 1: each worker reads an IterableDataset with one process",
                order.unused_loader_workers,
                order.name,
            )
    return found


# --- the same rows on all workers ------------------------------------------------------------------------------------------


def digest(loaders: Sequence[ElasticLoader]) -> int:
    """Return a number below 2 ** 56, equal on workers that have seen the same batches since the last call."""
    seen = [order.begin_vote() for order in iterables_of(loaders)]
    return int.from_bytes(hashlib.sha256(repr(seen).encode()).digest()[:7], "big") if any(seen) else 0


def refuse_different_rows(loaders: Sequence[ElasticLoader]) -> None:
    """Compare what went into the newest digests. All workers call it together.

    Raises:
        MembershipError: two workers have seen different rows, on all workers.
    """
    orders = iterables_of(loaders)
    if not orders:
        return
    of_ranks = transfer.all_gather([[tuple(each) for each in order.in_vote] for order in orders])
    for rank, theirs in enumerate(of_ranks):
        for order, mine, other in zip(orders, of_ranks[0], theirs, strict=True):
            if found := _difference_of_batches([HandedOut(*each) for each in mine], [HandedOut(*each) for each in other]):
                raise MembershipError(f"{_text(order, found, 'rank 0', f'rank {rank}')}. The job ends")


def compare_next_batches(loaders: Sequence[ElasticLoader], position: FitPosition, joining_ranks: Sequence[int]) -> None:
    """Fetch the next batch, and compare it with what other workers have in it. All workers of a round call it together.

    Args:
        joining_ranks: workers to refuse if they differ, while others train on.

    Raises:
        MembershipError: this worker joins with other rows, or the workers that have the state differ.
        DataError: this worker joins, and would need too long to read up to the others.
    """
    orders, size, rank = iterables_of(loaders), position.size, position.rank
    if not orders or size == 1:
        return
    for order in orders:
        order.is_catching_up = rank in joining_ranks
        order.forget_handed_out()
    mine = [tuple(each) if (each := loader.peek()) is not None else None for loader in loaders]
    of_ranks = transfer.all_gather(mine)
    standing = next(each for each in range(size) if each not in joining_ranks)
    for other in range(size):
        if (other in joining_ranks) and other != rank:
            continue
        for loader, ours, theirs in zip(loaders, of_ranks[standing], of_ranks[other], strict=True):
            if loader.iterable is None or ours is None or theirs is None:
                continue
            if found := _difference_of_batches([HandedOut(*ours)], [HandedOut(*theirs)]):
                names = f"rank {standing}", "this worker" if other == rank else f"rank {other}"
                end = "The job continues without this worker" if other in joining_ranks else "The job ends"
                raise MembershipError(f"{_text(loader.iterable, found, *names)}. {end}")


def _difference_of_batches(mine: Sequence[HandedOut], theirs: Sequence[HandedOut]) -> str:
    """Describe how two workers' batches differ. Those that only one has seen are not compared."""
    known: Mapping[tuple[int, int], HandedOut] = {(each.epoch, each.batch): each for each in mine}
    for other in theirs:
        own = known.get((other.epoch, other.batch))
        if own is None:
            continue
        where = f"in batch {own.batch} of epoch {own.epoch}"
        if (own.num_rows, own.is_last) != (other.num_rows, other.is_last):
            return f"{where} %s has {_length(own)} and %s has {_length(other)}"
        if own.first is not None and other.first is not None and not are_same_row(own.first, other.first):
            return f"{where} the first row of %s is {Sketch(*own.first)} and that of %s is {Sketch(*other.first)}"
    return ""


def _length(seen: HandedOut) -> str:
    if not seen.num_rows:
        return "no row"
    return f"{seen.num_rows} rows" + (", the last ones of the epoch," if seen.is_last else "")


def _text(order: IterableOrder, found: str, one: str, other: str) -> str:
    return (
        f"{order.name} gives workers different rows: {found % (one, other)}. A live job splits each batch over the workers by "
        "itself, so every worker must read all rows in the same order. Let the dataset split nothing by rank, node or world "
        "size (leave out split_dataset_by_node of Hugging Face; nodesplitter=None, workersplitter=None for WebDataset), and "
        "shuffle by a fixed seed, such as .shuffle(1000, seed=1) of WebDataset, or by the random numbers of Python, numpy or "
        "torch, which are fixed for each epoch"
    )
