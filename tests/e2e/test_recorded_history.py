"""The fault tests' checks find every violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.events import Event, RoundFormed, WorkerLost, record_of
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord, decode, encode
from tests.e2e.history import Change, History, history_violations

KEYS = Keys("run")
FIRST = RoundRecord(number=1, members=["a", "b"], reason="start", kind="start", planned=True, convener="a")
SECOND = dataclasses.replace(FIRST, number=2, kind="shrink", members=["a"])


def history(*values: tuple[str, bytes | None], lost: Sequence[str] = (), lines: Sequence[Event] = ()) -> list[Change]:
    """Changes at one revision each, and each round together with the line about it.

    Args:
        lost: workers that the last round's own line names as lost.
        lines: further lines written with the last round.
    """
    changes = [Change(revision, key, value) for revision, (key, value) in enumerate(values, start=1)]
    events: list[Change] = []
    for change in changes:
        if change.key == KEYS.round and change.value is not None:
            is_last = change.revision == len(changes)
            cause = {"lost": list(lost) if is_last else [], "left_out": []}
            formed = RoundFormed(decode(RoundRecord, change.value, change.key).number, [], "start", cause=cause)
            about: Sequence[Event] = [formed, *lines] if is_last else [formed]
            records = [encode(record_of(line, "")) for line in about]
            events += [Change(change.revision, f"{KEYS.events}{change.revision}-{n}", r) for n, r in enumerate(records)]
    return [*changes, *events]


REGISTERED = ((KEYS.workers + "a", b"{}"), (KEYS.workers + "b", b"{}"))
ELECTED = (KEYS.coordinator, b"a")
GOOD = (*REGISTERED, ELECTED, (KEYS.round, encode(FIRST)), (KEYS.round, encode(SECOND)))


def test_a_good_history_is_not_blamed() -> None:
    assert history_violations(history(*GOOD), KEYS) == []
    handed_over = (*GOOD[:4], (KEYS.coordinator, None), (KEYS.coordinator, b"b"))
    by_b = encode(dataclasses.replace(SECOND, convener="b"))
    assert history_violations(history(*handed_over, (KEYS.round, by_b)), KEYS) == []


@pytest.mark.parametrize(
    "changes, what",
    [
        ((*GOOD, (KEYS.round, encode(SECOND))), "round 2 follows round 2"),
        ((*GOOD, (KEYS.round, encode(dataclasses.replace(SECOND, number=4)))), "round 4 follows round 2"),
        ((*GOOD, (KEYS.round, encode(FIRST))), "round 1 follows round 2"),
        ((*GOOD, (KEYS.round, None)), "was deleted"),
        ((*GOOD, (KEYS.coordinator, b"b")), "took the election key"),
        ((*REGISTERED, *GOOD[3:]), "coordinator was nobody"),
        ((*GOOD[:4], (KEYS.coordinator, None), *GOOD[4:]), "coordinator was nobody"),
        ((*GOOD[:4], (KEYS.coordinator, None), (KEYS.coordinator, b"b"), *GOOD[4:]), "coordinator was b"),
        ((*GOOD, (KEYS.round, encode(dataclasses.replace(SECOND, number=3, members=["a", "a"])))), "twice"),
        (GOOD[1:], "never registered: ['a']"),
    ],
)
def test_a_violation_in_a_history_is_found(changes: tuple[tuple[str, bytes | None], ...], what: str) -> None:
    found = history_violations(history(*changes), KEYS)
    assert found
    assert what in found[0]


def test_round_written_without_its_lines_is_found() -> None:
    assert history_violations(history(*GOOD, lost=["b"], lines=[WorkerLost("b")]), KEYS) == []
    [found] = history_violations(history(*GOOD, lost=["b"]), KEYS)
    assert "round 2 was written with lines about the losses of []" in found
    [found] = history_violations(history(*GOOD, lines=[WorkerLost("b")]), KEYS)
    assert "round 2 was written with lines about the losses of ['b']" in found
    [found] = history_violations(history(*GOOD)[:-1], KEYS)
    assert "round 2 was written with 0 lines about it" in found


def test_history_holds_every_change_in_order_across_a_crash_of_etcd(private_etcd: EmbeddedEtcd) -> None:
    followed = History(private_etcd.endpoint, "run")
    with EtcdClient(followed._client.config) as client:
        client.put(KEYS.round, b"1")
        private_etcd.kill()
        private_etcd.restart()
        client.put(KEYS.round, b"2")
        client.put(KEYS.coordinator, b"a")
        client.delete(KEYS.round)
    changes = followed.finish()
    followed.close()
    assert [(c.key, c.value) for c in changes] == [
        (KEYS.round, b"1"),
        (KEYS.round, b"2"),
        (KEYS.coordinator, b"a"),
        (KEYS.round, None),
    ]
    assert [c.revision for c in changes] == sorted({c.revision for c in changes})
