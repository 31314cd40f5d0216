"""The TorchElastic rendezvous backend `etcd-v3`, selected with `torchrun --rdzv-backend=etcd-v3`.

Defines the handler that torchrun calls, its configuration from `--rdzv-conf`, and the records of an agent and of its run.
`rounds.py` decides which agents form a round.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from torch.distributed import DistNetworkError, DistStoreError
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

from lightning_dlrover import variables
from lightning_dlrover.codec import RecordError
from lightning_dlrover.files import give_home
from lightning_dlrover.host import free_port, route_address
from lightning_dlrover.rdzv.agents.notices import Cloud, NoticeWatch, cloud_named
from lightning_dlrover.rdzv.agents.rounds import AgentCoordinator, Limits, RecordReader, why_over
from lightning_dlrover.rdzv.agents.store import LiveAgentStore, RoundStore, is_in_use
from lightning_dlrover.rdzv.etcd.client import EtcdClient, Lease
from lightning_dlrover.rdzv.etcd.health import warn_of_troubles
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import OwnedFolder
from lightning_dlrover.rdzv.etcd.types import (
    Delete,
    DeletePrefix,
    EtcdConfig,
    EtcdError,
    EtcdFullError,
    EtcdUnavailableError,
    Get,
    KeyValue,
    LeaseLostError,
    Put,
    absent,
    modified,
    none_under,
    parse_endpoints,
)
from lightning_dlrover.rdzv.group.config import Timeouts, seconds
from lightning_dlrover.rdzv.job.folders import remove_snapshots
from lightning_dlrover.rdzv.job.journal import ContentionError, Journal, readable, readable_folder
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    HISTORY_TTL_S,
    AddressRecord,
    AgentNotice,
    AgentRecord,
    AgentRound,
    JobRecord,
    Keys,
    WorkerRecord,
    encode,
    worker_name_of,
)
from lightning_dlrover.rdzv.job.sizes import CONF_SEPARATOR, parse_sizes
from lightning_dlrover.rdzv.membership.coordinator import eviction
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.spares import Spares, check_platform

T = TypeVar("T")


@dataclass(frozen=True)
class HandlerConfig:
    """The handler's options: --rdzv-endpoint, --rdzv-id, --nnodes and --rdzv-conf."""

    etcd: EtcdConfig
    run_id: str
    limits: Limits
    key_prefix: str = DEFAULT_PREFIX
    local_address: str | None = None
    join_timeout_s: float = 600.0  # limit on waiting for a round with room; the clock stops while there is a controller
    last_call_timeout_s: float = 3.0  # seconds that a round with enough nodes waits for more
    close_timeout_s: float = 30.0
    timeouts: Timeouts = field(default_factory=Timeouts)  # timeouts of this agent and its workers
    live: bool = False  # True if the script re-forms in process: never wait for more nodes, never restart
    num_workers: int = 1  # workers of this node, until the agent reports the number
    node: str = ""  # name of this node; empty if `dlrover run` has not started it
    history_ttl_s: float = HISTORY_TTL_S  # seconds that the run's records outlast its last agent and worker
    sizes: str = ""  # numbers of workers that may be requested, such as 1+2+4 or pow2; empty: any
    spares: bool = False  # start workers by forking a process that has imported their modules
    spares_folder: str = ""  # the controller's folder of records, if it keeps such a process for its nodes
    cloud: Cloud | None = None  # reads notices of this machine's end

    @staticmethod
    def from_parameters(params: RendezvousParameters) -> HandlerConfig:
        """Read `--rdzv-conf`, and the environment of this agent.

        Raises:
            ValueError: a key is unknown or its value malformed; the message names it.
        """
        conf = dict(params.config)
        # LaunchConfig adds these for other backends; this one does not use them.
        for foreign in ("timeout", "rank"):
            conf.pop(foreign, None)

        known = {"user", "password_file", "ca_cert", "cert", "cert_key"}

        def take(key: str, parse: Callable[[str], T], default: T) -> T:
            known.add(key)
            if key not in conf:
                return default
            text = str(conf.pop(key))
            try:
                return parse(text)
            except (ValueError, OSError) as error:
                raise ValueError(f"--rdzv-conf {key}={text!r} cannot be used: {error}") from error

        def take_seconds(key: str, default_s: float) -> float:
            return take(key, functools.partial(seconds, key), default_s)

        defaults = Timeouts()
        timeouts = Timeouts(**{f"{key}_s": take_seconds(key, getattr(defaults, f"{key}_s")) for key in Timeouts.names()})
        user = take("user", str, None)
        url = os.environ.get(variables.METADATA_URL, "")
        files = {key: take(key, _readable_file, None) for key in ("password_file", "ca_cert", "cert", "cert_key")}
        config = HandlerConfig(
            etcd=EtcdConfig(params.endpoint, user, timeout_s=timeouts.etcd_timeout_s, **files),
            run_id=params.run_id,
            limits=Limits(params.min_nodes, params.max_nodes),
            key_prefix=take("key_prefix", _key_prefix, DEFAULT_PREFIX),
            local_address=params.local_addr,
            join_timeout_s=take_seconds("join_timeout", 600.0),
            last_call_timeout_s=take("last_call_timeout", _seconds_or_zero, 3.0),
            close_timeout_s=take_seconds("close_timeout", 30.0),
            timeouts=timeouts,
            node=os.environ.get(variables.NODE, ""),
            live=take("live", _flag, False),
            history_ttl_s=take("history_ttl", _lifetime, HISTORY_TTL_S),
            num_workers=take("nproc", _positive, variables.local_world_size(os.environ)),
            sizes=take("sizes", _sizes, ""),
            spares=take("spares", _flag, False),
            spares_folder=os.environ.get(variables.SPARES, ""),
            cloud=take("notices", functools.partial(cloud_named, url=url, node=os.environ.get(variables.NODE, "")), None),
        )
        if conf:
            raise ValueError(f"--rdzv-conf has unknown keys {sorted(conf)}; known are {' '.join(sorted(known))}")
        Keys(config.run_id, config.key_prefix)
        return config


