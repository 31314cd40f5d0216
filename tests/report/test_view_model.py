"""The picture of a job: what it contains, that it is bounded and clean, and what a change costs."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job import records as records_module
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    EventRecord,
    JobRecord,
    PlanRecord,
    ProgressRecord,
    WorkerRecord,
    encode,
)
from lightning_dlrover.report import view_model
from lightning_dlrover.report.timeline import Profile, profile_of
from lightning_dlrover.report.view_model import (
    MAX_EVENTS,
    MAX_POINTS,
    MAX_TEXT,
    JobRecords,
    ShownJob,
    clean,
    goodput_of,
    shown_job,
)
from tests.support.recorded_jobs import START, decision, decision_event, entries_of, profile, recorded_job, window_event

NOW = START + 101.0


def job_of(records: dict[str, bytes], now: float = NOW) -> ShownJob:
    return shown_job("job", entries_of(records), DEFAULT_PREFIX, now)


def records_of(records: dict[str, bytes]) -> JobRecords:
    made = JobRecords("job")
    for path, value in records.items():
        made.put(path, value)
    return made


def test_picture_shows_workers_rates_plan_and_joiners() -> None:
    job = job_of(recorded_job())
    assert (job.state, job.num_workers, job.wanted_workers, job.min_workers, job.max_workers) == ("training", 2, 3, 1, 4)
    assert job.progress is not None
    assert job.progress.percent == pytest.approx(45.0)
    assert job.progress.seconds_left == pytest.approx(119.0)
    assert job.samples_per_s == 5120.0
    assert job.parts is not None
    assert job.parts.step_s == pytest.approx(0.1)
    assert [worker.rank for worker in job.workers] == [0, 1]
    assert job.workers[0].own_s == pytest.approx(0.09)
    assert [(joiner.node, joiner.stage) for joiner in job.joiners] == [("node9", "requested")]
    assert [(each.number, each.kind, each.stall_s) for each in job.rounds] == [(1, "start", None), (2, "grow", 0.4)]
    assert job.plan is not None
    assert (job.plan.owner, job.plan.num_workers, job.plan.is_binding) == ("planner", 3, True)
    assert job.prediction is not None
    assert job.prediction.is_inside
    assert job.prediction.measured_s == pytest.approx(0.1)
    assert [size.num_workers for size in job.sizes] == [1, 2, 3, 4]
    assert job.newest_at == START + 100.0
    assert job.events[-1].text == "the present size is the fastest that pays"


def test_a_slow_worker_has_its_factor_and_the_others_wait_for_it() -> None:
    records = recorded_job(3)
    slow = profile("host0-1", 1, 3, forward_s=0.13, communication_s=0.01, step_time_s=0.19, at=NOW)
    records["profiles/host0-1"] = encode(slow)
    for rank in (0, 2):
        fast = profile(f"host0-{rank}", rank, 3, communication_s=0.10, step_time_s=0.19, at=NOW)
        records[f"profiles/host0-{rank}"] = encode(fast)
    workers = job_of(records).workers
    assert [round(worker.slow_factor or 0, 2) for worker in workers] == [1.0, 2.0, 1.0]
    assert [worker.parts and round(worker.parts.wait_s, 3) for worker in workers] == [0.09, 0.0, 0.09]
    assert [worker.parts and round(worker.parts.comm_s, 3) for worker in workers] == [0.01, 0.01, 0.01]


def test_the_order_of_records_does_not_change_the_picture() -> None:
    records = recorded_job(5)
    expected = job_of(records)
    for seed in range(5):
        paths = [*records]
        random.Random(seed).shuffle(paths)
        assert job_of({path: records[path] for path in paths}) == expected


def test_changes_one_by_one_give_the_picture_of_one_read() -> None:
    records = recorded_job(4)
    followed = records_of(records)
    followed.shown(NOW)
    del records["live/workers/host0-3"], records["profiles/host0-3"]
    followed.remove("live/workers/host0-3")
    followed.remove("profiles/host0-3")
    leaving = WorkerRecord("host0-1", "a1", "host0", 1001, 0, "127.0.0.1", 1, "reforming", 2, since=NOW)
    records["live/workers/host0-1"] = encode(leaving)
    followed.put("live/workers/host0-1", encode(leaving))
    assert followed.shown(NOW) == job_of(records)
    assert [worker.state for worker in followed.shown(NOW).workers] == ["active", "reforming", "active", "gone"]


def test_one_change_among_a_thousand_workers_decodes_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    records = recorded_job(1000)
    followed = records_of(records)
    before = followed.shown(NOW)
    decoded: list[str] = []
    made: list[Any] = []
    worker = view_model._worker

    def noted_decode(kind: type[Any], value: bytes, path: str) -> Any:
        decoded.append(path)
        return records_module.decode(kind, value, path)

    def noted_worker(*parts: Any) -> Any:
        made.append(parts)
        return worker(*parts)

    monkeypatch.setattr(view_model, "decode", noted_decode)
    monkeypatch.setattr(view_model, "_worker", noted_worker)
    changed = encode(profile("host1-9", 9, 1000, memory_bytes=1 << 20, at=NOW))
    followed.put("profiles/host1-9", changed)
    after = followed.shown(NOW)
    assert (decoded, len(made)) == (["profiles/host1-9"], 1)
    assert after.workers[9].memory_bytes == 1 << 20
    assert sum(old is not new for old, new in zip(before.workers, after.workers, strict=True)) == 1


def test_hostile_text_is_one_clean_line_wherever_it_stands() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J<script>alert(1)</script>\u202ex\n\x9b31m\u200b" + "A" * 10_000
    records = recorded_job()
    records["live/shared/job"] = encode(JobRecord("failed", True, 1, 4, "0.1", message=evil))
    records["live/shared/plan"] = encode(PlanRecord(3, "user", evil, True))
    records["progress"] = encode(ProgressRecord(1, 0, 1, 2, 1.0, loss=evil))
    records["live/workers/host0-1"] = encode(WorkerRecord(evil, "a1", evil, 1, 0, evil, 1, "active", 2))
    records["live/workers/" + evil] = encode(WorkerRecord(evil, "a1", evil, 1, 0, evil, 1, "ready", 2))
    records["events/9-w"] = encode(
        EventRecord("round", NOW, evil, {"number": 3, "members": [evil], "kind": evil, "reason": evil})
    )
    records["live/shared/round"] = b"\xff\xfe" + evil.encode("utf-8", "surrogatepass")
    job = JobRecords("job")
    for path, value in records.items():
        job.put(path, value)
    document = job.shown(NOW).to_json()
    texts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            for each in value.items():
                collect(list(each))
        elif isinstance(value, list | tuple):
            for each in value:
                collect(each)

    collect(document)
    assert sum("<script>" in text for text in texts) >= 4  # markup is text, for the page to escape
    assert [text for text in texts if not text.isprintable()] == []
    assert max(map(len, texts)) <= MAX_TEXT
    assert len(job.shown(NOW).problems) == 1
    json.dumps(document, allow_nan=False).encode()


def test_a_picture_is_bounded_however_long_a_job_runs() -> None:
    followed = records_of(recorded_job())
    for number in range(6000):
        event = kinds.RoundFormed(number, [], "grow", num_members=3) if number % 2 else kinds.WorkerLost(f"w{number}")
        followed.add_events([kinds.record_of(event, f"event {number}", START + number)])
        followed.add_events([window_event(START + number, 20 * number)])
        progress = ProgressRecord(number, 0, number, 3, 1.0, at=START + number)
        followed.put("progress", encode(progress))
    job = followed.shown(START + 6000)
    assert len(job.events) <= MAX_EVENTS
    assert job.events[-1].text == "event 5999"
    assert len(job.series) <= MAX_POINTS
    assert job.series[-1].at == START + 5999
    assert job.num_losses == 3000
    assert len(json.dumps(job.to_json())) < 300_000


def test_time_left_is_hidden_at_the_start_and_when_stale() -> None:
    records = recorded_job()
    records["progress"] = encode(ProgressRecord(5, 0, 5, 2, 1.0, 2, 1000, 120.0, at=NOW))
    early = job_of(records).progress
    assert early is not None
    assert early.seconds_left is None
    late = job_of(recorded_job(), START + 400.0).progress
    assert late is not None
    assert (late.seconds_left, late.percent) == (None, 45.0)


def windows(*events: EventRecord) -> list[Profile]:
    return [profile_of(event.at, event.data) for event in events]


def test_goodput_counts_each_step_once() -> None:
    # 10 s of steps, 5 s without any, 10 s of steps of which 4 s repeat.
    once = windows(window_event(110.0, 0, 100), window_event(125.0, 60, 100))
    goodput, until = goodput_of(once, 100.0)
    assert goodput == pytest.approx((6.0 + 10.0) / 25.0)
    assert until == 125.0


def test_goodput_counts_steps_between_two_windows_as_far_as_there_was_time() -> None:
    apart = windows(window_event(110.0, 0, 100), window_event(121.0, 110, 100))
    assert goodput_of(apart, 100.0)[0] == pytest.approx((10.0 + 1.0 + 10.0) / 21.0)
    short = windows(window_event(110.0, 0, 100), window_event(120.5, 110, 100))
    assert goodput_of(short, 100.0)[0] == pytest.approx(1.0)


def test_a_second_fit_does_not_undo_the_steps_of_the_first() -> None:
    both = windows(window_event(110.0, 0, 100), window_event(120.0, 0, 100))
    assert goodput_of(both, 100.0, [110.5])[0] == pytest.approx(1.0)
    assert goodput_of(both, 100.0)[0] == pytest.approx(0.5)
    assert goodput_of([], 100.0) == (None, None)


def test_an_ended_job_is_pictured_from_its_events_alone() -> None:
    ended = JobRecords("job")
    ended.add_events([kinds.record_of(kinds.RoundFormed(1, ["w"], "start"), "round 1", START)])
    assert ended.shown(NOW).state == "ended"
    ended.add_events([kinds.record_of(kinds.FitFinished(40), "finished after 40 steps", START + 9)])
    job = ended.shown(NOW)
    assert (job.state, job.is_over, job.num_workers, job.last_event) == ("finished", True, 0, "finished after 40 steps")


def test_a_memory_forecast_belongs_to_its_worker_and_round() -> None:
    records = recorded_job()
    short = kinds.MemoryShort("host0-1", 2, 900, "replace", "grows", 2, 0, 1, 1, 4 << 30, 1.0, 300.0, 200.0, 0.1)
    records["events/9-w"] = encode(kinds.record_of(short, "memory grows", NOW))
    assert [worker.full_at for worker in job_of(records).workers] == [None, NOW + 30.0]


@pytest.mark.parametrize("text, cleaned", [("a\x1b[2Jb", "a [2Jb"), ("é  ü", "é  ü"), ("x" * 9, "xxxxx…"), ("a\u202eb", "a b")])
def test_clean(text: str, cleaned: str) -> None:
    assert clean(text, 6) == cleaned


def test_an_unreadable_decision_hides_nothing_else() -> None:
    records = recorded_job()
    broken = decision_event(decision(NOW))
    records["events/9-w"] = encode(EventRecord("decision", NOW, "", {**broken.data, "candidates": "none"}))
    job = job_of(records)
    assert (job.prediction, job.sizes, job.num_workers) == (None, (), 2)
