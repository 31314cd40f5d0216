"""The TorchElastic rendezvous backend `etcd-v3`: what `torchrun --rdzv-backend=etcd-v3` talks to.

Scripts that know nothing of us get TorchElastic's contract: a change of membership restarts all workers. Once
workers that can be re-formed in process have registered (`JobRecord.live`), joins and leaves are theirs:
agents start and end workers, and never restart those of others. Which agents form a round is decided in
`agent_rounds.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from lightning_dlrover.rdzv.agent_rounds import (
    AgentView,
    Limits,
    SeenAgent,
    candidates,
    members_of_next_round,
    num_waiting,
    participants,
)
from lightning_dlrover.rdzv.agent_store import LiveAgentStore, RoundStore
from lightning_dlrover.rdzv.client import (
    Delete,
    EtcdClient,
    EtcdConfig,
    EtcdError,
    EtcdUnavailableError,
    KeyValue,
    Lease,
    LeaseLostError,
    Mirror,
    Put,
    modified,
    parse_endpoints,
)
from lightning_dlrover.rdzv.records import (
    DEFAULT_PREFIX,
    HISTORY_TTL_S,
    AgentRecord,
    AgentRound,
    JobRecord,
    Keys,
    RecordError,
    WorkerRecord,
    decode,
    encode,
)

__all__ = ["BACKEND", "EtcdRendezvousHandler", "HandlerConfig", "create_backend"]

BACKEND = "etcd-v3"

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.5  # the mirror wakes us; this only bounds what a missed wake-up costs


def create_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The creator that torch looks for under the entry point group `torchrun.handlers`."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    return EtcdRendezvousHandler(HandlerConfig.from_parameters(params))


@dataclass(frozen=True)
class HandlerConfig:
    """Everything the handler was told: --rdzv-endpoint, --rdzv-id, --nnodes and --rdzv-conf."""

    etcd: EtcdConfig
    run_id: str
    limits: Limits
    key_prefix: str = DEFAULT_PREFIX
    local_address: str | None = None
    join_timeout_s: float = 600.0
    last_call_timeout_s: float = 3.0  # how long a round with enough nodes waits for more
    close_timeout_s: float = 30.0
    lease_ttl_s: float = 5.0  # an agent that was not heard from for so long is dead
    live: bool = False  # the script is known to re-form in process: never wait for more nodes, never restart
    num_workers: int = 1  # of this node, until the agent tells
    history_ttl_s: float = HISTORY_TTL_S  # the run's records outlast its last agent and worker by so long

    @staticmethod
    def from_parameters(params: RendezvousParameters) -> HandlerConfig:
        """Read `--rdzv-conf`.

        Raises:
            ValueError: an unknown key or a malformed value, named.
        """
        conf = dict(params.config)
        # LaunchConfig adds these for other backends; they say nothing to this one.
        for foreign in ("timeout", "rank"):
            conf.pop(foreign, None)

        def take(key: str, parse: Callable[[str], T], default: T) -> T:
            if key not in conf:
                return default
            text = str(conf.pop(key))
            try:
                return parse(text)
            except (ValueError, OSError) as error:
                raise ValueError(f"--rdzv-conf {key}={text!r} cannot be used: {error}") from error

        etcd_timeout_s = take("etcd_timeout", _seconds, 5.0)
        user = take("user", str, None)
        files = {key: take(key, _readable_file, None) for key in ("password_file", "ca_cert", "cert", "cert_key")}
        config = HandlerConfig(
            etcd=EtcdConfig(params.endpoint, user, timeout_s=etcd_timeout_s, **files),
            run_id=params.run_id,
            limits=Limits(params.min_nodes, params.max_nodes),
            key_prefix=take("key_prefix", _key_prefix, DEFAULT_PREFIX),
            local_address=params.local_addr,
            join_timeout_s=take("join_timeout", _seconds, 600.0),
            last_call_timeout_s=take("last_call_timeout", _seconds_or_zero, 3.0),
            close_timeout_s=take("close_timeout", _seconds, 30.0),
            lease_ttl_s=take("lease_ttl", _seconds, 5.0),
            live=take("live", _flag, False),
            history_ttl_s=take("history_ttl", _lifetime, HISTORY_TTL_S),
            num_workers=take("nproc", _positive, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )
        if conf:
            known = "close_timeout etcd_timeout history_ttl join_timeout key_prefix last_call_timeout lease_ttl live nproc"
            raise ValueError(
                f"--rdzv-conf has unknown keys {sorted(conf)}; known are {known} user password_file ca_cert cert cert_key"
            )
        Keys(config.run_id, config.key_prefix)
        return config


class EtcdRendezvousHandler(RendezvousHandler):
    """One elastic agent's part in the rendezvous. Used by the agent's main thread only."""

    def __init__(self, config: HandlerConfig) -> None:
        """
        Raises:
            RendezvousConnectionError: no etcd answers at the endpoint.
        """
        self._config = config
        self._keys = Keys(config.run_id, config.key_prefix)
        self._client = EtcdClient(config.etcd)
        self._client.share_lifetime(self._keys.root, config.history_ttl_s)
        try:
            self._client.check()
        except EtcdError as error:
            self._client.close()
            raise RendezvousConnectionError(f"run {config.run_id!r} cannot start: {error}") from error
        host = socket.gethostname()
        self._agent_id = f"{re.sub(r'[^A-Za-z0-9.-]', '-', host)}-{uuid.uuid4().hex[:8]}"
        self._address = config.local_address or _address_towards(config.etcd.endpoints)
        self._readable: dict[str, object] = {}  # last version of each record that could be read
        self._bad_records: dict[str, int] = {}  # revisions that were complained about
        self._record = AgentRecord(
            agent_id=self._agent_id,
            host=host,
            pid=os.getpid(),
            num_workers=config.num_workers,
            state="waiting",
            labels={"node": node} if (node := os.environ.get("DLROVER_NODE")) else {},
            address=self._address,
            min_nodes=config.limits.min_nodes,
            join_timeout_s=config.join_timeout_s,
        )
        self._wake = threading.Event()
        self._mirror: Mirror | None = None
        self._lease: Lease | None = None
        self._registered_revision = 0
        self._store: RoundStore | None = None
        self._has_finished = False
        self._is_shut_down = False

    # -- torch's interface

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._config.run_id

    @property
    def use_agent_store(self) -> bool:
        # Rounds that share one store see each other's keys: torch's own restarts hang on that.
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; in a live job, return at once.

        Raises:
            RendezvousClosedError: the job has finished or failed, or was closed.
            RendezvousTimeoutError: not enough nodes, or no room, for `join_timeout`.
            RendezvousConnectionError: etcd cannot be reached.
            RendezvousStateError: a record of this run cannot be read.
        """
        with self._rendezvous_errors():
            return self._next_rendezvous(time.monotonic() + self._config.join_timeout_s)

    def is_closed(self) -> bool:
        """Whether nobody can join any more.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, and this agent has not joined, so it knows of nothing yet.
        """
        with self._rendezvous_errors():
            return _why_over(self._view()) is not None

    def set_closed(self) -> None:
        """Let nobody join any more; those inside go on.

        Raises:
            RendezvousConnectionError: etcd could not be reached within `close_timeout`.
        """
        with self._rendezvous_errors():
            self._close_job("closed by an agent", time.monotonic() + self._config.close_timeout_s)

    def num_nodes_waiting(self) -> int:
        """Agents for which this one should restart its workers; always 0 in a live job."""
        if self._mirror is None:
            return 0
        self._stay_registered()
        view = self._view()
        if self._config.live or _is_live(view):
            return 0
        if view.round is not None and view.round_number > self._record.round_number:
            return 1  # the others took us for dead and went on without us: join them again
        return num_waiting(view, self._config.limits)

    def shutdown(self) -> bool:
        """Leave; the others go on. Closes the run only when all of its workers have succeeded."""
        if self._is_shut_down:
            return True
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        # Without etcd our leases tell the others; waiting for it here would only delay the exit.
        if self._mirror is not None and self._mirror.healthy:
            try:
                self._leave()
            except (EtcdError, RendezvousStateError) as error:
                logger.warning("run %r: could not sign off: %s", self._config.run_id, error)
        self._client.close()
        return True

    @contextlib.contextmanager
    def _rendezvous_errors(self) -> Iterator[None]:
        """Turns what etcd's client raises into what callers of a rendezvous handler expect."""
        try:
            yield
        except (EtcdError, TimeoutError) as error:
            raise RendezvousConnectionError(f"run {self._config.run_id!r}: {error}") from error

    # -- a round

    def _next_rendezvous(self, deadline: float) -> RendezvousInfo:
        if self._mirror is None:
            self._mirror = Mirror(self._client, self._keys.live, self._wake.set)
            # torchrun does not call shutdown() when it ends by a signal.
            atexit.register(self.shutdown)
        else:
            # The agent has ended all its workers before it came here; nobody need wait for their leases.
            self._delete_own_workers()
        self._drop_store()
        self._has_finished = False
        _raise_if_over(self._config.run_id, self._view())
        self._register(state="waiting", round_number=self._view().round_number, port=0)

        enough_since: float | None = None
        while True:
            self._wake.clear()
            self._stay_registered()
            view = self._view()
            _raise_if_over(self._config.run_id, view)
            if self._may_join_at_once(view):
                return self._join_live(view)
            if view.round is not None and self._is_admitted(view):
                info = self._enter(view.round, deadline)
                if info is not None:
                    return info
                self._register(state="waiting", round_number=view.round.number, port=0)
                continue
            now = time.monotonic()
            if now > deadline:
                self._give_up(view)
            if members_of_next_round(view, self._config.limits, last_call_is_over=True):
                enough_since = now if enough_since is None else enough_since
                last_call_s = 0.0 if self._config.live else self._config.last_call_timeout_s
                remaining_s = enough_since + last_call_s - now
                members = members_of_next_round(view, self._config.limits, remaining_s <= 0)
                if members:
                    self._propose(view, members)
            else:
                enough_since, remaining_s = None, _POLL_S
            self._wake.wait(min(_POLL_S, max(0.01, remaining_s), max(0.01, deadline - now)))

    def _is_admitted(self, view: AgentView) -> bool:
        return self._agent_id in participants(view) and view.round_number > self._record.round_number

    def _may_join_at_once(self, view: AgentView) -> bool:
        others_run = any(agent != self._agent_id for agent in participants(view))
        return _is_live(view) or (self._config.live and others_run and not self._is_admitted(view))

    def _propose(self, view: AgentView, members: list[str]) -> None:
        """Write the next round; whoever is first wins, and all others agree by reading it."""
        number = view.round_number + 1
        round_ = AgentRound(
            number=number,
            agents=members,
            state="complete",
            written_by=self._agent_id,
            reason=f"{len(members)} nodes were waiting",
            created_at=time.time(),
        )
        unchanged = modified(self._keys.agent_round) == view.round_revision
        try:
            written = self._client.txn([unchanged], [Put(self._keys.agent_round, encode(round_))])
        except EtcdUnavailableError as error:
            logger.warning("run %r: round %d must wait: %s", self._config.run_id, number, error)
            return
        if written.succeeded:
            logger.info("run %r: round %d of %d nodes", self._config.run_id, number, len(members))

    def _enter(self, round_: AgentRound, deadline: float) -> RendezvousInfo | None:
        """Our part in a complete round, once all its members have entered it; None if one of them died
        instead."""
        node_rank = round_.agents.index(self._agent_id)
        port = _free_port(self._address) if node_rank == 0 else 0
        self._register(state="running", round_number=round_.number, port=port)
        while True:
            self._wake.clear()
            self._stay_registered()
            view = self._view()
            _raise_if_over(self._config.run_id, view)
            inside = participants(view) if view.round_number == round_.number else []
            if len(inside) < len(round_.agents):
                logger.warning("run %r: round %d broke up before it began", self._config.run_id, round_.number)
                return None
            if all(view.agents[a].record.round_number == round_.number for a in inside):
                break
            if time.monotonic() > deadline:
                self._give_up(view)
            self._wake.wait(_POLL_S)
        if node_rank == 0:
            # Nobody can still be in the round before the last one.
            self._client.delete_prefix(self._store_prefix(round_.number - 2))
        first = view.agents[round_.agents[0]].record
        self._store = RoundStore(self._client, self._store_prefix(round_.number), self._set_num_workers, self._wait_at_exit)
        self._export_environment()
        bootstrap = RendezvousStoreInfo(first.address, first.port)
        return RendezvousInfo(self._store, node_rank, len(round_.agents), bootstrap)

    def _join_live(self, view: AgentView) -> RendezvousInfo:
        """Ranks that are true now; the workers give themselves those that count."""
        others = [seen.record for agent, seen in view.agents.items() if agent != self._agent_id]
        self._register(state="running", round_number=view.round_number, port=0)
        self._export_environment()
        logger.info("run %r: joined the live job as node %d", self._config.run_id, len(others))
        return RendezvousInfo(
            LiveAgentStore(sum(record.num_workers for record in others), self._set_num_workers),
            len(others),
            len(others) + 1,
            RendezvousStoreInfo(self._address, _free_port(self._address)),
        )

    def _give_up(self, view: AgentView) -> None:
        limits, run_id = self._config.limits, self._config.run_id
        running, waiting = participants(view), candidates(view)
        if self._mirror is not None and not self._mirror.healthy:
            why = f"etcd at {self._config.etcd.endpoints} cannot be reached"
        elif len(running) >= limits.max_nodes:
            why = f"the job has its maximum of {limits.max_nodes} nodes: raise --nnodes, or do not start more"
        elif running:
            why = f"{len(running)} nodes still run the round before and did not make room"
        else:
            why = f"only {len(waiting)} of at least {limits.min_nodes} nodes came: start more or lower --nnodes"
        self._client.delete(self._keys.agents + self._agent_id)
        raise RendezvousTimeoutError(
            f"run {run_id!r}: no room in a round within join_timeout={self._config.join_timeout_s:g} s; {why}"
        )

    # -- the end

    def _wait_at_exit(self, all_arrived: Callable[[int], bool], timeout_s: float) -> None:
        """TorchElastic's exit barrier, for those that are still there to come; a live job has none."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._wake.clear()
            self._stay_registered()
            view = self._view()
            if _is_live(view):
                return
            if all_arrived(len(participants(view))):
                # A member that waits for another round has not finished its part.
                members = view.round.agents if view.round is not None else []
                self._has_finished = not set(members).intersection(candidates(view))
                return
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DistStoreError(f"run {self._config.run_id!r}: other nodes did not finish within {timeout_s:g} s")
            self._wake.wait(min(0.2, remaining_s))

    def _leave(self) -> None:
        self._delete_own_workers()
        view = self._view()
        if self._has_finished and not _is_live(view):
            # A spare or late node must not run the whole script again.
            self._close_job("its nodes have finished", time.monotonic() + 2.0)
        if self._lease is not None:
            self._lease.revoke()
        self._client.delete(self._keys.agents + self._agent_id)
        if not self._client.get_prefix(self._keys.agents)[1]:
            # The last one out, also of several that leave at once. What all were killed before removing ends with its lifetime.
            self._client.delete_prefix(self._keys.store)
            if _is_live(view) and _why_over(view) is not None:
                self._client.delete(self._keys.agent_round)

    def _close_job(self, reason: str, deadline: float) -> None:
        while True:
            try:
                if self._try_to_close(reason):
                    return
            except EtcdUnavailableError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"run {self._config.run_id!r} could not be closed in time")

    def _try_to_close(self, reason: str) -> bool:
        """Whether the run is closed; False when another agent has written in between."""
        entry = self._client.get(self._keys.agent_round)
        round_ = (self._decode(AgentRound, entry) if entry is not None else None) or AgentRound(0, [], "complete")
        if round_.state == "closed":
            return True
        closed = dataclasses.replace(round_, state="closed", written_by=self._agent_id, reason=reason, created_at=time.time())
        unchanged = modified(self._keys.agent_round) == (entry.mod_revision if entry else 0)
        return self._client.txn([unchanged], [Put(self._keys.agent_round, encode(closed))]).succeeded

    def _delete_own_workers(self) -> None:
        _, found = self._client.get_prefix(self._keys.workers)
        for kv in found:
            with contextlib.suppress(RecordError):  # not ours, whatever it is
                if decode(WorkerRecord, kv.value, kv.key).agent_id == self._agent_id:
                    self._client.txn([], [Delete(kv.key)])

    def _drop_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # -- our record

    def _register(self, **changes: Any) -> None:
        """Write our record, under a new lease when the old one is lost, and wait until our mirror shows
        it."""
        if "state" in changes:
            changes = {"since": time.time(), **changes}
        self._record = dataclasses.replace(self._record, **changes)
        self._write_record()

    def _write_record(self) -> None:
        key = self._keys.agents + self._agent_id
        while True:
            if self._lease is None or self._lease.lost.is_set():
                self._lease = self._client.lease(self._config.lease_ttl_s).keep_alive()
            try:
                self._registered_revision = self._client.put(key, encode(self._record), self._lease)
                break
            except LeaseLostError:
                self._lease.close()
                self._lease = None
        if self._mirror is not None:
            # Decisions are made from the mirror, and must not be made from before our own last word.
            self._mirror.wait_for(lambda _: self._has_seen_own_record() or None, self._config.etcd.timeout_s)

    def _has_seen_own_record(self) -> bool:
        return self._mirror is not None and self._mirror.revision >= self._registered_revision

    def _stay_registered(self) -> None:
        """Come back after our lease was lost, as after a long break in the network."""
        gone = self._has_seen_own_record() and self._mirrored(self._keys.agents + self._agent_id) is None
        if self._lease is None or not (gone or self._lease.lost.is_set()):
            return
        try:
            self._write_record()
        except (EtcdError, TimeoutError) as error:
            logger.warning("run %r: agent %s is not registered: %s", self._config.run_id, self._agent_id, error)

    def _set_num_workers(self, num_workers: int) -> None:
        if num_workers != self._record.num_workers:
            self._register(num_workers=num_workers)

    # -- what etcd says

    def _view(self) -> AgentView:
        keys = self._keys
        if self._mirror is not None:
            entries: Mapping[str, KeyValue] = self._mirror.snapshot()
        else:
            entries = {kv.key: kv for kv in self._client.get_prefix(keys.live)[1]}
        round_entry, job_entry = entries.get(keys.agent_round), entries.get(keys.job)
        agents = {}
        for key, kv in entries.items():
            if key.startswith(keys.agents) and (record := self._decode(AgentRecord, kv)) is not None:
                agents[record.agent_id] = SeenAgent(record, kv.create_revision)
        return AgentView(
            agents=agents,
            round=self._decode(AgentRound, round_entry) if round_entry is not None else None,
            round_revision=round_entry.mod_revision if round_entry is not None else 0,
            job=self._decode(JobRecord, job_entry) if job_entry is not None else None,
        )

    def _mirrored(self, key: str) -> KeyValue | None:
        return self._mirror.snapshot().get(key) if self._mirror is not None else self._client.get(key)

    def _decode(self, record_type: type[T], entry: KeyValue) -> T | None:
        """The record; once this agent has joined, the last readable one, or None, in place of garbage.

        Raises:
            RendezvousStateError: garbage, and this agent is still joining.
        """
        try:
            record = decode(record_type, entry.value, entry.key)
        except RecordError as error:
            if self._record.state != "running":
                raise RendezvousStateError(f"run {self._config.run_id!r}: {error}") from error
            if self._bad_records.get(entry.key) != entry.mod_revision:
                self._bad_records[entry.key] = entry.mod_revision
                logger.error("run %r: ignored a record: %s", self._config.run_id, error)
            return self._readable.get(entry.key)  # type: ignore[return-value]
        self._readable[entry.key] = record
        return record

    def _store_prefix(self, round_number: int) -> str:
        return f"{self._keys.store}{round_number}/"

    def _export_environment(self) -> None:
        """Tell the workers, which inherit the agent's environment, where the job's state is."""
        etcd, limits = self._config.etcd, self._config.limits
        values = {
            "DLROVER_ENDPOINT": etcd.endpoints,
            "DLROVER_PREFIX": self._config.key_prefix,
            "DLROVER_RUN_ID": self._config.run_id,
            "DLROVER_AGENT_ID": self._agent_id,
            "DLROVER_AGENT_PID": str(os.getpid()),
            "DLROVER_MIN_NODES": str(limits.min_nodes),
            "DLROVER_MAX_NODES": str(limits.max_nodes),
            "DLROVER_HISTORY_TTL_S": str(round(self._config.history_ttl_s)),
            **etcd.to_environment(),
        }
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)  # left from an outer job, it would not fit this endpoint
            else:
                os.environ[name] = value


def _is_live(view: AgentView) -> bool:
    return view.job is not None and view.job.live


def _why_over(view: AgentView) -> str | None:
    if view.job is not None and view.job.phase == "finished":
        return "has finished"
    if view.job is not None and view.job.phase == "failed":
        return f"has failed ({view.job.message or 'no reason was recorded'})"
    if view.round is not None and view.round.state == "closed":
        return f"is closed ({view.round.reason or 'no reason was recorded'})"
    return None


def _raise_if_over(run_id: str, view: AgentView) -> None:
    why = _why_over(view)
    if why is not None:
        raise RendezvousClosedError(
            f"run {run_id!r} {why}, no node can join it any more; start a new job with another --rdzv-id"
        )


def _address_towards(endpoints: str) -> str:
    """The address of this host on the way to etcd: the other nodes come the same way."""
    for host, port in parse_endpoints(endpoints):
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing, only chooses the route
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.getfqdn()


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# -- values of --rdzv-conf


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("it must be a number of seconds above 0")
    return value


def _lifetime(text: str) -> float:
    if not 60 <= (value := _seconds(text)) <= 9e9:
        # Should all of a running job be cut off from etcd for so long, it would be forgotten.
        raise ValueError("it must be at least 60 seconds")
    return value


def _seconds_or_zero(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise ValueError("it must be 1 or 0")


def _key_prefix(text: str) -> str:
    if not text.startswith("/") or "//" in text or text == "/":
        raise ValueError("it must start with '/' and name a folder of keys, such as /dlrover")
    return text.rstrip("/")


def _readable_file(path: str) -> str | None:
    with open(path, "rb"):
        return os.path.abspath(path)
