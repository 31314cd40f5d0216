"""`dlrover top` by textual's own pilot, in a small and a large terminal, against a real etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from lightning_dlrover.dashboard.top import Confirmation, JobScreen, JobsScreen, Page, Table, Top, WorkerScreen
from lightning_dlrover.pool.view import GrantRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import (
    DrainRecord,
    EventRecord,
    JobRecord,
    Keys,
    PlanRecord,
    StacksRecord,
    StacksRequest,
    encode,
)
from lightning_dlrover.report.watcher import Watcher
from tests.support.recorded_jobs import decision, decision_event, profile, recorded_job, write

SMALL, LARGE = (80, 24), (200, 60)

Play = Callable[[Pilot[int], Top], Awaitable[None]]


@pytest.fixture
def client(private_etcd: EmbeddedEtcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as connected:
        yield connected


def played(endpoint: str, play: Play, job: str | None = None, size: tuple[int, int] = SMALL, **options: Any) -> None:
    """Run `dlrover top` while a coroutine plays its user."""

    async def run() -> None:
        with Watcher(endpoint, only=job) as watcher:
            app = Top(watcher, job, **options)
            async with app.run_test(size=size, notifications=True) as pilot:
                await play(pilot, app)

    asyncio.run(run())


def text_of(app: App[Any]) -> str:
    """Return the characters on the screen."""
    width, height = app.size
    strips = app.screen._compositor.render_strips(app.size)
    return "\n".join(strip.text[:width] for strip in strips[:height])


async def shows(pilot: Pilot[int], *parts: str, timeout_s: float = 15.0) -> str:
    """Wait until the screen has all these texts, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        await pilot.pause()
        text = text_of(pilot.app)
        missing = [part for part in parts if part not in text]
        if not missing:
            return text
        assert time.monotonic() < deadline, f"{missing} not on the screen:\n{text}"
        await asyncio.sleep(0.05)


async def until(found: Callable[[], Any], what: str, timeout_s: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := await asyncio.to_thread(found)):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)
    return result


def now_job(num_workers: int = 2) -> dict[str, bytes]:
    return recorded_job(num_workers, time.time() - 101.0)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x60"])
def test_jobs_are_listed_and_opened(private_etcd: EmbeddedEtcd, client: EtcdClient, size: tuple[int, int]) -> None:
    write(client, "ctr", now_job(3))
    write(client, "images", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        text = await shows(pilot, "2 jobs, 2 running", "ctr", "images", "training", "3 of 4 (1-6)", "45 %", "open job", "quit")
        assert max(map(len, text.splitlines())) <= size[0]
        await pilot.press("down", "enter")
        await shows(pilot, "job images", "2, 3 wanted", "RANK", "node1")
        await pilot.press("escape")
        await shows(pilot, "2 jobs")
        await pilot.press("q")

    played(private_etcd.endpoint, play, size=size)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x60"])
def test_a_job_is_readable_in_both_sizes(private_etcd: EmbeddedEtcd, client: EtcdClient, size: tuple[int, int]) -> None:
    write(client, "ctr", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        parts = ["job ctr", "training", "live", "45 %", "loss 0.41", "5,120 samples/s", "goodput 88%", "compute 90%"]
        parts += ["start 1", "grow 2 (0.4 s)", "plan  3 workers by planner", "as predicted", "node9 is requested"]
        parts += ["RANK", "SLOW", "MEMORY", "3.0 G 75%", "round 2 formed", "drain", "replace", "stacks", "quit"]
        text = await shows(pilot, *parts)
        assert ("samples per second" in text) == (size == LARGE)

    played(private_etcd.endpoint, play, "ctr", size)


def test_changes_appear_by_themselves_and_the_cursor_stays(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(4))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node3")
        await pilot.press("down", "down")
        screen = app.screen
        assert isinstance(screen, JobScreen)
        assert screen.query_one("#workers", Table).selected == "host0-2"
        client.put(Keys("ctr").profiles + "host0-2", encode(profile("host0-2", 2, 4, memory_bytes=4 << 30)))
        client.delete(Keys("ctr").workers + "host0-0")
        await shows(pilot, "4.0 G 100%", "gone")
        event = kinds.record_of(kinds.WorkerLost("host0-0", 2), "worker host0-0 was lost")
        Journal(client, Keys("ctr")).append(event, "test")
        await shows(pilot, "worker host0-0 was lost")
        assert screen.query_one("#workers", Table).selected == "host0-2"

    played(private_etcd.endpoint, play, "ctr")


def test_scaling_asks_with_the_prediction_and_sets_the_number(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    records = now_job(2)
    records["live/shared/plan"] = encode(PlanRecord(2, "planner", "as good as it gets", True, 7))
    records["events/9-w"] = encode(decision_event(decision(time.time())))
    write(client, "ctr", records)
    plan = Journal(client, Keys("ctr"))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "job ctr", "node1")
        await pilot.press("+")
        text = await shows(pilot, "Set job ctr to 3 workers? It has 2.", "interval of 90 %", "predicted", "earlier")
        assert "7,680" in text
        await pilot.press("+")
        await shows(pilot, "Set job ctr to 4 workers?", "10,240")
        await pilot.press("+")  # the job's maximum
        await pilot.press("n")
        await until(lambda: not isinstance(app.screen, Confirmation), "the question is closed")
        assert plan.get(PlanRecord, Keys("ctr").plan).record == PlanRecord(2, "planner", "as good as it gets", True, 7)
        await pilot.press("+")
        await shows(pilot, "Set job ctr to 3 workers?")
        await pilot.press("+", "y")
        written = await until(lambda: _by_user(plan), "the plan is written")
        assert (written.num_workers, written.binding, written.reason) == (4, True, "set to 4 workers by hand")
        await shows(pilot, "4 wanted", "4 workers requested")
        await pilot.press("+")
        await shows(pilot, "was started for at most")
        await pilot.press("-")
        await shows(pilot, "Set job ctr to 3 workers? It has 2, and its plan wants 4.")
        await pilot.press("escape")
        await pilot.press("a")
        await shows(pilot, "Leave the size of job ctr to its planner")
        await pilot.press("y")
        await until(lambda: not _by_user(plan), "the planner decides again")

    played(private_etcd.endpoint, play, "ctr")


def _by_user(plan: Journal) -> PlanRecord | None:
    record = plan.get(PlanRecord, plan.keys.plan).record
    return record if record is not None and record.source == "user" else None


def test_a_job_is_held_at_its_size(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))
    plan = Journal(client, Keys("ctr"))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "job ctr", "node1")
        await pilot.press("h")
        await shows(pilot, "Hold job ctr at 2 workers?")
        await pilot.press("y")
        held = await until(lambda: _by_user(plan), "the plan is written")
        assert (held.num_workers, held.binding) == (2, True)

    played(private_etcd.endpoint, play, "ctr")


