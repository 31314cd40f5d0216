"""The GPUs of one machine that several runs of pools share: each run claims those that its nodes use, by name, in etcd.

The brain decides how many GPUs a job has. A run on this machine decides which ones, when it starts a node. Its claims are bound
to the lease of its place in the pool, so those of a killed run expire with it, and fenced on that place.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.operations import Delete, Put, absent
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.pool_records import GpuRecord, MemberRecord, PoolKeys
from lightning_dlrover.rdzv.job.records import encode
from lightning_dlrover.rdzv.job.tenure import Tenure

__all__ = ["GpuClaims"]

log = logging.getLogger(__name__)


class GpuClaims:
    """The claims of one run.

    Args:
        tenure: the run's place in its pool.
    """

    def __init__(self, client: EtcdClient, pool: PoolKeys, run_id: str, tenure: Tenure[MemberRecord]) -> None:
        self._client = client
        self._pool = pool
        self._tenure = tenure
        self._mine = GpuRecord(run_id, tenure.record.host, tenure.record.pid)
        self._claimed: dict[str, str] = {}  # keys by name

    def take(self, gpus: Sequence[str], number: int) -> list[str]:
        """Claim the first GPUs that no other run has. Return their names, fewer than `number` if too few are free.

        Raises:
            EtcdError: etcd does not answer.
        """
        taken: list[str] = []
        for gpu in gpus:
            if len(taken) < number and self._claim(gpu):
                taken.append(gpu)
        return taken

    def give_back(self, gpus: Collection[str]) -> None:
        """Let other runs have GPUs. Without etcd they stay claimed, and are the first ones to be taken again."""
        for gpu in gpus:
            try:
                self._client.txn([self._tenure.is_ours], [Delete(self._claimed[gpu])])
                del self._claimed[gpu]
            except EtcdError as error:
                log.info("GPU %s is given back later: %s", gpu, error)

    def take_back(self) -> None:
        """Claim everything again after the loss of the lease, as in an outage of etcd.

        Raises:
            EtcdError: etcd does not answer.
        """
        for gpu in list(self._claimed):
            if not self._claim(gpu, is_new_lease=True):
                log.warning("GPU %s, which this job uses, was given away in an outage of etcd: %s", gpu, self.holders([gpu]))

    def holders(self, gpus: Sequence[str]) -> str:
        """Name the jobs that have these GPUs, as `a has GPU-1, b has GPU-2`.

        Raises:
            EtcdError: etcd does not answer.
        """
        found = {gpu: readable(GpuRecord, self._client.get(self._key(gpu))) for gpu in gpus}
        return ", ".join(f"{record.run_id} has {gpu}" for gpu, record in found.items() if record is not None)

    @property
    def deletions(self) -> list[Delete]:
        """Operations that give all GPUs back."""
        return [Delete(key) for key in self._claimed.values()]

    def _claim(self, gpu: str, is_new_lease: bool = False) -> bool:
        if gpu in self._claimed and not is_new_lease:
            return True
        key = self._key(gpu)
        put = Put(key, encode(self._mine), self._tenure.lease.id)
        done = self._client.txn([self._tenure.is_ours, absent(key)], [put])
        # The record may be ours although the answer to a former attempt was lost.
        is_ours = done.succeeded or readable(GpuRecord, self._client.get(key)) == self._mine
        if is_ours:
            self._claimed[gpu] = key
        return is_ours

    def _key(self, gpu: str) -> str:
        # A number names a GPU of this host only. A UUID names the same one in all containers.
        return self._pool.gpu(f"{self._mine.host}:{gpu}" if re.fullmatch(r"\d+", gpu) else gpu)
