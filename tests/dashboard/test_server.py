"""The web server of `dlrover serve`: what it shows, to whom, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `web`")
pytest.importorskip("httpx", reason="needs httpx, for starlette's test client")
pytest.importorskip("prometheus_client", reason="needs the extra `web`")

from starlette.testclient import TestClient

from lightning_dlrover.dashboard.hub import MAX_WORKERS, Parts, pool_rows, shown_workers
from lightning_dlrover.dashboard.serve import WatchedMetrics, _actions
from lightning_dlrover.dashboard.server import HEADERS, Access, PageServer, Refused, create_app, listening_socket, read_token
from lightning_dlrover.pool.view import BrainRecord, GrantRecord, MemberRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import DrainRecord, EventRecord, Keys, PlanRecord, ProgressRecord, decode, encode
from lightning_dlrover.report.metrics import Exporter, page_of, registry_of
from lightning_dlrover.report.view_model import shown_job
from lightning_dlrover.report.watcher import Watcher
from tests.support.counted_requests import counted
from tests.support.recorded_jobs import entries_of, recorded_job, write
from tests.support.waiting import eventually

TOKEN = "a-token-of-some-length"
HOSTILE = '<img src=x onerror=alert(1)>\x1b[2J</script>\u202e"'
CHANGE = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def prefix(run_id: str) -> str:
    """Prefix of this test's jobs alone."""
    return f"/{run_id}"


@pytest.fixture
def job(client: EtcdClient, prefix: str) -> Keys:
    """A job of two workers that trains."""
    keys = Keys("job", prefix)
    for path, value in recorded_job().items():
        client.put(keys.root + path, value)
    return keys


@pytest.fixture
def watcher(etcd: EmbeddedEtcd, prefix: str, job: Keys, tmp_path: Path) -> Iterator[Watcher]:
    with Watcher(etcd.endpoint, prefix, tmp_path / "runs") as found:
        eventually(lambda: found.job("job").job is not None, "the job")
        yield found


def client_of(watcher: Watcher, token: str = "", **given: Any) -> TestClient:
    actions = _actions(watcher, "default") if token else {}
    return TestClient(create_app(watcher, Access(frozenset({"testserver"}), token), actions, **given))


