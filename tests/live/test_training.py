"""A worker's way into a new round, without processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dlrover.live.order import Position, can_meet
from lightning_dlrover.live.replica import send_buffers
from lightning_dlrover.rdzv.transport import transfer
from tests.support.live_parts import BETWEEN, INSIDE, JOINER, a_formation, a_worker, hellos

THREE = hellos(BETWEEN, BETWEEN, BETWEEN)


@pytest.mark.parametrize("is_in_validation", [False, True])
def test_all_members_agree_whether_the_next_forward_sends_buffers(
    is_in_validation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first one has ended a validation and is in the step after it. The second one may still be in its last collective.
    second = replace(BETWEEN, at_boundary=False, collective=3, validation=1) if is_in_validation else INSIDE
    said = hellos(replace(INSIDE, batch=6), second)
    monkeypatch.setattr(transfer, "send", lambda results, rank: None)
    monkeypatch.setattr(transfer, "receive", lambda rank: {})
    monkeypatch.setattr(transfer, "all_gather", lambda mine: [mine, mine])
    found = []
    for name in said:
        live = a_worker(name)
        live._settle(a_formation(name, said), Position.decode(said[name]))
        found.append(live._strategy.model.require_forward_param_sync)
    assert found == [not is_in_validation] * 2


@pytest.mark.parametrize("has_left_state", [False, True])
def test_new_workers_that_all_have_a_left_state_are_not_given_one_again(has_left_state: bool) -> None:
    live = a_worker("w1")
    given: list[Any] = []
    live._successors.resume = lambda: has_left_state
    live._state.give = lambda formation, joining: given.append(joining)
    live._settle(a_formation("w1", hellos(JOINER, JOINER)), None)
    assert given == ([] if has_left_state else [[("w0", "w1")]])


def test_buffers_sent_before_a_validation_stay_unchanged() -> None:
    strategy = a_worker()._strategy
    strategy.configure_ddp()
    replica: Any = strategy.model
    mean = torch.arange(3.0)
    replica.module = torch.nn.Module()
    replica.module.register_buffer("mean", mean)
    replica.broadcast_buffers, replica.named_module_buffers = True, {"mean": mean}
    replica._sync_buffers = lambda: None
    sent = send_buffers(replica)
    mean += 1.0  # the next training step
    assert torch.equal(sent["mean"], torch.arange(3.0))
    assert not replica.require_forward_param_sync


def test_loss_while_the_state_is_packed_ends_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    live = a_worker("w0", a_formation("w0", THREE, number=1))
    switched_to: list[int] = []

    def dump() -> dict[str, Any]:  # contains a user's collective, during which the others recover from a loss
        live.position.formation = a_formation("w0", hellos(BETWEEN, BETWEEN), number=3)
        return {}

    planned = a_formation("w0", {**THREE, "w3": JOINER}).round
    live.world.view = SimpleNamespace(round=planned)
    live.world.switch = lambda number, hello: switched_to.append(number)
    live._state.message = dump
    live._state.partial_values = lambda with_large=True: {}
    monkeypatch.setattr(transfer, "largest", list)
    live._switch(2)
    assert switched_to == []
    assert live._state._outgoing is None


@pytest.mark.parametrize("position", [BETWEEN, INSIDE, replace(INSIDE, collective=7, validation=2)])
def test_position_round_trips(position: Position) -> None:
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
        ((INSIDE, JOINER), False),  # the state of an unfinished step cannot be handed over
        ((BETWEEN, INSIDE, JOINER), False),
        ((BETWEEN, replace(BETWEEN, batch=6), JOINER), False),  # conflicting positions
        ((replace(BETWEEN, at_boundary=False), JOINER), False),  # inside a validation or an accumulation window
        ((BETWEEN, INSIDE), True),  # survivors alone agree wherever they are
        ((JOINER, JOINER), True),  # no worker has a state: all begin
    ],
)
def test_joiners_enter_only_where_all_others_are_between_the_same_steps(
    said: tuple[Position | bytes, ...], expected: bool
) -> None:
    assert can_meet(hellos(*said)) is expected
    assert can_meet(hellos(*reversed(said))) is expected
