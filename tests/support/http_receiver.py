"""A real HTTP server that receives documents, and answers as a test wants it to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

Answer = int | Literal["hang", "drip"]


class Receiver:
    """Receives posted documents. Use as a context manager.

    Attributes:
        documents: those of requests that were answered with 200, in order.
        requests: headers, path and document of every request.
        answers: of the next requests; once used up, `then` answers.
    """

    def __init__(self, *answers: Answer, then: Answer = 200) -> None:
        self.answers, self.then = [*answers], then
        self.documents: list[dict[str, Any]] = []
        self.requests: list[tuple[dict[str, str], str, dict[str, Any]]] = []
        self.is_ending = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def events(self) -> list[str]:
        return [document["event"] for document in self.documents]

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = receiver.answers.pop(0) if receiver.answers else receiver.then
            receiver.requests.append((dict(self.headers.items()), self.path, document))
            if answer == "hang":
                receiver.is_ending.wait(60)
                return
            if answer == "drip":
                self._drip()
                return
            if answer == 200:
                receiver.documents.append(document)
            self.send_response(answer)
            if 300 <= answer < 400:
                self.send_header("Location", f"{receiver.url}/elsewhere")
            self.end_headers()

        def _drip(self) -> None:
            """Send an endless header, slowly enough to keep every read of a socket within its timeout."""
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # the client has given up
                self.connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not receiver.is_ending.wait(0.1):
                    self.connection.sendall(b"x")

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
