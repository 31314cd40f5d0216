"""The web server of `dlrover serve`: pages, streams of events, metrics, recommendations, and changes with a token.

Reads need no password, so the server listens on loopback unless told otherwise. A request is answered only if its Host header
names this server: otherwise a web site could read the page through a name that it lets point to this address. Changes need the
token in a header, and are refused from other sites. See docs/reference/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_dlrover.dashboard.hub import Hub, job_fields, job_row, pool_rows
from lightning_dlrover.pool.view import POOLS_FOLDER
from lightning_dlrover.report.view_model import ShownJob
from lightning_dlrover.report.watcher import Watcher

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a request: the windows of a job for a recommendation."""

MAX_VIEWERS = 200
"""Maximum number of pages that are open at once."""

MIN_TOKEN = 16
"""Minimum number of characters of a token."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    ]
)
"""Content security policy: the page's own files, and nothing inline."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

_FILES = {"page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}

Action = Callable[[str, Mapping[str, Any], bool], str]
"""Changes a job, given its name, the fields of the request, and whether only the expected effects are asked for.

Returns what was done, or would be, in words. Raises `Refused` with the reason."""


class Refused(Exception):
    """A request cannot be carried out. The message is shown to the user."""

    def __init__(self, text: str, status: int = 409) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Who may ask, and who may change jobs.

    Args:
        hosts: names of this server in addition to loopback and addresses, in lower case.
        token: allows changes; empty: nobody may change anything.
    """

    hosts: frozenset[str] = frozenset()
    token: str = ""

    def names_this_server(self, host: str) -> bool:
        """Whether a Host header names this server: by an address, as localhost, or by one of its names."""
        try:
            name = (urlsplit(f"//{host}").hostname or "") if host else ""
            if name == "localhost" or name in self.hosts:
                return True
            ipaddress.ip_address(name)  # a site cannot let an address point elsewhere
        except ValueError:
            return False
        return True

    def may_change(self, headers: Headers) -> bool:
        """Whether a request has the token. The time of the comparison does not depend on the token."""
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        return bool(self.token) and hmac.compare_digest(given.encode(), self.token.encode())


def comes_from_this_site(headers: Headers) -> bool:
    """Whether a request that writes was made by the server's own page, or by a program that is no browser."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def read_token(file: Path) -> str:
    """Return the token in a file. A missing file is made, with a random token, readable by this user only.

    Raises:
        Refused: the token is too short, or others may read it.
        OSError: the file cannot be read or made.
    """
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise Refused(f"--token-file {file} can be read by other users; `chmod 600 {file}` prevents that")
    token = file.read_text().strip()
    if len(token) < MIN_TOKEN:
        raise Refused(
            f"--token-file {file} has a token of {len(token)} characters; use {MIN_TOKEN} or more, or remove the file to have "
            "one made"
        )
    return token


class _Guard:
    """Refuses requests under foreign names and writes of foreign sites, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        answer: ASGIApp = self._app
        if not self._access.names_this_server(headers.get("host", "")):
            text = "this server has another name; `dlrover serve --allow-host NAME` adds one"
            answer = JSONResponse({"error": text}, 421)
        elif (scope["method"] not in ("GET", "HEAD") and not comes_from_this_site(headers)) or (
            scope["path"].startswith("/api/") and headers.get("sec-fetch-site") == "cross-site"
        ):
            answer = JSONResponse({"error": "requests of other sites are refused"}, 403)
        await answer(scope, receive, send_guarded)


Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    watcher: Watcher,
    access: Access,
    actions: Mapping[str, Action] | None = None,
    scrape: Callable[[], bytes] | None = None,
    recommend: Callable[[Any], dict[str, Any]] | None = None,
    openapi: Mapping[str, Any] | None = None,
) -> Starlette:
    """Return the application of the server.

    Args:
        watcher: outlives it.
        actions: changes of a job, by name.
        scrape: returns the page of metrics; None: there is none.
        recommend: answers a request for a recommendation. Raises `Refused`, or ValueError for fields that make no sense.
        openapi: description of the interface.
    """
    actions = actions or {}
    hub = Hub(watcher, {"control": bool(access.token)})
    folder = resources.files(__package__) / "page"
    files = {name: (folder / name).read_bytes() for name in ("page.html", *_FILES)}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(hub.run())
        try:
            yield
        finally:
            running.cancel()

    async def page(_: Request) -> Response:
        return Response(files["page.html"], media_type="text/html; charset=utf-8")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            return _error("there is no such file", 404)
        return Response(files[name], media_type=_FILES[name])

    async def events(request: Request) -> Response:
        if hub.num_viewers >= MAX_VIEWERS:
            return _error(f"{MAX_VIEWERS} pages are open already; close some", 503)
        return StreamingResponse(hub.stream(request.query_params.get("job")), media_type="text/event-stream")

    async def jobs(_: Request) -> Response:
        found = await asyncio.to_thread(watcher.jobs)
        pools = pool_rows(watcher.entries_below(f"{POOLS_FOLDER}/"))
        sources = [{"place": each.place, "is_connected": each.is_connected, "problem": each.problem} for each in found.sources]
        return JSONResponse({"jobs": [job_row(each) for each in found.jobs], "pools": pools, "sources": sources})

    async def job(request: Request) -> Response:
        seen = await asyncio.to_thread(watcher.job, request.path_params["name"])
        if seen.job is None:
            return _error(seen.source.problem or "no such job", 404)
        return JSONResponse({**job_fields(seen.job), "workers": _workers(seen.job)})

    async def change(request: Request) -> Response:
        action = actions.get(request.path_params["action"])
        if action is None:
            return _error("there is no such action", 404)
        if not access.may_change(request.headers):
            text = "this page is read-only; `dlrover serve --token-file FILE` allows changes" if not access.token else ""
            return _error(text or "the token is wrong", 403 if not access.token else 401)
        body = await _body(request)
        is_dry = body.pop("dry_run", False) is True
        text = await asyncio.to_thread(action, request.path_params["name"], body, is_dry)
        return JSONResponse({"text": text})

    async def metrics(_: Request) -> Response:
        if scrape is None:
            return _error("metrics need the package prometheus-client: pip install 'lightning-dlrover[metrics]'", 404)
        return Response(await asyncio.to_thread(scrape), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def recommendation(request: Request) -> Response:
        if recommend is None:
            return _error("recommendations are switched off", 404)
        body = await _body(request)
        return JSONResponse(await asyncio.to_thread(recommend, body))

    async def description(_: Request) -> Response:
        return JSONResponse(dict(openapi or {}))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def no_icon(_: Request) -> Response:
        return Response(status_code=204)

    routes = [
        Route("/", page),
        Route("/job/{name}", page),
        Route("/static/{name}", file),
        Route("/api/events", events),
        Route("/api/jobs", jobs),
        Route("/api/jobs/{name}", job),
        Route("/api/jobs/{name}/{action}", change, methods=["POST"]),
        Route("/metrics", metrics),
        Route("/v1/recommend", recommendation, methods=["POST"]),
        Route("/openapi.json", description),
        Route("/healthz", health),
        Route("/favicon.ico", no_icon),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={Refused: _refused, ValueError: _invalid})
    app.add_middleware(_Guard, access=access)
    app.state.hub = hub
    return app


def _workers(job: ShownJob) -> list[dict[str, Any]]:
    return [dict(vars(worker), parts=vars(worker.parts) if worker.parts is not None else None) for worker in job.workers]


async def _body(request: Request) -> dict[str, Any]:
    """Return the fields of a request. Raise `Refused` if it is too large, or no JSON object."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused("send JSON, with Content-Type: application/json", 415)
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise Refused(f"the request is larger than {MAX_BODY_BYTES >> 20} MiB; send fewer windows", 413)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {error}", 400) from error
    if not isinstance(found, dict):
        raise Refused("the request is not a JSON object", 400)
    return found


def _error(text: str, status: int) -> Response:
    return JSONResponse({"error": text}, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(str(error), error.status)


async def _invalid(_: Request, error: Exception) -> Response:
    return _error(str(error), 400)


class PageServer(uvicorn.Server):
    """Ends the streams of all viewers first when it is asked to end: they would go on for ever."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False, proxy_headers=False
        )
        super().__init__(config)
        self._hub: Hub = app.state.hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, then the server."""
        await self._hub.close()
        await super().shutdown(sockets)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0: any free one. Raise `Refused` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        raise Refused(f"{host}:{port} cannot be used: {error.strerror}; choose another --port") from error
    return made


def names_of(host: str, allowed: Collection[str]) -> frozenset[str]:
    """Return the names by which requests may call a server that listens at this address."""
    own = {socket.gethostname().lower(), socket.getfqdn().lower()} if not host.startswith("127.") and host != "::1" else set()
    return frozenset({*own, *(name.lower() for name in allowed)})
