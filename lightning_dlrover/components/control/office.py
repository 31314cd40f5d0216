"""Hold the right to act for one job: its `controller` key, which fences every write reserved for its holder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.operations import Delete, modified
from lightning_dlrover.rdzv.job.events import Event, record_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import ControllerRecord, Keys, NodeRecord, NodesRecord
from lightning_dlrover.rdzv.job.tenure import Tenure, holder_text

__all__ = ["ControllerBusyError", "Office"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


class Office(Tenure[ControllerRecord]):
    """The right to act for one job, held by a lease on the job's `controller` key.

    The key's create revision fences every write, so a controller with an expired lease cannot change anything.

    Raises:
        ControllerBusyError: another controller holds the key.
        EtcdError: the holder is unknown.
    """

    def __init__(self, client: EtcdClient, keys: Keys, record: ControllerRecord) -> None:
        self._keys = keys
        super().__init__(Journal(client, keys), keys.controller, lambda: record, self._is_taken, LEASE_TTL_S)

    def write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if this controller still acts and, with `revision`, if the record has not changed since.

        Raises:
            EtcdError: the record was not written, or its fate is unknown.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._journal.fenced_write({key: record}, [self.is_ours, *unchanged]):
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def delete(self, key: str) -> None:
        """Delete a key if this controller still acts and etcd answers."""
        with contextlib.suppress(EtcdError):  # the next controller repeats it
            self._client.txn([self.is_ours], [Delete(key)])

    def add_event(self, event: Event, text: str) -> bool:
        """Append to the job's history if this controller still acts."""
        return self._journal.append(record_of(event, text[:2000]), "controller", [self.is_ours])

    def publish_nodes(self, apps: Mapping[str, str], held_up: str) -> bool:
        """Update the controller's record. Return whether it has changed."""
        record = dataclasses.replace(self.record, apps=dict(apps), held_up=held_up[:2000])
        if record == self.record:
            return False
        try:
            self.publish(record)
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)
            return False
        return True

    def _is_taken(self, holder: ControllerRecord | None) -> ControllerBusyError:
        who = holder_text(holder, "another controller")
        return ControllerBusyError(
            f"job {self._keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
            f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
        )