@contextlib.contextmanager
def served(watcher: Watcher, token: str = "") -> Iterator[str]:
    """Serve with a real server, and yield its URL."""
    listening = listening_socket("127.0.0.1", 0)
    app = create_app(watcher, Access(token=token), _actions(watcher, "default") if token else {})
    server = PageServer(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        eventually(lambda: server.started, "the server")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


class Stream:
    """The messages of a stream of events, read over a connection."""

    def __init__(self, url: str) -> None:
        self._answer = urllib.request.urlopen(url, timeout=15)

    def next(self) -> dict[str, Any]:
        while True:
            line = self._answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found

    def close(self) -> None:
        self._answer.close()


# --- what is shown ------------------------------------------------------------------------------------------------------------


def test_jobs_and_one_job_are_answered_as_json(watcher: Watcher) -> None:
    client = client_of(watcher)
    [row] = client.get("/api/jobs").json()["jobs"]
    assert (row["run_id"], row["state"], row["num_workers"]) == ("job", "training", 2)
    job = client.get("/api/jobs/job").json()
    assert [worker["rank"] for worker in job["workers"]] == [0, 1]
    assert job["workers"][0]["parts"]["compute_s"] > 0
    assert client.get("/api/jobs/other").status_code == 404
    assert "has no job 'other'" in client.get("/api/jobs/other").json()["error"]


def test_viewer_gets_the_whole_page_once_and_then_differences(watcher: Watcher, client: EtcdClient, job: Keys) -> None:
    with served(watcher) as url:
        stream = Stream(f"{url}/api/events?job=job")
        first = stream.next()
        assert first["full"]
        assert first["set"]["run_id"] == "job"
        assert len(first["items"]) == 2
        client.put(job.progress, encode(ProgressRecord(901, 0, 901, 2, 99.0, at=1_790_000_101.0)))
        while "samples_per_s" not in (second := stream.next())["set"]:
            pass
        assert not second["full"]
        assert second["set"]["samples_per_s"] == 99
        assert "workers_per_node" not in second["set"]
        assert second["items"] == []
        stream.close()


def test_job_that_appears_and_one_that_goes_are_told_to_the_list(watcher: Watcher, client: EtcdClient, prefix: str) -> None:
    with served(watcher) as url:
        stream = Stream(f"{url}/api/events")
        assert [row["run_id"] for row in stream.next()["items"]] == ["job"]
        client.put(f"{prefix}/later/live/shared/job", recorded_job()["live/shared/job"])
        while not (message := stream.next())["items"] or message["items"][0]["run_id"] != "later":
            pass
        stream.close()


def test_page_of_an_unknown_job_says_so_and_comes_alive_by_itself(watcher: Watcher, client: EtcdClient, prefix: str) -> None:
    with served(watcher) as url:
        stream = Stream(f"{url}/api/events?job=later")
        message = stream.next()
        assert message["set"] == {}
        assert "has no job 'later'" in message["source"]["problem"]
        write_job(client, Keys("later", prefix))
        while "run_id" not in (message := stream.next())["set"]:
            pass
        assert message["set"]["state"] == "training"
        stream.close()


def write_job(client: EtcdClient, keys: Keys) -> None:
    for path, value in recorded_job().items():
        client.put(keys.root + path, value)


@pytest.mark.long
def test_page_says_when_etcd_is_away_and_comes_back(tmp_path: Path) -> None:
    with EmbeddedEtcd() as server, EtcdClient(EtcdConfig(server.endpoint)) as client:
        write(client, "job", recorded_job())
        with Watcher(server.endpoint, None, tmp_path) as watcher, served(watcher) as url:
            stream = Stream(f"{url}/api/events?job=job")
            while not (message := stream.next())["source"]["is_connected"]:
                pass
            server.kill()
            while (message := stream.next())["source"]["is_connected"]:
                pass
            assert message["source"]["problem"]
            server.restart()
            while not stream.next()["source"]["is_connected"]:
                pass
            stream.close()


def test_page_of_a_job_stays_after_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "over"
    folder.mkdir(parents=True)
    place = {"run_id": "over", "endpoint": "unix:/nowhere/etcd.sock:0", "prefix": "/dlrover", "pid": 1, "target": "local"}
    (folder / "job.json").write_text(json.dumps(place))
    events = [value for path, value in sorted(recorded_job().items()) if path.startswith("events/")]
    events.append(encode(EventRecord("finished", 1_790_000_200.0, "training has finished", {"global_step": 900})))
    (folder / "events.jsonl").write_bytes(b"\n".join(events) + b"\n")
    with Watcher(None, None, tmp_path / "runs") as watcher:
        found = client_of(watcher).get("/api/jobs/over").json()
    assert found["state"] == "finished"
    assert found["series"]
    assert found["events"][-1]["text"] == "training has finished"


def test_many_viewers_cost_etcd_no_further_request(watcher: Watcher) -> None:
    with served(watcher) as url:
        streams = [Stream(f"{url}/api/events?job=job") for _ in range(5)]
        for stream in streams:
            assert stream.next()["full"]
        client = watcher.client_of("job")
        assert client is not None
        with counted(client) as requests:
            streams += [Stream(f"{url}/api/events") for _ in range(5)]
            for stream in streams[5:]:
                assert stream.next()["full"]
        assert len(requests) <= 2  # the watch's own checks
        for stream in streams:
            stream.close()


def test_nothing_is_computed_without_viewers(watcher: Watcher) -> None:
    app = create_app(watcher, Access(frozenset({"testserver"})))
    with TestClient(app) as client:
        client.get("/")
        assert app.state.hub.num_looks == 0


def test_large_job_shows_workers_that_need_attention_first() -> None:
    job = shown_job("job", entries_of(recorded_job(MAX_WORKERS + 100)), "/dlrover", 1_790_000_110.0)
    slow = replace(job.workers[-1], slow_factor=3.0)
    found = shown_workers(replace(job, workers=(*job.workers[:-1], slow)))
    assert len(found) == MAX_WORKERS
    assert found[0] == slow


def test_parts_are_sent_once_and_gone_ones_are_named() -> None:
    parts = Parts()
    assert parts.replace({"a": 1, "b": 2}, 1)
    assert not parts.replace({"a": 1, "b": 2}, 2)
    assert parts.since(1) == ([], [])
    assert parts.replace({"a": 3}, 3)
    assert parts.since(1) == ([("a", b"3")], ["b"])
    parts.replace({"a": 3, "b": 1}, 4)
    assert parts.since(3) == ([("b", b"1")], [])


def test_pools_show_budget_and_queue(client: EtcdClient, prefix: str) -> None:
    pool = PoolKeys("team", prefix)
    client.put(pool.brain, encode(BrainRecord("host", 7, "jct", {"cores": 4.0})))
    client.put(pool.members + "runs", encode(MemberRecord("host", 1, 1, 3, 1.0, cores=2.0, owner="ann")))
    client.put(pool.grants + "runs", encode(GrantRecord("granted", 1, "fits")))
    client.put(pool.members + "waits", encode(MemberRecord("host", 1, 2, 3, 1.0, cores=2.0)))
    client.put(pool.grants + "waits", encode(GrantRecord("waiting", 0, "needs 4 cores", place=1, queued=1)))
    client.put(pool.gpu("g"), b"{}")
    [found] = pool_rows(client.entries(pool.pools))
    assert (found["pool"], found["policy"], found["budget"], found["used"]) == ("team", "jct", {"cores": 4.0}, {"cores": 2.0})
    assert [(row["job"], row["state"], row["place"]) for row in found["jobs"]] == [
        ("runs", "running", 0),
        ("waits", "waiting", 1),
    ]


def test_metrics_of_all_jobs_are_on_one_page(watcher: Watcher) -> None:
    registry = registry_of(Exporter(WatchedMetrics(watcher)))
    text = client_of(watcher, scrape=lambda: page_of(registry)).get("/metrics").text
    assert 'dlrover_workers{job="job"} 2.0' in text
    assert 'dlrover_rounds_total{job="job",kind="grow"} 1.0' in text
    assert "dlrover_jobs_omitted 0.0" in text


# --- who may ask --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8700", "localhost", "[::1]:8700", "192.0.2.7", "testserver"])
def test_own_names_and_addresses_are_answered(watcher: Watcher, host: str) -> None:
    assert client_of(watcher).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "", "127.0.0.1.evil.example", "localhost.evil.example"])
