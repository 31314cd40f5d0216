"""A shared etcd with TLS, users and roles. Only clients with the right files are admitted, and no secret leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters

from lightning_dlrover.rdzv.agents.rendezvous import create_backend
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.secure_etcd import PASSWORD, SecureEtcd, secure_etcd
from tests.support.torchrun_agent import StartAgent
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    with secure_etcd(tmp_path_factory.mktemp("secured")) as etcd:
        yield etcd


def conf_of(access: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in access.items())


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("SUM", total.item(), flush=True)
dist.destroy_process_group()
"""


def test_torchrun_trains_with_certificate_user_and_role(secured: SecureEtcd, start_agent: StartAgent) -> None:
    conf = f"last_call_timeout=0,{conf_of(secured.access)}"
    agents = [start_agent(GLOO, nnodes="2", conf=conf, endpoint=secured.endpoint) for _ in range(2)]
    assert [agent.wait(90) for agent in agents] == [0, 0], agents[0].output + agents[1].output
    assert all(agent.lines("SUM") == ["SUM 2.0"] for agent in agents)
    assert PASSWORD not in agents[0].output + agents[1].output


def join(endpoint: str, run_id: str, access: dict[str, str]) -> None:
    handler = create_backend()(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 1, **access))
    try:
        handler.next_rendezvous()
    finally:
        handler.shutdown()


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"password_file": "wrong.password"}, "authentication failed.*check user and password"),
        ({"user": None, "password_file": None}, "authentication enabled: give a user .*user=...,password_file=..."),
        ({"ca_cert": "other-ca.pem"}, "that ca_cert belongs to the authority that signed"),
        ({"cert": None, "cert_key": None}, r"whether etcd requires one"),
        ({"ca_cert": None, "cert": None, "cert_key": None}, r"whether etcd requires TLS \(ca_cert\)"),
        ({"key_prefix": "/others"}, "permission denied; grant the user readwrite there, or change key_prefix"),
    ],
)
def test_missing_credential_is_named_within_seconds(
    changed: dict[str, str | None], told: str, secured: SecureEtcd, run_id: str
) -> None:
    timeout_s = "2.5" if "cert" in changed or "ca_cert" in changed else "3"  # a connection that is refused is tried to the end
    access: dict[str, Any] = {**secured.access, "etcd_timeout": timeout_s, "join_timeout": "5", "last_call_timeout": "0"}
    for name, value in changed.items():
        if value is None:
            del access[name]
        else:
            access[name] = value if name in ("user", "key_prefix") else str(secured.folder / value)
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=f"(?s){told}") as refused:
        join(secured.endpoint, run_id, access)
    assert time.monotonic() - began < 20
    assert PASSWORD not in str(refused.value)


def test_a_role_confines_its_users_to_the_prefix(secured: SecureEtcd, keys: Keys) -> None:
    with EtcdClient(EtcdConfig(secured.endpoint, **secured.access)) as client:
        client.put(keys.job, b"mine")
        for forbidden in (
            lambda: client.put("/other/key", b""),
            lambda: client.get("/other/key"),
            lambda: client.get_prefix("/"),
            lambda: client.delete_prefix("/dlroves/"),
            lambda: Mirror(client, "/dlrove"),
        ):
            with pytest.raises(EtcdError, match="permission denied"):
                forbidden()
        assert client.delete(keys.job)


def test_a_token_that_has_run_out_is_renewed_and_watches_go_on(tmp_path: Path, keys: Keys) -> None:
    with (
        secure_etcd(tmp_path, token_ttl_s=1) as etcd,
        EtcdClient(EtcdConfig(etcd.endpoint, **etcd.access)) as client,
        EtcdClient(EtcdConfig(etcd.endpoint, **etcd.access)) as other,
    ):
        lease = client.lease(2).keep_alive()
        client.put(keys.job, b"leased", lease)
        seen = threading.Event()
        with Mirror(client, keys.live, on_change=seen.set) as mirror:
            for number in range(2):
                seen.clear()
                # The connection idles beyond the token's lifetime. Only etcd's next refusal shows that the token has expired.
                assert not seen.wait(2.5)
                other.put(keys.round, str(number).encode())
                wanted = str(number).encode()
                eventually(
                    lambda: (entry := mirror.snapshot().get(keys.round)) is not None and entry.value == wanted,  # noqa: B023
                    "the write is seen",
                    20,
                )
            assert not lease.lost.is_set()
            assert keys.job in mirror.snapshot()


def test_a_changed_password_is_picked_up_while_the_client_lives(tmp_path: Path, keys: Keys) -> None:
    with secure_etcd(tmp_path) as etcd:
        access = {**etcd.access, "password_file": str(tmp_path / "wrong.password")}
        with EtcdClient(EtcdConfig(etcd.endpoint, **access)) as client:
            with pytest.raises(EtcdError, match="authentication failed"):
                client.put(keys.job, b"")
            (tmp_path / "wrong.password").write_text(PASSWORD)
            client.put(keys.job, b"")


def test_a_password_that_changes_in_etcd_before_its_file_does_costs_no_lease(tmp_path: Path, keys: Keys) -> None:
    with secure_etcd(tmp_path) as etcd:
        root = {**etcd.access, "user": "root", "password_file": str(tmp_path / "root.password")}
        with (
            EtcdClient(EtcdConfig(etcd.endpoint, **etcd.access)) as client,
            EtcdClient(EtcdConfig(etcd.endpoint, **root)) as admin,
            ThreadPoolExecutor(1) as pool,
        ):
            lease = client.lease(4).keep_alive()
            client.put(keys.job, b"leased", lease)
            change = etcdrpc.AuthUserChangePasswordRequest(name="trainer", password="another")
            admin.caller.call("change a password", "Auth", "UserChangePassword", change)
            writing = pool.submit(client.put, keys.round, b"1")
            with pytest.raises(TimeoutError):
                writing.result(1.0)
            (tmp_path / "trainer.password").write_text("another\n")
            writing.result(10)
            assert client.get(keys.job) is not None
            assert not lease.lost.is_set()


def test_replaced_certificates_are_read_again(secured: SecureEtcd, keys: Keys, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes((secured.folder / "other-ca.pem").read_bytes())
    with EtcdClient(EtcdConfig(secured.endpoint, **{**secured.access, "ca_cert": str(authority)}, timeout_s=2.0)) as client:
        with pytest.raises(EtcdError, match="handshake failed"):
            client.check()
        authority.write_bytes((secured.folder / "ca.pem").read_bytes())
        client.check()
        authority.unlink()  # missing for a moment, as during a replacement
        client.caller.connections.drop(client.caller.connections.current())
        assert client.put(keys.job, b"")


def test_unreadable_password_is_waited_for(secured: SecureEtcd, keys: Keys, tmp_path: Path) -> None:
    password, away = tmp_path / "password", tmp_path / "away"
    password.write_text(f"{PASSWORD}\n")
    access = {**secured.access, "password_file": str(password)}
    with (
        EtcdClient(EtcdConfig(secured.endpoint, **access)) as client,
        EtcdClient(EtcdConfig(secured.endpoint, **secured.access)) as writer,
        Mirror(client, keys.live) as mirror,
    ):
        password.rename(away)
        client.caller._token = None
        mirror._cancel_watch()  # the new subscription needs a token
        eventually(lambda: not mirror.healthy, "the mirror notices", 20)
        returns = threading.Timer(0.5, away.rename, [password])
        returns.start()
        client.put(keys.plan, b"own")
        writer.put(keys.job, b"other")
        mirror.wait_for(lambda found: found.get(keys.job), 10)
        returns.join()
