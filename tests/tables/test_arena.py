"""Rows keep their place from one layout to the next, and unused memory is returned to the system at once."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import psutil
import pytest
import torch

from lightning_dlrover.tables.exchange import HUGE_PAGE, Arena

MIB = 1 << 20
SIZE = 64 * MIB


def resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.fixture
def arena() -> Iterator[Arena]:
    it = Arena(64 * SIZE)
    it.begin()
    yield it
    it.close()


def rows(arena: Arena, key: str, first: int, length: int, size: int = SIZE) -> torch.Tensor:
    """Bytes `first` to `first + length` of a table's rows, as numbers, at their present place."""
    start = arena.place(key, size, first, length)
    return arena.values(torch.float32)[start // 4 : (start + length) // 4]


def filled(arena: Arena, key: str = "a", nbytes: int = SIZE) -> torch.Tensor:
    return rows(arena, key, 0, nbytes, nbytes).fill_(3.0)


def test_addresses_cost_no_memory_and_read_as_zeros() -> None:
    before = resident()
    arena = Arena(1 << 40)
    arena.begin()
    values = rows(arena, "a", 1 << 39, SIZE, 1 << 40)
    assert not values[:: mmap.PAGESIZE].any()
    assert resident() - before < SIZE // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_all_addresses_can_be_seen_as_any_type(arena: Arena, dtype: torch.dtype) -> None:
    values, behind = arena.values(dtype), arena.values(dtype, arena.num_bytes)
    assert (tuple(values.shape), values.dtype) == ((4 * 64 * SIZE // dtype.itemsize,), dtype)
    assert behind.data_ptr() - values.data_ptr() == 64 * SIZE == 4 * 64 * SIZE - behind.nbytes


def test_kept_rows_stay_in_place_and_other_memory_is_released(arena: Arena) -> None:
    quarter = SIZE // 4
    rows(arena, "a", 0, 2 * quarter).fill_(3.0)
    arena.begin()
    now = rows(arena, "a", quarter, 2 * quarter)
    before = resident()
    arena.finish()
    assert before - resident() > 0.9 * quarter
    assert bool((now[: quarter // 4] == 3.0).all())
    assert not now[quarter // 4 :].any()


def test_rows_outside_the_layout_come_back_as_zeros(arena: Arena) -> None:
    filled(arena, "a")
    filled(arena, "b")
    arena.begin()
    kept = rows(arena, "b", 0, SIZE)
    arena.finish()
    arena.begin()
    again = rows(arena, "a", 0, SIZE)
    assert not again.any()
    assert bool((kept == 3.0).all())


def test_a_layout_given_up_half_way_leaves_nothing_behind(arena: Arena) -> None:
    before = resident()
    filled(arena, "a")
    arena.begin()
    filled(arena, "b")
    arena.begin()  # "b" was never finished
    arena.begin()
    assert resident() - before < SIZE // 4


@pytest.mark.slow
def test_slots_never_overlap() -> None:
    small = Arena(6 * MIB)
    generator = torch.Generator().manual_seed(0)
    for number in range(100):
        small.begin()
        sizes = torch.randint(4, 300_000, (8,), generator=generator) // 4 * 4
        named = torch.randperm(16, generator=generator)[:8]
        layout = {f"{int(n)}/{int(s)}": int(s) for n, s in zip(named, sizes, strict=True)}
        placed = {key: rows(small, key, 0, size, size) for key, size in layout.items()}
        for value, values in enumerate(placed.values()):
            values.fill_(float(value + 1))
        assert all(bool((v == float(i + 1)).all()) for i, v in enumerate(placed.values())), number
        small.finish()
    small.close()


def test_rows_that_choose_their_place_have_it_in_the_next_layout_too(arena: Arena) -> None:
    at = arena.num_bytes + 12 * MIB
    assert arena.place("a", 4 * MIB, MIB, MIB, at) == at + MIB
    arena.values(torch.float32)[(at + MIB) // 4] = 3.0
    arena.begin()
    assert arena.place("a", 4 * MIB, 0, 2 * MIB, at) == at
    arena.finish()
    assert float(arena.values(torch.float32)[(at + MIB) // 4]) == 3.0


def test_more_rows_than_addresses_are_refused() -> None:
    small = Arena(MIB)
    small.begin()
    with pytest.raises(MemoryError, match="4194304 bytes of rows do not fit into 2097152"):
        small.place("a", 4 * MIB, 0, 0)


def test_refused_address_space_is_an_error_with_the_remedy() -> None:
    with pytest.raises(MemoryError, match="ulimit -v unlimited"):
        Arena(1 << 60)


def test_a_table_whose_size_has_changed_is_refused(arena: Arena) -> None:
    rows(arena, "a", 0, MIB, MIB)
    arena.begin()
    with pytest.raises(ValueError, match="1048576 bytes, and is to have 2097152"):
        rows(arena, "a", 0, MIB, 2 * MIB)


# --- released early -----------------------------------------------------------------------------------------------------------


def test_releasing_a_part_keeps_the_values_of_the_rest(arena: Arena) -> None:
    table = filled(arena).view(-1, 16)
    before = resident()
    num_rows = table.shape[0]
    arena.release(table[num_rows // 4 : 3 * num_rows // 4])
    assert before - resident() > 0.45 * SIZE
    assert bool((table[: num_rows // 4] == 3.0).all())
    assert bool((table[3 * num_rows // 4 :] == 3.0).all())


def test_a_table_released_in_odd_pieces_is_given_back_nearly_whole(arena: Arena) -> None:
    table = filled(arena).view(-1, 16)
    before = resident()
    piece = 4 * MIB // 64 + 7  # rows: no border of a piece is also one of a page
    for first in range(0, table.shape[0], piece):
        arena.release(table[first : first + piece])
    assert before - resident() > 0.95 * SIZE


@pytest.mark.parametrize(
    "first, last", [(0, 1), (1, 1023), (1000, 1100), (1024, 2048), (2047, 4096), (4095, 4097), (4999, 5000)]
)
def test_values_next_to_a_released_part_stay(arena: Arena, first: int, last: int) -> None:
    values = filled(arena, nbytes=5000 * 4)
    arena.release(values[first:last])
    assert bool((values[:first] == 3.0).all())
    assert bool((values[last:] == 3.0).all())


def test_memory_of_others_is_ignored(arena: Arena) -> None:
    other = Arena(SIZE)
    other.begin()
    mine = filled(arena, nbytes=MIB)
    foreign = [torch.ones(MIB), filled(other, nbytes=4 * MIB), torch.ones(0)]
    for tensor in foreign:
        arena.release(tensor)
    assert bool((foreign[0] == 1.0).all())
    assert bool((foreign[1] == 3.0).all())
    assert bool((mine == 3.0).all())


def test_a_strip_of_columns_is_left_alone(arena: Arena) -> None:
    table = filled(arena, nbytes=MIB).view(-1, 16)
    arena.release(table[:, 4:8])
    assert bool((table == 3.0).all())


# --- the end ------------------------------------------------------------------------------------------------------------------


def test_closing_gives_all_memory_back_though_tensors_are_still_there() -> None:
    arena = Arena(2 * SIZE)
    arena.begin()
    before = resident()
    tensors = [filled(arena, str(i), SIZE // 4) for i in range(4)]
    assert resident() - before > 0.9 * SIZE
    arena.close()
    assert resident() - before < 0.1 * SIZE
    assert not any(bool(t.any()) for t in tensors)


def test_tensors_outlive_the_arena() -> None:
    arena = Arena(SIZE)
    arena.begin()
    tensor = filled(arena, nbytes=MIB)
    del arena
    assert bool((tensor == 3.0).all())


# --- memory ahead of time -----------------------------------------------------------------------------------------------------


def test_placed_rows_use_memory_touched_before(arena: Arena) -> None:
    before = resident()
    arena.reserve(SIZE)
    reserved = resident()
    values = rows(arena, "a", SIZE // 2 + 12345 * 4, SIZE, 4 * SIZE).fill_(3.0)
    assert reserved - before > 0.9 * SIZE
    assert abs(resident() - reserved) < 2 * HUGE_PAGE + MIB  # only pages at the borders are new
    assert bool((values == 3.0).all())
    arena.drop_reserve()
    assert bool((values == 3.0).all())


def test_the_reserve_never_replaces_rows_that_are_kept(arena: Arena) -> None:
    rows(arena, "a", SIZE // 4, SIZE // 4).fill_(3.0)
    arena.begin()
    arena.reserve(SIZE)
    values = rows(arena, "a", 0, SIZE)
    kept = values[SIZE // 16 : SIZE // 8]
    assert bool((kept == 3.0).all())
    assert not values[: SIZE // 16].any()
    assert not values[SIZE // 8 :].any()


def test_a_reserve_that_is_not_needed_is_given_back(arena: Arena) -> None:
    before = resident()
    arena.reserve(SIZE)
    rows(arena, "a", 0, SIZE // 4, SIZE // 4).fill_(3.0)
    arena.drop_reserve()
    assert resident() - before < SIZE // 4 + 2 * HUGE_PAGE


def test_touching_memory_ahead_leaves_its_values_as_they_are(arena: Arena) -> None:
    values = rows(arena, "a", 0, SIZE)
    values[: SIZE // 8].fill_(3.0)
    before = resident()
    arena.touch(values.data_ptr(), SIZE)
    assert resident() - before > 0.45 * SIZE
    assert bool((values[: SIZE // 8] == 3.0).all())
    assert not values[SIZE // 8 :].any()