def _lifetime(text: str) -> float:
    if not 60 <= (value := float(text)) <= 9e9:
        # If a whole running job is cut off from etcd for this long, its records expire.
        raise ValueError("it must be at least 60 seconds")
    return value


def _seconds_or_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) == 0:
            return 0.0
    return seconds("last_call_timeout", text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def _sizes(text: str) -> str:
    parse_sizes(text, CONF_SEPARATOR)
    return text.strip()


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


def export(config: HandlerConfig, agent_id: str, left_state_folder: str | None) -> None:
    """Export the location of the job's records to the workers, which inherit the agent's environment."""
    give_home()
    etcd, limits = config.etcd, config.limits
    values = {
        variables.ENDPOINT: etcd.endpoints,
        variables.PREFIX: config.key_prefix,
        variables.RUN_ID: config.run_id,
        variables.AGENT_ID: agent_id,
        variables.AGENT_PID: str(os.getpid()),
        variables.MIN_NODES: str(limits.min_nodes),
        variables.MAX_NODES: str(limits.max_nodes),
        variables.SIZES: config.sizes or None,
        variables.HISTORY_TTL_S: str(round(config.history_ttl_s)),
        variables.LEFT_STATE: left_state_folder,
        **config.timeouts.to_environment(),
        **etcd.to_environment(),
    }
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)  # a variable left from an outer job would not fit this endpoint
        else:
            os.environ[name] = value


