"""Refuse arguments of `DLRoverStrategy` that cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real

from lightning_dlrover.tables.snapshots import SnapshotConfig

__all__ = ["check_arguments"]


def check_arguments(
    global_batch_size: object,
    check_interval_s: object,
    timeout: object,
    sharding_constraints: object,
    sharders: object,
    snapshots: object,
    compare_data: object,
    rerun_epoch_hooks: object,
    max_catch_up_s: object,
    max_share: object,
    on_drift: object,
) -> None:
    """Raise TypeError or ValueError for the first argument that cannot be meant; see `DLRoverStrategy`."""
    if global_batch_size is not None:
        _check_type("global_batch_size", global_batch_size, Integral, "a whole number of samples, or None")
        if global_batch_size < 1:  # type: ignore[operator]
            raise ValueError(f"global_batch_size is {global_batch_size}, it must be at least 1")
    _check_type("check_interval_s", check_interval_s, Real, "a number of seconds")
    if not 0 < check_interval_s < math.inf:  # type: ignore[operator]
        raise ValueError(f"check_interval_s is {check_interval_s}, it must be above 0")
    _check_type("timeout", timeout, timedelta, "a datetime.timedelta")
    if timeout <= timedelta():  # type: ignore[operator]
        raise ValueError(f"timeout is {timeout}, it must be above 0")
    _check_type("sharding_constraints", sharding_constraints, Mapping | None, "a mapping from names of tables, or None")
    _check_type("sharders", sharders, Sequence | None, "a list of torchrec's sharders, or None")
    _check_type("snapshots", snapshots, SnapshotConfig | None, "a SnapshotConfig, or None")
    _check_type("compare_data", compare_data, bool, "True or False")
    _check_type("rerun_epoch_hooks", rerun_epoch_hooks, bool, "True or False")
    _check_type("max_catch_up_s", max_catch_up_s, Real, "a number of seconds")
    if not max_catch_up_s > 0:  # type: ignore[operator]
        raise ValueError(f"max_catch_up_s is {max_catch_up_s}, it must be above 0; math.inf stands for no limit")
    if max_share is not None and max_share != "whole":
        _check_type("max_share", max_share, Integral, "a whole number of samples, 'whole' or None")
        if max_share < 1:  # type: ignore[operator]
            raise ValueError(f"max_share is {max_share}, it must be at least 1")
    if on_drift not in ("end", "repair", "ignore"):
        raise ValueError(f"on_drift is {on_drift!r:.80}, it must be 'end', 'repair' or 'ignore'")


def _check_type(name: str, value: object, kind: object, meant: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
        raise TypeError(f"{name} of DLRoverStrategy is {value!r:.80}, of type {type(value).__name__}; it must be {meant}")
