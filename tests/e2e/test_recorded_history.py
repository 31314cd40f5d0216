"""The fault tests' checks find every violation."""

from __future__ import annotations

import dataclasses

import pytest
from history import Change, History, history_violations

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import (
    Keys,
    RoundRecord,
    encode,
)

KEYS = Keys("run")
FIRST = RoundRecord(number=1, members=["a", "b"], reason="start", kind="start", planned=True, convener="a")
SECOND = dataclasses.replace(FIRST, number=2, kind="shrink", members=["a"])


def history(*values: tuple[str, bytes | None]) -> list[Change]:
    return [Change(revision, key, value) for revision, (key, value) in enumerate(values, start=1)]


REGISTERED = ((KEYS.workers + "a", b"{}"), (KEYS.workers + "b", b"{}"))
ELECTED = (KEYS.convener, b"a")
GOOD = (*REGISTERED, ELECTED, (KEYS.round, encode(FIRST)), (KEYS.round, encode(SECOND)))


def test_a_good_history_is_not_blamed() -> None:
    assert history_violations(history(*GOOD), KEYS) == []
    handed_over = (*GOOD[:4], (KEYS.convener, None), (KEYS.convener, b"b"))
    by_b = encode(dataclasses.replace(SECOND, convener="b"))
    assert history_violations(history(*handed_over, (KEYS.round, by_b)), KEYS) == []


@pytest.mark.parametrize(
    "changes, what",
    [
        ((*GOOD, (KEYS.round, encode(SECOND))), "round 2 follows round 2"),
        ((*GOOD, (KEYS.round, encode(dataclasses.replace(SECOND, number=4)))), "round 4 follows round 2"),
        ((*GOOD, (KEYS.round, encode(FIRST))), "round 1 follows round 2"),
        ((*GOOD, (KEYS.round, None)), "was deleted"),
        ((*GOOD, (KEYS.convener, b"b")), "took the election key"),
        ((*REGISTERED, *GOOD[3:]), "convener was nobody"),
        ((*GOOD[:4], (KEYS.convener, None), *GOOD[4:]), "convener was nobody"),
        ((*GOOD[:4], (KEYS.convener, None), (KEYS.convener, b"b"), *GOOD[4:]), "convener was b"),
        ((*GOOD, (KEYS.round, encode(dataclasses.replace(SECOND, number=3, members=["a", "a"])))), "twice"),
        (GOOD[1:], "never registered: ['a']"),
    ],
)
def test_a_violation_in_a_history_is_found(changes: tuple[tuple[str, bytes | None], ...], what: str) -> None:
    found = history_violations(history(*changes), KEYS)
    assert found
    assert what in found[0]


def test_history_holds_every_change_in_order_across_a_crash_of_etcd(private_etcd: EmbeddedEtcd) -> None:
    followed = History(private_etcd.endpoint, "run")
    with EtcdClient(followed._client.config) as client:
        client.put(KEYS.round, b"1")
        private_etcd.kill()
        private_etcd.restart()
        client.put(KEYS.round, b"2")
        client.put(KEYS.convener, b"a")
        client.delete(KEYS.round)
    changes = followed.finish()
    followed.close()
    assert [(c.key, c.value) for c in changes] == [
        (KEYS.round, b"1"),
        (KEYS.round, b"2"),
        (KEYS.convener, b"a"),
        (KEYS.round, None),
    ]
    assert [c.revision for c in changes] == sorted({c.revision for c in changes})
