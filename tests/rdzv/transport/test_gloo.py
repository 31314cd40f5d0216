"""Sockets of gloo, in this process."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import cast

from lightning_dlrover.rdzv.membership.member import Member, MemberBackend
from lightning_dlrover.rdzv.transport.process_groups import RoundSockets, StoreServer, inet_sockets, shut_down


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
        shut_down(fd, inet_sockets()[fd])
        assert not is_open(client)
        assert not is_open(accepted)


def test_descriptor_reused_by_another_socket_is_left_alone() -> None:
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        shut_down(client.fileno(), inet_sockets()[client.fileno()] + 1)
        assert is_open(client)


def test_severing_a_round_that_forms_shuts_down_no_connection_of_others() -> None:
    server = StoreServer("127.0.0.1", 5.0)
    member = Member(cast(MemberBackend, None))
    sockets = RoundSockets(member, server, timeout_s=1234.0)
    listener, client, accepted = connected_pair()  # listens as the store of another member's
    pair = socket.socketpair()  # as asyncio and multiprocessing open them
    with listener, client, accepted, pair[0], pair[1]:
        sockets.begin_forming(3, store_port=listener.getsockname()[1])
        to_store = socket.create_connection(listener.getsockname())
        elsewhere, users, peer = connected_pair()
        of_gloo, gloos, gloos_peer = connected_pair()
        gloos.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1234, 0))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        to_own_store = socket.create_connection(("127.0.0.1", server.port))  # of a peer, for a newer round
        late_pair = socket.socketpair()
        opened = [to_store, elsewhere, users, peer, of_gloo, gloos, gloos_peer, datagrams, to_own_store, *late_pair]
        with contextlib.ExitStack() as stack:
            for each in opened:
                stack.enter_context(each)
            sockets.sever(3)
            assert {fd for fd, _ in sockets.severed} == {to_store.fileno(), gloos.fileno()}
            assert not is_open(gloos_peer)
            assert all(map(is_open, [client, users, peer, to_own_store, *pair, *late_pair]))
            sockets.end_forming()
