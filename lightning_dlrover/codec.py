"""The one way to write dataclasses as JSON, and to read them from JSON that may hold anything.

A record has the fields of its dataclass, nothing else. Dataclasses, lists, tuples and dicts may be nested. Rules beyond types
belong into the dataclass's `__post_init__`, as a ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 1 << 62  # limit of any number in a field, as larger, infinite or NaN values would break computations
_LARGEST_PORT = 65535


class RecordError(ValueError):
    """A value is not the record that its place requires."""


def to_json(record: Any, **more: Any) -> bytes:
    """Return a dataclass as compact JSON, with `more` fields in front."""
    return json.dumps({**more, **vars(record)}, separators=(",", ":"), default=dataclasses.asdict).encode()


def from_fields(record_type: type[T], document: Any, where: str) -> T:
    """Return the record with the fields in `document`.

    Args:
        where: place of the document, for errors.

    Raises:
        RecordError: a field is missing, unknown or has another type, an integer is negative, or a number is out of range.
    """
    if not isinstance(document, dict):
        raise RecordError(f"{where} is {document!r:.80}, not the fields of a {record_type.__name__}")
    fields, hints = _fields_of(record_type)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, f in fields.items():
        if name in document:
            place = f"{where}: field {name!r} of {record_type.__name__}"
            values[name] = value = _converted(document[name], hints[name], place)
            if name.endswith("port") and not 0 <= value <= _LARGEST_PORT:
                raise RecordError(f"{place} is {value}, which is not a port")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}: field {name!r} of {record_type.__name__} is missing")
    if unknown := sorted(set(document) - set(fields)):
        raise RecordError(f"{where}: unknown fields {unknown} in {record_type.__name__}")
    try:
        return record_type(**values)
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from error


@functools.cache
def _fields_of(record_type: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """Return the fields of a dataclass and their types, by name."""
    return {f.name: f for f in dataclasses.fields(record_type)}, get_type_hints(record_type)


def _converted(value: Any, hint: Any, where: str, shown: Any = None) -> Any:
    """Return a value of JSON as the type of a field.

    Args:
        shown: type for the error, if `hint` is a part of it.

    Raises:
        RecordError: it is of another type, or out of range.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (each for each in inner if each is not types.NoneType)
        return None if value is None else _converted(value, inner, where, shown=hint)
    if dataclasses.is_dataclass(hint):
        return from_fields(typing.cast("type[Any]", hint), value, where)
    if origin is list and isinstance(value, list):
        return _items(value, inner[0], where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_items(value, inner[0], where))
    if origin is dict and isinstance(value, dict):
        return dict(zip(value, _items(value.values(), inner[1], where), strict=True))
    if not _has_type(value, hint, origin, inner):
        raise RecordError(f"{where} is {value!r:.80}, not {shown or hint}")
    return float(value) if hint is float else value


def _items(values: typing.Collection[Any], hint: Any, where: str) -> list[Any]:
    if hint is Any or (hint is str and set(map(type, values)) <= {str}):  # long lists, such as the names of a thousand nodes
        return list(values)
    return [_converted(item, hint, f"{where} (one item)") for item in values]


def _has_type(value: Any, hint: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in inner)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
    if hint is int:  # every integer in a record is a count or a number, so none is negative
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
    return isinstance(hint, type) and isinstance(value, hint)
