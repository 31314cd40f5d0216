"""Choose the workers that keep copies of each part of a snapshot, and send them the copies.

Each worker sends its part to as many others as there are replicas, on other hosts if there are any. A neighbour with the part
of the previous snapshot gets only the changes since then. A neighbour on the same host reads shared memory.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.live.member import RoundEndedError
from lightning_dlrover.tables.collectives import swap
from lightning_dlrover.tables.exchange import CHUNK_BYTES
from lightning_dlrover.tables.snapshot import (
    Part,
    PartHeader,
    PartWriter,
    SnapshotError,
    changes_of,
    put_changes,
    size_of_changes,
)
from lightning_dlrover.tables.snapshot_store import SnapshotStore

__all__ = ["MissingPartError", "Neighbours", "others"]

EVERYTHING, CHANGES, NOTHING = range(3)
"""Requests of a neighbour for a part."""

PAUSE_S = 0.004
"""Seconds between two messages to a neighbour: training has priority on the wire."""

Group = dist.ProcessGroup | dist.ProcessGroupGloo

Name = tuple[int, int]
"""Name of a snapshot: round and batch."""

GoingOn = Callable[[], AbstractContextManager[None]]
"""Context around every write of a thread to shared memory. Raises `RoundEndedError` once its round has ended."""


class MissingPartError(SnapshotError):
    """A worker could not take its part of a snapshot, so that nobody keeps a copy of it."""


def others(rank: int, hosts: Sequence[str], count: int) -> list[int]:
    """Return the ranks that keep copies of a worker's part.

    They are on as many other hosts as possible, then on its own host. Copies are spread evenly over workers: the first worker
    of a host has its copies with the first one of the next host, the second with the second, and so on.
    """
    size = len(hosts)
    ring = [(rank + step) % size for step in range(1, size)]
    place = sum(host == hosts[rank] for host in hosts[:rank])  # position among the workers of its host
    turns: dict[int, int] = {}  # times that a rank's host is passed over before its turn
    for host in set(hosts) - {hosts[rank]}:
        there = [r for r, each in enumerate(hosts) if each == host]
        turns |= {r: (i - place) % len(there) for i, r in enumerate(there)}
    first = {hosts[r]: i for i, r in reversed(list(enumerate(ring)))}
    return sorted(ring, key=lambda r: (hosts[r] == hosts[rank], turns.get(r, 0), first[hosts[r]], ring.index(r)))[:count]


class Neighbours:
    """The workers that exchange copies of their parts with this one in a round.

    Args:
        store: destination of the copies.
        group: process group of all members; None: nothing is exchanged.
        keepers: ranks that keep a copy of this worker's part.
        owners: ranks that this worker keeps copies of.
    """

    def __init__(self, store: SnapshotStore, group: Group | None, keepers: Sequence[int], owners: Sequence[int]) -> None:
        self.keepers = list(keepers)
        self.owners = list(owners)
        self._store = store
        self._group = group

    def disconnected(self) -> Neighbours:
        """Return the same neighbours without the connections to them."""
        return Neighbours(self._store, None, self.keepers, self.owners)

    def replicate(
        self,
        part: Part | None,
        changed: Sequence[torch.Tensor | None],
        base: Name | None,
        keep: Name | None,
        stopping: threading.Event,
        going_on: GoingOn,
    ) -> None:
        """Send a part to the neighbours while receiving theirs; all in step, so that no two wait for each other.

        Args:
            part: None if this worker could not take it: the others must not wait for it.
            changed: rows of each block that differ from the base; None: all.
            base: the snapshot that the neighbours may have already.
            keep: the newest snapshot that counts; its parts stay.
            stopping: set when the round has ended.
            going_on: entered while shared memory is written.

        Raises:
            RoundEndedError: the round has ended.
            MissingPartError: a worker that this one keeps copies of has none.
            SnapshotError: there is no memory for a copy.
            RuntimeError: the connection is lost, or a neighbour silent.
        """
        if self._group is None:
            return
        counts = [-1 if rows is None else len(rows) for rows in changed]
        header = part.header.encode().decode() if part is not None else None
        said = json.dumps({"header": header, "base": base, "counts": counts}).encode()
        incoming = self._introduce(torch.frombuffer(bytearray(said), dtype=torch.uint8), keep, going_on)
        answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self.keepers}
        wants = {rank: incoming[rank].wants if rank in incoming else NOTHING for rank in self.owners}
        swap(self._group, {rank: torch.tensor([want], dtype=torch.uint8) for rank, want in wants.items()}, answers)
        wanted = {rank: int(answer) for rank, answer in answers.items()}
        outgoing: dict[int, torch.Tensor | None] = {}
        if part is not None:
            changes = changes_of(part, changed) if CHANGES in wanted.values() else None
            outgoing = {rank: changes if want == CHANGES else part.values for rank, want in wanted.items() if want != NOTHING}
        by_wire = {rank: each.values for rank, each in incoming.items() if each.wants != NOTHING}
        sizes = [len(values) for values in (*outgoing.values(), *by_wire.values()) if values is not None]
        for start in range(0, max(sizes, default=0), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            mine = {rank: values[start:end] for rank, values in outgoing.items() if values is not None}
            swap(self._group, mine, {rank: values[start:end] for rank, values in by_wire.items()})
            if stopping.wait(PAUSE_S):
                raise RoundEndedError("the round ended")
        for each in incoming.values():
            each.copy_from_host(going_on)
        with going_on():
            for each in incoming.values():
                each.finish()
        if missing := sorted(set(self.owners) - incoming.keys()):
            raise MissingPartError(f"rank {missing[0]} could not take its part")

    def _introduce(self, said: torch.Tensor, keep: Name | None, going_on: GoingOn) -> dict[int, _Incoming]:
        """Announce this worker's part to the neighbours, and receive the announcements of others."""
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in self.owners}
        swap(self._group, dict.fromkeys(self.keepers, torch.tensor([len(said)])), lengths)
        texts = {rank: torch.empty(int(length.item()), dtype=torch.uint8) for rank, length in lengths.items()}
        swap(self._group, dict.fromkeys(self.keepers, said), texts)
        incoming = {}
        for rank, text in texts.items():
            try:
                found = json.loads(text.numpy().tobytes())
                if found["header"] is None:
                    continue
                header, base, counts = PartHeader.decode(found["header"].encode()), found["base"], found["counts"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SnapshotError(f"rank {rank} sent something else than a part of a snapshot: {error}") from error
            with going_on():
                incoming[rank] = _Incoming(self._store, keep, header, tuple(base) if base else None, counts)
        return incoming


class _Incoming:
    """A part of another worker on its way here: all of it, or its changes since a local one, by wire or shared memory.

    Attributes:
        wants: request to its owner: EVERYTHING, CHANGES, or NOTHING if this worker finds the part in their host's memory.
        values: buffer for data from the wire.
    """

    def __init__(
        self,
        store: SnapshotStore,
        keep: Name | None,
        header: PartHeader,
        base: Name | None,
        counts: Sequence[int],
    ) -> None:
        self._counts = counts
        self._writer: PartWriter | None = None
        self._problem: SnapshotError | None = None
        self.values = torch.empty(0, dtype=torch.uint8)
        try:
            self._writer = store.begin(header, keep)
        except SnapshotError as error:
            self._problem = error  # its owner is asked to send nothing, so that it does not wait
        self._original = store.part_of(header.owner, header.name)
        if self._writer is None or self._original is not None:
            self.wants = NOTHING
        elif base is not None and self._writer.base == base:
            self.wants = CHANGES
            self.values = torch.empty(size_of_changes(header, counts), dtype=torch.uint8)
        else:
            self.wants = EVERYTHING
            self.values = self._writer.values

    def copy_from_host(self, going_on: GoingOn) -> None:
        """Copy a part that is in this host's memory, if it is."""
        if self._writer is None or self._original is None:
            return
        there, here = self._writer.values, self._original.values
        for start in range(0, len(there), CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, len(there) - start)
            with going_on():
                # A tensor's own copy would wake the threads that train.
                ctypes.memmove(there.data_ptr() + start, here.data_ptr() + start, num_bytes)

    def finish(self) -> None:
        """Complete the part once all of it has arrived."""
        if self._problem is not None:
            raise self._problem
        assert self._writer is not None
        if self.wants == CHANGES:
            put_changes(self._writer, self._counts, self.values)
        self._writer.commit()
