"""Watch a pool during a test: the total number of its jobs' workers, at each change in etcd."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from lightning_dlrover.pool.view import num_alive
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, KeyValue
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, Keys


class PoolAudit:
    """Counts the workers of some jobs, and the seconds for which they were more than `budget`.

    Args:
        jobs: their names; other jobs of the same etcd do not count.
    """

    def __init__(self, endpoint: str, jobs: list[str], budget: int) -> None:
        self._client = EtcdClient(EtcdConfig(endpoint))
        self._keys = [Keys(job) for job in jobs]
        self._budget = budget
        self._lock = threading.Lock()
        self._exceeded_since: float | None = None
        self.worst_s = 0.0
        self.most = 0
        self.history: list[tuple[float, dict[str, int]]] = []
        self._mirror: Mirror | None = None

    def __enter__(self) -> PoolAudit:
        self._mirror = Mirror(self._client, DEFAULT_PREFIX + "/", self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._look()
        self._client.close()

    def counts(self) -> dict[str, int]:
        """Workers of each job now."""
        assert self._mirror is not None
        entries = self._mirror.snapshot()
        return {keys.run_id: _alive(entries, keys) for keys in self._keys}

    def _look(self) -> None:
        if self._mirror is None:
            return
        with self._lock:
            counts, now = self.counts(), time.monotonic()
            if not self.history or self.history[-1][1] != counts:
                self.history.append((now, counts))
            total = sum(counts.values())
            self.most = max(self.most, total)
            if self._exceeded_since is not None:
                self.worst_s = max(self.worst_s, now - self._exceeded_since)
            self._exceeded_since = (self._exceeded_since or now) if total > self._budget else None


def _alive(entries: Mapping[str, KeyValue], keys: Keys) -> int:
    return num_alive({key: entry for key, entry in entries.items() if key.startswith(keys.live)}, keys)
