"""Metrics for Prometheus: what a scrape answers about a job, and where its time went."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")

from prometheus_client.parser import text_string_to_metric_families

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdUnavailableError
from lightning_dlrover.rdzv.job.events import (
    Event,
    FitFinished,
    RoundFormed,
    TrainingStalled,
    WindowMeasured,
    WorkerFailed,
    WorkerLost,
    record_of,
)
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import (
    EventRecord,
    JobRecord,
    Keys,
    PlanRecord,
    ProgressRecord,
    RoundRecord,
    SnapshotRecord,
    WorkerRecord,
    encode,
)
from lightning_dlrover.report.metrics import (
    METRICS,
    PHASES,
    ROUND_KINDS,
    Exporter,
    JobMeter,
    JobMetrics,
    MetricsError,
    Sample,
    serve_metrics,
)
from lightning_dlrover.report.status import JobPlace
from lightning_dlrover.report.timeline import TimeLedger
from lightning_dlrover.tuning.samples import STEP_PARTS
from tests.support.counted_requests import counted
from tests.support.windows import WINDOW

ROOT = Path(__file__).parents[2]


def scraped(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of a page by metric and labels, as Prometheus' own parser reads them."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def window(first: int, at: float, num_steps: int = 100, step_s: float = 0.1) -> EventRecord:
    measured = replace(WINDOW, first_step=first, num_steps=num_steps, step_time_s=step_s, at=at)
    return record_of(WindowMeasured(asdict(measured)), "", at)


def at(seconds: float, event: Event) -> EventRecord:
    return record_of(event, "", seconds)


def formed(number: int, kind: str) -> RoundFormed:
    return RoundFormed(number, [], kind, num_members=2)


@pytest.fixture
def training(client: EtcdClient, keys: Keys) -> Keys:
    """A job that has trained for 100 s, has lost a worker and 4 s, and has returned to a state 50 batches ago."""
    worker = WorkerRecord("w", "agent", "host", 1, 0, "127.0.0.1", 1, "active", 2)
    client.put(keys.job, encode(JobRecord("training", True, 1, 3, "0", global_batch_size=64)))
    client.put(keys.round, encode(RoundRecord(2, ["w", "gone"], "loss of gone", "loss", False)))
    client.put(keys.plan, encode(PlanRecord(3, "planner", "3 is best", True)))
    client.put(keys.workers + "w", encode(worker))
    client.put(keys.profiles + "w", encode(replace(WINDOW, peak_memory_bytes=3 << 30, memory_limit_bytes=4 << 30, at=1100.0)))
    client.put(keys.progress, encode(ProgressRecord(950, 0, 950, 2, 640.0, at=1110.0)))
    client.put(keys.snapshot, encode(SnapshotRecord(2, 900, 1090.0)))
    records = [
        at(1000.0, formed(1, "start")),
        window(0, 1060.0, num_steps=500),  # 50 s, after 10 s of startup
        at(1061.0, WorkerLost("gone", 1)),
        at(1061.0, formed(2, "loss")),
        at(1065.0, TrainingStalled(2, 4.0, "loss", 2, 1)),
        at(1065.0, TrainingStalled(2, 3.0, "loss", 2, 1)),  # another survivor's
        window(450, 1100.0, num_steps=350),  # 50 batches, 5 s, again
    ]
    journal = Journal(client, keys)
    for number, record in enumerate(records):
        journal.append(record, f"test-{number}")
    return keys


@pytest.fixture
def page(etcd: EmbeddedEtcd, training: Keys) -> Iterator[str]:
    metrics = JobMetrics(JobPlace(training.run_id, etcd.endpoint))
    with serve_metrics(("127.0.0.1", 0), metrics) as url:
        yield url
    metrics.close()


def test_scrape_shows_the_job(page: str, training: Keys) -> None:
    found = scraped(page)
    job = ("job", training.run_id)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted([job, *labels.items()]))]

    assert found["dlrover_up", ()] == 1
    assert found["dlrover_etcd_size_bytes", ()] > 0
    assert value("dlrover_workers") == 1  # `gone` is a member of the round, and is not alive
    assert value("dlrover_workers_wanted") == 3
    assert value("dlrover_job_phase", phase="training") == 1
    assert sum(value("dlrover_job_phase", phase=phase) for phase in PHASES) == 1
    assert value("dlrover_rounds_total", kind="loss") == 1
    assert value("dlrover_workers_lost_total") == 1
    assert value("dlrover_stalls_total", reason="loss") == 1
    assert value("dlrover_stall_seconds_total", reason="loss") == 4
    assert value("dlrover_lost_seconds_total", cause="startup") == pytest.approx(10)
    assert value("dlrover_lost_seconds_total", cause="repeated") == pytest.approx(5)
    assert sum(value("dlrover_step_seconds", part=part) for part in STEP_PARTS) == pytest.approx(0.1)
    assert value("dlrover_memory_limit_ratio") == 0.75
    assert value("dlrover_samples_per_second") == 640
    assert value("dlrover_last_step_timestamp_seconds") == 1110
    assert value("dlrover_last_snapshot_timestamp_seconds") == 1090
    # The newest record of progress is old, so the time since then counts as lost, too.
    assert 0 < value("dlrover_goodput_ratio") < 0.001
    assert value("dlrover_productive_seconds") == pytest.approx(45 + 35 + 10)


def test_goodput_is_the_share_of_time_in_steps_that_counted() -> None:
    meter = JobMeter()
    meter.add([at(0.5, formed(1, "start")), window(0, 20.0), window(100, 30.0), window(100, 50.0)])
    split = meter.time.split(now=51.0, progress_at=50.0)
    assert split.startup_s == pytest.approx(9.5)
    assert split.repeated_s == pytest.approx(10.0)
    assert split.goodput == pytest.approx(20 / 49.5)


def test_goodput_falls_while_nothing_progresses() -> None:
    ledger = TimeLedger()
    ledger.measured(replace(WINDOW, num_steps=100, at=110.0))
    assert ledger.split(now=115.0, progress_at=112.0).goodput == 1.0
    assert ledger.split(now=2000.0, progress_at=112.0).goodput < 0.01


def test_time_after_the_end_of_a_job_is_not_counted() -> None:
    meter = JobMeter()
    meter.add([window(0, 110.0), at(110.0, FitFinished(100))])
    assert meter.time.split(now=9e9, progress_at=0.0).goodput == pytest.approx(1.0)


def test_time_of_a_second_fit_in_the_same_round_is_counted() -> None:
    meter = JobMeter()
    meter.add([window(0, 110.0), at(110.0, FitFinished(100)), window(0, 160.0)])  # 40 s between the two
    split = meter.time.split(now=161.0, progress_at=160.0)
    assert split.wall_s == pytest.approx(60.0)
    assert split.goodput == pytest.approx(20.0 / 60.0)


def test_second_fit_repeats_nothing() -> None:
    meter = JobMeter()
    meter.add([window(0, 110.0), at(110.0, FitFinished(100)), at(111.0, formed(2, "start")), window(0, 121.0)])
    split = meter.time.split(now=122.0, progress_at=121.0)
    assert split.repeated_s == 0
    assert split.productive_s == pytest.approx(20.0)


def test_steps_that_windows_leave_out_count_up_to_the_time_between_them() -> None:
    meter = JobMeter()
    meter.add([window(0, 1010.0), window(110, 1021.0)])  # ten batches of 0.1 s within 1 s
    assert meter.time.split(1022.0, 1021.0).productive_s == pytest.approx(21.0)
    meter = JobMeter()
    meter.add([window(0, 1010.0), window(90_000, 1020.0)])  # a job that has returned to another checkpoint
    assert meter.time.split(1021.0, 1020.0).productive_s == pytest.approx(20.0)


def test_no_event_can_break_the_counters_or_add_a_label() -> None:
    meter = JobMeter()
    meter.add(
        [
            at(1.0, RoundFormed(1, [], 'evil"} 1\n', num_members=1)),
            at(1.0, TrainingStalled(1, float("inf"))),
            at(1.0, TrainingStalled(1, -5.0)),
            EventRecord("profile", 1.0, "", {"global_rank": 0}),
            EventRecord("decision", 1.0, "", {"chosen": 1}),
            EventRecord("stall", 1.0, "", {}),
            EventRecord("unknown", 1.0, "", {"a": []}),
            at(1.0, WorkerFailed("w")),
        ]
    )
    assert dict(meter.rounds) == {"other": 1}
    assert not meter.stall_s
    assert meter.num_failures == 1


def test_hostile_name_of_a_job_stays_a_label() -> None:
    name = 'a"} 9\n# HELP <script>\\'
    with serve_metrics(("127.0.0.1", 0), lambda: [Sample("dlrover_workers", 2, (name,))]) as url:
        assert scraped(url) == {("dlrover_up", ()): 1, ("dlrover_workers", (("job", name),)): 2}


def test_page_has_no_figures_while_etcd_is_away_and_again_afterwards() -> None:
    with EmbeddedEtcd() as server, EtcdClient(EtcdConfig(server.endpoint)) as client:
        client.put(Keys("job").job, encode(JobRecord("training", True, 1, 3, "0")))
        metrics = JobMetrics(JobPlace("job", server.endpoint))
        exporter = Exporter(metrics, every_s=0.0)

        def names() -> set[str]:
            return {metric.name for metric in exporter.collect()}

        assert "dlrover_job_phase" in names()
        server.kill()
        assert names() == {"dlrover_up"}
        server.restart()
        assert "dlrover_job_phase" in names()
        metrics.close()


def test_many_scrapes_share_one_read() -> None:
    num_reads = 0
    entered = threading.Barrier(8)

    def read() -> list[Sample]:
        nonlocal num_reads
        num_reads += 1
        return []

    def scrape() -> None:
        entered.wait(10)
        list(exporter.collect())

    exporter = Exporter(read)
    threads = [threading.Thread(target=scrape) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_reads == 1


def test_scrape_takes_two_requests_whatever_the_number_of_workers(etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.job, encode(JobRecord("training", True, 1, 300, "0")))
    for number in range(300):
        record = WorkerRecord(f"w{number}", "agent", "host", 1, 0, "127.0.0.1", 1, "active", 1)
        client.put(f"{keys.workers}w{number}", encode(record))
    metrics = JobMetrics(JobPlace(keys.run_id, etcd.endpoint))
    samples = metrics()
    assert metrics._client is not None
    with counted(metrics._client) as requests:
        metrics()
    metrics.close()
    assert len(requests) == 2
    assert len(samples) < 100


def test_events_count_once_however_often_the_job_is_read(etcd: EmbeddedEtcd, training: Keys) -> None:
    metrics = JobMetrics(JobPlace(training.run_id, etcd.endpoint))
    first = [each for each in metrics() if each.name.endswith("_total")]
    assert [each for each in metrics() if each.name.endswith("_total")] == first
    metrics.close()


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = ("seconds", "bytes", "ratio", "total")
    for name, family in METRICS.items():
        assert re.fullmatch(r"dlrover_[a-z][a-z_]*[a-z]", name), name
        assert (family.kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"(_ms|_mb|_percent|_count)$", name), name
        assert not {"worker", "worker_id", "rank", "host"} & {*family.labels}, name
    assert any(name.endswith(units) for name in METRICS)


def test_taken_port_is_refused_with_the_next_move() -> None:
    with serve_metrics(("127.0.0.1", 0), list) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(MetricsError, match="choose another port"), serve_metrics(("127.0.0.1", port), list):
            pass


def test_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.registry", None)
    with pytest.raises(MetricsError, match=r"lightning-dlrover\[metrics\]"), serve_metrics(("127.0.0.1", 0), list):
        pass


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
    return found


def expressions(of: Any) -> Iterator[str]:
    """Yield all queries of the Grafana board."""
    if isinstance(of, dict):
        yield from (value for key, value in of.items() if key in ("expr", "definition") and isinstance(value, str))
        for value in of.values():
            yield from expressions(value)
    elif isinstance(of, list):
        for value in of:
            yield from expressions(value)


def test_every_metric_of_the_board_is_exported_with_the_labels_it_uses() -> None:
    found = list(expressions(board()))
    assert len(found) > 10
    for expression in found:
        for name, selector in re.findall(r"(dlrover_\w+)(?:\{([^}]*)\})?", expression):
            assert name in METRICS, expression
            labels = re.findall(r"(\w+)\s*[=!]~?", selector)
            assert {*labels} <= {*METRICS[name].labels}, expression


def test_values_of_labels_that_the_board_selects_exist() -> None:
    known = {*ROUND_KINDS, *PHASES, *STEP_PARTS, "startup", "stall", "repeated", "$job", "$pool"}
    for expression in expressions(board()):
        assert {*re.findall(r'\w+[=!]~?"([^"]*)"', expression)} <= known, expression


def test_guide_lists_every_metric_once() -> None:
    text = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    listed = re.findall(r"^\| `(dlrover_\w+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(METRICS)


def test_unreadable_answer_of_etcd_is_not_an_error_of_the_scrape() -> None:
    def read() -> list[Sample]:
        raise EtcdUnavailableError("away")

    with serve_metrics(("127.0.0.1", 0), read) as url:
        assert scraped(url) == {("dlrover_up", ()): 0}
