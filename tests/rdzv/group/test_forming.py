"""How a worker reaches the other members while a round forms."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.group.forming import CONNECT_TIMEOUT_S, FEW, _contacts
from lightning_dlrover.rdzv.job.records import Keys


@pytest.mark.parametrize("size", [FEW + 1, 100, 1000])
def test_contacts_of_a_worker_are_few_in_a_round_of_any_size(size: int) -> None:
    members = [f"w{rank}" for rank in range(size)]
    assert max(len(_contacts(members, member)) for member in members) <= 8


@pytest.mark.parametrize("size", [2, FEW, FEW + 1, 100])
def test_both_workers_of_a_connection_are_contacts_of_each_other(size: int) -> None:
    members = [f"w{rank}" for rank in range(size)]
    contacts = {member: set(_contacts(members, member)) - {member} for member in members}
    for member in members[1:]:
        assert members[0] in contacts[member]  # it serves the round's store
        assert all(member in contacts[other] for other in contacts[member] - {members[0]})


ALONE = """
from lightning_dlrover.rdzv import World

with World.from_environment() as world:
    for step in world.steps(1):
        with step:
            print("formed", step.size, flush=True)
"""


LOOKUP_S = 1.5
"""Seconds that the name server takes: longer than the first attempt to reach a store."""


@pytest.fixture
def _slow_name_server() -> Iterator[None]:
    """At 127.0.0.10, a name server that finds no name, and takes its time."""
    is_over = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, ThreadPoolExecutor() as pool:
        try:
            server.bind(("127.0.0.10", 53))
        except OSError as error:
            pytest.skip(f"port 53 cannot be used here: {error}")
        server.settimeout(0.1)

        def answer(question: bytes, asker: tuple[str, int]) -> None:
            if not is_over.wait(LOOKUP_S):
                server.sendto(question[:2] + b"\x81\x83" + question[4:], asker)

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    pool.submit(answer, *server.recvfrom(512))

        serving = pool.submit(serve)
        yield
        is_over.set()
        serving.result(10)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_slow_name_server")
def test_round_forms_although_each_name_is_looked_up_for_longer_than_an_attempt_lasts(
    etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path
) -> None:
    assert LOOKUP_S > 2 * CONNECT_TIMEOUT_S
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.10\n")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DLROVER_RUN_ID": keys.run_id,
        "DLROVER_ENDPOINT": etcd.endpoint,
        "DLROVER_AGENT_ID": "a0",
    }
    mount = f'mount --bind {tmp_path / "resolv.conf"} /etc/resolv.conf && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", ALONE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if "ermitted" in ran.stderr or "ermission" in ran.stderr:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()[-100:]}")
    assert ran.stdout.splitlines() == ["formed 1"], ran.stderr
