"""The view of a job that its records give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    DrainRecord,
    JobRecord,
    Keys,
    PlanRecord,
    RecordError,
    RoundRecord,
    WorkerRecord,
    decode,
)
from lightning_dlrover.rdzv.live.rounds import View

__all__ = ["Decoded", "read_view"]

R = TypeVar("R")


@dataclass
class Decoded:
    """Cache of decoded records: a record is decoded once per revision."""

    mod_revision: int
    record: Any


def read_view(
    entries: dict[str, KeyValue],
    keys: Keys,
    cache: dict[str, Decoded],
    bad: Callable[[str, RecordError], None],
) -> View:
    """Decode a snapshot of `keys.live` into a view.

    A record that cannot be read is reported to `bad`, and its last readable version stays in force. Garbage under the prefix
    therefore cannot stop a running job.
    """

    def load(key: str, record_type: type[R]) -> R | None:
        entry = entries.get(key)
        if entry is None:
            cache.pop(key, None)
            return None
        known = cache.get(key)
        if known is None or known.mod_revision != entry.mod_revision:
            try:
                known = Decoded(entry.mod_revision, decode(record_type, entry.value, key))
            except RecordError as error:
                known = Decoded(entry.mod_revision, known.record if known else None)
                bad(key, error)
            cache[key] = known
        record: R | None = known.record
        return record

    def folder(prefix: str, record_type: type[R]) -> dict[str, R]:
        found = sorted((e.create_revision, k) for k, e in entries.items() if k.startswith(prefix))
        loaded = {k.removeprefix(prefix): load(k, record_type) for _, k in found}
        return {name: record for name, record in loaded.items() if record is not None}

    workers = folder(keys.workers, WorkerRecord)
    drains = folder(keys.drains, DrainRecord)
    return View(
        job=load(keys.job, JobRecord),
        round=load(keys.round, RoundRecord),
        plan=load(keys.plan, PlanRecord),
        workers=workers,
        agents=folder(keys.agents, AgentRecord),
        drains=frozenset(worker for worker, record in drains.items() if not record.once_replaced),
        # A request by others outlasts the worker's lease. After its expiry the worker's place is free already.
        replacements=frozenset(w for w, record in drains.items() if record.once_replaced and w in workers),
    )
