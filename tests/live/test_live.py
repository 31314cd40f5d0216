"""What workers tell each other on entering a round, and what makes their models alike."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_dlrover.live.loggers import _adopt_csv_log
from lightning_dlrover.live.training import (
    LiveTraining,
    Position,
    can_meet,
)
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.tables.snapshot import SnapshotError

BETWEEN = Position(updates=5, batch=5, in_step=False, collective=0, validation=0, at_boundary=True)
INSIDE = replace(BETWEEN, in_step=True, at_boundary=False)
JOINER = b""


def hellos(*said: Position | bytes) -> dict[str, bytes]:
    return {f"w{i}": each if isinstance(each, bytes) else each.encode() for i, each in enumerate(said)}


@pytest.mark.parametrize("position", [BETWEEN, INSIDE, replace(INSIDE, collective=7, validation=2)])
def test_a_position_is_understood_as_it_was_said(position: Position) -> None:
    assert Position.decode(position.encode()) == position


def test_a_joiner_has_no_position() -> None:
    assert Position.decode(JOINER) is None


@pytest.mark.parametrize("hello", [b"garbage", b"\xff", b"[]", b"null", b"{}", BETWEEN.encode().replace(b"5", b'"5"')])
def test_bytes_that_are_no_position_are_a_value_error(hello: bytes) -> None:
    with pytest.raises(ValueError, match=r"position|decode|Expecting"):
        Position.decode(hello)


@pytest.mark.parametrize(
    "said, expected",
    [
        ((BETWEEN, JOINER), True),
        ((BETWEEN, BETWEEN, JOINER, JOINER), True),
        ((INSIDE, JOINER), False),  # the state of a step that is not done cannot be handed over
        ((BETWEEN, INSIDE, JOINER), False),
        ((BETWEEN, replace(BETWEEN, batch=6), JOINER), False),  # who would be right?
        ((replace(BETWEEN, at_boundary=False), JOINER), False),  # in a validation, or inside an accumulation window
        ((BETWEEN, INSIDE), True),  # survivors alone come to terms wherever they stand
        ((JOINER, JOINER), True),  # nobody has a state: all begin
    ],
)
def test_joiners_are_let_in_only_where_all_others_stand_between_the_same_two_steps(
    said: tuple[Position | bytes, ...], expected: bool
) -> None:
    assert can_meet(hellos(*said)) is expected
    assert can_meet(hellos(*reversed(said))) is expected


class Own:
    """Of the script's own: nothing that is taken from others unasked."""


@pytest.mark.parametrize("value, is_readable", [({"best": 1.5}, True), ({"best": Own()}, False)])
def test_a_state_that_could_not_be_gone_back_to_is_refused_when_it_is_packed(value: object, is_readable: bool) -> None:
    live = LiveTraining.__new__(LiveTraining)
    live._snapshots_are_readable = False
    live._names_in_state = frozenset()
    live._snapshot = lambda: {"callbacks": value}  # type: ignore[method-assign]
    if is_readable:
        assert transfer.loads(live._packed_snapshot()) == {"callbacks": value}
        return
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"add_safe_globals\(\[Own\]\)"):
            live._packed_snapshot()


def worker(**options: float) -> tuple[LiveTraining, torch.optim.Optimizer]:
    """One that optimizes manually."""
    module: Any = torch.nn.Linear(2, 1)
    module.automatic_optimization = False
    optimizer = torch.optim.SGD([{"params": module.parameters(), **options}])
    progress = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    live = LiveTraining.__new__(LiveTraining)
    live._manual_window_is_open, live._gradients = False, None
    live._trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=module,
        optimizers=[optimizer],
        precision_plugin=SimpleNamespace(state_dict=dict),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(manual_optimization=SimpleNamespace(optim_step_progress=progress))),
    )
    return live, optimizer


@pytest.mark.parametrize("is_in_next_step", [False, True])
def test_missed_update_brings_an_open_manual_window(is_in_next_step: bool) -> None:
    (source, _), (target, _) = worker(lr=0.1), worker(lr=0.1)
    module = source._trainer.lightning_module
    module.weight.grad = torch.tensor([[1.0, 2.0]])
    source._manual_window_is_open = True
    if is_in_next_step:
        source._gradients = source._copy_of_gradients()
        module.weight.grad += 5.0  # of the next batch, which will be computed again
    target._apply(source._last_update())
    assert target._manual_window_is_open
    assert torch.equal(target._trainer.lightning_module.weight.grad, torch.tensor([[1.0, 2.0]]))  # type: ignore[arg-type]
    assert target._trainer.lightning_module.bias.grad is None


def test_missed_update_brings_counters_of_parameter_groups() -> None:
    source, _ = worker(lr=0.1, k=7, weight_sum=0.5)  # counters as of schedule-free optimizers
    target, optimizer = worker(lr=0.2, k=6, weight_sum=0.4)
    target._apply(source._capture())
    (group,) = optimizer.param_groups
    assert (group["k"], group["weight_sum"]) == (7, 0.5)
    assert group["lr"] == 0.2  # its own scheduler sets it
    weights = [live._trainer.lightning_module.weight for live in (source, target)]
    assert torch.equal(*weights)  # type: ignore[arg-type]


# --- logs ---------------------------------------------------------------------------------------------------------------------


def test_a_csv_log_taken_over_from_another_worker_keeps_its_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    for step in range(3):
        former.log_metrics({"loss": float(step)}, step)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that former rows will be deleted, which they are not
        _adopt_csv_log(successor)
    successor.log_metrics({"loss": 3.0}, 3)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["loss", "step"]
    assert len(rows) == 5


def test_a_new_column_after_taking_over_a_csv_log_costs_no_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    former.log_metrics({"loss": 1.0}, 0)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(successor)
    successor.log_metrics({"loss": 2.0, "val": 0.5}, 1)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "val" in rows[0]


def test_there_is_nothing_to_take_over_where_no_log_was_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(logger)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 2
