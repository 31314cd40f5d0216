"""Endpoints that are Unix sockets, ``unix:/path``: reachable on this host only, and by no user whom its folder keeps out."""

from __future__ import annotations

import http.client
import re
import socket

__all__ = ["MAX_PATH_BYTES", "HTTPOverSocket", "can_hold_sockets", "socket_path"]

MAX_PATH_BYTES = 107
"""Maximum length of a socket's path. Linux has room for 108 bytes, the last of which is zero."""

# Commas separate endpoints, and gRPC reads the path as part of a URL.
_PATH = r"/[A-Za-z0-9_./:@+~=-]+"


def socket_path(endpoint: str) -> str | None:
    """Return the path of an endpoint ``unix:/path``; None if it is not one.

    Raises:
        ValueError: the path is not absolute, is too long, or holds characters that an endpoint cannot have.
    """
    text = endpoint.strip()
    if not text.startswith("unix:"):
        return None
    path = re.sub("^//(?=/)", "", text.removeprefix("unix:"))
    if re.fullmatch(_PATH, path) is None or len(path) > MAX_PATH_BYTES:
        raise ValueError(
            f"etcd endpoint {text!r} is not the path of a Unix socket: give unix:/PATH, absolute, of at most {MAX_PATH_BYTES} "
            "bytes, and without spaces and commas"
        )
    return path


def can_hold_sockets(folder: str, num_further_bytes: int) -> bool:
    """Whether a socket whose name takes that many bytes in this folder can be an endpoint."""
    return re.fullmatch(_PATH, folder) is not None and len(folder) + num_further_bytes <= MAX_PATH_BYTES


class HTTPOverSocket(http.client.HTTPConnection):
    """An HTTP connection through a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
