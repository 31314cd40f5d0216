"""The exchange of hellos through a round's store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import pytest

from lightning_dlrover.rdzv.group.forming import await_hellos, missing_hellos, publish_hello
from lightning_dlrover.rdzv.transport.torch_names import PrefixStore, TCPStore


class CountedStore:
    """A real store that counts the keys of one worker's requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_requests = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*args: Any) -> Any:
            self.num_requests += len(args[0]) if isinstance(args[0], list) else 1
            return getattr(self._store, name)(*args)

        return request


@pytest.fixture
def store() -> Any:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return PrefixStore("round/1", server)


def test_every_member_reads_the_hellos_of_all(store: Any) -> None:
    members = ["a", "b", "c"]
    for number, worker in enumerate(members):
        assert missing_hellos(store, members) == members[number:]
        publish_hello(store, members, worker, worker.encode() * number)
    assert await_hellos(store, members, 1.0) == {"a": b"", "b": b"b", "c": b"cc"}


@pytest.mark.parametrize("size", [3, 24, 200])
def test_requests_of_all_members_grow_only_as_their_number(store: Any, size: int) -> None:
    members = [f"w{number}" for number in range(size)]
    requests = Counter[str]()
    for worker in members:
        counted: Any = CountedStore(store)
        publish_hello(counted, members, worker, b"hello")
        requests[worker] += counted.num_requests
    for worker in members:
        counted = CountedStore(store)
        assert len(await_hellos(counted, members, 1.0)) == size
        requests[worker] += counted.num_requests
    assert {requests[worker] for worker in members[:-1]} == {4}
    assert requests[members[-1]] == 4 + size + 1  # it reads all hellos and writes the list


def test_list_with_other_names_is_refused(store: Any) -> None:
    publish_hello(store, ["a"], "a", b"")
    with pytest.raises(ValueError, match="than the round's 2 members"):
        await_hellos(store, ["a", "b"], 1.0)


def test_wait_lasts_until_the_last_member_has_written_its_hello(store: Any) -> None:
    publish_hello(store, ["a", "b"], "a", b"first")
    with pytest.raises(RuntimeError):
        await_hellos(store, ["a", "b"], 0.2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(await_hellos, store, ["a", "b"], 10.0)
        assert not wait([waiting], 0.3).done
        # A connection of its own: the other one waits.
        beside = TCPStore("127.0.0.1", store.underlying_store.port, timeout=timedelta(seconds=10))
        publish_hello(PrefixStore("round/1", beside), ["a", "b"], "b", b"last")
        assert waiting.result(10.0) == {"a": b"first", "b": b"last"}
