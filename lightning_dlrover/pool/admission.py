"""A job's place in a pool: its `dlrover run` requests it, waits for it, keeps it and releases it."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lightning_dlrover.output import time_text
from lightning_dlrover.pool.view import BrainRecord, GpuRecord, GrantRecord, MemberRecord, PoolKeys, num_alive
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import Delete, EtcdError, Put, absent, modified
from lightning_dlrover.rdzv.job.journal import Journal, Tenure, holder_text, readable
from lightning_dlrover.rdzv.job.records import Keys, NodesRecord, PlanRecord, encode

log = logging.getLogger(__name__)

R = TypeVar("R")


class GpuClaims:
    """The GPUs of its machine that one run of a pool has claimed for its nodes, by name, in etcd.

    The brain decides how many GPUs a job has. The run decides which ones, when it starts a node. Its claims are bound to the
    lease of its place in the pool (`tenure`), so those of a killed run expire with it, and fenced on that place.
    """

    def __init__(self, client: EtcdClient, pool: PoolKeys, run_id: str, tenure: Tenure[MemberRecord]) -> None:
        self._client = client
        self._pool = pool
        self._tenure = tenure
        self._mine = GpuRecord(run_id, tenure.record.host, tenure.record.pid)
        self._claimed: dict[str, str] = {}  # keys by name

    def take(self, gpus: Sequence[str], number: int) -> list[str]:
        """Claim the first GPUs that no other run has. Return their names, fewer than `number` if too few are free."""
        taken: list[str] = []
        for gpu in gpus:
            if len(taken) < number and self._claim(gpu):
                taken.append(gpu)
        return taken

    def give_back(self, gpus: Collection[str]) -> None:
        """Release GPUs to other runs. Without etcd they stay claimed, and are the first ones to be taken again."""
        for gpu in gpus:
            try:
                self._client.txn([self._tenure.is_ours], [Delete(self._claimed[gpu])])
                del self._claimed[gpu]
            except EtcdError as error:
                log.info("GPU %s is released later: %s", gpu, error)

    def take_back(self) -> None:
        """Claim everything again after the loss of the lease, such as in an outage of etcd."""
        for gpu in list(self._claimed):
            if not self._claim(gpu, is_new_lease=True):
                log.warning("GPU %s, which this job uses, was given away in an outage of etcd: %s", gpu, self.holders([gpu]))

    def holders(self, gpus: Sequence[str]) -> str:
        """Name the jobs that have these GPUs, as `a has GPU-1, b has GPU-2`."""
        found = {gpu: readable(GpuRecord, self._client.get(self._key(gpu))) for gpu in gpus}
        return ", ".join(f"{record.run_id} has {gpu}" for gpu, record in found.items() if record is not None)

    @property
    def deletions(self) -> list[Delete]:
        """Operations that release all GPUs."""
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


MEMBER_TTL_S = 10.0
"""Seconds after which a killed `dlrover run` loses its place in the queue, unless `--lease-ttl` sets another time."""

MEMBER_LEASES = 2.0
"""The same in leases of a node or worker. A run may stand still while its nodes train."""

REPORT_EVERY_S = 60.0
"""Seconds between two lines about a wait if only its estimate changes."""

LOOK_S = 1.0
"""Seconds between two checks that a brain decides on the pool, while nothing else happens."""


class TicketError(RuntimeError):
    """The job cannot have a place in its pool."""


class PoolTicket:
    """A place in a pool, or in its queue. Use as a context manager: leaving it releases the place.

    Args:
        ask: the job as it was started.
        say: called with a readable line whenever the wait changes.
        ttl_s: seconds after which the place counts as lost if this process is killed.

    Raises:
        TicketError: another process has, or waits for, a place under this name.
        EtcdError: etcd does not answer.
    """

    def __init__(
        self,
        client: EtcdClient,
        pool: PoolKeys,
        keys: Keys,
        ask: MemberRecord,
        say: Callable[[str], None] = lambda _: None,
        ttl_s: float = MEMBER_TTL_S,
    ) -> None:
        self._client = client
        self._pool = pool
        self._keys = keys
        self._ask = ask
        self._say = say
        self._ttl_s = ttl_s
        self._journal = Journal(client, keys)
        self._grant_key = pool.grants + keys.run_id
        self._tenure = Tenure(self._journal, pool.members + keys.run_id, lambda: ask, self._taken, ttl_s)
        self._lost_gpus = False
        self.gpus = GpuClaims(client, pool, keys.run_id, self._tenure)

    def __enter__(self) -> PoolTicket:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def wait(self, timeout_s: float) -> int:
        """Wait for a place, and write the job's first plan. Return the number of workers to start with.

        Raises:
            TicketError: the pool can never have room for the job, or had none within `timeout_s`, or the job was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        reported: tuple[object, ...] = ()
        reported_at = -REPORT_EVERY_S
        with Mirror(self._client, self._grant_key) as mirror:
            while True:
                self.keep()
                revision = mirror.revision
                grant = readable(GrantRecord, mirror.get(self._grant_key))
                if grant is not None and grant.state == "refused":
                    raise TicketError(f"job {self._keys.run_id!r} cannot run in pool {self._pool.pool!r}: {grant.reason}")
                if grant is not None and grant.state == "granted" and self._begin(mirror, grant):
                    return grant.num_workers
                if stop := self._stop():
                    # A later job of this name is another one.
                    self._client.txn([self._tenure.is_ours], [Delete(self._keys.nodes)])
                    raise TicketError(f"job {self._keys.run_id!r} has not begun: {stop}")
                brain = self._read(BrainRecord, self._pool.brain)
                text, state = self._describe(grant, brain), _state_of_wait(grant, brain)
                if state != reported or time.monotonic() - reported_at >= REPORT_EVERY_S:
                    self._say(text)
                    reported, reported_at = state, time.monotonic()
                if time.monotonic() >= deadline:
                    raise TicketError(
                        f"job {self._keys.run_id!r} waited {time_text(timeout_s)} for a place in pool {self._pool.pool!r} and "
                        f"got none: {text}; --place-timeout sets how long it waits"
                    )
                with contextlib.suppress(TimeoutError):
                    left_s = min(LOOK_S, max(0.0, deadline - time.monotonic()))
                    mirror.wait_for(lambda _, seen=revision: True if mirror.revision != seen else None, left_s)  # type: ignore[misc]

    def keep(self) -> None:
        """Take the place again if its lease was lost, such as in an outage of etcd. Call regularly."""
        try:
            if self._tenure.take_back():
                self._lost_gpus = True
            if self._lost_gpus:
                self.gpus.take_back()
                self._lost_gpus = False
        except EtcdError:
            pass  # the next call repeats it
        except TicketError as error:
            # An earlier attempt with a lost answer may hold it until its lease expires. Training must continue.
            log.info("run %s: its place in pool %s is taken again later: %s", self._keys.run_id, self._pool.pool, error)

    def leave(self) -> None:
        """Release the place: at once if no process of the job is left, else as soon as that is so."""
        try:
            if not num_alive(self._client.entries(self._keys.live), self._keys):
                # Both at once: a job without a grant and with a member record waits for a place.
                member = self._pool.members + self._keys.run_id
                self._client.txn([self._tenure.is_ours], [Delete(self._grant_key), Delete(member), *self.gpus.deletions])
        except EtcdError as error:
            log.info("run %s: its place in pool %s is released later: %s", self._keys.run_id, self._pool.pool, error)
        self._tenure.give_up()

    def _begin(self, mirror: Mirror, grant: GrantRecord) -> bool:
        """Write the first plan, if the grant is still the brain's newest. Return whether the job has a plan."""
        entry = mirror.get(self._grant_key)
        revision = entry.mod_revision if entry is not None else 0
        reason = f"pool {self._pool.pool}: {grant.reason}"
        plan = PlanRecord(grant.num_workers, "brain", reason, binding=True, created_at=time.time())
        fence = [absent(self._keys.plan), modified(self._grant_key) == revision, self._tenure.is_ours]
        try:
            done = self._journal.fenced_write({self._keys.plan: plan}, fence)
            return done or self._client.get(self._keys.plan) is not None  # a job that continues has a plan already
        except EtcdError:
            return False

    def _stop(self) -> str:
        """Return why the job must end before it has begun, or an empty string."""
        nodes = self._read(NodesRecord, self._keys.nodes)
        return nodes.stop if nodes is not None else ""

    def _read(self, kind: type[R], key: str) -> R | None:
        with contextlib.suppress(EtcdError):
            return self._journal.get(kind, key, readable).record
        return None

    def _describe(self, grant: GrantRecord | None, brain: BrainRecord | None) -> str:
        wait = f"job {self._keys.run_id} waits for a place in pool {self._pool.pool}"
        if brain is None:
            start = f"start `dlrover pool run --pool {self._pool.pool} --budget ...` with the same etcd"
            return f"{wait}, and no process decides on that pool: {start}"
        if grant is None or grant.state != "waiting":
            return f"{wait}, on which process {brain.pid} on {brain.host} decides"
        return f"{wait}: {wait_text(grant, time.time())}"

    def _taken(self, holder: MemberRecord | None) -> TicketError:
        return TicketError(
            f"job {self._keys.run_id!r} has, or waits for, a place in pool {self._pool.pool!r} already, by "
            f"{holder_text(holder)}; choose another --rdzv-id (if that process was killed a moment ago: try again in "
            f"{self._ttl_s:.0f} s)"
        )


def _state_of_wait(grant: GrantRecord | None, brain: BrainRecord | None) -> tuple[object, ...]:
    """Return the state of a wait without its times, which change with every look."""
    who = (brain.host, brain.pid) if brain is not None else None
    if grant is None or brain is None or grant.state != "waiting":
        return (who,)
    return who, grant.place, grant.queued, re.sub(r"\d+", "", grant.reason)


def member_key(client: EtcdClient, keys: Keys) -> str | None:
    """Return the key of a job's place in a pool or its queue; None if it has none."""
    for entry in client.get_prefix(PoolKeys("any", keys.prefix).pools)[1]:
        pool, kind, run_id = entry.key.rsplit("/", 3)[1:]
        if (kind, run_id) == ("members", keys.run_id):
            return PoolKeys(pool, keys.prefix).members + run_id
    return None


def wait_text(grant: GrantRecord, now: float) -> str:
    """Describe the wait of a job in words: `number 2 of 3 in the queue, expected to start in about 5 min: ...`."""
    expected = "its start cannot be predicted"
    if grant.expected_at:
        expected = f"expected to start in about {time_text(max(0.0, grant.expected_at - now))}"
    return f"number {grant.place} of {grant.queued} in the queue, {expected}: {grant.reason}"