@pytest.mark.parametrize("key, replaced", [("d", False), ("r", True)])
def test_the_selected_worker_is_drained(private_etcd: EmbeddedEtcd, client: EtcdClient, key: str, replaced: bool) -> None:
    write(client, "ctr", now_job(3))
    journal = Journal(client, Keys("ctr"))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node2")
        await pilot.press("down", key)
        await shows(
            pilot, f"{'Replace' if replaced else 'Drain'} worker host0-1 (rank 1)?", "another" if replaced else "2 workers"
        )
        await pilot.press("y")
        found = await until(lambda: journal.get(DrainRecord, Keys("ctr").drains + "host0-1").record, "the worker is asked")
        assert (found.once_replaced, found.reason) == (replaced, "asked for by `dlrover top`")
        await shows(pilot, "leaving")

    played(private_etcd.endpoint, play, "ctr")
    assert client.get(Keys("ctr").drains + "host0-0") is None


def test_a_refusal_is_shown_and_changes_nothing(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(1))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node0")
        await pilot.press("d")
        await shows(pilot, "Drain worker host0-0")
        await pilot.press("y")
        await shows(pilot, "is the only worker")

    played(private_etcd.endpoint, play, "ctr")
    assert client.get_prefix(Keys("ctr").drains)[1] == []


@pytest.mark.parametrize("key", ["+", "-", "d", "r", "h", "a"])
def test_a_read_only_screen_asks_for_no_change(private_etcd: EmbeddedEtcd, client: EtcdClient, key: str) -> None:
    write(client, "ctr", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node1")
        await pilot.press(key)
        await shows(pilot, "read-only")
        assert not isinstance(app.screen, Confirmation)

    played(private_etcd.endpoint, play, "ctr", read_only=True)


def test_a_worker_shows_its_stacks_on_a_key(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))
    keys = Keys("ctr")
    journal = Journal(client, keys)

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node1")
        await pilot.press("enter")
        await shows(pilot, "worker host0-0 of job ctr", "rank 0", "own work 90 ms", "memory 3.0 G of 4.0 G")
        assert isinstance(app.screen, WorkerScreen)
        await pilot.press("s")
        request = await until(lambda: journal.get(StacksRequest, keys.stacks_request).record, "the worker is asked")
        stacks = 'File "train.py", line 9, in training_step\n  \x1b[31mloss = model(x)'
        answer = StacksRecord(
            "host0-0", request.number, 0, "host0", 1, "step", 0.5, False, "train.py:9 in training_step", stacks
        )
        client.put(keys.stacks + "host0-0", encode(answer))
        await shows(pilot, "in step since 0.5 s, at train.py:9", " [31mloss = model(x)")
        await pilot.press("escape")
        await shows(pilot, "RANK")

    played(private_etcd.endpoint, play, "ctr")


