"""The private names of Lightning that the strategy depends on, each in one function.

| of | names |
| --- | --- |
| the epoch's loop | `_should_check_val_fx`, `_broadcast_sigterm_tensor` |
| the validation's loop | `_evaluation_step` |
| the Trainer | `_val_check_time_interval` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "replace",
    "replace_evaluation_step",
    "replace_validation_check",
    "stop_sending_sigterm",
    "validates_by_the_clock",
]

Method = Callable[..., Any]


# --- loops -------------------------------------------------------------------------------------------------------------------


def replace(owner: Any, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method of this object by `make(Lightning's own)`. An earlier replacement is dropped."""
    vars(owner).pop(name, None)
    setattr(owner, name, make(getattr(owner, name)))


def replace_evaluation_step(val_loop: Any, make: Callable[[Method], Method]) -> None:
    """Replace the validation of one batch."""
    replace(val_loop, "_evaluation_step", make)


def replace_validation_check(epoch_loop: Any, make: Callable[[Method], Method]) -> None:
    """Replace the check after each batch whether a validation is due."""
    replace(epoch_loop, "_should_check_val_fx", make)


def validates_by_the_clock(trainer: Any) -> bool:
    """Return whether validations are due by time, as with `val_check_interval="00:10:00"`."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def stop_sending_sigterm(epoch_loop: Any) -> None:
    """Remove the broadcast after each batch of whether rank 0 has received SIGTERM. It hangs when another rank has."""
    epoch_loop._broadcast_sigterm_tensor = lambda: None
