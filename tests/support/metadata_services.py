"""The metadata services of AWS, Google and Azure on this machine, as their documentation describes them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

CloudName = Literal["aws", "gcp", "azure"]
Fault = Literal["", "hang", "trickle", "garbage", "empty", "huge", "cut off", "redirect", "error", "foreign"]

NO_SUCH_PAGE = '<?xml version="1.0" encoding="iso-8859-1"?>\n<html><head><title>404 - Not Found</title></head></html>\n'


@dataclass
class Plans:
    """What a cloud plans for one machine."""

    values: dict[str, str] = field(default_factory=dict)  # texts of AWS and Google by the last part of their paths
    events: list[dict[str, Any]] = field(default_factory=list)  # of Azure


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataService:
    """A metadata service that listens on a port of this machine, for several machines: each has a folder of its URLs."""

    def __init__(self, cloud: CloudName) -> None:
        self.cloud = cloud
        self.fault: Fault = ""
        self.machines: dict[str, Plans] = {}
        self.tokens: dict[str, float] = {}  # AWS: time at which each ends
        self.num_requests = 0
        self.closing = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client has given up
                    service.serve(self, self.command)

            do_PUT = do_GET

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The value of DLROVER_METADATA_URL; `{node}` is replaced by the machine's name."""
        return f"http://127.0.0.1:{self._server.server_port}/{{node}}"

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def plans(self, machine: str) -> Plans:
        return self.machines.setdefault(machine, Plans())

    def announce(self, machine: str, taken_at: float) -> None:
        """Plan the end of a machine: an interruption of a spot instance, a preemption, or a Preempt event."""
        plans = self.plans(machine)
        match self.cloud:
            case "aws":
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(taken_at))
                plans.values["instance-action"] = json.dumps({"action": "terminate", "time": at})
            case "gcp":
                plans.values["preempted"] = "TRUE"
            case "azure":
                plans.events.append(azure_event("Preempt", machine, formatdate(taken_at, usegmt=True)))

    def serve(self, request: BaseHTTPRequestHandler, method: str) -> None:
        self.num_requests += 1
        url = urlsplit(request.path)
        _, machine, *path = url.path.split("/")
        answer = FAULTS[self.fault](self) if self.fault in FAULTS else None
        if answer is None:
            headers = {name.lower(): value for name, value in request.headers.items()}
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            answer = CLOUDS[self.cloud](self, machine, "/".join(path), method, headers, query)
        body = answer.text.encode()
        request.send_response(answer.status)
        for name, value in answer.headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body) * (2 if self.fault == "cut off" else 1)))
        request.end_headers()
        if self.fault == "trickle":
            for byte in body * 1000:
                request.wfile.write(bytes([byte]))
                request.wfile.flush()
                if self.closing.wait(0.2):
                    return
        request.wfile.write(body)
        request.close_connection = True


def _hang(service: MetadataService) -> None:
    service.closing.wait(60.0)


FAULTS: Mapping[str, Callable[[MetadataService], Answer | None]] = {
    "hang": _hang,
    "garbage": lambda _: Answer(200, "<html>Welcome to the hotel's network</html>"),
    "foreign": lambda _: Answer(200, '["NONE"]'),
    "empty": lambda _: Answer(200, ""),
    "huge": lambda _: Answer(200, "{" + " " * 200_000 + "}"),
    "redirect": lambda _: Answer(302, "", {"Location": "http://127.0.0.1:1/"}),
    "error": lambda _: Answer(500, "internal error"),
}


def _aws(
    service: MetadataService, machine: str, path: str, method: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> Answer:
    if "x-forwarded-for" in headers:
        return Answer(403, "")
    if path == "latest/api/token":
        ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
            return Answer(405 if method != "PUT" else 400, "")
        token = uuid.uuid4().hex
        service.tokens[token] = time.monotonic() + int(ttl)
        return Answer(200, token, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": ttl})
    if service.tokens.get(headers.get("x-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
        return Answer(401, NO_SUCH_PAGE.replace("404 - Not Found", "401 - Unauthorized"))
    known = ("latest/meta-data/spot/instance-action", "latest/meta-data/events/recommendations/rebalance")
    value = service.plans(machine).values.get(path.rpartition("/")[2]) if path in known else None
    return Answer(200, value) if value is not None else Answer(404, NO_SUCH_PAGE)


def _gcp(
    service: MetadataService, machine: str, path: str, method: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> Answer:
    own = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return Answer(403, "<html><title>Error 403 (Forbidden)!!1</title></html>", own)
    values = {"preempted": "FALSE", "maintenance-event": "NONE", **service.plans(machine).values}
    folder, _, name = path.rpartition("/")
    if folder != "computeMetadata/v1/instance" or name not in values:
        return Answer(404, "<html><title>Error 404 (Not Found)!!1</title></html>", own)
    return Answer(200, values[name], own)


def azure_event(kind: str, machine: str, not_before: str, status: str = "Scheduled") -> dict[str, Any]:
    return {
        "EventId": str(uuid.uuid4()).upper(),
        "EventStatus": status,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def _azure(
    service: MetadataService, machine: str, path: str, method: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> Answer:
    if headers.get("metadata") != "true":
        return Answer(400, '{"error":"Bad request. Required metadata header not specified"}')
    if not query.get("api-version"):
        return Answer(400, '{"error":"Bad request. api-version was not specified in the request"}')
    if path == "metadata/instance/compute/name" and query.get("format") == "text":
        return Answer(200, machine)
    if path == "metadata/scheduledevents":
        events = [event for plans in service.machines.values() for event in plans.events]  # of all machines of a set
        return Answer(200, json.dumps({"DocumentIncarnation": len(events), "Events": events}))
    return Answer(404, '{ "error": "Not found" }')


CLOUDS: Mapping[CloudName, Callable[..., Answer]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
