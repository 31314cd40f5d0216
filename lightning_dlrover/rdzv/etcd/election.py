"""Elect the holder of a key: when to stand, how to take the key, and what shows that it is still held and fences its writes.

Workers and agents elect their coordinators, and `job/tenure.py` controllers, brains and places in a pool. The key is bound to
its holder's lease. Its create revision is the holder's term: it changes with every loss of the key, so a write that is fenced
on it and arrives late is refused.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import Compare, KeyValue, Put, absent, created

__all__ = ["Election", "candidacy_delay_s"]

PER_CANDIDATE_S = 0.0005
"""Seconds per candidate over which candidacies are spread after a holder's death: the first one spares the others theirs."""


def candidacy_delay_s(num_candidates: int) -> float:
    """Draw how long a candidate waits before it stands, so that not all do at once."""
    return random.SystemRandom().uniform(0.0, num_candidates * PER_CANDIDATE_S)


@dataclass(frozen=True)
class Election:
    """The election for one key."""

    key: str

    def candidacy(self, value: bytes, lease_id: int) -> tuple[Compare, Put]:
        """Return the transaction that takes the key if it is free: its condition and its write."""
        return absent(self.key), Put(self.key, value, lease_id)

    def claim(self, client: EtcdClient, value: bytes, lease_id: int) -> int:
        """Take the key if it is free. Return the term if that lease holds it now, else 0.

        Raises:
            EtcdError: etcd does not answer; the lease may or may not hold the key.
        """
        is_free, put = self.candidacy(value, lease_id)
        client.txn([is_free], [put])
        entry = client.get(self.key)  # the holder, even if the transaction's first answer was lost
        return entry.create_revision if entry is not None and entry.lease_id == lease_id else 0

    def fence(self, term: int) -> Compare:
        """Return the condition that holds for as long as this term lasts."""
        return created(self.key) == term

    def is_held(self, entry: KeyValue | None, term: int) -> bool:
        """Whether the key's entry shows that this term lasts."""
        return self.fence(term).holds(entry)
