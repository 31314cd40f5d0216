from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.rdzv import records
from lightning_dlrover.rdzv.records import (
    AgentRecord,
    AgentRound,
    JobRecord,
    Keys,
    RecordError,
    decode,
    encode,
)

RECORDS: list[Any] = [
    AgentRecord("a-1", "host", 7, 2, "running", {"node": "n0"}, 3, "10.0.0.1", 4711),
    AgentRound(3, ["a-1", "b-2"], "complete", "a-1", "2 nodes were waiting", 1.5),
    JobRecord("training", True, 1, 4, "0.1.0"),
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


@pytest.mark.parametrize("run_id", ["", "a/b", " x", "x "])
def test_a_run_id_that_cannot_name_a_folder_is_refused(run_id: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-id"):
        Keys(run_id)


def test_two_runs_never_share_a_key() -> None:
    one, two = Keys("a"), Keys("ab")
    assert not two.root.startswith(one.root)
