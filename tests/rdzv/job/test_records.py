from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.job import records
from lightning_dlrover.rdzv.job.records import AgentRecord, AgentRound, JobRecord, Keys, decode, encode
from lightning_dlrover.rdzv.job.sizes import WorldSizes

RECORDS: list[Any] = [
    AgentRecord("a-1", "host", 7, 2, "running", {"node": "n0"}, 3, "10.0.0.1", 4711),
    AgentRound(3, ["a-1", "b-2"], "complete", "a-1", "2 nodes were waiting", 1.5),
    JobRecord("training", True, 1, 4, "0.1.0", sizes=[1, 2, 4]),
    records.WorkerRecord("w", "a-1", "host", 8, 0, "10.0.0.1", 4712, "ready"),
    records.EventRecord("round", 1.0, "formed", {"number": 1}),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_every_record_survives_its_json_form(record: Any) -> None:
    assert decode(type(record), encode(record), "k") == record


@given(st.binary(max_size=200))
def test_no_bytes_decode_to_anything_but_a_record_or_a_record_error(raw: bytes) -> None:
    with pytest.raises(RecordError, match="the/key"):
        decode(JobRecord, raw, "the/key")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AgentRound) if f.name in ("number", "agents")])
def test_a_record_without_a_required_field_is_refused_by_its_name(field: str) -> None:
    document = json.loads(encode(RECORDS[1]))
    del document[field]
    with pytest.raises(RecordError, match=field):
        decode(AgentRound, json.dumps(document).encode(), "k")


@pytest.mark.parametrize("change", [{"number": "3"}, {"number": True}, {"agents": [1]}, {"state": "open"}, {"x": 1}, {"v": 2}])
def test_a_wrong_type_an_unknown_field_or_another_version_is_refused(change: dict[str, Any]) -> None:
    document = json.loads(encode(RECORDS[1])) | change
    with pytest.raises(RecordError):
        decode(AgentRound, json.dumps(document).encode(), "k")


ALL_RECORDS: list[Any] = [
    *RECORDS,
    records.RoundRecord(3, ["a", "b"], "2 workers", "grow", True, "10.0.0.1", 29500, "a", 1.5),
    records.PlanRecord(2, "planner", "faster", True, 1, 2.5),
    records.PlanRecord(2, "planner", "faster", True, 1, 2.5, loader_workers=1, intra_op_threads=2, prefetch_factor=4),
    records.DrainRecord("w", "asked for"),
    records.DrainRecord("w", "asked for", once_replaced=True, source="aws", taken_at=2e9),
    records.ControllerRecord("host", 7, "local", {"n0": "app"}, "/runs/job"),
    records.CheckpointRecord("/a/b.ckpt", 7),
    records.ProgressRecord(7, 0, 7, 2, 100.5, 10, 100, 93.0, "nan", 1.5),
    records.SearchRecord('{"lr": [0.1], "loss": [NaN]}'),
]


@pytest.mark.parametrize("setting", ["loader_workers", "intra_op_threads", "prefetch_factor"])
@pytest.mark.parametrize("value", [-1, 1025, 1 << 40, 1.5, True, "2"])
def test_impossible_plan_is_refused_by_the_settings_name(setting: str, value: Any) -> None:
    document = json.loads(encode(records.PlanRecord(2, "user", "", True))) | {setting: value}
    with pytest.raises(RecordError, match=f"^key 'the/key'.*{setting}"):
        decode(records.PlanRecord, json.dumps(document).encode(), "the/key")


@pytest.mark.parametrize("at", ["-1", "1e300", "NaN", "Infinity"])
def test_end_of_a_node_at_an_impossible_time_is_refused(at: str) -> None:
    with pytest.raises(RecordError, match="taken_at"):
        decode(records.DrainRecord, f'{{"v":1,"worker_id":"w","reason":"","source":"s","taken_at":{at}}}'.encode(), "k")
    with pytest.raises(RecordError, match="taken_at"):
        decode(records.Notice, f'{{"v":1,"term":1,"taken_at":{{"w":{at}}}}}'.encode(), "k")


def test_a_plan_from_before_there_were_settings_leaves_them_as_they_are() -> None:
    raw = b'{"v":1,"num_workers":2,"source":"user","reason":"","binding":true}'
    assert decode(records.PlanRecord, raw, "k") == records.PlanRecord(2, "user", "", True)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=8),
        st.integers(min_value=-(10**400), max_value=10**400),
        st.floats(),
        st.sampled_from([-1, 65536, 1 << 63, 10**400, float("nan"), float("inf"), "\ud800", "\x00", [], {}, [[]], [None]]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def numbers_in(record: Any) -> list[float]:
    return [value for value in dataclasses.asdict(record).values() if isinstance(value, int | float)]


def assert_harmless(record_type: type[Any], raw: bytes) -> None:
    """Assert that a record can be used, compared, printed and encoded, or that its decoding raises a RecordError."""
    try:
        record = decode(record_type, raw, "the/key")
    except RecordError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "the/key" in refusal
        refusal.encode()
        return
    assert all((0 if isinstance(n, int) else -(1 << 62)) <= n <= 1 << 62 for n in numbers_in(record))
    repr(record).encode()
    assert all(0 <= value <= 65535 for name, value in vars(record).items() if name.endswith("port"))
    again = decode(record_type, encode(record), "the/key")
    assert encode(again) == encode(record)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(ALL_RECORDS), st.data())
