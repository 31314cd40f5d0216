"""Watch a cloud's metadata service for the end of this machine, and record notices for the workers of an agent.

Each cloud's class reads its service once; `NoticeWatch` repeats that in a thread of the agent. An answer that is refused, late
or malformed is no notice: it is reported once, and the next reading follows.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import json
import logging
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.journal import Journal, readable_folder
from lightning_dlrover.rdzv.job.records import MAX_TIME, EndNotice, Keys, WorkerRecord, worker_name_of
from lightning_dlrover.rdzv.membership.worker_records import note_end

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two readings: a small part of the shortest notice, which is 30 s."""

REQUEST_S = 5.0  # limit on one request, from the connection to the last byte
MAX_BYTES = 64 * 1024
"""Maximum bytes of an answer. Azure's list of events is the longest, at less than 1 KiB per event."""


class MetadataError(Exception):
    """The metadata service did not answer, or its answer is not one of its own."""


class Metadata:
    """Requests to a metadata service. Proxies are not used and redirections are not followed: it is on this machine's link.

    Raises:
        ValueError: `url` is not the beginning of a URL such as http://169.254.169.254.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not the beginning of a metadata service's URL, such as http://169.254.169.254")
        self._host, self._port = parts.hostname, parts.port or 80
        self._root = parts.path.rstrip("/")

    def get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, str, http.client.HTTPMessage]:
        """Return the status, the text and the headers of an answer.

        Raises:
            MetadataError: there is no complete answer within `REQUEST_S`.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_S)
        sockets: list[socket.socket] = []
        # A socket's own timeout, which limits the connection, starts again with each byte.
        limit = threading.Timer(REQUEST_S, _shut_down, [sockets])
        limit.daemon = True
        limit.start()
        try:
            connection.connect()
            sockets.append(connection.sock)  # the connection gives it up before the answer is read
            connection.request(method, self._root + path, headers={**headers, "User-Agent": "lightning-dlrover"})
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            limit.cancel()
            connection.close()
        if len(body) > MAX_BYTES or (answer.length or 0) > 0:
            raise MetadataError(f"{method} {path}: the answer is longer than {MAX_BYTES} bytes, or was cut off")
        return answer.status, body.decode(errors="replace"), answer.headers


def _shut_down(sockets: list[socket.socket]) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Cloud(Protocol):
    """The notices of one cloud for the machine that it runs on."""

    def read(self) -> EndNotice | None:
        """Return the newest notice, None if nothing is planned.

        Raises:
            MetadataError: the service did not answer as its documentation describes.
        """


TOKEN_S = 21600  # lifetime of a token of AWS, the longest one


