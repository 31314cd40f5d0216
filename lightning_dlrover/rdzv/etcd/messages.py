"""Keys, conditions and operations as etcd's messages, and back."""

from __future__ import annotations

from typing import Any

from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, DeletePrefix, KeyValue, Op, Put
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc

__all__ = ["compare_message", "key_value", "op_message", "range_end"]


def range_end(prefix: str) -> bytes:
    """First key after all keys with this prefix."""
    raw = prefix.encode()
    if not raw:
        raise ValueError("an empty prefix would mean every key in etcd")
    return raw[:-1] + bytes([raw[-1] + 1])  # UTF-8 never holds 0xff, so there is no carry


def key_value(kv: Any) -> KeyValue:
    return KeyValue(
        key=kv.key.decode(errors="replace"),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease_id=kv.lease,
    )


def compare_message(compare: Compare) -> Any:
    message = etcdrpc.Compare(
        key=compare.key.encode(),
        range_end=range_end(compare.key) if compare.is_prefix else b"",
        result=etcdrpc.Compare.EQUAL if compare.result == "equal" else etcdrpc.Compare.GREATER,
    )
    if compare.target == "create":
        message.target, message.create_revision = etcdrpc.Compare.CREATE, compare.revision
    else:
        message.target, message.mod_revision = etcdrpc.Compare.MOD, compare.revision
    return message


def op_message(op: Op) -> Any:
    key = op.key.encode()
    if isinstance(op, Put):
        put = etcdrpc.PutRequest(key=key, value=op.value, lease=op.lease_id)
        return etcdrpc.RequestOp(request_put=put)
    if isinstance(op, Delete | DeletePrefix):
        end = range_end(op.key) if isinstance(op, DeletePrefix) else b""
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key, range_end=end))
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))
