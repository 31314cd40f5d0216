"""The state that a joiner receives, and the objects that it may contain."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections import deque
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.preprocessing import StandardScaler

from lightning_dlrover.live import state
from lightning_dlrover.live.state import LoggedValue, is_lightnings
from lightning_dlrover.rdzv.transport import transfer


class Size(enum.Enum):
    SMALL = 1


@dataclasses.dataclass
class Words:
    known: dict[str, int]


@dataclasses.dataclass
class Checked:
    """Runs its own code when it is created."""

    value: int

    def __post_init__(self) -> None:
        raise AssertionError("ran")


class Scaler:
    def __init__(self) -> None:
        self.mean = 2.0


class Outer:
    class Inner:
        pass


def sent(value: object, own: object = None) -> object:
    """Send `value` to a worker that has `own` in its state; return the result there."""
    return transfer.loads(transfer.pack(value).body, (LoggedValue,), transfer.names_in(transfer.pack(own)))


@pytest.mark.parametrize("value", [Size.SMALL, Words({"a": 1}), [Size.SMALL, Words({})]])
def test_enums_and_dataclasses_are_accepted_unasked(value: object) -> None:
    assert sent(value) == value


def test_classes_of_the_own_state_are_accepted() -> None:
    received = sent(Scaler(), own=Scaler())
    assert isinstance(received, Scaler)
    assert received.mean == 2.0
    fitted = sent(StandardScaler().fit([[1.0], [3.0]]), own=StandardScaler())
    assert isinstance(fitted, StandardScaler)
    assert fitted.mean_ == pytest.approx([2.0])
    maker = sent(functools.partial(torch.nn.Linear, 3), own=functools.partial(torch.nn.Linear, 2))
    assert isinstance(maker, functools.partial)
    assert maker.args == (3,)


def test_other_classes_are_refused_by_name() -> None:
    with pytest.raises(transfer.TransferError, match="Scaler, a type not allowed in transfers"):
        sent(Scaler(), own=Words({}))
    checked = object.__new__(Checked)
    checked.value = 1
    with pytest.raises(transfer.TransferError, match="Checked, a type not allowed in transfers"):
        sent(checked)


def test_class_inside_a_class_is_refused_with_advice() -> None:
    with pytest.raises(transfer.TransferError, match="move its class, which is inside another one"):
        sent(Outer.Inner(), own=Outer.Inner())


def test_object_that_cannot_be_written_is_named() -> None:
    with pytest.raises(transfer.TransferError, match=r"lambda.*leave it out of state_dict and on_save_checkpoint"):
        transfer.pack({"kept": lambda: 1})


def test_subclasses_of_lightnings_callbacks_are_recognised() -> None:
    class Kept(lightning_callbacks.ModelCheckpoint):
        pass

    class ModelCheckpoint(Callback):
        """Shares its name with Lightning's class, and nothing else."""

    assert is_lightnings(Kept(), "ModelCheckpoint")
    assert not is_lightnings(ModelCheckpoint(), "ModelCheckpoint")


@pytest.mark.parametrize(
    "trained, fresh",
    [
        (torch.ones(3), torch.zeros(3)),
        (np.ones(3), np.zeros(3)),
        ([1.0, 2.0], []),
        (deque([torch.ones(2)]), deque()),
        ({"seen": 4}, {}),
        ({3}, set()),
        (torch.ones(3), 0),
        (2, 0),
    ],
)
def test_attributes_that_differ_on_a_joiner_are_named(trained: object, fresh: object, caplog: pytest.LogCaptureFixture) -> None:
    def holding(value: object) -> torch.nn.Module:
        part = Part()
        part.kept = value
        return torch.nn.Sequential(part)

    theirs = state._plain_attributes(holding(trained))
    state._warn_of_attributes(holding(copy.deepcopy(trained)), theirs)
    assert not caplog.text
    state._warn_of_attributes(holding(fresh), theirs)
    assert "the model's attributes 0.kept (" in caplog.text


class Part(torch.nn.Module):
    """Keeps something that is no buffer."""

    kept: Any
