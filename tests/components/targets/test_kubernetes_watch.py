"""Watches of the nodes' Jobs and pods: what they save, and that whatever they fail to deliver is found by a list."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_dlrover.components.targets import kubernetes_api
from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi, Resource
from lightning_dlrover.components.targets.kubernetes_manifests import MARK_LABEL, KubernetesOptions
from lightning_dlrover.components.targets.kubernetes_watch import WatchedList
from lightning_dlrover.components.targets.target import App, NodeSpec
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.manual_clock import ShiftedClock
from tests.support.waiting import eventually

MARK = "0123456789"
HANDLE = f"run-node1-{MARK}/node1"
SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    """A cluster without a kubelet; the test updates its pods."""
    with kubernetes_cluster(tmp_path, runs_pods=False) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def api(cluster: KubernetesCluster) -> KubernetesApi:
    return KubernetesApi(request_s=5.0, pause_s=0.01)


@pytest.fixture
def pods(api: KubernetesApi, clock: ShiftedClock) -> Iterator[WatchedList]:
    watched = WatchedList(api, "training", Resource("pods"), clock=clock)
    watched.select(f"{MARK_LABEL}={MARK}")
    yield watched
    watched.close()


MakeTarget = Callable[[], KubernetesTarget]


@pytest.fixture
def make_target(api: KubernetesApi, clock: ShiftedClock) -> Iterator[MakeTarget]:
    made: list[KubernetesTarget] = []

    def make() -> KubernetesTarget:
        made.append(KubernetesTarget(SPEC, KubernetesOptions(image="trainer:1"), None, poll_s=0.0, api=api, clock=clock))
        made[-1].open(MARK)
        return made[-1]

    yield make
    for target in made:
        target.close()


@pytest.fixture
def target(make_target: MakeTarget) -> KubernetesTarget:
    """A target that has started node1 and watches it."""
    made = make_target()
    made.start("node1")
    wait_for(made, "pending")
    eventually(lambda: _is_watched(made), "the watches", 10.0, 0.02)
    return made


def _is_watched(target: KubernetesTarget) -> bool:
    return all(watched._watch is not None and watched._watch.stream is not None for watched in (target._jobs, target._pods))


def wait_for(target: KubernetesTarget, status: str) -> None:
    eventually(lambda: target.status(HANDLE) == status, f"{HANDLE} to be {status}", 10.0, 0.02)


def start(cluster: KubernetesCluster, api: KubernetesApi, *nodes: str) -> None:
    """Start nodes as another controller does."""
    target = KubernetesTarget(SPEC, KubernetesOptions(image="trainer:1"), None, api=api, watches=False)
    target.open(MARK)
    for node in nodes:
        target.start(node)


def phases(watched: WatchedList) -> list[str]:
    return sorted(str(pod["status"]["phase"]) for pod in watched.read())


def wait_for_watch(watched: WatchedList) -> None:
    eventually(lambda: watched._watch is not None and watched._watch.stream is not None, "the watch", 10.0, 0.01)


def wait_for_phases(watched: WatchedList, *wanted: str) -> None:
    eventually(lambda: phases(watched) == sorted(wanted), f"{wanted}", 10.0, 0.01, report=lambda: f"{phases(watched)}")


def num_lists(cluster: KubernetesCluster) -> int:
    return cluster.num_requests("GET", "pods")


def test_changes_come_by_the_watch_without_another_list(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi
) -> None:
    start(cluster, api, "node1", "node2")
    assert phases(pods) == ["Pending", "Pending"]
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Pending", "Running")
    start(cluster, api, "node3")
    wait_for_phases(pods, "Pending", "Pending", "Running")
    assert not pods.has_news
    cluster.set_pod("node2", "Running")
    eventually(lambda: pods.has_news, "news", 10.0, 0.01)
    assert (num_lists(cluster), cluster.num_requests("WATCH", "pods")) == (1, 1)


def test_watch_shows_only_objects_with_the_label(pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi) -> None:
    start(cluster, api, "node1")
    assert len(pods.read()) == 1
    other = KubernetesTarget(SPEC, KubernetesOptions(image="trainer:1"), None, api=api, watches=False)
    other.open("9876543210")
    other.start("node2")
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Running")


def test_long_lists_come_in_pages_of_one_moment(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "PAGE", 2)
    start(cluster, api, *(f"node{number}" for number in range(5)))
    assert len(pods.read()) == 5
    assert num_lists(cluster) == 3
    cluster.set_pod("node3", "Running")
    wait_for_phases(pods, *["Pending"] * 4, "Running")


def test_list_whose_continuation_has_expired_is_begun_again_once(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "PAGE", 2)
    start(cluster, api, *(f"node{number}" for number in range(5)))
    original, num_pages = cluster._page, 0

    def page(*arguments: object) -> Answer:
        nonlocal num_pages
        num_pages += 1
        if num_pages == 2:
            cluster.compact()
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "_page", page)
    assert len(pods.read()) == 5
    assert num_lists(cluster) == 2 + 3
    cluster.answer_next("GET", "pods", *[Answer(410, "too old", "Expired")] * 2)
    with pytest.raises(ApiError, match="too old"):
        pods.read(fresh=True)


def test_cut_watch_continues_from_the_newest_version(pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi) -> None:
    start(cluster, api, "node1", "node2")
    pods.read()
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Pending", "Running")
    for phase in ("Succeeded", "Failed"):
        with cluster.lock:
            cluster.cut_streams()
            cluster.set_pod("node2", phase)
        wait_for_phases(pods, "Running", phase)
    assert num_lists(cluster) == 1
    watches = [path for method, path in cluster.requests if "watch=true" in path]
    versions = [int(path.partition("resourceVersion=")[2].partition("&")[0]) for path in watches]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("is_http_status", [True, False], ids=["status", "event"])
def test_expired_version_leads_to_a_list(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi, is_http_status: bool, clock: ShiftedClock
) -> None:
    start(cluster, api, "node1")
    pods.read()
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Running")
    with cluster.lock:
        if is_http_status:
            cluster.answer_next("WATCH", "pods", Answer(410, "too old resource version", "Gone"))
        else:
            cluster.compact()  # the watch has not seen anything newer
        cluster.cut_streams()
        cluster.set_pod("node1", "Succeeded")
    wait_for_phases(pods, "Succeeded")
    assert num_lists(cluster) == 2
    cluster.set_pod("node1", "Failed")
    wait_for_phases(pods, "Failed")
    assert num_lists(cluster) == 2


def test_bookmarks_keep_a_quiet_watch_from_expiring(pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi) -> None:
    cluster.bookmark_s = 0.05
    start(cluster, api, "node1")
    pods.read()
    watch = pods._watch
    assert watch is not None
    eventually(lambda: watch.num_signs, "the watch", 10.0, 0.01)
    for _ in range(3):
        cluster.compact()  # others' changes
    eventually(lambda: int(watch.version) >= cluster._compacted, "a bookmark", 10.0, 0.01)
    with cluster.lock:
        cluster.cut_streams()
        cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Running")
    assert num_lists(cluster) == 1


def test_cluster_that_forbids_watches_is_polled_and_tried_again_later(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster.forbidden.add(("watch", "pods"))
    start(cluster, api, "node1")
    for phase in ("Running", "Succeeded", "Failed"):
        pods.read()
        cluster.set_pod("node1", phase)
        wait_for_phases(pods, phase)
    assert cluster.num_requests("WATCH", "pods") == 1
    [said] = [text for text in caplog.messages if "cannot be watched" in text]
    assert 'cannot watch resource "pods"' in said
    assert "rbac.yaml" in said
    cluster.forbidden.clear()
    clock.ahead_s = 601.0
    pods.read()
    wait_for_watch(pods)
    before = num_lists(cluster)
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Running")
    assert num_lists(cluster) == before


def test_proxy_that_buffers_a_watch_is_found_by_this_jobs_own_changes(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster.has_buffering_proxy = True
    target = make_target()
    assert target.apps() == []
    target.start("node1")
    assert target.status(HANDLE) == "pending"  # not gone: no list is newer than its start
    clock.ahead_s = 5.5
    assert target.apps() == [App("node1", HANDLE, True)]
    assert [text for text in caplog.messages if "jobs cannot be watched and are listed instead: it delivered noth" in text]
    for ahead_s in (12.0, 24.0, 36.0):
        clock.ahead_s = ahead_s
        cluster.set_pod("node1", "Running" if ahead_s < 36.0 else "Failed")
        target.apps()
    assert target.status(HANDLE) == "failed"
    assert len([text for text in caplog.messages if "cannot be watched" in text]) == 2  # pods, too
    num_watches = cluster.num_requests("WATCH", "")
    clock.ahead_s = 50.0
    target.apps()
    assert cluster.num_requests("WATCH", "") == num_watches


def test_silent_watch_is_checked_by_a_list_and_kept_if_nothing_has_changed(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi, clock: ShiftedClock
) -> None:
    start(cluster, api, "node1")
    pods.read()
    wait_for_watch(pods)
    for ahead_s, lists in ((9.0, 1), (11.0, 2), (20.0, 2), (22.0, 3)):
        clock.ahead_s = ahead_s
        assert phases(pods) == ["Pending"]
        assert num_lists(cluster) == lists
    cluster.set_pod("node1", "Running")
    wait_for_phases(pods, "Running")  # proven: bookmarks may be a minute apart
    for ahead_s, lists in ((90.0, 3), (110.0, 4)):
        clock.ahead_s = ahead_s
        assert phases(pods) == ["Running"]
        assert num_lists(cluster) == lists
    assert cluster.num_requests("WATCH", "pods") == 1


def test_node_is_gone_once_a_list_confirms_the_deletion(
    target: KubernetesTarget, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    cluster.set_pod("node1", "Running")
    wait_for(target, "running")
    cluster.answer_next("GET", "jobs", *[Answer(503, "starting")] * 3)
    with cluster.lock:
        cluster.objects["jobs"].clear()
        cluster.objects["pods"].clear()
    watch = target._jobs._watch
    assert watch is not None
    eventually(lambda: watch.has_deletion, "the event", 10.0, 0.01)
    assert target.status(HANDLE) == "running"
    cluster.clear_answers()
    clock.ahead_s = 61.0  # the longest pause after failures
    wait_for(target, "failed")


@pytest.mark.parametrize(
    "failure",
    [
        Answer(503, "starting"),
        Answer(429, "slow down"),
        Answer(),
        Answer(200, body=b""),
        Answer(200, body=b"<html>Welcome to our proxy</html>\n"),
        Answer(200, body=b'{"type": "ADDED", "object": {}}\n'),
        Answer(200, body=json.dumps({"type": "ERROR", "object": {"code": 500, "message": "internal"}}).encode() + b"\n"),
        Answer(200, body=b'{"type": "ERROR", "object": null}\n'),
    ],
    ids=["503", "429", "cut", "empty", "garbage", "no-object", "error-500", "error-null"],
)
def test_failing_watch_never_ends_a_node(
    make_target: MakeTarget, cluster: KubernetesCluster, failure: Answer, clock: ShiftedClock
) -> None:
    cluster.answer_next("WATCH", "jobs", *[failure] * 100)
    cluster.answer_next("WATCH", "pods", *[failure] * 100)
    target = make_target()
    target.start("node1")
    for ahead_s, phase in enumerate(("Pending", "Running") * 20):
        clock.ahead_s = float(ahead_s)
        cluster.set_pod("node1", phase)
        assert target.apps() == [App("node1", HANDLE, True)]
        assert target.status(HANDLE) in ("pending", "running")
    assert cluster.num_requests("WATCH", "pods") <= 8  # backoff
    cluster.clear_answers()
    for clock.ahead_s in (200.0, 300.0):  # the last failure, and after its pause
        target.apps()
    eventually(lambda: _is_watched(target), "the watches", 10.0, 0.01)
    cluster.set_pod("node1", "Succeeded")
    wait_for(target, "succeeded")


def test_unreachable_server_ends_no_watched_node(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.set_pod("node1", "Running")
    wait_for(target, "running")
    for method in ("GET", "WATCH"):
        for kind in ("jobs", "pods"):
            cluster.answer_next(method, kind, *[Answer()] * 100)
    cluster.cut_streams()
    for _ in range(10):
        assert target.status(HANDLE) == "running"
    cluster.clear_answers()


def test_pod_that_replaces_another_of_its_name_is_a_new_one(
    pods: WatchedList, cluster: KubernetesCluster, api: KubernetesApi
) -> None:
    start(cluster, api, "node1")
    [first] = pods.read()
    with cluster.lock:
        pod = cluster.pod_of("node1")
        metadata = {k: v for k, v in pod["metadata"].items() if k != "resourceVersion"} | {"uid": "other"}
        cluster.objects["pods"][pod["metadata"]["name"]] = {**pod, "metadata": metadata}
    eventually(lambda: [pod["metadata"]["uid"] for pod in pods.read()] == ["other"], "the new pod", 10.0, 0.01)
    assert first["metadata"]["uid"] != "other"


def test_news_of_a_watch_do_not_wait_for_the_next_poll(
    api: KubernetesApi, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    target = KubernetesTarget(SPEC, KubernetesOptions(image="trainer:1"), None, poll_s=1000.0, api=api, clock=clock)
    target.open(MARK)
    target.start("node1")
    target.apps()
    eventually(lambda: _is_watched(target), "the watches", 10.0, 0.01)
    cluster.set_pod("node1", "Running")
    wait_for(target, "running")
    target.close()


def test_closed_target_leaves_no_watch_behind(target: KubernetesTarget) -> None:
    def watching() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("dlrover-watch-")]

    assert len(watching()) == 2
    target.close()
    eventually(lambda: not watching(), "the end of the watches", 10.0, 0.01, report=lambda: f"{watching()}")


def test_hundred_running_nodes_cost_no_requests_while_bookmarks_come(
    api: KubernetesApi, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    cluster.bookmark_s = 0.05
    target = KubernetesTarget(SPEC, KubernetesOptions(image="trainer:1"), None, poll_s=0.0, api=api, clock=clock)
    target.open(MARK)
    for number in range(100):
        target.start(f"node{number}")
        cluster.set_pod(f"node{number}", "Running")
    target.apps()
    eventually(lambda: _is_watched(target), "the watches", 10.0, 0.01)
    watches = [target._jobs._watch, target._pods._watch]
    before = len(cluster.requests)
    for looks in range(20):
        num_signs = [watch.num_signs for watch in watches if watch is not None]
        clock.ahead_s = 60.0 * looks
        eventually(
            lambda: all(watch and watch.num_signs > old + 1 for watch, old in zip(watches, num_signs, strict=True)),  # noqa: B023
            "bookmarks",
            10.0,
            0.01,
        )
        assert len(target.apps()) == 100
    assert len(cluster.requests) == before
    target.close()


def test_a_node_that_never_had_a_pod_ends_with_its_job(
    cluster: KubernetesCluster, api: KubernetesApi, clock: ShiftedClock
) -> None:
    cluster.has_kueue, cluster.bookmark_s = True, 0.2  # it suspends the Job; bookmarks prove that the watches work
    options = KubernetesOptions(image="trainer:1", queue="training")
    target = KubernetesTarget(SPEC, options, None, poll_s=0.0, api=api, clock=clock)
    try:
        target.open(MARK)
        target.apps()
        eventually(lambda: _is_watched(target), "the watches", 10.0, 0.02)
        clock.ahead_s += 5.0
        target.start("node1")
        wait_for(target, "pending")
        assert not cluster.objects["pods"]
        target.cancel([HANDLE])
        wait_for(target, "failed")
        assert target.release(HANDLE)
    finally:
        target.close()


def test_closed_list_begins_no_other_watch(cluster: KubernetesCluster, api: KubernetesApi, pods: WatchedList) -> None:
    start(cluster, api, "node1")
    assert len(pods.read()) == 1
    wait_for_watch(pods)
    pods.close()
    assert len(pods.read(fresh=True)) == 1
    assert pods._watch is None
