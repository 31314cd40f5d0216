"""Keep the workers of a fit that reads an `IterableDataset` together: the same rows, the same end, and words for the guarantee.

Each worker reads the dataset by itself. One that splits itself by rank, draws numbers that no seed fixes, or depends on the
clock would give each worker rows of its own. So workers compare the lengths of global batches and the first rows of most: those
of the next batch before a fit begins and when a worker joins, those of all others with the votes between steps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.data_fingerprint import are_same_row, described_row
from lightning_dlrover.live.sequence_order import HandedOut, SequenceOrder, SequenceSettings
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.job.events import SequenceOpened
from lightning_dlrover.rdzv.live.member import MembershipError
from lightning_dlrover.report.streams import described_sequence

if TYPE_CHECKING:
    from lightning_dlrover.live.loader import ElasticLoader
    from lightning_dlrover.live.ports import Round

__all__ = ["compare_next_batches", "digest", "opened_sequences", "refuse_different_rows", "settings_for"]

log = logging.getLogger(__name__)


def settings_for(
    trainer: Any, training: bool, global_batch_size: int, max_catch_up_s: float, compare_data: bool
) -> SequenceSettings:
    """Return how a loader of a Trainer reads its `IterableDataset`."""
    limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
    settings = SequenceSettings(
        max_catch_up_s=max_catch_up_s,
        max_rows=limit * global_batch_size if isinstance(limit, int) and not isinstance(limit, bool) else None,
        describe=described_row,
        are_alike=are_same_row,
        compares_rows=compare_data,
    )
    if not training:
        return settings
    return replace(
        settings,
        max_rows=None,
        before_iter=partial(lightning_names.fetch_nothing_ahead, trainer.fit_loop),
        at_end=partial(lightning_names.end_with_next_fetch, trainer.fit_loop),
    )


def sequences_of(loaders: Sequence[ElasticLoader]) -> list[SequenceOrder]:
    return [loader.sequence for loader in loaders if loader.sequence is not None]


# --- on record -------------------------------------------------------------------------------------------------------------


def opened_sequences(loaders: Sequence[ElasticLoader], fit: int) -> list[tuple[SequenceOpened, str]]:
    """Return the records of the training loaders that read an `IterableDataset`, and log what is guaranteed.

    Args:
        fit: number of the script's `fit`.
    """
    found = []
    for number, loader in enumerate(loaders):
        if (order := loader.sequence) is None:
            continue
        opened = SequenceOpened(fit, number, order.name, order.is_stateful, order.settings.max_catch_up_s)
        text = f"reads {described_sequence(opened)}"
        log.info("%s", text)
        found.append((opened, text))
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
    seen = [order.begin_vote() for order in sequences_of(loaders)]
    return int.from_bytes(hashlib.sha256(repr(seen).encode()).digest()[:7], "big") if any(seen) else 0


def refuse_different_rows(loaders: Sequence[ElasticLoader]) -> None:
    """Compare what went into the newest digests. All workers call it together.

    Raises:
        MembershipError: two workers have seen different rows, on all workers.
    """
    orders = sequences_of(loaders)
    if not orders:
        return
    of_ranks = transfer.all_gather([[tuple(each) for each in order.in_vote] for order in orders])
    for rank, theirs in enumerate(of_ranks):
        for order, mine, other in zip(orders, of_ranks[0], theirs, strict=True):
            if found := _difference_of_batches([HandedOut(*each) for each in mine], [HandedOut(*each) for each in other]):
                raise MembershipError(f"{_text(order, found, 'rank 0', f'rank {rank}')}. The job ends")


def compare_next_batches(loaders: Sequence[ElasticLoader], round_: Round, joining_ranks: Sequence[int]) -> None:
    """Fetch the next batch, and compare it with what other workers have in it. All workers of a round call it together.

    Args:
        joining_ranks: workers to refuse if they differ, while others train on.

    Raises:
        MembershipError: this worker joins with other rows, or the workers that have the state differ.
        DataError: this worker joins, and would need too long to read up to the others.
    """
    orders, size, rank = sequences_of(loaders), round_.size, round_.rank
    if not orders or size == 1:
        return
    for order in orders:
        order.is_catching_up = rank in joining_ranks
        order.forget_handed_out()
    mine = [tuple(each) if (each := loader.peek()) is not None else None for loader in loaders]
    of_ranks = round_.gathered(mine)
    standing = next(each for each in range(size) if each not in joining_ranks)
    for other in range(size):
        if (other in joining_ranks) and other != rank:
            continue
        for loader, ours, theirs in zip(loaders, of_ranks[standing], of_ranks[other], strict=True):
            if loader.sequence is None or ours is None or theirs is None:
                continue
            if found := _difference_of_batches([HandedOut(*ours)], [HandedOut(*theirs)]):
                names = f"rank {standing}", "this worker" if other == rank else f"rank {other}"
                end = "The job goes on without this worker" if other in joining_ranks else "The job ends"
                raise MembershipError(f"{_text(loader.sequence, found, *names)}. {end}")


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
            return f"{where} the first row of %s is {_brief_row(own.first)} and that of %s is {_brief_row(other.first)}"
    return ""


def _length(seen: HandedOut) -> str:
    if not seen.num_rows:
        return "no row"
    return f"{seen.num_rows} rows" + (", the last ones of the epoch," if seen.is_last else "")


def _brief_row(first: Any) -> str:
    kind, arrays = first
    return f"{kind} {[x for array in arrays for x in array[1:] or array][:4]}"


def _text(order: SequenceOrder, found: str, one: str, other: str) -> str:
    return (
        f"{order.name} gives workers different rows: {found % (one, other)}. A live job splits each batch over the workers by "
        "itself, so every worker must read all rows in the same order. Let the dataset split nothing by rank, node or world "
        "size (leave out split_dataset_by_node of Hugging Face; nodesplitter=None, workersplitter=None for WebDataset), and "
        "shuffle by a fixed seed, such as .shuffle(1000, seed=1) of WebDataset, or by the random numbers of Python, numpy or "
        "torch, which are fixed for each epoch"
    )
