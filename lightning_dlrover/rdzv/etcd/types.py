"""Types shared by all users of etcd: errors, connection settings, and the parts of a transaction. Does not import gRPC."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from lightning_dlrover import variables


class EtcdError(RuntimeError):
    """etcd refused a request, or cannot be used as configured."""


class PermissionDeniedError(EtcdError):
    """etcd refuses this to the authenticated user."""


class EtcdUnavailableError(EtcdError):
    """No endpoint responded within the timeout. A write may or may not have been applied."""


class EtcdFullError(EtcdUnavailableError):
    """etcd refuses writes because its database has reached its quota.

    It still serves reads and single deletions, and refreshes, revokes and expires leases. It refuses new leases and, before
    3.4.20 and 3.5.7, every transaction, also one that only reads or deletes.
    """


class LeaseLostError(EtcdError):
    """The lease of a key to be written no longer exists in etcd."""


class UnreadablePasswordError(EtcdUnavailableError):
    """The password file cannot be read at this moment."""


MAX_PATH_BYTES = 107  # maximum length of a socket's path; Linux has room for 108 bytes, including the final zero

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
    """Whether a socket with a name of that many bytes in this folder can be an endpoint."""
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


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """Return host and port of each endpoint in ``host:port,host:port``, each with an optional ``http://`` or ``https://``.

    A Unix socket, ``unix:/path``, counts as port 0 of 127.0.0.1: other hosts reach neither.

    Raises:
        ValueError: a part has no host or no port between 1 and 65535, or an IPv6 address has no brackets.
    """
    endpoints = []
    for part in text.split(","):
        stripped = part.strip()
        if socket_path(stripped) is not None:
            endpoints.append(("127.0.0.1", 0))
            continue
        match = re.fullmatch(r"(?:https?://)?(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@?#]+):([0-9]{1,5})/?", stripped)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(
                f"etcd endpoint {stripped!r} in {text!r} is not host:port; give for example "
                "10.0.0.7:2379 (several separated by commas, IPv6 in brackets: [::1]:2379)"
            )
        endpoints.append((match[1].strip("[]"), int(match[2])))
    return endpoints


def is_loopback(host: str) -> bool:
    """Whether a host name or address means the machine that uses it; other machines cannot reach it by that name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def access_from(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the etcd user and credential files from the environment, by field of `EtcdConfig`."""
    return {name: environ[variable] for name, variable in variables.ACCESS.items() if environ.get(variable)}


@dataclass(frozen=True)
class EtcdConfig:
    """Connection settings for etcd. TLS is used if `ca_cert` is given or the endpoints start with https://."""

    endpoints: str  # host:port,host:port, or unix:/path of a socket on this host
    user: str | None = None
    password_file: str | None = None  # path of a file with the password in its first line; the password itself is not stored
    ca_cert: str | None = None  # path of a PEM file, as are `cert` and `key`
    cert: str | None = None
    cert_key: str | None = None
    timeout_s: float = 5.0  # limit on one operation, retries included

    def __post_init__(self) -> None:
        parse_endpoints(self.endpoints)
        if (self.user is None) != (self.password_file is None):
            raise ValueError("etcd needs both user and password_file, or neither")
        if (self.cert is None) != (self.cert_key is None):
            raise ValueError("a TLS client certificate needs both cert and cert_key")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}, must be above 0")

    @classmethod
    def from_environment(cls, endpoints: str, environ: Mapping[str, str], timeout_s: float = 5.0) -> EtcdConfig:
        """Read the user and the paths of files from the variables that `to_environment` sets."""
        return cls(endpoints, timeout_s=timeout_s, **access_from(environ))

    def to_environment(self) -> dict[str, str | None]:
        """Return the variables that `from_environment` reads; None: not to be set."""
        return {variable: getattr(self, name) for name, variable in variables.ACCESS.items()}

    @property
    def access(self) -> dict[str, str]:
        """The user and the files that are set, by field."""
        return {name: value for name in variables.ACCESS if (value := getattr(self, name)) is not None}

    def of_each_endpoint(self) -> list[EtcdConfig]:
        """Return the settings for each endpoint alone."""
        parts = [part.strip() for part in self.endpoints.split(",")]
        # Without the scheme a single endpoint of several would lose TLS.
        named = [part if "://" in part or not self.uses_tls else f"https://{part}" for part in parts]
        return [replace(self, endpoints=part) for part in named]

    @property
    def uses_tls(self) -> bool:
        return self.ca_cert is not None or self.cert is not None or "https://" in self.endpoints


def read_password(config: EtcdConfig) -> str | None:
    """Read the password at each use: it may change while a job runs, and a password that is not stored cannot leak."""
    if config.password_file is None:
        return None
    what = f"password_file {config.password_file!r} for etcd at {config.endpoints}"
    try:
        lines = Path(config.password_file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EtcdError(f"cannot read {what}: {error}") from error
    if not lines or not lines[0]:
        raise EtcdError(f"cannot use {what}: its first line is empty")
    return lines[0]


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int  # 1 when created, one more per put
    lease_id: int  # id of the key's lease; 0: none


@dataclass(frozen=True)
class Compare:
    """One condition of a transaction; build it with `created`, `modified`, `absent`, `exists` or `none_under`."""

    key: str
    target: Literal["create", "mod"]
    result: Literal["equal", "greater"]
    revision: int
    is_prefix: bool = False  # the condition is about each key that begins with `key`

    def holds(self, entry: KeyValue | None) -> bool:
        """Whether it is true of the key's entry, None if there is none. Not for a prefix."""
        found = (entry.create_revision if self.target == "create" else entry.mod_revision) if entry is not None else 0
        return found > self.revision if self.result == "greater" else found == self.revision


@dataclass(frozen=True)
class _RevisionOf:
    key: str
    target: Literal["create", "mod"]

    def __eq__(self, revision: object) -> Compare:  # type: ignore[override]
        if not isinstance(revision, int):
            raise TypeError(f"a revision is an int, not {type(revision).__name__}")
        return Compare(self.key, self.target, "equal", revision)


def created(key: str) -> _RevisionOf:
    """``created(key) == revision``: the key exists since exactly this revision (0: it does not exist)."""
    return _RevisionOf(key, "create")


def modified(key: str) -> _RevisionOf:
    """``modified(key) == revision``: the key was not written since that revision (0: it does not exist)."""
    return _RevisionOf(key, "mod")


def absent(key: str) -> Compare:
    return Compare(key, "create", "equal", 0)


def none_under(prefix: str) -> Compare:
    return Compare(prefix, "create", "equal", 0, is_prefix=True)


def exists(key: str) -> Compare:
    return Compare(key, "create", "greater", 0)


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class DeletePrefix:
    key: str  # prefix of the keys


@dataclass(frozen=True)
class Get:
    key: str


Op = Put | Delete | DeletePrefix | Get
OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True)
class Txn:
    succeeded: bool
    revision: int
    values: list[KeyValue]  # results of the Gets that found their keys, in order
