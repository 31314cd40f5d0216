"""An etcd with a quota of a few MB, filled by others; and one that refuses writes as if its database were full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc
from lightning_dlrover.rdzv.etcd.health import alarms_of
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, find_binary
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdFullError
from tests.support.waiting import eventually

OTHERS = "/others/"
"""Folder of keys that fill an etcd."""


@contextmanager
def etcd_with(folder: Path, *options: str) -> Iterator[EmbeddedEtcd]:
    """Run an etcd with further options."""
    binary = folder / "etcd.sh"
    binary.write_text(f'#!/bin/sh\nexec {find_binary()} "$@" {" ".join(options)}\n')
    binary.chmod(0o755)
    with EmbeddedEtcd(binary=str(binary)) as server:
        yield server


@contextmanager
def small_etcd(folder: Path) -> Iterator[tuple[EmbeddedEtcd, EtcdClient]]:
    """Run an etcd with a quota of 4 MiB; yield it with the client of another user."""
    with etcd_with(folder, f"--quota-backend-bytes={4 << 20}") as server, EtcdClient(EtcdConfig(server.endpoint)) as client:
        yield server, client


def commit(client: EtcdClient) -> None:
    """Have etcd write to its file, which it does every 100 ms otherwise. Only then its size is up to date."""
    client.caller.call("commit", "Maintenance", "Hash", etcdrpc.HashRequest())


def fill(client: EtcdClient) -> None:
    """Write other people's keys until etcd refuses a write and has raised its alarm."""

    def is_refused() -> bool:
        try:
            client.put(f"{OTHERS}{os.urandom(4).hex()}", b"x" * 100_000)
        except EtcdFullError:
            return True
        return False

    eventually(is_refused, "a refused write", 60)  # etcd looks at its size when it commits
    eventually(lambda: "NOSPACE" in alarms_of(client.caller), "the alarm", 10)


def make_room(client: EtcdClient) -> None:
    """Delete other people's keys, and give their room back by the commands that every message about a full etcd names."""
    client.delete_prefix(OTHERS)
    revision = client.get_prefix(OTHERS)[0]
    for command in (["compact", str(revision)], ["defrag"], ["alarm", "disarm"]):
        etcdctl = [str(Path(find_binary()).with_name("etcdctl")), f"--endpoints={client.config.endpoints}", *command]
        done = subprocess.run(
            etcdctl, env={**os.environ, "ETCDCTL_API": "3"}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def full(client: EtcdClient) -> Iterator[None]:
    """Raise etcd's alarm by hand. Unlike a database at its quota, etcd then takes transactions that only read or delete."""
    _alarm(client, etcdrpc.AlarmRequest.ACTIVATE)
    try:
        yield
    finally:
        _alarm(client, etcdrpc.AlarmRequest.DEACTIVATE)


def _alarm(client: EtcdClient, action: int) -> None:
    status = client.caller.call("read the status", "Maintenance", "Status", etcdrpc.StatusRequest())
    request = etcdrpc.AlarmRequest(action=action, memberID=status.header.member_id, alarm=etcdrpc.NOSPACE)
    client.caller.call("change an alarm", "Maintenance", "Alarm", request)
