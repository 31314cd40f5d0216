"""Another user's access to a job on this machine: a process drops to that user, then tries to reach everything."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STRANGER = 61_023
"""User id without a name, files or processes on this machine."""


@dataclass
class Attempts:
    """Results by target: ``refused``, an errno's name, or a text that names what was reached."""

    sockets: dict[str, str] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)  # start of the answer to an HTTP request
    reads: dict[str, str] = field(default_factory=dict)
    writes: dict[str, str] = field(default_factory=dict)
    secrets_of_processes: dict[str, str] = field(default_factory=dict)  # environments and memory
    command_lines: dict[str, str] = field(default_factory=dict)


def attempts_of_a_stranger(pids: list[int], sockets: list[str], ports: list[tuple[str, int]], paths: list[str]) -> Attempts:
    """Try, as `STRANGER`, to reach processes, sockets, TCP ports, files and folders. This process must be root."""
    given = {"pids": pids, "sockets": sockets, "ports": ports, "paths": paths}
    command = [sys.executable, __file__, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return Attempts(**json.loads(done.stdout))


def _result(attempt: Callable[[], object]) -> str:
    try:
        return f"reached: {attempt()}"
    except OSError as error:
        return "refused" if isinstance(error, PermissionError) else errno.errorcode.get(error.errno or 0, str(error))
    except http.client.HTTPException as error:
        return f"reached: {error!r}"


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        probe.connect(path)


def _page(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=0.5)
    try:
        connection.request("GET", "/version")
        return connection.getresponse().read(1000).decode(errors="replace")
    except TimeoutError:
        return "no answer"
    finally:
        connection.close()


def _read(path: str) -> object:
    return os.listdir(path) if os.path.isdir(path) else len(Path(path).read_bytes()[:1])


def _write(path: str) -> None:
    if os.path.isdir(path):
        file = os.path.join(path, f"stranger-{os.getpid()}")
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(file)
    else:
        os.close(os.open(path, os.O_WRONLY))


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    "localhost".encode("idna")  # imported now, as the interpreter's own folder may be closed to others
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    found = Attempts()
    for path in given["sockets"]:
        found.sockets[path] = _result(lambda: _connect(path))  # noqa: B023
    for host, port in given["ports"]:
        found.ports[f"{host}:{port}"] = _result(lambda: _page(host, port))  # noqa: B023
    for path in given["paths"]:
        found.reads[path] = _result(lambda: _read(path))  # noqa: B023
        found.writes[path] = _result(lambda: _write(path))  # noqa: B023
    for pid in given["pids"]:
        for name in ("environ", "mem", "fd", "map_files"):
            found.secrets_of_processes[f"/proc/{pid}/{name}"] = _result(lambda: _read(f"/proc/{pid}/{name}"))  # noqa: B023
        with contextlib.suppress(OSError):  # it has ended
            found.command_lines[str(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
