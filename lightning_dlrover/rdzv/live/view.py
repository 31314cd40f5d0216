"""The view of a job that its records give: all of them, or those that every worker follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    AgentRecord,
    DrainRecord,
    JobRecord,
    Keys,
    Notice,
    PlanRecord,
    RecordError,
    RoundRecord,
    WorkerRecord,
    decode,
)
from lightning_dlrover.rdzv.live.rounds import JobView
from lightning_dlrover.rdzv.live.worker_view import WorkerView

__all__ = ["Decoder", "read_view"]

R = TypeVar("R")


class Decoder:
    """Decode the records of one job, each version once. For use by one thread.

    A record that cannot be read is reported to `bad`, and its last readable version stays in force. Garbage under the prefix
    therefore cannot stop a running job.
    """

    def __init__(self, keys: Keys, bad: Callable[[str, RecordError], None]) -> None:
        self._keys = keys
        self._bad = bad
        self._read: dict[str, tuple[int, Any]] = {}  # revision and last readable record of each key
        # The last view and the snapshot that gave it. A mirror's is the same object until a key changes, and is read-only.
        self._last_view: tuple[Mapping[str, KeyValue], JobView] | None = None

    def view(self, entries: Mapping[str, KeyValue]) -> JobView:
        """Decode a snapshot of `keys.live`."""
        if self._last_view is not None and self._last_view[0] is entries and isinstance(entries, MappingProxyType):
            return self._last_view[1]
        self._last_view = entries, self._decoded_view(entries)
        return self._last_view[1]

    def _decoded_view(self, entries: Mapping[str, KeyValue]) -> JobView:
        keys = self._keys
        workers = self._folder(entries, keys.workers, WorkerRecord)
        drains = self._folder(entries, keys.drains, DrainRecord)
        view = JobView(
            job=self._record(entries, keys.job, JobRecord),
            round=self._record(entries, keys.round, RoundRecord),
            plan=self._record(entries, keys.plan, PlanRecord),
            workers=workers,
            addresses=self._folder(entries, keys.addresses, AddressRecord),
            agents=self._folder(entries, keys.agents, AgentRecord),
            drains=frozenset(worker for worker, record in drains.items() if not record.once_replaced),
            dismissals={worker: record.failed_round for worker, record in drains.items() if record.failed_round},
            # A request by others outlasts the worker's lease. After its expiry the worker's place is free already.
            replacements=frozenset(w for w, record in drains.items() if record.once_replaced and w in workers),
        )
        return view.with_requests_to_nodes()

    def worker_view(self, entries: Mapping[str, KeyValue]) -> WorkerView:
        """Decode a snapshot of `keys.shared`."""
        keys = self._keys
        return WorkerView(
            job=self._record(entries, keys.job, JobRecord),
            round=self._record(entries, keys.round, RoundRecord),
            plan=self._record(entries, keys.plan, PlanRecord),
            notice=self._record(entries, keys.notice, Notice),
            term=entries[keys.coordinator].create_revision if keys.coordinator in entries else 0,
        )

    def _record(self, entries: Mapping[str, KeyValue], key: str, record_type: type[R]) -> R | None:
        entry = entries.get(key)
        if entry is None:
            self._read.pop(key, None)
            return None
        revision, record = self._read.get(key, (0, None))
        if revision != entry.mod_revision:
            try:
                record = decode(record_type, entry.value, key)
            except RecordError as error:
                self._bad(key, error)
            self._read[key] = (entry.mod_revision, record)
        found: R | None = record
        return found

    def _folder(self, entries: Mapping[str, KeyValue], prefix: str, record_type: type[R]) -> dict[str, R]:
        found = sorted((e.create_revision, k) for k, e in entries.items() if k.startswith(prefix))
        if len(self._read) > 2 * len(entries) + 16:  # records of workers that have left
            self._read = {k: read for k, read in self._read.items() if k in entries}
        loaded = {k.removeprefix(prefix): self._record(entries, k, record_type) for _, k in found}
        return {name: record for name, record in loaded.items() if record is not None}


def read_view(
    entries: Mapping[str, KeyValue], keys: Keys, bad: Callable[[str, RecordError], None] = lambda *_: None
) -> JobView:
    """Decode one snapshot of `keys.live`. Records that cannot be read are reported to `bad` and left out."""
    return Decoder(keys, bad).view(entries)
