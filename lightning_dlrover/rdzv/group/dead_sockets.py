"""Keep gloo's thread for sockets from spinning on those that were shut down.

Gloo removes a broken connection from its epoll when it reads the end of its data. It never reads that of a connection whose
message it had received in part when the operation failed: the memory for the rest is gone. Epoll then reports the socket again
and again, which takes a whole core until the group is destroyed, or for ever if that hangs. Here such sockets are made to be
reported once more, and then no longer. They stay registered, as gloo removes them itself when the group is destroyed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
from collections.abc import Iterable
from pathlib import Path

__all__ = ["silence"]

EPOLL_CTL_MOD = 3


class _Event(ctypes.Structure):
    """`struct epoll_event`, whose data gloo takes for a pointer. Python's own `epoll` would overwrite it."""

    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def silence(sockets: Iterable[tuple[int, int]]) -> int:
    """Let no epoll of this process report these sockets any more, except once; return the number of those found.

    Call it only while nothing else closes them: a socket that reuses the number of a closed one would be silenced in its place.

    Args:
        sockets: (fd, inode) pairs of connections that were shut down. Closed ones are left out.
    """
    dead = {fd for fd, inode in sockets if _inode(fd) == inode}
    if not dead:
        return 0
    modify = ctypes.CDLL(None, use_errno=True).epoll_ctl
    num_found = 0
    for epoll, fd, data in _registered():
        if fd in dead:
            event = _Event(select.EPOLLIN | select.EPOLLONESHOT, data)
            num_found += modify(epoll, EPOLL_CTL_MOD, fd, ctypes.byref(event)) == 0
    return num_found


def _inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(fd).st_ino
    return None


def _registered() -> list[tuple[int, int, int]]:
    """Return the file descriptors in all epolls of this process: (epoll, fd, data)."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{name}").read_text()
                pairs = re.findall(r"^tfd:\s*(\d+)\s.*?data:\s*([0-9a-f]+)", text, re.MULTILINE)
                found += [(int(name), int(fd), int(data, 16)) for fd, data in pairs]
    return found