class Aws:
    """Interruptions of spot instances, and recommendations to replace one. Uses IMDSv2 only.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    URL = "http://169.254.169.254"

    def __init__(self, metadata: Metadata, clock: Callable[[], float] = time.time) -> None:
        self._metadata = metadata
        self._token = ""

    def read(self) -> EndNotice | None:
        if (found := self._get("spot/instance-action")) is not None:
            if not found.get("action"):
                raise MetadataError(f"spot/instance-action holds no action: {found}")
            return EndNotice("aws spot/instance-action", _iso_time(found.get("time")))
        # The risk is higher than usual. No time is given, and the interruption may never come.
        found = self._get("events/recommendations/rebalance")
        return EndNotice("aws events/recommendations/rebalance") if found is not None else None

    def _get(self, path: str) -> Mapping[str, Any] | None:
        """Return the object at `path`; None if there is none."""
        for is_last in (False, True):
            if not self._token:
                self._token = self._new_token()
            path_ = f"/latest/meta-data/{path}"
            status, text, _ = self._metadata.get(path_, {"X-aws-ec2-metadata-token": self._token})
            if status == 404:
                return None
            if status == 200:
                return _json_object(path_, text)
            self._token = ""  # 401: it has expired
            if status != 401 or is_last:
                raise _refusal(path_, status, text)
        raise AssertionError

    def _new_token(self) -> str:
        path = "/latest/api/token"
        status, text, _ = self._metadata.get(path, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, "PUT")
        if status != 200 or not re.fullmatch(r"[\x21-\x7e]{1,1024}", text):
            raise _refusal(f"PUT {path}", status, text)
        return text


PREEMPTION_S = 30.0  # from Google's preemption notice to the end of a machine
MAINTENANCE_S = 60.0  # from its notice of maintenance; an hour for machines with GPUs, which is not told apart here


class Gcp:
    """Preemption of spot machines, and maintenance that ends a machine. A live migration is no end.

    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    """

    URL = "http://metadata.google.internal"

    def __init__(self, metadata: Metadata, clock: Callable[[], float] = time.time) -> None:
        self._metadata = metadata
        self._clock = clock
        self._seen_at: dict[str, float] = {}  # key: name of the value; the service gives no times

    def read(self) -> EndNotice | None:
        is_preempted = self._value("preempted", {"TRUE": True, "FALSE": False})
        of_host = {"NONE": False, "MIGRATE_ON_HOST_MAINTENANCE": False, "TERMINATE_ON_HOST_MAINTENANCE": True}
        is_maintained = self._value("maintenance-event", of_host)
        for name, is_announced, notice_s in (
            ("preempted", is_preempted, PREEMPTION_S),
            ("maintenance-event", is_maintained, MAINTENANCE_S),
        ):
            if not is_announced:
                self._seen_at.pop(name, None)
                continue
            return EndNotice(f"gcp {name}", self._seen_at.setdefault(name, self._clock()) + notice_s)
        return None

    def _value(self, name: str, meanings: Mapping[str, bool]) -> bool:
        path = f"/computeMetadata/v1/instance/{name}"
        status, text, headers = self._metadata.get(path, {"Metadata-Flavor": "Google"})
        if status == 404 and name == "maintenance-event":
            return False  # machines without such events
        if status != 200 or text.strip() not in meanings or headers.get("Metadata-Flavor") != "Google":
            raise _refusal(path, status, text)
        return meanings[text.strip()]


ENDS = frozenset({"Reboot", "Redeploy", "Preempt", "Terminate"})
"""Azure's events that end a machine's processes. A Freeze pauses them for a few seconds."""


class Azure:
    """Scheduled events of this machine. They are not approved early: the machine is used until its end.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    URL = "http://169.254.169.254"

    def __init__(self, metadata: Metadata, clock: Callable[[], float] = time.time) -> None:
        self._metadata = metadata
        self._clock = clock
        self._name = ""
        self._started_at: dict[str, float] = {}  # key: event; when it was first seen as started

    def read(self) -> EndNotice | None:
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        events = _json_object(path, self._text(path)).get("Events")
        if not isinstance(events, list):
            raise MetadataError(f"{path}: no list of events")
        if not events:
            return None
        # The list covers all machines of an availability or scale set.
        self._name = self._name or self._text("/metadata/instance/compute/name?api-version=2021-02-01&format=text").strip()
        ours = [e for e in events if isinstance(e, dict) and e.get("EventType") in ENDS and self._name in _strings(e)]
        notices = [EndNotice(f"azure {event['EventType']}", self._begins_at(event)) for event in ours]
        return min(notices, key=lambda notice: notice.taken_at or float("inf"), default=None)

    def _begins_at(self, event: Mapping[str, Any]) -> float:
        """Return the earliest start of an event, in seconds since the epoch; 0 if it is unknown."""
        if event.get("EventStatus") == "Started":
            return self._started_at.setdefault(str(event.get("EventId")), self._clock())
        with contextlib.suppress(TypeError, ValueError, IndexError):
            at = email.utils.parsedate_to_datetime(str(event.get("NotBefore")))
            return _known(at.replace(tzinfo=at.tzinfo or datetime.timezone.utc).timestamp())
        return 0.0

    def _text(self, path: str) -> str:
        status, text, _ = self._metadata.get(path, {"Metadata": "true"})
        if status != 200:
            raise _refusal(path, status, text)
        return text