def test_a_record_with_any_fields_changed_is_harmless_or_refused(record: Any, data: st.DataObject) -> None:
    document = json.loads(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        document[data.draw(st.sampled_from([*document, "unknown"]))] = data.draw(json_values)
    assert_harmless(type(record), json.dumps(document).encode())


@settings(max_examples=300)
@given(st.sampled_from(ALL_RECORDS), st.data())
def test_a_record_with_any_bytes_changed_is_harmless_or_refused(record: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(record))
    begin = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(begin, min(len(raw), begin + 6)))
    raw[begin:end] = data.draw(st.binary(max_size=6))
    assert_harmless(type(record), bytes(raw))


@settings(max_examples=200)
@given(st.sampled_from(ALL_RECORDS), json_values)
def test_any_other_json_is_refused(record: Any, value: Any) -> None:
    assert_harmless(type(record), json.dumps(value).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"v":1,"path":"/a","global_step":' + b"9" * 5000 + b"}",
        b'{"v":1,"path":"/a","global_step":1e999}',
        b'{"v":1,"path":"/a","global_step":-1}',
        b'{"v":1,"path":"\\ud800","global_step":1}',
        b'{"v":1,"path":"\xed\xa0\x80","global_step":1}',
        '{"v":1,"path":"/a","global_step":1}'.encode("utf-16"),
        b"[" * 100_000 + b"]" * 100_000,
        b'{"v":1,"path":' * 50_000,
        b"\x00" * 100_000,
    ],
)
def test_hostile_json_is_refused(raw: bytes) -> None:
    with pytest.raises(RecordError, match="the/key"):
        decode(records.CheckpointRecord, raw, "the/key")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e300", "1" + "0" * 400])
def test_a_time_that_no_clock_shows_is_refused(number: str) -> None:
    raw = f'{{"v":1,"kind":"round","at":{number},"text":""}}'.encode()
    with pytest.raises(RecordError, match="'at'"):
        decode(records.EventRecord, raw, "k")


@pytest.mark.parametrize("port", [-1, 65536, 1 << 40])
def test_a_port_out_of_range_is_refused_by_its_field(port: int) -> None:
    document = json.loads(encode(RECORDS[0])) | {"port": port}
    with pytest.raises(RecordError, match="'port'"):
        decode(AgentRecord, json.dumps(document).encode(), "k")


@pytest.mark.parametrize("run_id", ["", "a/b", " x", "x "])
def test_a_run_id_that_cannot_name_a_folder_is_refused(run_id: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-id"):
        Keys(run_id)


def test_two_runs_never_share_a_key() -> None:
    one, two = Keys("a"), Keys("ab")
    assert not two.root.startswith(one.root)


run_ids = st.text(min_size=1, max_size=12).filter(lambda t: "/" not in t and t == t.strip() and t.isprintable())
prefixes = st.sampled_from(["/dlrover", "/dlrover/", "/dlrover/x", "/x", "/a/b", "/dlrove"]) | st.builds(
    lambda parts: "/" + "/".join(parts), st.lists(run_ids, min_size=1, max_size=3)
)


@given(run_ids, run_ids, prefixes)
def test_jobs_under_one_prefix_never_share_a_key(one: str, other: str, prefix: str) -> None:
    a, b = Keys(one, prefix), Keys(other, prefix)
    assert (a.root == b.root) == (one == other)
    for mine in (a, b):
        for name in ("job", "round", "plan", "workers", "agents", "events", "store", "live"):
            assert getattr(mine, name).startswith(mine.root)
    if one != other:
        assert not a.root.startswith(b.root)
        assert not b.root.startswith(a.root)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Keys("job"), Keys("job1")),
        (Keys("a"), Keys("A")),
        (Keys("a"), Keys("\u0430")),  # the Cyrillic letter
        (Keys("caf\u00e9"), Keys("cafe\u0301")),  # one letter, and a letter with a combining accent
        (Keys("x", "/dlrover"), Keys("y", "/dlrover/x")),
        (Keys("x", "/dlrover"), Keys("x", "/dlrover/x")),
    ],
)
def test_names_that_look_alike_are_different_jobs(one: Keys, other: Keys) -> None:
    for name in ("job", "round", "plan", "agent_round", "coordinator", "controller", "checkpoint"):
        assert getattr(one, name) != getattr(other, name)
    for folder in ("live", "events", "profiles", "store"):
        assert not getattr(one, folder).startswith(getattr(other, folder))
        assert not getattr(other, folder).startswith(getattr(one, folder))


@pytest.mark.parametrize("now, most", [(1, 2), (2, 2), (3, 5), (5, 5)])
def test_job_grows_up_to_the_next_number_of_workers_that_has_failed(now: int, most: int) -> None:
    job = JobRecord("training", True, 1, 8, "1", failed_sizes={"3": "failed", "6": "failed", "x": "nonsense"})
    assert job.most_workers(now) == most
    assert dataclasses.replace(job, sizes=[1, 4, 8]).most_workers(now) == WorldSizes((1, 4, 8)).at_most(most)
