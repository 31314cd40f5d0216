"""The page of `dlrover serve` in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `web`")
pytest.importorskip("websocket", reason="needs websocket-client")

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, PlanRecord, ProgressRecord, decode, encode
from lightning_dlrover.report.watcher import Watcher
from tests.dashboard.test_server import HOSTILE, TOKEN, served
from tests.support.browser import Tab, browser, needs_chromium
from tests.support.recorded_jobs import recorded_job
from tests.support.waiting import eventually

pytestmark = [needs_chromium, pytest.mark.long]

PAINTED = "document.documentElement.dataset.painted"


@pytest.fixture
def prefix(run_id: str) -> str:
    return f"/{run_id}"


@pytest.fixture
def watcher(etcd: EmbeddedEtcd, client: EtcdClient, prefix: str, tmp_path: Path) -> Iterator[Watcher]:
    for path, value in recorded_job().items():
        client.put(Keys("job", prefix).root + path, value)
    client.put(f"{prefix}/job/events/9-x", encode(EventRecord(HOSTILE, 1_790_000_105.0, HOSTILE)))
    client.put(f"{prefix}/{HOSTILE.replace('/', '')}/live/shared/job", recorded_job()["live/shared/job"])
    with Watcher(etcd.endpoint, prefix, tmp_path / "runs") as found:
        eventually(lambda: found.job("job").job is not None, "the job")
        yield found


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browser(tmp_path) as opened:
        yield opened


def test_page_is_readable_at_any_width_and_runs_nothing_of_the_records(watcher: Watcher, tab: Tab) -> None:
    with served(watcher) as url:
        for width, dark in ((390, True), (390, False), (1440, True), (1440, False)):
            tab.open(f"{url}/", width, dark=dark)
            tab.wait_for(PAINTED)
            assert "onerror=alert(1)" in tab.text()  # the other job's name
            assert tab.value("document.querySelectorAll('img').length") == 0
            assert tab.value("document.documentElement.scrollWidth") <= width
            tab.open(f"{url}/job/job", width, dark=dark)
            tab.wait_for(f"{PAINTED} && document.querySelectorAll('svg').length >= 2")
            assert "onerror=alert(1)" in tab.text()  # an event
            assert tab.value("document.querySelectorAll('img').length") == 0
            assert tab.value("document.documentElement.scrollWidth") <= width
            is_dark = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
            assert is_dark == dark
        assert tab.problems == []  # no script failed, and nothing broke the content security policy
        assert {request.startswith((url, "about:", "data:")) for request in tab.requests} == {True}


def test_page_follows_the_job(watcher: Watcher, tab: Tab, client: EtcdClient, prefix: str) -> None:
    with served(watcher) as url:
        tab.open(f"{url}/job/job")
        tab.wait_for(f"{PAINTED} && document.body.innerText.includes('epoch 1 of 2')")
        client.put(f"{prefix}/job/progress", encode(ProgressRecord(2_345, 1, 345, 2, 5120.0, 2, 1000, at=1_790_000_120.0)))
        tab.wait_for("document.body.innerText.includes('step 2,345')")


def test_page_of_an_unknown_job_says_so(watcher: Watcher, tab: Tab) -> None:
    with served(watcher) as url:
        tab.open(f"{url}/job/none")
        tab.wait_for("document.body.innerText.includes(\"has no job 'none'\")")


def test_page_says_when_its_server_has_gone(watcher: Watcher, tab: Tab) -> None:
    with served(watcher) as url:
        tab.open(f"{url}/job/job")
        tab.wait_for(PAINTED)
    tab.wait_for("!document.getElementById('notice').hidden", 40)
    assert "does not answer" in tab.text()


def test_size_is_changed_after_a_confirmation_that_shows_the_prediction(
    watcher: Watcher, tab: Tab, client: EtcdClient, prefix: str
) -> None:
    def planned() -> PlanRecord:
        entry = client.get(f"{prefix}/job/live/shared/plan")
        assert entry is not None
        return decode(PlanRecord, entry.value, entry.key)

    with served(watcher, TOKEN) as url:
        tab.open(f"{url}/job/job#token={TOKEN}")
        tab.wait_for(PAINTED)
        assert tab.value("location.hash") == ""
        click = "[...document.querySelectorAll('button')].find(b => b.textContent.startsWith('{}'))?.click()"
        tab.wait_for("document.body.innerText.includes('+ 1 worker')")
        tab.value(click.format("+ 1 worker"))
        tab.wait_for("document.getElementById('dialog').innerText.includes('samples/s')")
        assert planned().source == "planner"
        tab.value(click.format("Do it"))
        eventually(lambda: planned().source == "user", "the plan")
        assert planned().num_workers == 4  # one more than the plan's three
        tab.wait_for("document.getElementById('dialog').innerText.includes('requested')")
