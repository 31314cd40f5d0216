"""Exchange the hellos of a round's members through its store, in a few requests of each member.

Each member writes its hello and counts itself. The one that is counted last writes the list of all hellos, and the others only
wait for that list. If every member read every hello, the store would serve as many requests as members, squared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

from lightning_dlrover.rdzv.group.torch_names import Store

__all__ = ["await_hellos", "missing_hellos", "publish_hello"]

LIST = "hellos"
COUNT = "num_hellos"


def publish_hello(store: Store, members: Sequence[str], me: str, hello: bytes) -> None:
    """Write this worker's hello, and the list of all if it is the last. Call it once in a round.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    store.set(_key(me), hello.decode())
    if store.add(COUNT, 1) == len(members):
        texts = [found.decode() for found in store.multi_get([_key(w) for w in members])]
        store.set(LIST, json.dumps(dict(zip(members, texts, strict=True))))


def await_hellos(store: Store, members: Sequence[str], timeout_s: float) -> dict[str, bytes]:
    """Wait until all members have written theirs, and return them.

    Raises:
        RuntimeError: the store cannot be reached, or `timeout_s` are over.
        ValueError: the list cannot be read; another program may write into the round's store.
    """
    store.wait([LIST], timedelta(seconds=timeout_s))
    texts = json.loads(store.get(LIST))
    if not isinstance(texts, dict) or set(texts) != set(members):
        raise ValueError(f"the list of hellos names {len(texts)} other workers than the round's {len(members)} members")
    return {worker: str(texts[worker]).encode() for worker in members}


def missing_hellos(store: Store, members: Sequence[str]) -> list[str]:
    """Return the members without a hello, for an error message: one request for each of them."""
    return [w for w in members if not store.check([_key(w)])]


def _key(worker_id: str) -> str:
    return f"hello/{worker_id}"