@pytest.mark.parametrize("path", ["/", "/api/jobs", "/api/events", "/metrics", "/static/page.js"])
def test_foreign_name_reads_nothing(watcher: Watcher, host: str, path: str) -> None:
    answer = client_of(watcher).get(path, headers={"Host": host})
    assert answer.status_code == 421
    assert "job" not in answer.json()["error"]


def test_every_answer_has_the_headers_that_confine_a_page(watcher: Watcher) -> None:
    client = client_of(watcher)
    for path in ("/", "/job/job", "/static/page.js", "/static/none", "/api/jobs", "/api/jobs/none", "/nowhere", "/healthz"):
        answer = client.get(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_page_has_nothing_inline_and_nothing_of_other_sites() -> None:
    folder = Path(__file__).parents[2] / "lightning_dlrover" / "dashboard" / "page"
    html, script, style = ((folder / name).read_text() for name in ("page.html", "page.js", "page.css"))
    assert not re.search(r"<script>|<style|\son\w+=|style=", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", html + script + style)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


def test_page_without_a_token_changes_nothing(watcher: Watcher, client: EtcdClient, job: Keys) -> None:
    before = client.get(job.plan)
    answer = client_of(watcher).post("/api/jobs/job/scale", json={"num_workers": 2}, headers=CHANGE)
    assert answer.status_code in (403, 404)
    assert client.get(job.plan) == before


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", "Bearer " + TOKEN[:-1], "Basic " + TOKEN, "Bearer é"])
def test_wrong_token_is_refused(watcher: Watcher, client: EtcdClient, job: Keys, given: str) -> None:
    before = client.get(job.plan)
    headers = {"Authorization": given.encode()} if given else {}
    answer = client_of(watcher, TOKEN).post("/api/jobs/job/scale", json={"num_workers": 2}, headers=headers)
    assert answer.status_code == 401
    assert client.get(job.plan) == before


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://testserver:81"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_change_nothing_even_with_the_token(
    watcher: Watcher, client: EtcdClient, job: Keys, headers: dict[str, str]
) -> None:
    before = client.get(job.plan)
    answer = client_of(watcher, TOKEN).post("/api/jobs/job/scale", json={"num_workers": 2}, headers=CHANGE | headers)
    assert answer.status_code == 403
    assert client.get(job.plan) == before


def test_form_of_another_site_cannot_pass_for_json(watcher: Watcher) -> None:
    headers = CHANGE | {"Content-Type": "text/plain"}
    answer = client_of(watcher, TOKEN).post("/api/jobs/job/scale", content=b'{"num_workers": 2}', headers=headers)
    assert answer.status_code == 415


def test_token_scales_after_a_question_that_changes_nothing(watcher: Watcher, client: EtcdClient, job: Keys) -> None:
    page = client_of(watcher, TOKEN)
    before = client.get(job.plan)
    headers = CHANGE | {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    asked = page.post("/api/jobs/job/scale", json={"num_workers": 4, "dry_run": True}, headers=headers)
    assert asked.status_code == 200
    assert "Set job job to 4 workers?" in asked.json()["text"]
    assert "samples/s" in asked.json()["text"]  # the prediction
    assert client.get(job.plan) == before
    assert page.post("/api/jobs/job/scale", json={"num_workers": 4}, headers=headers).status_code == 200
    entry = client.get(job.plan)
    assert entry is not None
    plan = decode(PlanRecord, entry.value, entry.key)
    assert (plan.num_workers, plan.source) == (4, "user")
    assert page.post("/api/jobs/job/auto", json={}, headers=headers).status_code == 200
    entry = client.get(job.plan)
    assert entry is not None
    assert decode(PlanRecord, entry.value, entry.key).source == "planner"


def test_token_drains_a_worker(watcher: Watcher, client: EtcdClient, job: Keys) -> None:
    page = client_of(watcher, TOKEN)
    worker = page.get("/api/jobs/job").json()["workers"][1]["worker_id"]
    asked = page.post("/api/jobs/job/drain", json={"worker": worker, "dry_run": True}, headers=CHANGE).json()["text"]
    assert "1 worker would train on" in asked
    assert client.get(job.drains + worker) is None
    assert page.post("/api/jobs/job/drain", json={"worker": worker}, headers=CHANGE).status_code == 200
    entry = client.get(job.drains + worker)
    assert entry is not None
    assert decode(DrainRecord, entry.value, entry.key).worker_id == worker


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("scale", {}, 400),
        ("scale", {"num_workers": "2"}, 400),
        ("scale", {"num_workers": True}, 400),
        ("scale", {"num_workers": 400}, 409),
        ("drain", {"worker": 7}, 400),
        ("drain", {"worker": "none"}, 409),
        ("cancel", {}, 404),
    ],
)
def test_impossible_changes_are_refused_with_a_reason(watcher: Watcher, action: str, body: dict[str, Any], status: int) -> None:
    answer = client_of(watcher, TOKEN).post(f"/api/jobs/job/{action}", json=body, headers=CHANGE)
    assert answer.status_code == status
    assert len(answer.json()["error"]) > 10


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b'{"a": "' + b"x" * (5 << 20) + b'"}', 413)]
)
def test_broken_or_huge_requests_are_refused(watcher: Watcher, content: bytes, status: int) -> None:
    client = client_of(watcher, recommend=lambda given: given)
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/recommend", content=content, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..%2f..%2f__init__.py"])
def test_only_the_page_s_files_are_served(watcher: Watcher, path: str) -> None:
    assert client_of(watcher).get(path).status_code == 404


def test_hostile_records_stay_texts(watcher: Watcher, client: EtcdClient, job: Keys) -> None:
    client.put(f"{job.events}9-x", encode(EventRecord(HOSTILE, 1_790_000_105.0, HOSTILE)))
    page = client_of(watcher)
    eventually(lambda: "onerror" in page.get("/api/jobs/job").text, "the event")
    answer = page.get("/api/jobs/job")
    assert answer.headers["content-type"] == "application/json"
    assert "\x1b" not in answer.json()["events"][-1]["text"]
    assert "\u202e" not in answer.json()["events"][-1]["text"]


# --- the token's file, and the address ----------------------------------------------------------------------------------------


def test_missing_token_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    token = read_token(tmp_path / "token")
    assert len(token) > 40
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert read_token(tmp_path / "token") == token


def test_token_that_others_may_read_or_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 40)
    os.chmod(file, 0o644)
    with pytest.raises(Refused, match="chmod 600"):
        read_token(file)
    os.chmod(file, 0o600)
    file.write_text("short")
    with pytest.raises(Refused, match="16 or more"):
        read_token(file)


def test_taken_port_is_refused_with_the_next_move() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Refused, match="choose another --port"):
        listening_socket("127.0.0.1", taken.getsockname()[1])
