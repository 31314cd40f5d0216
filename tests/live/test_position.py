"""Messages that workers exchange on entering a round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dlrover.live.order import Position, can_meet
from tests.support.live_parts import BETWEEN, INSIDE, JOINER, hellos


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
