"""The records of a run, as one of its agents reads and ends them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousTimeoutError

from lightning_dlrover.rdzv.agents.coordinator import RecordReader
from lightning_dlrover.rdzv.agents.rounds import why_over
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdFullError
from lightning_dlrover.rdzv.etcd.operations import Delete, DeletePrefix, KeyValue, absent, none_under
from lightning_dlrover.rdzv.job.journal import ContentionError, Journal, readable, readable_folder
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    AgentNotice,
    AgentRecord,
    AgentRound,
    JobRecord,
    Keys,
    RecordError,
    WorkerRecord,
    worker_name_of,
)
from lightning_dlrover.rdzv.job.snapshot_folders import remove_snapshots
from lightning_dlrover.rdzv.live.coordinator import burial

__all__ = ["Known", "RunRecords"]

T = TypeVar("T")


@dataclass(frozen=True)
class Known:
    """An agent's view of all others: the same few records, whatever their number."""

    round: AgentRound | None
    notice: AgentNotice | None
    term: int  # term of the coordinator in office; 0: there is none

    @property
    def round_number(self) -> int:
        return self.round.number if self.round is not None else 0

    @property
    def members(self) -> list[str]:
        return self.round.agents if self.round is not None else []

    @property
    def counts(self) -> AgentNotice | None:
        """The notice if its counts hold, which is the case while its writer is in office."""
        return self.notice if self.notice is not None and self.notice.term == self.term else None

    @property
    def over(self) -> str:
        return why_over(self.round, None) or (self.counts.over if self.counts is not None else "")


class RunRecords:
    """Read the records of a run in etcd, close the run, and remove records that its agent need not leave behind."""

    def __init__(self, client: EtcdClient, keys: Keys, run_id: str, agent_id: str, reader: RecordReader) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._run_id = run_id
        self._agent_id = agent_id
        self._reader = reader

    def read(self, record_type: type[T], entry: KeyValue | None) -> T | None:
        """Return the record. Once this agent has joined, garbage is replaced by the last readable version, or None.

        Raises:
            RendezvousStateError: the record is garbage, and this agent is still joining.
        """
        try:
            return self._reader.read(record_type, entry)
        except RecordError as error:
            raise RendezvousStateError(f"run {self._run_id!r}: {error}") from error

    def known(self, entries: Mapping[str, KeyValue]) -> Known:
        """Return the view of an agent whose mirror holds these entries. Raises as `read` does."""
        coordinator = entries.get(self._keys.agent_coordinator)
        return Known(
            round=self.read(AgentRound, entries.get(self._keys.agent_round)),
            notice=self.read(AgentNotice, entries.get(self._keys.agent_notice)),
            term=coordinator.create_revision if coordinator is not None else 0,
        )

    def why_over(self) -> str:
        """Read from etcd the reason why no agent can join any more."""
        # Two reads, as a full etcd may refuse a transaction. Both records are final once they give a reason.
        round_, job = self._client.get(self._keys.agent_round), self._client.get(self._keys.job)
        return why_over(self.read(AgentRound, round_), self.read(JobRecord, job))

    def other_agents(self) -> list[AgentRecord]:
        """Return the records of all other agents."""
        _, entries = self._client.get_prefix(self._keys.agents)
        records = [self.read(AgentRecord, entry) for entry in entries]
        return [record for record in records if record is not None and record.agent_id != self._agent_id]

    def close(self, reason: str, timeout_s: float) -> None:
        """Let no further round form."""

        def closed(round_: AgentRound | None) -> AgentRound | None:
            round_ = round_ or AgentRound(0, [], "complete")
            if round_.state == "closed":
                return None
            return dataclasses.replace(round_, state="closed", written_by=self._agent_id, reason=reason, created_at=time.time())

        try:
            self._journal.swap(AgentRound, self._keys.agent_round, closed, read=self.read, timeout_s=timeout_s)
        except ContentionError as error:
            raise RendezvousTimeoutError(f"run {self._run_id!r} could not be closed in time: {error}") from error

    def remove_leftovers(self) -> None:
        """Remove what killed workers have left in this host's memory, if the job will never continue."""
        try:
            is_over = self._journal.is_over()
        except RecordError:
            return
        if is_over:
            remove_snapshots(self._keys)

    def delete_own_workers(self) -> None:
        """Remove the records of this agent's workers, which have ended: their leases would last a while."""
        here = worker_name_of(socket.gethostname())
        # First their addresses, which tell the others that a worker without a record may live.
        for worker_id, address in readable_folder(self._client, AddressRecord, self._keys.addresses, here).items():
            if address.agent_id == self._agent_id:
                self._client.delete(self._keys.addresses + worker_id)
        _, found = self._client.get_prefix(self._keys.workers + here)
        for kv in found:
            worker = readable(WorkerRecord, kv)
            if worker is not None and worker.agent_id == self._agent_id:
                self._client.delete(kv.key)  # no transaction: a full etcd takes none, but it deletes
                with contextlib.suppress(EtcdFullError):
                    for write in burial(kv, self._client.get(self._keys.coordinator), self._keys)[1:]:
                        self._client.txn(write.compare, write.ops)

    def tidy_up(self, is_live: bool) -> None:
        """Remove the records that only agents need, if this was the last agent.

        Runs in the last agent, and possibly in several that leave at once. If all were killed before, the records expire.
        """
        keys = self._keys
        is_last = none_under(keys.agents)  # an agent may register at any time, and keeps what it then writes
        if self._client.txn([is_last], [DeletePrefix(keys.store), DeletePrefix(keys.agents_left)]).succeeded:
            self._client.txn([is_last, absent(keys.agent_coordinator)], [Delete(keys.agent_notice)])
            if is_live and self.why_over():
                self._client.txn([is_last], [Delete(keys.agent_round)])
