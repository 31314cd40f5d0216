from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.job import events
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    Event,
    FitFinished,
    FitResumed,
    GrowthFailed,
    HangFound,
    IterableOpened,
    JobFailed,
    MemoryShort,
    NodeMemoryShort,
    NodeNoticed,
    NodeResized,
    NodesHeldUp,
    OutcomeJudged,
    PoolJobChanged,
    RecordIgnored,
    ReplicaDrifted,
    RoundFormed,
    RowsSkipped,
    SettingsApplied,
    SharesChanged,
    SizeGiven,
    SizeRequested,
    SnapshotCompleted,
    SnapshotFailed,
    SnapshotLost,
    StateClosed,
    StateKept,
    StateRolledBack,
    StragglerFound,
    StreamOpened,
    TablesMoved,
    TrainingStalled,
    UnknownEvent,
    ValuesLost,
    WindowMeasured,
    WorkerFailed,
    WorkerLost,
    content_of,
    events_of,
    record_of,
)
from lightning_dlrover.rdzv.job.records import EventRecord, decode, encode

CAUSE = '"cause":{"joined":["a"],"lost":[],"left_out":[],"drained":[],"not_in_plan":[]}'
STRAGGLER = (
    '"global_rank":1,"part":"compute","own_s":0.5,"others_s":0.25,"ratio":2.0,"lost_s":0.25,"step_time_s":0.5,"num_steps":20'
)
FORECAST = (
    '"level_bytes":900,"grown_bytes":100,"limit_bytes":1000,"bytes_per_step":1.5,"steps_left":66.0,'
    '"earliest_steps_left":50.0,"step_time_s":0.5'
)
STREAM = (
    '"fit":1,"number":0,"source":"parquet(\'a\')","folder":"/x","num_shards":2,"num_rows":100,"digest":"abc","own_batches":13,'
    '"epoch_batches":13,"cycles":false,"epoch":0,"batches_before":0,"steps_before":0,"accumulate":1,"batch_size":8,"slots":4,'
    '"cycle":12,"block_rows":4096'
)
OPENED = StreamOpened(1, 0, "parquet('a')", "/x", 2, 100, "abc", 13, 13, False, 0, 0, 0, 1, 8, 4, 12, 4096)
STACK = {"worker_id": "b", "global_rank": 1, "stack": 0}

