"""Memory that is released is the system's again, at once, and nothing else is lost with it."""

from __future__ import annotations

import mmap
import os

import psutil
import pytest
import torch

from lightning_dlrover.sharding.arena import Arena

MIB = 1 << 20
SIZE = 64 * MIB


def resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def filled(arena: Arena, nbytes: int = SIZE) -> torch.Tensor:
    return arena.empty(nbytes // 4, torch.float32).fill_(3.0)


def test_new_memory_reads_as_zeros_and_is_not_touched_yet() -> None:
    arena = Arena()
    before = resident()
    tensor = arena.empty(SIZE // 4, torch.float32)
    assert resident() - before < SIZE // 4
    assert not tensor[:: mmap.PAGESIZE].any()
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_have_the_size_and_type_asked_for(dtype: torch.dtype) -> None:
    arena = Arena()
    tensor = arena.empty(1001, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == ((1001,), dtype)
    assert arena.empty(0, dtype).numel() == 0
    arena.close()


def test_memory_of_a_released_part_is_given_back_and_the_rest_keeps_its_values() -> None:
    arena = Arena()
    table = filled(arena).view(-1, 16)
    before = resident()
    rows = table.shape[0]
    arena.release(table[rows // 4 : 3 * rows // 4])
    assert before - resident() > 0.45 * SIZE
    assert bool((table[: rows // 4] == 3.0).all())
    assert bool((table[3 * rows // 4 :] == 3.0).all())
    arena.close()


def test_a_table_released_in_odd_pieces_is_given_back_nearly_whole() -> None:
    arena = Arena()
    table = filled(arena).view(-1, 16)
    before = resident()
    piece = 4 * MIB // 64 + 7  # rows: no border of a piece is one of a page
    for first in range(0, table.shape[0], piece):
        arena.release(table[first : first + piece])
    assert before - resident() > 0.95 * SIZE
    arena.close()


@pytest.mark.parametrize(
    "first, last", [(0, 1), (1, 1023), (1000, 1100), (1024, 2048), (2047, 4096), (4095, 4097), (4999, 5000)]
)
def test_values_next_to_a_released_part_stay(first: int, last: int) -> None:
    arena = Arena()
    values = filled(arena, 5000 * 4)
    arena.release(values[first:last])
    assert bool((values[:first] == 3.0).all())
    assert bool((values[last:] == 3.0).all())
    arena.close()


def test_releasing_one_tensor_leaves_its_neighbours_alone() -> None:
    arena = Arena()
    tensors = [filled(arena, size) for size in (5000 * 4, 4096, 3 * MIB, 4, 8192, 2 * MIB)]
    for released in (2, 4, 0):
        arena.release(tensors[released])
        kept = [t for i, t in enumerate(tensors) if i not in (0, 2, 4)]
        assert all(bool((t == 3.0).all()) for t in kept)
    assert not tensors[2].any()
    arena.close()


def test_memory_of_others_is_ignored() -> None:
    arena, other = Arena(), Arena()
    arena.release(torch.ones(MIB))  # nothing is in the arena yet
    mine = filled(arena, MIB)
    foreign = [torch.ones(MIB), filled(other, 4 * MIB), torch.ones(0)]
    for tensor in foreign:
        arena.release(tensor)
    assert bool((foreign[0] == 1.0).all())
    assert bool((foreign[1] == 3.0).all())
    assert bool((mine == 3.0).all())
    arena.close()
    assert bool((foreign[1] == 3.0).all())
    other.close()


def test_a_strip_of_columns_is_left_alone() -> None:
    arena = Arena()
    table = filled(arena, MIB).view(-1, 16)
    arena.release(table[:, 4:8])
    assert bool((table == 3.0).all())
    arena.close()


def test_closing_gives_all_memory_back_though_tensors_are_still_there() -> None:
    arena = Arena()
    before = resident()
    tensors = [filled(arena, SIZE // 4) for _ in range(4)]
    assert resident() - before > 0.9 * SIZE
    arena.close()
    assert resident() - before < 0.1 * SIZE
    assert not any(bool(t.any()) for t in tensors)


def test_a_closed_arena_ignores_what_it_once_gave() -> None:
    arena = Arena()
    tensor = filled(arena, MIB)
    arena.close()
    tensor.fill_(5.0)
    arena.release(tensor)
    assert bool((tensor == 5.0).all())
