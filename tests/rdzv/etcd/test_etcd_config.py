"""Validation of etcd's addresses and passwords."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, is_loopback, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("localhost:2379", [("localhost", 2379)]),
        ("http://10.0.0.1:2379", [("10.0.0.1", 2379)]),
        ("a:1, b:65535", [("a", 1), ("b", 65535)]),
        ("unix:/run/etcd.sock:0", [("127.0.0.1", 0)]),
        ("[::1]:2379,https://[fe80::2]:1/", [("::1", 2379), ("fe80::2", 1)]),
    ],
)
def test_endpoints_are_read_as_host_and_port(text: str, endpoints: list[tuple[str, int]]) -> None:
    assert parse_endpoints(text) == endpoints


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost", "LOCALHOST", "localhost."])
def test_a_machines_own_name_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::2", "host", "localhost.example.org", ""])
def test_a_name_that_others_can_reach_is_no_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("text", ["", "host", "host:", ":2379", "host:0", "host:65536", "::1:2379", "a:1,,b:2", "a:1/x"])
def test_malformed_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port; give for example"):
        parse_endpoints(text)


@pytest.mark.parametrize("text", ["unix:", "unix:relative", "unix:/with space", "unix:/" + "x" * 107])
def test_a_path_that_is_no_socket_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match="give unix:/PATH, absolute, of at most 107 bytes"):
        parse_endpoints(text)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush\n")
    client = EtcdClient(EtcdConfig("a:1", user="u", password_file=str(file)))
    assert "hush" not in repr(client)
    assert "hush" not in repr(vars(client))


@pytest.mark.parametrize("content", [None, b"", b"\nsecond line", b"\xff\xfe"])
def test_a_file_that_holds_no_password_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EtcdError, match=f"password_file '{file}' for etcd at a:1"):
        EtcdClient(EtcdConfig("a:1", user="u", password_file=str(file)))