LINES: dict[str, Event] = {
    '"round" {"number":2,"members":["a","b"],"kind":"grow","planned":true,"reason":"b is ready",'
    + CAUSE
    + ',"decided_s":0.01,"num_members":2}': (
        RoundFormed(2, ["a", "b"], "grow", True, "b is ready", json.loads("{" + CAUSE + "}")["cause"], 0.01, 2)
    ),
    '"loss" {"worker_id":"b","round":2,"evidence":"its port refuses connections","decided_s":0.02}': (
        WorkerLost("b", 2, "its port refuses connections", 0.02)
    ),
    '"stall" {"round":3,"seconds":0.25,"kind":"loss","workers_before":2,"workers_after":1}': (
        TrainingStalled(3, 0.25, "loss", 2, 1)
    ),
    '"undo" {"num_workers":3,"former":2,"worker_id":"b","error":"ValueError"}': GrowthFailed(3, 2, "b", "ValueError"),
    '"error" {"worker_id":"b","rank":1,"traceback":"Traceback","at":1.5}': WorkerFailed("b", 1, "Traceback", 1.5),
    '"error" {"key":"/dlrover/job/live/plan"}': RecordIgnored("/dlrover/job/live/plan"),
    '"error" {}': JobFailed(),
    '"unjoinable" {"reason":"a lambda"}': StateClosed("a lambda"),
    '"scale" {"num_workers":3,"source":"user"}': SizeRequested(3, "user"),
    '"scale" {"num_workers":3,"source":"user","loader_workers":2,"intra_op_threads":0,"prefetch_factor":4,"node_cpus":8,'
    '"node_memory_mb":2048}': SizeRequested(3, "user", 2, 0, 4, 8, 2048),
    '"settings" {"loader_workers":[1],"prefetch_factor":[2],"intra_op_threads":4,'
    '"before":{"loader_workers":[0],"prefetch_factor":[0],"intra_op_threads":4},"seconds":0.5,"refused":""}': (
        SettingsApplied([1], [2], 4, {"loader_workers": [0], "prefetch_factor": [0], "intra_op_threads": 4}, 0.5, "")
    ),
    '"nodes" {}': NodesHeldUp(),
    '"node_size" {"node":"node1","act":"resized","cpus":2,"memory_mb":0,"wanted_cpus":2,"wanted_memory_mb":0,'
    '"seconds":0.5}': NodeResized("node1", "resized", 2, 0, 2, 0, 0.5),
    '"notice" {"worker_id":"w1","source":"aws spot/instance-action","taken_at":1700000000.0}': NodeNoticed(
        "w1", "aws spot/instance-action", 1700000000.0
    ),
    '"pool_job" {"job":"a","change":"grown","workers_before":1,"workers_after":2}': PoolJobChanged("a", "grown", 1, 2),
    '"profile" {"step_time_s":0.5,"cost":null}': WindowMeasured({"step_time_s": 0.5, "cost": None}),
    '"decision" {"decision_id":1,"spent":null}': DecisionMade({"decision_id": 1, "spent": None}),
    '"outcome" {"decision_id":1}': OutcomeJudged({"decision_id": 1}),
    '"hang" {"request":1,"asked_by":"a","reason":"no step for 60 s","workers":[{"worker_id":"b","global_rank":1,"stack":0}],'
    '"missing":["c"],"stacks":["File ..."]}': HangFound(1, "a", "no step for 60 s", [STACK], ["c"], ["File ..."]),
    '"straggler" {"worker_id":"b","act":"replace","why":"it pays","round":2,"step":40,"saved_s":-0.5,"cost_s":1.0,'
    + STRAGGLER
    + "}": StragglerFound("b", "replace", "it pays", 2, 40, -0.5, 1.0, 1, "compute", 0.5, 0.25, 2.0, 0.25, 0.5, 20),
    '"shares" {"round":2,"step":40,"samples":[9,3]}': SharesChanged(2, 40, [9, 3]),
    '"memory" {"worker_id":"b","round":2,"step":40,"act":"enlarge","reason":"it grows","num_workers":0,'
    '"node_memory_bytes":4096,' + FORECAST + "}": (
        MemoryShort("b", 2, 40, "enlarge", "it grows", 0, 4096, 900, 100, 1000, 1.5, 66.0, 50.0, 0.5)
    ),
    '"memory" {"act":"enlarge","node":"node1","node_memory_mb":2048}': NodeMemoryShort("enlarge", "node1", 2048),
    '"kept" {"global_step":40,"bytes":1024}': StateKept(40, 1024),
    '"size" {"pool":"p","policy":"ours","workers_before":2,"workers_after":1,"samples_per_s_before":17.0,'
    '"samples_per_s_after":10.0,"low_per_s":9.0,"high_per_s":11.0,"cost_s":0.5,"others":{"b":[0,1]}}': SizeGiven(
        "p", "ours", 2, 1, 17.0, 10.0, 9.0, 11.0, 0.5, {"b": [0, 1]}
    ),
    '"resume" {"global_step":40}': FitResumed(40),
    '"rollback" {"round":3,"batch":38,"batches":2}': StateRolledBack(3, 38, 2),
    '"values" {"round":3,"epoch":1,"workers":["b"],"names":["all_ids"]}': ValuesLost(3, 1, ["b"], ["all_ids"]),
    '"drift" {"batch":70,"name":"parameter a","rank":1,"repaired":true}': ReplicaDrifted(70, "parameter a", 1, True),
    '"finished" {"global_step":100}': FitFinished(100),
    '"stream" {' + STREAM + "}": OPENED,
    '"iterable" {"fit":1,"number":0,"dataset":"Numbers","is_stateful":true,"max_catch_up_s":60.0}': (
        IterableOpened(1, 0, "Numbers", True, 60.0)
    ),
    '"skipped" {"fit":1,"number":0,"shard":2,"file":"b.parquet","ranges":[[3,9]],"reason":"it is corrupt"}': (
        RowsSkipped(1, 0, 2, "b.parquet", [[3, 9]], "it is corrupt")
    ),
    '"stream" {' + STREAM + ',"seed":7}': dataclasses.replace(OPENED, seed=7),
    '"stream" {' + STREAM + ',"ranges":{"a/0":[3,9]},"grows":true}': dataclasses.replace(
        OPENED, ranges={"a/0": [3, 9]}, grows=True
    ),
    '"reshard" {"round":3,"values_moved":10,"values":100,"seconds":0.5}': TablesMoved(3, 10, 100, 0.5),
    '"snapshot" {"round":3,"bytes_rank_0":4096,"replicas":1}': SnapshotCompleted(3, 4096, 1),
    '"snapshot" {"round":3,"worker_id":"b","problem":"no memory"}': SnapshotFailed(3, "b", "no memory"),
    '"snapshot" {"round":3,"batch":38,"lost":["b"]}': SnapshotLost(3, 38, ["b"]),
    '"thoughts" {"any":[1,null]}': UnknownEvent({"any": [1, None]}, "thoughts"),
}
"""Kind and data as every release so far has written them, with the event that they stand for."""