def _strings(event: Mapping[str, Any]) -> list[Any]:
    resources = event.get("Resources")
    return resources if isinstance(resources, list) else []


def _json_object(path: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"{path}: not JSON, but {text[:100]!r}") from error
    if not isinstance(found, dict):
        raise MetadataError(f"{path}: not an object of JSON, but {text[:100]!r}")
    return found


def _iso_time(text: Any) -> float:
    """Return a time such as 2026-01-31T14:30:00Z in seconds since the epoch; 0 if it cannot be read."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        at = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return _known(at.replace(tzinfo=at.tzinfo or datetime.timezone.utc).timestamp())
    return 0.0


def _known(at: float) -> float:
    """Return a time in seconds since the epoch; 0 for the first and last days of calendars, which mean that none is known."""
    return at if 0.0 < at <= MAX_TIME else 0.0


def _refusal(path: str, status: int, text: str) -> MetadataError:
    return MetadataError(f"{path}: answered with {status}: {' '.join(text.split())[:100]!r}")


CLOUDS: Mapping[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
"""Each cloud by the value of `--notices`."""


def cloud_named(name: str, url: str = "", node: str = "") -> Cloud:
    """Return the reader of a cloud's notices.

    Args:
        url: beginning of the URLs of another metadata service than the cloud's own. `{node}` stands for `node`.

    Raises:
        ValueError: the cloud is unknown, or the URL is malformed.
    """
    if name not in CLOUDS:
        raise ValueError(f"it must be one of {', '.join(CLOUDS)}")
    made = CLOUDS[name]
    return made(Metadata(url.replace("{node}", node) if url else made.URL))


class NoticeWatch:
    """A thread of an agent that reads its cloud's notices, and records them for the agent's workers.

    Args:
        agent_id, host: of the agent, as its workers' records have them.
        owner: the thread ends once this object is gone.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        agent_id: str,
        host: str,
        cloud: Cloud,
        owner: object,
        poll_s: float = POLL_S,
    ) -> None:
        self._journal = Journal(client, keys)
        self._agent_id = agent_id
        self._host = host
        self._cloud = cloud
        self._poll_s = poll_s
        self._trouble = ""
        self._has_read = False
        self._stood: EndNotice | None = None  # a notice without a time that was there at the first reading
        self._stopped = threading.Event()
        self._owner = weakref.ref(owner)
        threading.Thread(target=self._run, name="dlrover-notices", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set() and self._owner() is not None:
            try:
                self._look()
            except EtcdError:
                pass  # the next reading records it
            except Exception as error:  # whatever a service has answered, the next notice must be read
                if not self._trouble:
                    log.warning("run %s: a notice could not be recorded: %r", self._journal.keys.run_id, error)
                self._trouble = repr(error)
            self._stopped.wait(self._poll_s)

    def _look(self) -> None:
        run_id = self._journal.keys.run_id
        try:
            notice = self._cloud.read()
        except MetadataError as error:
            if not self._trouble:
                text = "run %s: notices of this machine's end cannot be read: %s; the service is asked every %g s"
                log.warning(text, run_id, error, self._poll_s)
            self._trouble = str(error)
            return
        if self._trouble:
            log.warning("run %s: notices of this machine's end can be read again", run_id)
            self._trouble = ""
        if not self._has_read:
            # The machine was chosen with it, and most likely so would the next one be.
            self._has_read, self._stood = True, notice if notice is not None and not notice.taken_at else None
        if notice is None or notice == self._stood:
            return
        # Workers that the agent starts after the notice are on the same machine.
        folder = self._journal.keys.workers
        for worker, record in readable_folder(self._journal.client, WorkerRecord, folder, worker_name_of(self._host)).items():
            if record.agent_id == self._agent_id and note_end(self._journal, worker, notice):
                log.warning("run %s: the machine of worker %s %s", run_id, worker, notice)
