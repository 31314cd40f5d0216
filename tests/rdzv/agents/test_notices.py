"""Notices of the three clouds, read from services on this machine, and their way into the records of an agent's workers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from lightning_dlrover.rdzv.agents import notices
from lightning_dlrover.rdzv.agents.notices import Cloud, Metadata, MetadataError, NoticeWatch, cloud_named
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import DrainRecord, EndNotice, Keys, WorkerRecord, encode
from tests.support.metadata_services import CloudName, Fault, MetadataService, azure_event
from tests.support.waiting import eventually

CLOUDS: list[CloudName] = ["aws", "gcp", "azure"]

StartService = Callable[[CloudName], MetadataService]


@pytest.fixture
def service_of() -> Iterator[StartService]:
    started: list[MetadataService] = []

    def start(cloud: CloudName) -> MetadataService:
        started.append(MetadataService(cloud))
        return started[-1]

    yield start
    for service in started:
        service.close()


def reader(service: MetadataService, machine: str = "vm1") -> Cloud:
    return cloud_named(service.cloud, service.url, machine)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_notice_holds_the_time_and_only_for_its_machine(cloud: CloudName, service_of: StartService) -> None:
    service, at = service_of(cloud), float(int(time.time()) + 30)
    ours, other = reader(service), reader(service, "vm2")
    assert ours.read() is None
    service.announce("vm1", at)
    found = ours.read()
    assert found is not None
    assert found.source.startswith(f"{cloud} ")
    assert found.taken_at == pytest.approx(at, abs=2.0 if cloud == "gcp" else 0.0)  # Google's has no time, but 30 s
    assert ours.read() == found
    assert other.read() is None


def test_aws_token_that_has_ended_is_renewed(service_of: StartService) -> None:
    service = service_of("aws")
    cloud = reader(service)
    assert cloud.read() is None
    assert cloud.read() is None
    assert len(service.tokens) == 1
    service.tokens.clear()
    assert cloud.read() is None
    assert len(service.tokens) == 1


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("instance-action", {"action": "stop", "time": "2026-01-31T14:30:00Z"}, ("aws spot/instance-action", 1769869800.0)),
        ("instance-action", {"action": "hibernate", "time": "2026-01-31T14:30:00"}, ("aws spot/instance-action", 1769869800.0)),
        ("instance-action", {"action": "terminate", "time": "soon"}, ("aws spot/instance-action", 0.0)),
        ("instance-action", {"action": "terminate"}, ("aws spot/instance-action", 0.0)),
        ("rebalance", {"noticeTime": "2026-01-31T14:30:00Z"}, ("aws events/recommendations/rebalance", 0.0)),
    ],
)
def test_aws_formats(path: str, value: dict[str, Any], expected: tuple[str, float], service_of: StartService) -> None:
    service = service_of("aws")
    service.plans("vm1").values[path] = json.dumps(value)
    assert reader(service).read() == EndNotice(*expected)


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "gcp maintenance-event"),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}, "gcp preempted"),
    ],
)
def test_live_migration_of_google_is_no_end(values: dict[str, str], source: str | None, service_of: StartService) -> None:
    service = service_of("gcp")
    service.plans("vm1").values |= values
    found = reader(service).read()
    assert (found.source if found is not None else None) == source


def test_notice_of_google_that_was_withdrawn_and_made_again_has_a_new_time(service_of: StartService) -> None:
    service, now = service_of("gcp"), [1000.0]
    cloud = notices.Gcp(Metadata(service.url.replace("{node}", "vm1")), lambda: now[0])
    found = []
    for value, now[0] in (("TRUE", 1000.0), ("TRUE", 1010.0), ("FALSE", 1020.0), ("TRUE", 1030.0)):
        service.plans("vm1").values["preempted"] = value
        notice = cloud.read()
        found.append(notice.taken_at if notice is not None else None)
    assert found == [1030.0, 1030.0, None, 1060.0]


def test_azures_freezes_are_no_end_and_the_earliest_event_counts(service_of: StartService) -> None:
    service = service_of("azure")
    at = 1769869800.0
    plans = service.plans("vm1")
    plans.events = [azure_event("Freeze", "vm1", formatdate(at - 900.0, usegmt=True))]
    assert reader(service).read() is None
    plans.events += [azure_event(kind, "vm1", formatdate(at + i, usegmt=True)) for i, kind in enumerate(["Redeploy", "Reboot"])]
    assert reader(service).read() == EndNotice("azure Redeploy", at)
    plans.events += [azure_event("Terminate", "vm1", "Some day")]
    assert reader(service).read() == EndNotice("azure Redeploy", at)
    plans.events = plans.events[-1:]
    assert reader(service).read() == EndNotice("azure Terminate", 0.0)


def test_event_of_azure_that_has_started_ends_the_machine_now(service_of: StartService) -> None:
    service = service_of("azure")
    service.plans("vm1").events = [azure_event("Preempt", "vm1", "", "Started")]
    cloud = reader(service)
    found = cloud.read()
    assert found is not None
    assert found.taken_at == pytest.approx(time.time(), abs=2.0)
    assert cloud.read() == found


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("fault", ["hang", "trickle", "garbage", "empty", "huge", "cut off", "redirect", "error", "foreign"])
def test_answer_that_is_not_the_clouds_is_an_error_in_time(
    cloud: CloudName, fault: Fault, service_of: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "REQUEST_S", 0.4)
    service = service_of(cloud)
    service.announce("vm1", time.time() + 30.0)
    service.fault = fault
    began = time.monotonic()
    with pytest.raises(MetadataError):
        reader(service).read()
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("cloud", CLOUDS)
def test_service_that_refuses_connections_is_an_error(cloud: CloudName) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(MetadataError, match="refused"):
        cloud_named(cloud, url).read()


@pytest.mark.parametrize("url", ["169.254.169.254", "https://169.254.169.254", "http://", "file:///etc/passwd", "http://a/?b"])
def test_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the beginning of a metadata service's URL"):
        cloud_named("aws", url)
    with pytest.raises(ValueError, match="one of aws, gcp, azure"):
        cloud_named("ibm", "")


def test_environments_proxy_is_not_used(service_of: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert reader(service_of("azure")).read() is None


# --- the agent's thread -------------------------------------------------------------------------------------------------------


def register(client: EtcdClient, keys: Keys, agent: str, number: int) -> str:
    worker = f"host-{number}"
    record = WorkerRecord(worker, agent, "host", number, 0, "127.0.0.1", 1, "active", 1)
    client.put(keys.workers + worker, encode(record))
    return worker


def test_watch_records_the_notice_for_the_agents_workers_alone(
    client: EtcdClient, keys: Keys, service_of: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    service, journal = service_of("aws"), Journal(client, keys)
    ours = [register(client, keys, "agent1", number) for number in (1, 2)]
    others = register(client, keys, "agent2", 3)
    service.fault = "error"
    watch = NoticeWatch(client, keys, "agent1", "host", reader(service), service, poll_s=0.05)
    try:
        eventually(lambda: service.num_requests > 3, "several requests")
        service.fault = ""
        eventually(lambda: "can be read again" in caplog.text, "an answer")
        service.announce("vm1", 4e9)
        eventually(lambda: client.count(keys.drains) == 2, "the requests to leave")
        late = register(client, keys, "agent1", 4)  # the agent has started it since
        eventually(lambda: client.count(keys.drains) == 3, "that of the late worker")
    finally:
        watch.stop()
    notice = EndNotice("aws spot/instance-action", 4e9)
    for worker in (*ours, late):
        record = journal.get(DrainRecord, keys.drains + worker).record
        assert record == DrainRecord(worker, f"its node {notice}", True, source=notice.source, taken_at=notice.taken_at)
    assert client.get(keys.drains + others) is None
    assert caplog.text.count("cannot be read") == 1
    assert sum(event.kind == "notice" for event in journal.events()) == 3


def test_watch_repeats_a_record_that_etcd_did_not_take(
    client: EtcdClient, keys: Keys, service_of: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError

    service, txn = service_of("gcp"), client.txn
    failures: list[Any] = []
    worker = register(client, keys, "agent1", 1)

    def unavailable(*given: Any) -> Any:
        if len(failures) < 2:
            failures.append(given)
            raise EtcdUnavailableError("away")
        return txn(*given)

    monkeypatch.setattr(client, "txn", unavailable)
    service.announce("vm1", 0.0)
    watch = NoticeWatch(client, keys, "agent1", "host", reader(service), service, poll_s=0.05)
    try:
        eventually(lambda: client.get(keys.drains + worker), "the request to leave")
    finally:
        watch.stop()
    assert len(failures) == 2
