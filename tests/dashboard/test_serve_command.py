"""`dlrover serve` as a process of its own, with a real job."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `web`")

from lightning_dlrover import dashboard
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.dashboard import serve
from tests.support.dlrover_process import Dlrover, Run
from tests.support.waiting import eventually

SCRIPT = Path(__file__).parents[1] / "e2e" / "tiny_loop.py"
SERVE = "import sys; from lightning_dlrover.cli.main import main; sys.exit(main(['serve', *sys.argv[1:]]))"


@pytest.fixture
def dlrover(tmp_path: Path) -> Iterator[Dlrover]:
    commands = Dlrover(tmp_path)
    yield commands
    commands.end()


def start(dlrover: Dlrover, *options: object) -> tuple[Run, str]:
    """Start the server, and return it with its URL."""
    server = dlrover.follow([sys.executable, "-c", SERVE, "--port", "0", *map(str, options)], "serve")
    return server, server.wait_for_output(r"at (http://127\.0\.0\.1:\d+)/ ")[1]


def job_at(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/api/jobs/job", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError:  # not there yet
        return {"state": "unknown", "num_workers": 0, "num_losses": 0}


def wait_for(url: str, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    found = job_at(url)

    def look() -> bool:
        nonlocal found
        found = job_at(url)
        return holds(found)

    eventually(look, what, 90.0, report=lambda: f"{found}")
    return found


def change(url: str, action: str, token: str, **body: Any) -> str:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/api/jobs/job/{action}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["text"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_page_follows_a_job_through_a_loss_a_change_by_hand_and_its_end(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    server, url = start(dlrover, "--token-file", tmp_path / "token")
    run = dlrover.start("--workers", "1:2", SCRIPT, "--until", until)
    wait_for(url, lambda job: job["state"] == "training" and job["num_workers"] == 1, "a worker")
    token = (tmp_path / "token").read_text().strip()
    assert "2 workers requested" in change(url, "scale", token, num_workers=2)
    job = wait_for(url, lambda job: job["num_workers"] == 2, "the second worker")
    os.kill(next(worker["pid"] for worker in job["workers"] if worker["rank"] == 1), signal.SIGKILL)
    # Training must not end before the lost worker's node is replaced: the job would have failed with it.
    wait_for(url, lambda job: job["num_losses"] == 1 and job["num_workers"] == 2, "the loss, and a replacement")
    run.finish(until)
    job = wait_for(url, lambda job: job["state"] not in ("training", "starting"), "the end")
    assert job["num_losses"] == 1
    assert job["events"]
    server.process.send_signal(signal.SIGINT)
    assert server.wait_for_exit(15) in (0, 130)
    assert "Traceback" not in server.output


def test_server_ends_at_once_while_pages_are_open(dlrover: Dlrover) -> None:
    server, url = start(dlrover)
    pages = [urllib.request.urlopen(f"{url}/api/events", timeout=20) for _ in range(3)]
    for page in pages:
        assert page.readline().startswith(b"retry:")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_exit(10)
    assert "Traceback" not in server.output
    for page in pages:
        page.close()


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_dlrover.dashboard.server", None)
    monkeypatch.delattr(dashboard, "server", raising=False)
    with pytest.raises(UsageError, match=r"lightning-dlrover\[web\]"):
        serve.serve(None)  # type: ignore[arg-type]
