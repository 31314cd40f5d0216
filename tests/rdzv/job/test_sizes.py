"""Numbers of workers that may be requested."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.rdzv.job.sizes import CONF_SEPARATOR, POWERS_OF_TWO, WorldSizes, parse_sizes, sizes_within

LISTED = st.sets(st.integers(1, 40), max_size=8).map(lambda found: tuple(sorted(found)))


@given(LISTED, st.integers(1, 4), st.integers(1, 60))
def test_neighbours_of_a_number_are_the_nearest_sizes(listed: tuple[int, ...], per_node: int, number: int) -> None:
    sizes = WorldSizes(tuple(n * per_node for n in listed), per_node)
    every = [n for n in range(1, 500) if sizes.allows(n)]
    assert sizes.at_most(number) == max((n for n in every if n <= number), default=every[0])
    assert sizes.at_least(number) == min((n for n in every if n >= number), default=every[-1])


@given(LISTED.filter(bool))
def test_sizes_in_a_configuration_are_read_back(listed: tuple[int, ...]) -> None:
    assert parse_sizes(WorldSizes(listed).conf, CONF_SEPARATOR) == listed


@pytest.mark.parametrize(("text", "sizes"), [("4, 1,2,4", (1, 2, 4)), ("3", (3,)), ("pow2", POWERS_OF_TWO)])
def test_sizes_are_sorted_and_counted_once(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1.5", "1:8", "pow3", "999999"])
def test_text_that_is_no_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of workers above 0; give pow2, or sizes such as 1,2,4,8"):
        parse_sizes(text)


def test_powers_of_two_outside_of_the_limits_are_left_out_and_listed_ones_refused() -> None:
    assert sizes_within(POWERS_OF_TWO, 3, 20) == (4, 8, 16)
    assert sizes_within(POWERS_OF_TWO, 2, 20, per_node=4) == (4, 8, 16)
    assert sizes_within((4, 12), 3, 20, per_node=4) == (4, 12)
    with pytest.raises(ValueError, match="2 is outside of the job's limits of 3 to 20 workers"):
        sizes_within((2, 4), 3, 20)


@pytest.mark.parametrize(
    ("per_node", "message"),
    [(1, "no size from 5 to 7 workers is a power of two; list sizes, such as 5,6,7"), (3, "is a multiple of 3, .* such as 6$")],
)
def test_limits_without_a_power_of_two_are_refused(per_node: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes_within(POWERS_OF_TWO, 5, 7, per_node)
