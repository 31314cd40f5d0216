"""Decide which columns and types the Parquet files of a stream have in common, before a row is read.

A column may have a wider type in some of the files: an integer column that had missing values becomes one of float64 in pandas.
All files are then read with the widest type. Columns without a common type are refused, and the error names both files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_dlrover.data.source import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["AgreedColumns", "agreed_columns"]


@dataclass(frozen=True)
class AgreedColumns:
    """The columns of all files.

    Args:
        names: in their order; those of a file in `casts` alone are brought into it.
        casts: by file, types of columns that have another one there. A file with the columns of all is not in it.
    """

    names: list[str] = field(default_factory=list)
    casts: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)

    def batch(self, batch: pa.RecordBatch, key: str) -> pa.RecordBatch:
        """Return rows of a file with the columns of all.

        Raises:
            DataError: a value has no place in the common type.
        """
        import pyarrow as pa

        casts = self.casts.get(key)
        if casts is None:
            return batch
        columns = []
        for name in self.names:
            column = batch.column(name)
            if name in casts:
                try:
                    column = column.cast(casts[name])
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise DataError(
                        f"{key}: column {name!r} is {column.type} there and cannot be read as {casts[name]}, its type for all "
                        f"files: {error}. Write the file again, or give a type with parquet(..., types={{{name!r}: ...}})"
                    ) from error
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=self.names)


def agreed_columns(
    columns: Mapping[str, bytes], wanted: Sequence[str] | None, given: Mapping[str, str] | None = None
) -> AgreedColumns:
    """Compare the columns of files.

    Args:
        columns: serialized Arrow schemas by file.
        wanted: columns to read, also fields of structs (``"at.x"``); None: all.
        given: Arrow's names of types by column.

    Raises:
        DataError: a file lacks a column, or a column has types that have none in common.
        ValueError: there is no such type.
    """
    import pyarrow as pa

    types = {name: pa.type_for_alias(kind) for name, kind in (given or {}).items()}
    schemas = {body: pa.ipc.read_schema(pa.py_buffer(body)) for body in dict.fromkeys(columns.values())}
    if not schemas:
        return AgreedColumns()
    file_with = {body: key for key, body in reversed(list(columns.items()))}  # the first one
    first_body = next(iter(schemas))
    first = file_with[first_body]
    all_names = list(schemas[first_body].names)
    names = all_names if wanted is None else list(dict.fromkeys(name.partition(".")[0] for name in wanted))
    if unknown := [name for name in types if name not in names]:
        raise DataError(f"types={given}: {first} has no column {', '.join(unknown)} to read, only {', '.join(names)}")
    common: dict[str, tuple[pa.DataType, str]] = {name: (kind, "types=") for name, kind in types.items()}  # and a file with it
    for body, schema in schemas.items():
        for name in [*names, *(schema.names if wanted is None else ())]:
            _check_name(name, (first, all_names), (file_with[body], schema.names))
            kind = schema.field(name).type
            before, other = common.setdefault(name, (kind, file_with[body]))
            if before == kind or name in types:
                continue
            widest = _wider(before, kind) if wanted is None or name in wanted else None
            if widest is None:
                raise DataError(_differ(name, (before, other), (kind, file_with[body])))
            if widest != before:
                common[name] = widest, file_with[body]
    casts = {}
    for body, schema in schemas.items():
        found = {name: common[name][0] for name in names if schema.field(name).type != common[name][0]}
        if found or (wanted is None and schema.names != names):
            casts[body] = found
    return AgreedColumns(names, {key: casts[body] for key, body in columns.items() if body in casts})


def _check_name(name: str, first: tuple[str, Sequence[str]], file: tuple[str, Sequence[str]]) -> None:
    """Check that a file and the first one have a column.

    Args:
        first: the first file, and the names of its columns.

    Raises:
        DataError: one of them lacks it, or has it twice.
    """
    (key, names), (other, others) = file, first
    if (times := names.count(name)) > 1:
        raise DataError(f"{key} has {times} columns with the name {name!r}: a row can only hold one of them")
    if name not in others:
        (key, names), (other, others) = first, file
    if name in names:
        return
    if name not in others:
        raise DataError(f"{key} has no column {name}, only {', '.join(names)}")
    raise DataError(
        f"{key} has no column {name!r}, and {other} has one. Give the columns that all files have with "
        "parquet(..., columns=[...]), or make a stream of each kind of file"
    )


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type that has the values of both; None: there is none."""
    import pyarrow as pa

    # A column without any value would make batches of nulls, and fields of structs that a file lacks would become nulls.
    if any(pa.types.is_null(kind) or pa.types.is_struct(kind) for kind in (one, other)):
        return None
    schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def _differ(name: str, one: tuple[pa.DataType, str], other: tuple[pa.DataType, str]) -> str:
    import pyarrow as pa

    (kind, key), (other_kind, other_key) = (other, one) if pa.types.is_null(other[0]) else (one, other)
    if pa.types.is_null(kind):
        return (
            f"{key}: column {name!r} has no values, so its type is null, and in {other_key} it is {other_kind}. A batch "
            f"of nulls is not a tensor. Leave the file or the column out; or give "
            f"parquet(..., types={{{name!r}: '{other_kind}'}}) and fill the nulls in a collate_fn"
        )
    return (
        f"{key}: column {name!r} is {kind}, and in {other_key} it is {other_kind}, and no type has the values of both. Write "
        f"one of them again, leave the column out, or give a type with parquet(..., types={{{name!r}: '{kind}'}})"
    )