def test_plan_events_and_help_open_and_close(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "node1")
        for key, text in (("e", "interval of 90 %"), ("v", "Events of job ctr"), ("?", "GOODPUT")):
            await pilot.press(key)
            await shows(pilot, text, "Esc back")
            assert isinstance(app.screen, Page)
            await pilot.press("escape")
            await shows(pilot, "RANK")

    played(private_etcd.endpoint, play, "ctr")


def test_jobs_are_filtered_by_name(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))
    write(client, "images", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "ctr", "images")
        await pilot.press("/", "i", "m")
        await until(lambda: app.screen.query_one("#jobs", Table).row_count == 1, "one job is left")
        assert app.screen.query_one("#filter", Input).value == "im"
        await pilot.press("enter", "enter")
        await shows(pilot, "job images")
        await pilot.press("escape", "escape")
        await until(lambda: app.screen.query_one("#jobs", Table).row_count == 2, "all jobs are back")
        assert isinstance(app.screen, JobsScreen)

    played(private_etcd.endpoint, play)


def test_jobs_that_wait_in_a_pool_are_listed_with_their_place(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))
    grant = GrantRecord("waiting", place=2, queued=3, reason="needs 4 cores, and 2 are free")
    client.put(PoolKeys("default").grants + "later", encode(grant))
    client.put(PoolKeys("default").grants + "ctr", encode(GrantRecord("granted", 2)))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "1 job, 1 running", "later", "queued")
        await pilot.press("down")
        await shows(pilot, "pool default: number 2 of 3 in the queue", "and 2 are free")

    played(private_etcd.endpoint, play)


def test_a_silent_etcd_is_named_and_the_last_picture_stays(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "live", "node1")
        private_etcd.kill()
        await shows(pilot, "STALE for", "does not answer", "node1", timeout_s=30)
        await asyncio.to_thread(private_etcd.restart)
        await shows(pilot, "live", timeout_s=30)

    played(private_etcd.endpoint, play, "ctr")


def test_an_unknown_job_is_named(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "has no job 'nobody'", "Nothing to show")
        await pilot.press("+")
        await shows(pilot, "is not running")

    played(private_etcd.endpoint, play, "nobody")


def test_the_end_of_a_job_is_seen_and_no_key_acts_on_it(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(2))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "training")
        client.put(Keys("ctr").job, encode(JobRecord("failed", True, 1, 4, "0.1", message="it ran out of luck")))
        await shows(pilot, "failed", "it ran out of luck")
        await pilot.press("+")
        await shows(pilot, "is not running")

    played(private_etcd.endpoint, play, "ctr")


def test_hostile_text_reaches_no_terminal(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\x9b5m"
    records = now_job(2)
    records["live/shared/plan"] = encode(PlanRecord(3, "user", evil, True))
    records["events/9-w"] = encode(EventRecord("error", time.time(), evil))
    write(client, "ctr", records)
    client.put(f"/dlrover/{evil}/live/shared/job", encode(JobRecord("training", True, 1, 2, "0.1")))

    async def play(pilot: Pilot[int], app: Top) -> None:
        text = await shows(pilot, "ctr", "]0;owned", "[red]x[/red]")  # markup is text as well
        assert [c for c in text if c != "\n" and not c.isprintable()] == []
        await pilot.press("down", "enter")
        text = await shows(pilot, "by user", "[red]x[/red]")
        assert [c for c in text if c != "\n" and not c.isprintable()] == []

    played(private_etcd.endpoint, play)


def test_a_thousand_workers_hold_up_no_key(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "ctr", now_job(1000))

    async def play(pilot: Pilot[int], app: Top) -> None:
        await shows(pilot, "workers 1000", "node3", timeout_s=30)
        begin = time.monotonic()
        await pilot.press("ctrl+end")
        await shows(pilot, "node999")
        assert time.monotonic() - begin < 5.0

    played(private_etcd.endpoint, play, "ctr")
