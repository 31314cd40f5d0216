"""A live copy of the keys under a prefix, kept current by one watch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from lightning_dlrover.rdzv.etcd.client import CLOSE_DEADLINE_S, EtcdClient
from lightning_dlrover.rdzv.etcd.connection import RETRY_PAUSE_S, WatchStream, grpc, key_value
from lightning_dlrover.rdzv.etcd.types import EtcdError, KeyValue

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SUSPECT_S = 1.0  # seconds that a watch may be late when etcd notifies many clients of one change


class Selection(Protocol):
    """The keys under a prefix that a mirror copies, where it does not copy all of them."""

    def wants(self, key: str) -> bool: ...

    def read(self, client: EtcdClient) -> tuple[int, list[KeyValue]]:
        """Return the present entries that it wants, and a revision: the copy repeats all changes after it.

        Raises:
            EtcdError: etcd does not answer.
        """
        ...


class Mirror:
    """A live copy of all keys under a prefix, kept by a watch.

    The copy is consistent: it shows etcd at `revision`. A watch that ends, was compacted or died silently is replaced. Every
    `check_interval_s` a small read without values compares the copy's size and newest revision. The read is skipped if another
    response, such as that to a lease refresh, shows that etcd has had no write since.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        on_change: Callable[[], None] | None = None,
        check_interval_s: float = 2.0,
        selection: Selection | None = None,
    ) -> None:
        """Load the prefix. Raises the errors of `EtcdClient.get_prefix`.

        Args:
            on_change: called from the mirror's own thread after each update of the copy; must return quickly.
            selection: keys to copy. The mirror then collects changes for `take_changes`. Its check notices a write that the
                watch has missed, but no deletion; None: all keys.
        """
        self.prefix = prefix
        self._client = client
        self._on_change = on_change
        self._check_interval_s = check_interval_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._healthy = True
        self._stream: WatchStream | None = None
        self._selection = selection
        self._revision, found = self._read()
        self._newest = self._revision  # newest change that the watch has shown, whether or not the copy has its key
        self._keys = {kv.key: kv for kv in found}
        # Changes that were not taken yet, by key; None: deleted.
        self._changes: dict[str, KeyValue | None] = dict(self._keys) if selection is not None else {}
        self._snapshot: MappingProxyType[str, KeyValue] | None = None  # result of `snapshot`; None: changed since
        client.adopt(self)
        name = f"etcd-mirror-{prefix.rstrip('/').rsplit('/', 1)[-1]}"
        self._threads = [
            threading.Thread(target=self._follow, name=name, daemon=True),
            threading.Thread(target=self._check_regularly, name=f"{name}-check", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """False while etcd cannot be reached, so that the copy may be out of date."""
        return self._healthy

    @property
    def revision(self) -> int:
        with self._changed:
            return self._revision

    def snapshot(self) -> MappingProxyType[str, KeyValue]:
        """Return the present copy: the same object until a key changes, so that its readers decode it once."""
        with self._changed:
            if self._snapshot is None:
                self._snapshot = MappingProxyType(dict(self._keys))
            return self._snapshot

    def get(self, key: str) -> KeyValue | None:
        with self._changed:
            return self._keys.get(key)

    def take_changes(self) -> dict[str, KeyValue | None]:
        """Return the entries that have changed since the last call, by key; None for a deleted one. Needs a selection."""
        with self._changed:
            changes, self._changes = self._changes, {}
        return changes

    def wait_for(self, predicate: Callable[[dict[str, KeyValue]], T | None], timeout_s: float) -> T:
        """Return the first result of `predicate` that is not None. It is called for the present copy and after each change.

        Raises:
            TimeoutError: there was no result within `timeout_s`.
            EtcdError: the mirror was closed before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                seen, keys = self._revision, dict(self._keys)
            result = predicate(keys)
            if result is not None:
                return result
            with self._changed:
                while self._revision == seen and not self._closed.is_set():
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        state = "" if self._healthy else f"; etcd at {self._client.config.endpoints} cannot be reached"
                        raise TimeoutError(f"waited {timeout_s:g} s for a change under {self.prefix!r} and saw none{state}")
                    self._changed.wait(remaining_s)
                if self._closed.is_set():
                    raise EtcdError(f"the mirror of {self.prefix!r} was closed while a caller waited for a change")

    def catch_up(self, timeout_s: float) -> None:
        """Wait until the copy shows every write that etcd has accepted before this call.

        Raises:
            TimeoutError: it does not within `timeout_s`.
            EtcdError: etcd does not answer, or the mirror was closed before it did.
        """
        revision, *found = self._client.newest_in(self.prefix, timeout_s)
        truth = tuple(found)
        self.wait_for(lambda keys: True if self.revision >= revision or _extent(keys) == truth else None, timeout_s)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """End and join the threads; `on_change` is not called afterwards."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._cancel_watch()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self) -> None:
        """Apply the watch's events. Only this thread changes the copy."""
        while not self._closed.is_set():
            try:
                stream = self._client.caller.watch(self.prefix, self._revision + 1)
                with self._changed:
                    self._stream = stream
                    # The mirror was closed in between, and no other thread would cancel this stream.
                    if self._closed.is_set():
                        stream.cancel()
                for response in stream:
                    if response.canceled or response.compact_revision:
                        logger.debug("watch of %r ended: %s", self.prefix, response.cancel_reason or "compacted")
                        break
                    self._healthy = True
                    if response.events:
                        self._apply(response.events)
                stream.cancel()
            except (grpc.RpcError, ValueError, EtcdError) as error:
                logger.debug("watch of %r ended: %r", self.prefix, error)
            except Exception:  # without this thread a stale copy would go undetected
                logger.exception("watch of %r ended; restarting it", self.prefix)
            if not self._closed.is_set():
                self._reload()

    def _read(self) -> tuple[int, list[KeyValue]]:
        return self._selection.read(self._client) if self._selection is not None else self._client.get_prefix(self.prefix)

    def _reload(self) -> None:
        """Read the prefix again, retrying until etcd responds."""
        reported = False
        while not self._closed.is_set():
            try:
                revision, found = self._read()
            except EtcdError as error:
                self._healthy = False
                if not reported:
                    logger.warning("the copy of %r may be out of date until etcd answers: %s", self.prefix, error)
                    reported = True
                self._closed.wait(0.2)
                continue
            self._healthy = True
            self._replace(revision, {kv.key: kv for kv in found})
            # A watch that is refused at once (permissions, a compaction loop) must not spin.
            self._closed.wait(RETRY_PAUSE_S)
            return

    def _apply(self, events: Sequence[Any]) -> None:
        """Apply events at a cost proportional to their number, whatever the size of the prefix."""
        changed = False
        with self._changed:
            seen = self._revision
            for event in events:
                if event.kv.mod_revision <= seen:
                    continue
                self._revision = self._newest = max(self._revision, event.kv.mod_revision)
                kv = key_value(event.kv)
                if self._selection is not None and not self._selection.wants(kv.key):
                    continue
                if event.type != event.DELETE:
                    changed = True
                    self._keys[kv.key] = kv
                elif self._keys.pop(kv.key, None) is not None:
                    changed = True
                else:
                    continue
                if self._selection is not None:
                    self._changes[kv.key] = self._keys.get(kv.key)
            if changed:
                self._snapshot = None
            self._changed.notify_all()
        self._report(changed)

    def _replace(self, revision: int, keys: dict[str, KeyValue]) -> None:
        with self._changed:
            changed = keys != self._keys
            if self._selection is not None:
                self._changes |= {key: kv for key, kv in keys.items() if self._keys.get(key) != kv}
                self._changes |= dict.fromkeys(self._keys.keys() - keys.keys())
            # An etcd restored from an older backup is behind us. Its state counts all the same.
            self._revision, self._keys, self._snapshot = revision, keys, None
            self._newest = revision
            self._changed.notify_all()
        self._report(changed)

    def _report(self, changed: bool) -> None:
        if changed and self._on_change is not None and not self._closed.is_set():
            try:
                self._on_change()
            except Exception:  # a listener's bug must not end the mirror for its other users
                logger.exception("on_change of the mirror of %r failed", self.prefix)

    def _check_regularly(self) -> None:
        suspect: tuple[int, int] | None = None
        checked_revision, checked_at = 0, 0.0
        while not self._closed.wait(self._check_interval_s if suspect is None else _SUSPECT_S):
            if suspect is None and self._client.caller.has_stood_still(checked_revision, checked_at):
                checked_at = time.monotonic()
                continue
            checked_at = time.monotonic()
            try:
                checked_revision, *found = self._client.newest_in(self.prefix, self._check_interval_s)
            except EtcdError:
                # The watch of a dead connection ends with it.
                self._healthy = False
                continue
            self._healthy = True
            copy, truth = self._extent(), tuple(found)
            if truth == copy or (self._selection is not None and truth[1] <= copy[1]):
                suspect = None
            elif suspect == copy:
                # The copy has not changed although etcd differs: the watch is dead.
                logger.warning("the watch of %r missed a change; reading again", self.prefix)
                suspect = None
                self._cancel_watch()
            else:
                suspect = copy

    def _extent(self) -> tuple[int, int]:
        """Return the number of keys and the newest revision that etcd should have if the watch has missed nothing."""
        if self._selection is None:
            return _extent(self.snapshot())
        with self._changed:
            return 0, self._newest

    def _cancel_watch(self) -> None:
        with self._changed:
            stream = self._stream
        if stream is not None:
            stream.cancel()


def _extent(keys: Mapping[str, KeyValue]) -> tuple[int, int]:
    """Return the number of keys and their newest `mod_revision`."""
    return len(keys), max((kv.mod_revision for kv in keys.values()), default=0)
