"""One codec reads every record, and its errors name the place, the value and the expected type."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from lightning_dlrover.codec import RecordError, from_fields, to_json


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    best: Part | None = None
    limit: int | None = None
    rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.limit == 0:
            raise ValueError("limit is 0")


WHOLE = Whole((Part("a", (1, 2)), Part("b")), Part("a"), 7, {"x": 1.5})


def test_nested_record_survives_json() -> None:
    assert from_fields(Whole, json.loads(to_json(WHOLE)), "here") == WHOLE
    assert json.loads(to_json(WHOLE, v=1))["v"] == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": 3}, r"^here: field 'parts' of Whole is 3, not tuple\[.*Part, \.\.\.\]"),
        ({"parts": [3]}, r"field 'parts' of Whole \(one item\) is 3, not the fields of a Part"),
        ({"parts": [{}]}, r"\(one item\): field 'name' of Part is missing"),
        ({"parts": [{"name": "a", "sizes": [-1]}]}, r"field 'sizes' of Part \(one item\) is -1, not <class 'int'>"),
        ({"best": {"name": "a", "colour": 1}}, r"field 'best' of Whole: unknown fields \['colour'\] in Part"),
        ({"limit": "7"}, r"field 'limit' of Whole is '7', not int \| None"),
        ({"limit": True}, "field 'limit' of Whole is True"),
        ({"limit": 0}, "^here: limit is 0"),
        ({"rates": {"x": float("nan")}}, r"field 'rates' of Whole \(one item\) is nan, not <class 'float'>"),
    ],
    ids=repr,
)
def test_bad_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_fields(Whole, {**json.loads(to_json(WHOLE)), **change}, "here")