class Registration:
    """An agent's own record: written only by the agent, bound to its lease, and guarded against late writes."""

    def __init__(self, client: EtcdClient, key: str, record: AgentRecord, lease_ttl_s: float) -> None:
        self.key = key
        self.record = record
        self.lease: Lease | None = None
        self._client = client
        self._lease_ttl_s = lease_ttl_s
        self._revision = 0  # revision of our record's last write; 0: no record exists

    @property
    def is_lost(self) -> bool:
        return self.lease is not None and self.lease.lost.is_set()

    def write(self, **changes: Any) -> None:
        """Write our record, under a new lease when the old one is lost.

        Guarded by the revision of our last write: a write that etcd receives late must not restore an older state.
        """
        if "state" in changes:
            changes = {"since": time.time(), **changes}
        self.record = replace(self.record, **changes)
        while True:
            if self.lease is None or self.lease.lost.is_set():
                self.lease = self._client.lease(self._lease_ttl_s).keep_alive()
            unchanged = modified(self.key) == self._revision
            try:
                written = self._client.txn([unchanged], [Put(self.key, encode(self.record), self.lease.id)], [Get(self.key)])
            except LeaseLostError:
                self.lease.close()
                self.lease = None
                continue
            if written.succeeded:
                self._revision = written.revision
                break
            # The record expired with an earlier lease, or holds our own write with a lost response. No other process writes it.
            self._revision = written.values[0].mod_revision if written.values else 0


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
        """Return the view of an agent with these entries in its mirror. Raises the errors of `read`."""
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
            return replace(round_, state="closed", written_by=self._agent_id, reason=reason, created_at=time.time())

        try:
            self._journal.swap(AgentRound, self._keys.agent_round, closed, read=self.read, timeout_s=timeout_s)
        except ContentionError as error:
            raise RendezvousTimeoutError(f"run {self._run_id!r} could not be closed in time: {error}") from error

    def remove_leftovers(self) -> None:
        """Remove snapshots of killed workers from this host's memory, if the job will never continue."""
        try:
            is_over = self._journal.is_over()
        except RecordError:
            return
        if is_over:
            remove_snapshots(self._keys)

    def delete_own_workers(self) -> None:
        """Remove the records of this agent's workers, which have ended: their leases would last a while."""
        here = worker_name_of(socket.gethostname())
        # First their addresses: an address shows the others that a worker without a record may be alive.
        for worker_id, address in readable_folder(self._client, AddressRecord, self._keys.addresses, here).items():
            if address.agent_id == self._agent_id:
                self._client.delete(self._keys.addresses + worker_id)
        _, found = self._client.get_prefix(self._keys.workers + here)
        for kv in found:
            worker = readable(WorkerRecord, kv)
            if worker is not None and worker.agent_id == self._agent_id:
                self._client.delete(kv.key)  # no transaction: a full etcd takes none, but it deletes
                with contextlib.suppress(EtcdFullError):
                    for write in eviction(kv, self._client.get(self._keys.coordinator), self._keys)[1:]:
                        self._client.txn(write.compare, write.ops)

    def tidy_up(self, is_live: bool) -> None:
        """Remove the records that only agents need, if this was the last agent.

        Runs in the last agent, and possibly in several that leave at once. If all were killed before, the records expire.
        """
        keys = self._keys
        is_last = none_under(keys.agents)  # an agent may register at any time, and its later writes must stay
        if self._client.txn([is_last], [DeletePrefix(keys.store), DeletePrefix(keys.agents_left)]).succeeded:
            self._client.txn([is_last, absent(keys.agent_coordinator)], [Delete(keys.agent_notice)])
            if is_live and self.why_over():
                self._client.txn([is_last], [Delete(keys.agent_round)])


BACKEND = "etcd-v3"

logger = logging.getLogger(__name__)

_POLL_S = 0.5  # seconds between polls; the mirror wakes this agent, so this only bounds the cost of a missed wake-up
_SIGN_OFF_TTL_S = 5.0  # minimum lifetime of an agent's sign-off; a dead coordinator may have to be replaced first
_CHECK_S = 20.0  # seconds between checks for changes that the mirror missed; with many agents more checks would load etcd


_NODES_FINISHED = "its nodes have finished"  # reason for closing a run of plain scripts
_FINISHED = JobRecord("finished", live=True, min_workers=1, max_workers=1, version="")


