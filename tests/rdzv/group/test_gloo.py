"""Sockets of gloo, in this process."""

from __future__ import annotations

import socket

from lightning_dlrover.rdzv.group.gloo import inet_sockets, shut_down


def connected_pair(port: int = 0) -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", port))
    client = socket.create_connection(listener.getsockname())
    return listener, client, listener.accept()[0]


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        return sock.recv(1) != b""
    except TimeoutError:
        return True


def test_a_connection_is_shut_down_so_that_both_ends_notice() -> None:
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        fd = client.fileno()
        shut_down(fd, inet_sockets()[fd], set(), 0)
        assert not is_open(client)
        assert not is_open(accepted)


def test_descriptor_reused_by_another_socket_is_left_alone() -> None:
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        shut_down(client.fileno(), inet_sockets()[client.fileno()] + 1, set(), 0)
        assert is_open(client)


def test_connections_to_etcd_and_to_the_own_store_are_spared() -> None:
    """Peers may be connected to our store for a newer round than the severed one."""
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        port = listener.getsockname()[1]
        inodes = inet_sockets()
        shut_down(client.fileno(), inodes[client.fileno()], {port}, 0)
        shut_down(accepted.fileno(), inodes[accepted.fileno()], set(), port)
        shut_down(listener.fileno(), inodes[listener.fileno()], set(), 0)
        assert is_open(client)
        assert is_open(accepted)
        socket.create_connection(listener.getsockname()).close()
