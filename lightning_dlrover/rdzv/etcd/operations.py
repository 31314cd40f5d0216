"""Parts of a transaction: conditions, operations and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = [
    "Compare",
    "Delete",
    "DeletePrefix",
    "Get",
    "KeyValue",
    "Op",
    "OpT",
    "Put",
    "Txn",
    "absent",
    "created",
    "exists",
    "modified",
    "none_under",
]


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int  # 1 when created, one more per put
    lease_id: int  # id of the key's lease; 0: none


@dataclass(frozen=True)
class Compare:
    """One condition of a transaction; build it with `created`, `modified`, `absent`, `exists` or `none_under`."""

    key: str
    target: Literal["create", "mod"]
    result: Literal["equal", "greater"]
    revision: int
    is_prefix: bool = False  # the condition is about each key that begins with `key`

    def holds(self, entry: KeyValue | None) -> bool:
        """Whether it is true of the key's entry, None if there is none. Not for a prefix."""
        found = (entry.create_revision if self.target == "create" else entry.mod_revision) if entry is not None else 0
        return found > self.revision if self.result == "greater" else found == self.revision


@dataclass(frozen=True)
class _RevisionOf:
    key: str
    target: Literal["create", "mod"]

    def __eq__(self, revision: object) -> Compare:  # type: ignore[override]
        if not isinstance(revision, int):
            raise TypeError(f"a revision is an int, not {type(revision).__name__}")
        return Compare(self.key, self.target, "equal", revision)


def created(key: str) -> _RevisionOf:
    """``created(key) == revision``: the key exists since exactly this revision (0: it does not exist)."""
    return _RevisionOf(key, "create")


def modified(key: str) -> _RevisionOf:
    """``modified(key) == revision``: the key was not written since that revision (0: it does not exist)."""
    return _RevisionOf(key, "mod")


def absent(key: str) -> Compare:
    return Compare(key, "create", "equal", 0)


def none_under(prefix: str) -> Compare:
    return Compare(prefix, "create", "equal", 0, is_prefix=True)


def exists(key: str) -> Compare:
    return Compare(key, "create", "greater", 0)


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class DeletePrefix:
    key: str  # of all keys that begin with it


@dataclass(frozen=True)
class Get:
    key: str


Op = Put | Delete | DeletePrefix | Get
OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True)
class Txn:
    succeeded: bool
    revision: int
    values: list[KeyValue]  # results of the Gets that found their keys, in order
