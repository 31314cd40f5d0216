"""A random password for an etcd that serves one job, for clients that a Unix socket cannot reach."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from lightning_dlrover.rdzv.etcd.caller import Caller
from lightning_dlrover.rdzv.etcd.config import EtcdConfig, read_password
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc

__all__ = ["USER", "make_password", "require_password"]

USER = "root"
"""User of a job's own etcd. It has no other users, so none needs fewer permissions."""


def make_password(file: Path) -> None:
    """Write a random password into a file that only this user reads. A file that is there is kept.

    Raises:
        OSError: the file cannot be written.
    """
    # Whole or not at all, as the next `dlrover run` keeps what it finds.
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with open(unfinished, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as written:
        written.write(secrets.token_hex(32) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink()


def require_password(endpoint: str, file: Path) -> None:
    """Let an etcd without users refuse everyone who does not know the password in a file.

    Raises:
        EtcdError: etcd does not answer, or has users already.
    """
    access = EtcdConfig(endpoint, USER, str(file))
    caller = Caller(EtcdConfig(endpoint))
    try:
        add = etcdrpc.AuthUserAddRequest(name=USER, password=read_password(access))
        caller.call("create a user", "Auth", "UserAdd", add)
        caller.call("create a role", "Auth", "RoleAdd", etcdrpc.AuthRoleAddRequest(name="root"))
        caller.call("grant a role", "Auth", "UserGrantRole", etcdrpc.AuthUserGrantRoleRequest(user=USER, role="root"))
        caller.call("require a password", "Auth", "AuthEnable", etcdrpc.AuthEnableRequest())
    finally:
        caller.close()
