"""Notifications: destinations that are slow, refuse, fail and hang; no secret is shown; none is lost or repeated needlessly."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.events import record_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import EventRecord, Keys
from lightning_dlrover.report import notify
from lightning_dlrover.report.notify import (
    END_S,
    EtcdCursors,
    EtcdNotifications,
    FileCursors,
    JobEvents,
    Notification,
    Notifier,
    destination,
    ended,
)
from tests.support.http_receiver import Answer, Receiver
from tests.support.waiting import eventually

SECRET = "T0P-S3CR3T"


class NoCursors:
    def __init__(self) -> None:
        self.positions: dict[str, int] | None = None

    def read(self) -> dict[str, int] | None:
        return self.positions

    def write(self, positions: Mapping[str, int]) -> None:
        self.positions = {**positions}


def notification(number: int = 1) -> Notification:
    return Notification(f"ctr/{number}", "grown", "run", "job ctr has grown: ünï", 1.5, "ctr", workers=3, workers_before=2)


def delivered(receiver: Receiver, number: int = 1) -> None:
    eventually(lambda: len(receiver.documents) >= number, "the documents", 20, report=lambda: str(receiver.requests))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


# --- posting ---


def test_document_has_the_documented_fields_and_no_empty_ones(receiver: Receiver) -> None:
    url = receiver.url.replace("://", f"://us%40er:{SECRET}@")
    with Notifier([destination(f"{url}/hook?key={SECRET}")], NoCursors()) as notifier:
        notifier.put(1, notification())
        delivered(receiver)
    headers, path, document = receiver.requests[0]
    assert document == {
        "schema": 1,
        "id": "ctr/1",
        "event": "grown",
        "source": "run",
        "text": "job ctr has grown: ünï",
        "at": 1.5,
        "time": "1970-01-01T00:00:01.500+00:00",
        "job": "ctr",
        "workers": 3,
        "workers_before": 2,
        "host": socket.gethostname(),
    }
    assert path == f"/hook?key={SECRET}"
    assert (headers["Content-Type"], headers["Idempotency-Key"]) == ("application/json", "ctr/1")
    assert headers["Authorization"] == "Basic dXNAZXI6VDBQLVMzQ1IzVA=="


@pytest.mark.parametrize("failure", [500, 503, 429])
def test_server_that_fails_once_gets_the_same_document_again(failure: int) -> None:
    with Receiver(failure) as receiver:
        with Notifier([destination(receiver.url)], NoCursors()) as notifier:
            notifier.put(1, notification())
            notifier.put(2, notification(2))
        assert [document["id"] for _, _, document in receiver.requests] == ["ctr/1", "ctr/1", "ctr/2"]
        assert [document["id"] for document in receiver.documents] == ["ctr/1", "ctr/2"]


@pytest.mark.parametrize("answer", [302, 400, 404, 410])
def test_final_answer_is_not_followed_by_another_attempt(answer: int, caplog: pytest.LogCaptureFixture) -> None:
    with Receiver(answer) as receiver:
        with Notifier([destination(f"{receiver.url}/{SECRET}")], NoCursors()) as notifier:
            notifier.put(1, notification())
            notifier.put(2, notification(2))
        assert [path for _, path, _ in receiver.requests] == [f"/{SECRET}"] * 2  # also not at the place of the redirection
    assert f"1 notification to {receiver.url} not delivered: HTTP {answer}" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("trouble", ["hang", "drip", "refuse", "unknown"])
def test_end_waits_for_an_unreachable_destination_only_for_a_while(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    with Receiver(then="drip" if trouble == "drip" else "hang") as receiver, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        urls = {"refuse": f"http://127.0.0.1:{unused.getsockname()[1]}", "unknown": "http://nowhere.invalid"}
        notifier = Notifier([destination(f"{urls.get(trouble, receiver.url)}/{SECRET}")], NoCursors())
        began = time.monotonic()
        for number in range(1, 101):
            notifier.put(number, notification(number))
        assert time.monotonic() - began < 0.5
        notifier.close()
        assert time.monotonic() - began < END_S + 2.0
    assert "100 notifications to http://" in caplog.text
    assert SECRET not in caplog.text


def test_hurried_end_waits_for_nothing() -> None:
    hurry = threading.Event()
    with Receiver(then="hang") as receiver:
        notifier = Notifier([destination(receiver.url)], NoCursors(), hurry=hurry)
        notifier.put(1, notification())
        eventually(lambda: receiver.requests, "the request")
        hurry.set()
        began = time.monotonic()
        notifier.close()
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("trouble", ["hang", "drip"])
def test_destination_that_comes_back_gets_later_notifications(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(notify, "TOTAL_S", 0.5)
    with Receiver("drip" if trouble == "drip" else "hang", 500) as receiver:
        with Notifier([destination(f"{receiver.url}/{SECRET}")], NoCursors()) as notifier:
            notifier.put(1, notification())
            eventually(lambda: "was given up" in caplog.text, "the end of the attempts")
            receiver.answers.clear()
            notifier.put(2, notification(2))
            delivered(receiver)
        assert [document["id"] for document in receiver.documents] == ["ctr/2"]
    assert SECRET not in caplog.text


def test_queue_of_a_hanging_destination_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "MAX_QUEUED", 5)
    monkeypatch.setattr(notify, "ATTEMPT_S", 1.0)
    with Receiver("hang") as receiver:
        with Notifier([destination(receiver.url)], NoCursors()) as notifier:
            notifier.put(1, notification())
            eventually(lambda: receiver.requests, "the first request")
            for number in range(2, 50):
                notifier.put(number, notification(number))
            delivered(receiver, 5)
        assert [document["id"] for document in receiver.documents] == [f"ctr/{n}" for n in (1, 46, 47, 48, 49)]


# --- commands ---


def test_command_gets_the_document_and_no_shell(tmp_path: Path) -> None:
    file = tmp_path / "got it; touch oops"
    with Notifier([destination(f"tee -a '{file}'")], NoCursors()) as notifier:
        notifier.put(1, notification())
        notifier.put(2, notification(2))
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["ctr/1", "ctr/2"]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_failing_command_is_repeated_and_its_words_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = tmp_path / "count"
    script = f"cat > /dev/null; echo {SECRET} >&2; echo x >> {count}; [ $(wc -l < {count}) -ge 2 ]"
    with Notifier([destination(f"sh -c '{script}'"), destination(f"false {SECRET}")], NoCursors()) as notifier:
        notifier.put(1, notification())
    assert count.read_text() == "x\nx\n"
    assert "1 notification to command false not delivered: exit code 1" in caplog.text
    assert "command sh" not in caplog.text
    assert SECRET not in caplog.text


def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    notifier = Notifier([destination(f"sh -c 'sleep 600 & echo $$ $! > {pids}; wait'")], NoCursors())
    notifier.put(1, notification())
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the command's processes")
    began = time.monotonic()
    notifier.close()
    assert time.monotonic() - began < END_S + 2.0

    def has_ended(pid: str) -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    eventually(lambda: all(map(has_ended, pids.read_text().split())), "the end of both")


# --- destinations ---


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "it is empty, perhaps an unset variable"),
        (f"ftp://host/{SECRET}", "ftp:// is no scheme that can be posted to"),
        (f"https:///{SECRET}", "the URL has no host"),
        (f"https://host:port/{SECRET}", "host or port is malformed"),
        (f"https://host/{SECRET}\n", "characters that must be percent-encoded"),
        (f"no-such-program --key {SECRET}", "there is no program 'no-such-program'"),
        (f"sh -c '{SECRET}", "cannot be split into words: No closing quotation"),
        ("@nowhere", "file 'nowhere' cannot be read: No such file or directory"),
        ("@empty", "file 'empty' has no URL or command in its first line"),
    ],
)
def test_unusable_destination_is_refused_without_showing_it(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_dlrover.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "script.py").write_text("")
    assert main(["run", "--notify", text, "script.py"]) == 2
    errors = capsys.readouterr().err
    assert "dlrover: --notify: " in errors
    assert reason in errors
    assert SECRET not in errors


def test_destination_shows_its_host_or_program_alone(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(f"https://u:{SECRET}@[::1]:8443/{SECRET}?{SECRET}#{SECRET}\n")
    shown = [destination(f"@{tmp_path / 'hook'}"), destination(f"{sys.executable} -c {SECRET}")]
    assert [str(each) for each in shown] == ["https://[::1]:8443", f"command {os.path.basename(sys.executable)}"]
    assert SECRET not in repr(shown)


# --- cursor ---


def test_each_destination_has_a_cursor_of_its_own(tmp_path: Path) -> None:
    cursors = FileCursors(tmp_path / "notified")
    assert cursors.read() is None
    with Receiver() as quick, Receiver(200, then="hang") as slow:
        to = [destination(quick.url), destination(slow.url)]
        first = Notifier(to, cursors, newest=2)
        for number in (3, 4, 7):
            first.put(number, notification(number))
        delivered(quick, 3)
        at = {f"1 {quick.url}": 7, f"2 {slow.url}": 3}
        eventually(lambda: cursors.read() == at, "the cursor of the slow one before the pending one")
        slow.then = 200
        with Notifier(to, cursors, newest=9) as second:  # the first was killed
            for number in (3, 4, 7, 9):
                second.put(number, notification(number))
            delivered(slow, 4)
        assert [document["id"] for document in quick.documents] == ["ctr/3", "ctr/4", "ctr/7", "ctr/9"]
        assert [document["id"] for document in slow.documents] == ["ctr/3", "ctr/4", "ctr/7", "ctr/9"]
        first.close()


def test_new_destination_gets_later_events_only(tmp_path: Path) -> None:
    cursors = FileCursors(tmp_path / "notified")
    cursors.write({"1 command true": 5})
    with Receiver() as receiver, Notifier([destination("true"), destination(receiver.url)], cursors, newest=8) as notifier:
        for number in (5, 6):
            notifier.put(number, notification(number))
        delivered(receiver)
    assert [document["id"] for document in receiver.documents] == ["ctr/6"]


def write(client: EtcdClient, keys: Keys, *events: tuple[kinds.Event, str]) -> None:
    """Write lines of a history in one transaction, as a coordinator does."""
    Journal(client, keys).append_all(Journal(client, keys).puts([record_of(*event) for event in events], "w"))


def round_(number: int, kind: str, members: int, **more: object) -> tuple[kinds.Event, str]:
    formed = kinds.RoundFormed(number, [f"w{n}" for n in range(members)], kind, num_members=members, reason="why", **more)  # type: ignore[arg-type]
    return formed, f"round {number}"


LOST = (kinds.WorkerLost("w9"), "worker w9 is gone: its lease ended")


@pytest.mark.parametrize("cut", range(6))
def test_successor_of_a_killed_process_repeats_only_what_was_not_settled(client: EtcdClient, keys: Keys, cut: int) -> None:
    """The first process handles `cut` events, the last of which hangs at its destination when the process is killed."""
    lines = [round_(1, "start", 1), round_(2, "grow", 2), round_(3, "shrink", 1), round_(4, "grow", 3), round_(5, "grow", 4)]
    answers: list[Answer] = [*[200] * (cut - 1), "hang"] if cut else []
    with Receiver(*answers) as receiver:
        to = [destination(receiver.url)]
        first = EtcdNotifications(client, keys.events, keys.notified, to, JobEvents("ctr"))
        for line in lines[:cut]:
            write(client, keys, line)
        first.look_once_more()
        eventually(lambda: len(receiver.requests) == cut, "all requests")
        if cut > 1:
            eventually(lambda: max((EtcdCursors(client, keys.notified).read() or {"": 0}).values()) > 0, "the cursor")
        for line in lines[cut:]:
            write(client, keys, line)
        with EtcdNotifications(client, keys.events, keys.notified, to, JobEvents("ctr")):  # `first` is never closed
            delivered(receiver, 5)
        found = [document["event"] for document in receiver.documents]
        assert found == ["started", "grown", "shrunk", "grown", "grown"]
        ids = [document["id"] for _, _, document in receiver.requests]
        assert len(ids) - len({*ids}) == (1 if cut else 0)  # the one that hung, with the same id
        first.close()


def test_history_that_began_without_notifications_is_not_sent(client: EtcdClient, keys: Keys, receiver: Receiver) -> None:
    write(client, keys, round_(1, "start", 2))
    with EtcdNotifications(client, keys.events, keys.notified, [destination(receiver.url)], JobEvents("ctr")) as sent:
        write(client, keys, LOST, round_(2, "loss", 1))
        sent.look_once_more()
    assert [(each["event"], each["workers_before"], each["workers"]) for each in receiver.documents] == [("lost", 2, 1)]


# --- events ---


@pytest.mark.parametrize(
    "events, expected",
    [
        ([round_(1, "start", 2)], "started"),
        ([round_(2, "grow", 3)], "grown"),
        ([round_(2, "shrink", 1)], "shrunk"),
        ([round_(2, "replace", 2)], "replaced"),
        ([LOST, round_(2, "loss", 1)], "lost"),
        ([LOST, round_(2, "loss", 2, cause={"joined": ["w3"]})], "replaced"),
        ([round_(2, "retry", 2)], None),
        ([(kinds.GrowthFailed(3, 2, "w2"), "undone")], "refused"),
        ([(kinds.NodesHeldUp(), "the quota is used up")], "refused"),
        ([(kinds.StateClosed("r"), "no worker can join")], "refused"),
        ([(kinds.HangFound(1, "w0", "r", [], [], []), "the job hangs")], "hung"),
        ([(kinds.NodeMemoryShort("none", "node1", 0), "killed")], "short_of_memory"),
        ([(kinds.WorkerFailed("w0"), "an error")], None),
        ([(kinds.FitFinished(3), "finished")], None),
    ],
)
def test_event_of_a_job_that_a_person_cares_about_is_named(events: list[tuple[kinds.Event, str]], expected: str | None) -> None:
    made = JobEvents("ctr")
    made("0", [record_of(*round_(1, "start", 2))])
    found = made("7-w", [record_of(*event) for event in events])
    assert (found.event if found else None) == expected
    if found is not None:
        assert found.id == "ctr/7-w"
        assert found.text.startswith("job ctr ")
        assert all(text in found.text for _, text in events)


def test_unreadable_and_unknown_lines_are_passed_over() -> None:
    made = JobEvents("ctr")
    assert made("1", [EventRecord("of-tomorrow", 1.0, "?", {})]) is None
    assert made("2", [EventRecord("round", 1.0, "?", {"number": "two"})]) is None


def test_end_of_a_job_names_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert ended("ctr", "failed", "node1 failed", 1).text == "job ctr has failed: node1 failed"
    assert ended("ctr", "finished", "the job has finished", 0).text == "job ctr has finished"
    assert caplog.get_records("call") == []
    assert logging.getLogger("lightning_dlrover.report.notify").isEnabledFor(logging.WARNING)
