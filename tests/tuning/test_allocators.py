from __future__ import annotations

import random

import pytest

from lightning_dlrover.tuning.memory import CudaCache, Event, Footprint

MIB = 1 << 20


def served(events: list[Event]) -> Footprint:
    found = Footprint(CudaCache())
    for event in events:
        found.add(event)
    return found


@pytest.mark.parametrize(
    ("num_bytes", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12), (33 * MIB, 34)]
)
def test_first_request_reserves_the_documented_segment(num_bytes: int, reserved: int) -> None:
    assert served([(1, num_bytes)]).peak_held_bytes == reserved * MIB


def test_freed_memory_serves_the_next_request_of_its_size() -> None:
    assert served([(1, 40 * MIB), (1, 0), (2, 40 * MIB)]).peak_held_bytes == 40 * MIB


def test_small_and_large_requests_do_not_share_a_segment() -> None:
    assert served([(1, 12 * MIB), (1, 0), (2, 1000)]).peak_held_bytes == 14 * MIB


def test_neighbours_merge_when_both_are_free() -> None:
    assert served([(1, 8 * MIB), (2, 8 * MIB), (1, 0), (2, 0), (3, 9 * MIB), (4, 9 * MIB)]).peak_held_bytes == 20 * MIB


def test_holes_that_are_too_small_cost_memory() -> None:
    found = served([(1, 10 * MIB), (2, 10 * MIB), (1, 0), (2, 0), (3, 20 * MIB)])
    assert (found.peak_held_bytes, found.peak_live_bytes, found.peak_at) == (40 * MIB, 20 * MIB, 2)


def test_held_memory_is_never_below_the_live_one() -> None:
    draw = random.Random(1)
    found = Footprint(cache := CudaCache())
    live: list[int] = []
    for handle in range(1, 3000):
        if live and draw.random() < 0.5:
            found.add((live.pop(draw.randrange(len(live))), 0))
        else:
            found.add((handle, int(2 ** draw.uniform(4, 25))))
            live.append(handle)
        assert cache.held_bytes >= found.live_bytes
    for handle in live:
        found.add((handle, 0))
    assert found.live_bytes == 0


@pytest.mark.parametrize("events", [[(1, 0)], [(1, 5), (1, 5)], [(1, -5)]])
def test_impossible_event_is_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match=r"event \d gives handle 1 .* allocate each handle once"):
        served(events)
