"""Every change under a job's prefix, in etcd's order, and the invariants of that history."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped]

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, content_of
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, RoundRecord, decode


@dataclass(frozen=True)
class Change:
    """One key at one revision. All changes of a transaction share their revision."""

    revision: int
    key: str
    value: bytes | None  # None: the key was deleted


class History:
    """Follows a job from before its start, through every restart of etcd."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self.keys = Keys(run_id)
        self.changes: list[Change] = []
        self._client = EtcdClient(EtcdConfig(endpoint, timeout_s=30.0))
        self._grown = threading.Condition()
        self._next_revision = self._client.get_prefix(self.keys.root)[0] + 1
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="history", daemon=True)
        self._thread.start()

    def finish(self) -> list[Change]:
        """All changes until now."""
        end = f"{self.keys.root}end/{uuid.uuid4().hex}"
        self._client.put(end, b"")
        try:
            with self._grown:
                if not self._grown.wait_for(lambda: self.changes and self.changes[-1].key == end, 30.0):
                    raise AssertionError(f"the watch of {self.keys.root} does not come to an end")
                return [change for change in self.changes if not change.key.startswith(f"{self.keys.root}end/")]
        finally:
            self._client.delete(end)

    def close(self) -> None:
        self._closed.set()
        self._client.close()
        self._thread.join(10.0)

    def _follow(self) -> None:
        while not self._closed.wait(0.02):
            try:
                for response in self._client.caller.watch(self.keys.root, self._next_revision):
                    if response.compact_revision:
                        raise AssertionError(f"etcd has forgotten revisions before {response.compact_revision}")
                    if response.canceled:
                        break
                    self._add(response.events)
            except (grpc.RpcError, ValueError, EtcdError):
                connections = self._client.caller.connections
                connections.drop(connections.current())

    def _add(self, events: Iterable[object]) -> None:
        with self._grown:
            for event in events:
                kv = event.kv  # type: ignore[attr-defined]
                is_deletion = event.type == event.DELETE  # type: ignore[attr-defined]
                self.changes.append(Change(kv.mod_revision, kv.key.decode(), None if is_deletion else kv.value))
                self._next_revision = kv.mod_revision + 1
            self._grown.notify_all()


def history_violations(changes: Iterable[Change], keys: Keys) -> list[str]:
    """Violations at any moment.

    Two rounds with one number, a gap, a round without a coordinator, a duplicate member, or a round without the lines about
    itself and the workers lost before it.
    """
    changes = list(changes)
    bad = _unannounced(changes, keys)
    number, coordinator, known = 0, "", set[str]()
    for change in changes:
        name = f"revision {change.revision}"
        if change.key == keys.coordinator:
            if change.value is not None and coordinator:
                bad.append(f"{name}: {change.value.decode()} took the election key from {coordinator}")
            coordinator = change.value.decode() if change.value is not None else ""
        elif change.key.startswith(keys.workers) and change.value is not None:
            known.add(change.key.removeprefix(keys.workers))
        elif change.key == keys.round:
            if change.value is None:
                bad.append(f"{name}: the round was deleted")
                continue
            found = decode(RoundRecord, change.value, change.key)
            if found.number != number + 1:
                bad.append(f"{name}: round {found.number} follows round {number}")
            number = found.number
            if found.convener != coordinator:
                bad.append(f"{name}: round {number} was written by {found.convener}, coordinator was {coordinator or 'nobody'}")
            if len(set(found.members)) != len(found.members):
                bad.append(f"{name}: round {number} has a member twice: {found.members}")
            if strangers := set(found.members) - known:
                bad.append(f"{name}: round {number} has members that never registered: {sorted(strangers)}")
    return bad


def _unannounced(changes: Sequence[Change], keys: Keys) -> list[str]:
    """Describe the rounds that were not written together with the lines about them."""
    events: dict[int, list[RoundFormed | WorkerLost]] = {}
    for change in changes:
        if change.key.startswith(keys.events) and change.value is not None:
            content = content_of(decode(EventRecord, change.value, change.key))
            if isinstance(content, RoundFormed | WorkerLost):
                events.setdefault(change.revision, []).append(content)
    bad = []
    for change in changes:
        if change.key != keys.round or change.value is None:
            continue
        number, lines = decode(RoundRecord, change.value, change.key).number, events.get(change.revision, [])
        causes = [line.cause for line in lines if isinstance(line, RoundFormed) and line.number == number]
        if len(causes) != 1:
            bad.append(f"revision {change.revision}: round {number} was written with {len(causes)} lines about it")
            continue
        lost = sorted(line.worker_id for line in lines if isinstance(line, WorkerLost))
        if lost != sorted(causes[0]["lost"] + causes[0]["left_out"]):
            bad.append(
                f"revision {change.revision}: round {number} was written with lines about the losses of {lost}: {causes[0]}"
            )
    return bad
