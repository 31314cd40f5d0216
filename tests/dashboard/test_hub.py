"""The hub of the page: a bad name ends nobody else's stream, and no change is lost between the looks and the streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs the extra web")
from lightning_dlrover.dashboard.hub import Hub, Parts
from lightning_dlrover.report.watcher import Watcher


async def messages(stream: AsyncIterator[bytes], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for part in stream:
        if part.startswith(b"data: "):
            found.append(json.loads(part[6:]))
            if len(found) == count:
                break
    return found


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Hub]:
    with Watcher(run_dir=folder) as watcher:
        hub = Hub(watcher)
        task = asyncio.create_task(hub.run())
        yield hub
        await hub.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("name", ["\0", "a" * 5000, "..", "a/b", "\ud800"])
def test_a_name_that_no_file_can_have_ends_no_other_viewers_page(tmp_path: Path, name: str) -> None:
    async def viewers() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with running(tmp_path) as hub:
            bad = asyncio.create_task(messages(hub.stream(name), 1))
            good = await asyncio.wait_for(messages(hub.stream(None), 1), 10.0)
            return good, await asyncio.wait_for(bad, 10.0)

    good, bad = asyncio.run(viewers())
    assert good[0]["source"]["is_connected"]
    assert "has no job" in bad[0]["source"]["problem"]


def test_unknown_names_leave_nothing_in_memory(tmp_path: Path) -> None:
    with Watcher(run_dir=tmp_path) as watcher:
        for number in range(100):
            assert watcher.job(f"job-{number}").job is None
        assert not watcher._ended


def test_a_viewer_gets_the_last_change_however_the_threads_meet(tmp_path: Path) -> None:
    async def viewed() -> int:
        with Watcher(run_dir=tmp_path) as watcher:
            hub = Hub(watcher)
            hub._viewers["job"] = 1
            is_over = threading.Event()

            def look() -> None:
                for number in range(1, 300):
                    with hub._lock:
                        page = hub._pages.setdefault("job", page_of())
                        page.fields.replace({f"part{number % 7}": number, "last": number}, number)
                        hub._number = number
                is_over.set()

            def page_of() -> Any:
                from lightning_dlrover.dashboard.hub import _Page

                return _Page()

            thread = threading.Thread(target=look)
            thread.start()
            newest = 0
            async for part in hub.stream("job"):
                if part.startswith(b"data: "):
                    newest = json.loads(part[6:])["set"].get("last", newest)
                async with hub._looked:
                    hub._looked.notify_all()
                if is_over.is_set() and newest == 299:
                    break
            thread.join()
            return newest

    assert asyncio.run(asyncio.wait_for(viewed(), 30.0)) == 299


def test_parts_of_a_message_are_those_that_changed_since_the_last() -> None:
    parts = Parts()
    assert parts.replace({"a": 1, "b": 2}, 1)
    assert not parts.replace({"a": 1, "b": 2}, 2)
    assert parts.replace({"a": 3}, 3)
    assert parts.since(1) == ([("a", b"3")], ["b"])
    assert parts.since(3) == ([], [])