class RunIsOverError(RendezvousClosedError, SystemExit):
    """No agent can join the run any more.

    It is also a `SystemExit`, so that torchrun ends with its code. Otherwise torchrun would print thirty lines of traceback
    below the one line that matters, which is logged before.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.code = exit_code


def create_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the handler creator. Torch finds this function through the entry point group `torchrun.handlers`."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    return EtcdRendezvousHandler(HandlerConfig.from_parameters(params))


class _RoundDeadline:
    """An agent's deadline for a round: `timeout_s` after a controller was last present.

    A controller starts missing nodes as soon as its scheduler has room, which may take hours.
    """

    def __init__(self, client: EtcdClient, keys: Keys, timeout_s: float) -> None:
        self._client = client
        self._keys = keys
        self._timeout_s = timeout_s
        self._ends_at = time.monotonic() + timeout_s
        self._next_look = 0.0  # each look costs a request, and there may be many agents

    def remaining_s(self) -> float:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._timeout_s / 10
            with contextlib.suppress(EtcdUnavailableError):  # a controller that cannot be seen starts no nodes
                if self._client.get(self._keys.controller) is not None:
                    self._ends_at = now + self._timeout_s
        return self._ends_at - now

    def answer_to(self, request: Callable[[], T]) -> T:
        """Return the result of a request, repeated while etcd is full or away. It has answered this agent before."""
        is_reported = False
        while True:
            try:
                return request()
            except EtcdUnavailableError as error:
                remaining_s = self.remaining_s()
                if remaining_s <= 0:
                    raise
                if not is_reported and not isinstance(error, EtcdFullError):  # the client reports a full etcd itself
                    logger.warning(
                        "run %r: this agent waits for etcd, for up to %.0f s: %s", self._keys.run_id, remaining_s, error
                    )
                    is_reported = True


class EtcdRendezvousHandler(RendezvousHandler):
    """One elastic agent's part in the rendezvous. Used by the agent's main thread only.

    Plain scripts get TorchElastic's contract: a change of membership restarts all workers. Once workers that can be re-formed
    in process have registered (`JobRecord.live`), they handle joins and leaves. Agents then only start and end their own
    workers, and never restart those of others. The agent that coordinates decides with `rounds.py` which agents
    form a round. Each agent watches three keys and writes its own record.
    """

    def __init__(self, config: HandlerConfig) -> None:
        """Connect to etcd, and prepare this agent's record.

        Raises:
            RendezvousConnectionError: etcd does not respond at the endpoint.
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
        routes = (route_address(*endpoint) for endpoint in parse_endpoints(config.etcd.endpoints))  # other nodes use them too
        self._address = config.local_address or next(filter(None, routes), None) or socket.getfqdn()
        self._all_addresses = "::" if ":" in self._address else ""
        record = AgentRecord(
            agent_id=self._agent_id,
            host=host,
            pid=os.getpid(),
            num_workers=config.num_workers,
            state="waiting",
            labels={"node": config.node} if config.node else {},
            address=self._address,
            min_nodes=config.limits.min_nodes,
            join_timeout_s=config.join_timeout_s,
        )
        self._own = Registration(self._client, self._keys.agents + self._agent_id, record, config.timeouts.lease_ttl_s)
        self._wake = threading.Event()
        self._mirror: Mirror | None = None
        self._store: RoundStore | None = None
        # Threads hold this handler weakly, so that they end if it is dropped without a shutdown.
        is_joining, on_error = _weakly(self._is_joining), _weakly(self._on_coordinator_error)
        reader = RecordReader(config.run_id, lambda: bool(is_joining()))
        self._run = RunRecords(self._client, self._keys, config.run_id, self._agent_id, reader)
        self._coordinator = AgentCoordinator(
            self._client,
            self._keys,
            self._agent_id,
            config.limits,
            0.0 if config.live else config.last_call_timeout_s,
            RecordReader(config.run_id, lambda: bool(is_joining())),
            on_error,
            functools.partial(warn_of_troubles, config.etcd, functools.partial(logger.warning, "run %r: %s", config.run_id)),
        )
        self._shutdown_at_exit = _weakly(self.shutdown)
        weakref.finalize(self, _end_threads, self._client, self._coordinator, os.getpid()).atexit = False
        self._coordinator_error: RecordError | None = None
        self._left_state: OwnedFolder | None = None  # state left by workers that this agent ends together
        self._spares_folder: OwnedFolder | None = None
        self._spares = self._own_spares()
        place = (self._client, self._keys, self._agent_id, host)
        self._notices = NoticeWatch(*place, cloud, self) if (cloud := config.cloud) is not None else None
        self._num_members = 0  # members of the round that this agent takes part in
        self._num_agents = 0  # approximate number of living agents
        self._is_live = False
        self._must_restart = False
        self._has_finished = False
        self._is_unregistered = False  # our lease was lost, and etcd takes no new registration
        self._is_shut_down = False

    # -- torch's interface

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._config.run_id

    @property
    def use_agent_store(self) -> bool:
        # Rounds that share one store see each other's keys, which makes torch's own restarts hang.
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; in a live job, return at once.

        Raises:
            RunIsOverError: the job has finished or failed, or was closed.
            RendezvousTimeoutError: for `join_timeout` there were too few nodes or no room, and no controller to start more.
            RendezvousConnectionError: etcd cannot be reached.
            RendezvousStateError: a record of this run cannot be read.
        """
        with self._rendezvous_errors():
            return self._next_rendezvous()

    def is_closed(self) -> bool:
        """Whether no agent can join any more.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, and this agent has not joined, so it has no copy of the records.
        """
        with self._rendezvous_errors():
            try:
                return bool(self._run.why_over())
            except EtcdUnavailableError:
                if self._mirror is None:
                    raise
                return bool(self._known().over)

    def set_closed(self) -> None:
        """Refuse further agents; those inside continue.

        Raises:
            RendezvousConnectionError: etcd could not be reached within `close_timeout`.
        """
        with self._rendezvous_errors():
            self._run.close("closed by an agent", self._config.close_timeout_s)

    def num_nodes_waiting(self) -> int:
        """Number of agents that this one should restart its workers for.

        Counts agents that wait although the job has room, and agents that were lost while enough others are left. Always 0 in
        a live job. Sends no request to etcd."""
        if self._mirror is None:
            return 0
        self._stay_registered()
        self._look_after_spares()
        known = self._known()
        if self._config.live or self._is_live:
            return 0
        if self._must_restart or known.round_number > self._own.record.round_number:
            return 1  # rejoin: the ranks were provisional, or the others declared us dead and formed a round without us
        counts = known.counts
        if counts is None or counts.round_number != self._own.record.round_number:
            return 0
        limits = self._config.limits
        waiting = counts.num_waiting if counts.num_inside < limits.max_nodes else 0
        # Workers may be waiting in a collective for a host that has disappeared.
        return waiting + (counts.num_lost if counts.num_inside >= limits.min_nodes else 0)

    def shutdown(self) -> bool:
        """Leave while the others continue. Closes the run only if all of its workers have succeeded."""
        if self._is_shut_down:
            return True
        self._is_shut_down = True
        atexit.unregister(self._shutdown_at_exit)
        if self._left_state is not None:
            self._left_state.cleanup()
        if self._notices is not None:
            self._notices.stop()
        if self._spares is not None:
            self._spares.close()
        if self._spares_folder is not None:
            self._spares_folder.cleanup()
        self._coordinator.stop()
        # Without etcd the expiry of our leases informs the others. Waiting for etcd here would only delay the exit.
        if self._mirror is not None and self._mirror.healthy:
            try:
                self._leave()
            except (EtcdError, RendezvousStateError) as error:
                logger.warning("run %r: could not sign off: %s", self._config.run_id, error)
        self._client.close()
        return True

    @contextlib.contextmanager
    def _rendezvous_errors(self) -> Iterator[None]:
        """Convert errors of etcd's client into those that callers of a rendezvous handler expect."""
        try:
            yield
        except (EtcdError, TimeoutError) as error:
            raise RendezvousConnectionError(f"run {self._config.run_id!r}: {error}") from error

    def _raise_if_over(self, why: str, has_waited: bool) -> None:
        if not why:
            return
        text = f"run {self._config.run_id!r} {why}: this node came too late to join; for a new job use another --rdzv-id"
        was_spare = has_waited and (why == why_over(None, _FINISHED) or _NODES_FINISHED in why)
        if was_spare:
            logger.warning("run %r was finished by other nodes before this one was needed", self._config.run_id)
        else:
            logger.error("%s", text)
        raise RunIsOverError(text, exit_code=0 if was_spare else 1)

    # -- a round

    def _next_rendezvous(self) -> RendezvousInfo:
        has_worked = self._mirror is not None  # if so, its workers have failed or were ended for another round
        deadline = _RoundDeadline(self._client, self._keys, self._config.join_timeout_s)
        if self._mirror is None:
            self._mirror = Mirror(self._client, self._keys.for_agents, _weakly(self._on_change), check_interval_s=_CHECK_S)
            # torchrun does not call shutdown() when it ends by a signal.
            atexit.register(self._shutdown_at_exit)
        else:
            # The agent has already ended all its workers, so the others need not wait for their leases to expire.
            deadline.answer_to(self._run.delete_own_workers)
        self._drop_store()
        self._has_finished = self._must_restart = False
        self._coordinator_error = None
        job = self._run.read(JobRecord, deadline.answer_to(lambda: self._client.get(self._keys.job)))
        self._is_live = job is not None and job.live
        last_round = self._known().round_number
        self._raise_if_over(why_over(self._known().round, job), has_waited=False)
        self._enter(deadline, "waiting", last_round)
        while True:
            self._wake.clear()
            self._stay_registered()
            known = self._known()
            self._raise_if_over(known.over, has_waited=not has_worked)
            if self._coordinator_error is not None:
                raise RendezvousStateError(
                    f"run {self._config.run_id!r}: {self._coordinator_error}"
                ) from self._coordinator_error
            is_admitted = known.round_number > last_round and self._agent_id in known.members
            if self._may_join_at_once(known, is_admitted):
                return self._join_live(deadline, known.round_number)
            if is_admitted:
                if known.notice is not None and known.notice.confirmed_round == known.round_number:
                    return self._start(known.members, known.notice)
                if self._own.record.round_number != known.round_number or self._own.record.state == "waiting":
                    is_first = known.members[0] == self._agent_id
                    port = free_port(self._all_addresses) if is_first else 0
                    self._enter(deadline, "running", known.round_number, port)
            elif self._own.record.state != "waiting":
                logger.warning("run %r: a round lost a member before it began; waiting for the next one", self._config.run_id)
                last_round = known.round_number
                self._enter(deadline, "waiting", last_round)
            remaining_s = deadline.remaining_s()
            if remaining_s <= 0:
                self._give_up(known)
            self._wake.wait(min(_POLL_S, remaining_s))

    def _may_join_at_once(self, known: Known, is_admitted: bool) -> bool:
        others_run = known.counts is not None and known.counts.num_inside > 0
        return self._is_live or (self._config.live and others_run and not is_admitted)

    def _start(self, members: list[str], notice: AgentNotice) -> RendezvousInfo:
        """Start our part in a round that all its members have entered."""
        number, node_rank = notice.confirmed_round, members.index(self._agent_id)
        if node_rank == 0:
            # No agent can still be in the round before the last one.
            self._client.delete_prefix(self._store_prefix(number - 2))
        self._num_members = len(members)
        self._store = RoundStore(self._client, self._store_prefix(number), node_rank, len(members), weakref.proxy(self))
        self._export()
        bootstrap = RendezvousStoreInfo(notice.master_address, notice.master_port)
        return RendezvousInfo(self._store, node_rank, len(members), bootstrap)

    def _join_live(self, deadline: _RoundDeadline, round_number: int) -> RendezvousInfo:
        """Return ranks that are true now; the workers assign themselves the ranks that count."""
        others = deadline.answer_to(self._run.other_agents)
        self._is_live = True
        self._enter(deadline, "running", round_number)
        self._export()
        logger.info("run %r: joined the live job as node %d", self._config.run_id, len(others))
        return RendezvousInfo(
            LiveAgentStore(sum(record.num_workers for record in others), self.starts),
            len(others),
            len(others) + 1,
            RendezvousStoreInfo(self._address, free_port(self._all_addresses)),
        )

    def _enter(self, deadline: _RoundDeadline, state: Literal["waiting", "running"], round_number: int, port: int = 0) -> None:
        deadline.answer_to(lambda: self._register(state=state, round_number=round_number, port=port))

    def _give_up(self, known: Known) -> None:
        limits, run_id = self._config.limits, self._config.run_id
        num_running = known.counts.num_inside if known.counts is not None else 0
        num_waiting = max(1, known.counts.num_waiting) if known.counts is not None else 1
        if self._mirror is not None and not self._mirror.healthy:
            why = f"etcd at {self._config.etcd.endpoints} cannot be reached"
        elif num_running >= limits.max_nodes:
            why = f"the job has its maximum of {limits.max_nodes} nodes: raise --nnodes, or do not start more"
        elif num_running:
            why = f"{num_running} nodes still run the previous round and did not make room"
        else:
            why = f"only {num_waiting} of at least {limits.min_nodes} nodes joined: start more, or lower --nnodes"
        self._client.delete(self._keys.agents + self._agent_id)
        raise RendezvousTimeoutError(
            f"run {run_id!r}: no room in a round within join_timeout={self._config.join_timeout_s:g} s; {why}. "
            "To wait longer, set --rdzv-conf join_timeout=SECONDS"
        )

    # -- callbacks of our round's store (RoundAgent)

    def starts(self, num_workers: int) -> None:
        if num_workers > 1 and self._left_state is None and transfer.ROOT.is_dir():
            try:
                self._left_state = OwnedFolder(transfer.PREFIX, transfer.ROOT)
            except OSError as error:
                logger.warning(
                    "run %r: the job's state will not survive a restart of this node's workers: %s", self._config.run_id, error
                )
            self._export()
        if num_workers != self._own.record.num_workers:
            self._register(num_workers=num_workers)

    def round_has_broken_up(self) -> bool:
        self._stay_registered()
        known = self._known()
        if known.round_number > self._own.record.round_number or known.over:
            return True
        counts = known.counts
        return counts is not None and counts.round_number == known.round_number and counts.num_inside < self._num_members

    def must_restart(self) -> None:
        logger.warning("run %r: a node was lost while ranks were assigned; the workers will restart", self._config.run_id)
        self._must_restart = True

    def has_finished(self) -> None:
        self._register(state="finished")

    def wait_for_others(self, timeout_s: float) -> None:
        """TorchElastic's exit barrier among the members that are still present; a live job has none."""
        deadline = time.monotonic() + timeout_s
        reached_at = time.monotonic()
        while True:
            self._wake.clear()
            self._stay_registered()
            known = self._known()
            if self._is_live or known.round_number > self._own.record.round_number:
                return
            counts = known.counts
            if counts is not None and counts.round_number == self._own.record.round_number and not counts.num_unfinished:
                # A member that waits for another round has not finished its part.
                self._has_finished = not counts.num_members_waiting
                return
            now = time.monotonic()
            reached_at = now if self._mirror is None or self._mirror.healthy else reached_at
            if now - reached_at > self._config.etcd.timeout_s:
                raise DistNetworkError(
                    f"run {self._config.run_id!r}: etcd does not answer, so it is unknown whether other nodes have finished"
                )
            remaining_s = deadline - now
            if remaining_s <= 0:
                raise DistStoreError(f"run {self._config.run_id!r}: other nodes did not finish within {timeout_s:g} s")
            self._wake.wait(min(_POLL_S, remaining_s))

    # -- the end

    def _leave(self) -> None:
        self._run.delete_own_workers()
        if self._has_finished and not self._is_live:
            # A spare or late node must not run the whole script again.
            self._run.close(_NODES_FINISHED, timeout_s=2.0)
        if self._is_live:
            self._client.delete(self._own.key)
        else:
            # The sign-off has a lease of its own, which expires after the coordinator has read it.
            lease_id = self._client.lease(max(_SIGN_OFF_TTL_S, 2 * self._config.timeouts.lease_ttl_s)).id
            sign_off = Put(self._keys.agents_left + self._agent_id, self._agent_id.encode(), lease_id)
            self._client.txn([], [sign_off, Delete(self._own.key)])
        if self._own.lease is not None:
            self._own.lease.revoke()
        self._run.tidy_up(self._is_live)
        if self._is_live:
            self._run.remove_leftovers()

    def _drop_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # -- our record

    def _register(self, **changes: Any) -> None:
        self._own.write(**changes)
        self._campaign()

    def _stay_registered(self) -> None:
        """Register again after our lease was lost, as after a long outage, and stand for coordinator if there is none."""
        if not self._own.is_lost:
            self._campaign()  # the change that called for a candidate may have come while our own former term was ending
            return
        try:
            self._register()
            self._is_unregistered = False
        except (EtcdError, TimeoutError) as error:
            if not self._is_unregistered:
                logger.warning("run %r: agent %s is not registered: %s", self._config.run_id, self._agent_id, error)
            self._is_unregistered = True

    # -- spare processes

    def _own_spares(self) -> Spares | None:
        """Let workers start from a spare process, if this job keeps any.

        Raises:
            SparesError: this platform cannot fork them.
            MissingNamesError: the installed torch starts workers in another way.
        """
        if not self._config.spares and not self._config.spares_folder:
            return None
        from lightning_dlrover.rdzv.agents.program import start_workers_from  # torchrun has loaded what it imports

        check_platform()
        folder = self._config.spares_folder
        if not folder:
            self._spares_folder = OwnedFolder("dlrover-spares-")
            folder = self._spares_folder.name
        say = functools.partial(logger.warning, "run %r: %s", self._config.run_id)
        spares = Spares(folder, say, "node" if self._config.spares_folder else "agent")
        start_workers_from(spares)
        return spares

    def _look_after_spares(self) -> None:
        """Start the spare process once the workers train, and publish its state."""
        if self._spares is None:
            return
        self._spares.look()
        state, memory = self._spares.state, self._spares.memory_bytes
        if (state, memory) != (self._own.record.spare, self._own.record.spare_bytes):
            with contextlib.suppress(EtcdError, TimeoutError):  # the next look repeats it
                self._register(spare=state, spare_bytes=memory)

    # -- reading from etcd

    def _on_change(self) -> None:
        self._campaign()
        self._wake.set()

    def _campaign(self) -> None:
        """Ensure that there is a coordinator."""
        mirror, lease = self._mirror, self._own.lease
        if mirror is None or lease is None or lease.lost.is_set() or self._coordinator_error is not None:
            return
        if (entry := mirror.get(self._keys.agent_coordinator)) is None or entry.lease_id == lease.id:
            self._coordinator.campaign(mirror, lease, self._num_agents)

    def _on_coordinator_error(self, error: RecordError) -> None:
        self._coordinator_error = error
        self._wake.set()

    def _known(self) -> Known:
        """Return this agent's view of the others."""
        known = self._run.known(self._mirror.snapshot() if self._mirror is not None else {})
        if known.counts is not None:
            self._num_agents = known.counts.num_agents
            self._is_live |= known.counts.live
        return known

    def _is_joining(self) -> bool:
        return self._own.record.state == "waiting"

    def _export(self) -> None:
        export(self._config, self._agent_id, self._left_state.name if self._left_state is not None else None)

    def _store_prefix(self, round_number: int) -> str:
        return f"{self._keys.store}{round_number}/"


def _weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Wrap `method` without keeping its object alive; the wrapper returns None once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T | None:
        bound = reference()
        return bound(*args) if bound is not None else None

    return call


def _end_threads(client: EtcdClient, coordinator: AgentCoordinator, pid: int) -> None:
    """End the threads of a handler that was garbage-collected. Its agent's lease expires, so the others declare it lost."""

    def end() -> None:
        coordinator.stop()
        if is_in_use(client):  # a round's store, perhaps that of a process group, still uses the client
            client.end_children()
        else:
            client.close()

    if os.getpid() != pid:
        return  # a forked copy of the process: the threads run in the original
    # Done in a thread, because the code that triggered the collection may hold any lock.
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and all threads with it
        threading.Thread(target=end, name="dlrover-end", daemon=True).start()