def stored(line: str) -> bytes:
    kind, _, data = line.partition(" ")
    return f'{{"v":1,"kind":{kind},"at":5.0,"text":"a sentence","data":{data}}}'.encode()


@pytest.mark.parametrize("line", LINES)
def test_each_event_is_read_and_written_as_ever(line: str) -> None:
    assert content_of(decode(EventRecord, stored(line), "k")) == LINES[line]
    assert encode(record_of(LINES[line], "a sentence", 5.0)) == stored(line)


def test_iterable_datasets_of_earlier_histories_are_read() -> None:
    opened = IterableOpened(1, 0, "Numbers", True, 60.0)
    record = EventRecord("sequence", 5.0, "", opened.data)
    assert list(events_of([record], IterableOpened)) == [(record, opened)]


def test_every_event_is_among_the_lines_above() -> None:
    types = {known for _, known in inspect.getmembers(events, inspect.isclass) if issubclass(known, Event)}
    assert types - {type(event) for event in LINES.values()} == {Event, events.PlannerEvent}


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith('"thoughts"')])
def test_fields_of_a_newer_release_are_ignored(line: str) -> None:
    record = decode(EventRecord, stored(line), "k")
    newer = dataclasses.replace(record, data={**record.data, "mood": "good"})
    event = content_of(newer)
    assert event == (type(event)(newer.data) if isinstance(event, events.PlannerEvent) else LINES[line])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"members": [], "kind": "grow"}, "field 'number' of RoundFormed is missing"),
        ({"number": "two", "members": [], "kind": "grow"}, "field 'number' of RoundFormed is 'two'"),
        ({"number": 2, "members": ["a", 1], "kind": "grow"}, r"field 'members' of RoundFormed \(one item\) is 1"),
        ({"number": 2, "members": [], "kind": "grow", "decided_s": float("nan")}, "field 'decided_s' of RoundFormed is nan"),
    ],
)
def test_an_error_names_the_kind_the_field_and_its_value(data: dict[str, object], problem: str) -> None:
    with pytest.raises(RecordError, match=f"an event of kind 'round': {problem}"):
        content_of(EventRecord("round", 1.0, "", data))


def test_events_of_one_type_are_found_among_others_and_garbage() -> None:
    records = [
        record_of(FitFinished(3), "", 1.0),
        EventRecord("memory", 2.0, "", {"act": 7}),
        record_of(NodeMemoryShort("none", "node1", 0), "", 3.0),
        EventRecord("thoughts", 4.0, "", {}),
    ]
    assert [(record.at, event) for record, event in events_of(records, NodeMemoryShort)] == [
        (3.0, NodeMemoryShort("none", "node1", 0))
    ]
    assert list(events_of(records, MemoryShort)) == []
    assert [record.at for record, _ in events_of(records, Event)] == [1.0, 3.0, 4.0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(line=st.sampled_from(list(LINES)), data=st.data())
def test_any_value_of_any_field_is_read_or_refused(line: str, data: st.DataObject) -> None:
    record = decode(EventRecord, stored(line), "k")
    for name in record.data:
        record = dataclasses.replace(record, data={**record.data, name: data.draw(JSON | st.just(record.data[name]))})
    with contextlib.suppress(RecordError):
        content_of(record)
