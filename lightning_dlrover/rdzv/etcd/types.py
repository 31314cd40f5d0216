"""Connection settings for etcd: endpoints, user, password and certificates."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.unix_socket import socket_path

__all__ = ["EtcdConfig", "access_from", "is_loopback", "parse_endpoints", "read_password"]


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
