"""Numbers in votes, and checksums that find replicas that drift apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlrover.live.agreement import (
    PERIOD_STEPS,
    Item,
    checksum,
    checksum_of_slice,
    explain_drift,
    num_bytes_of,
    slice_between,
)
from tests.support.live_parts import BETWEEN, a_formation, a_worker, hellos


@pytest.mark.parametrize("fit_of_vote, stops", [(1, False), (2, True)])
def test_wish_to_stop_ends_no_later_fit(fit_of_vote: int, stops: bool) -> None:
    live = a_worker("w0", a_formation("w0", hellos(BETWEEN)))
    live.world.records = SimpleNamespace(checkpoint_request=lambda: 0)
    for fit in (1, 2):
        live.fit_begins()
        if fit == fit_of_vote:
            live.votes._wants_stop = True
            live.world.wishes = live.votes.wishes()
    assert not live.votes.count(step_time_s=0.0)
    assert live._trainer.lightning.should_stop is stops


def items(*tensors: Tensor) -> list[Item]:
    found, start = [], 0
    for number, tensor in enumerate(tensors):
        found.append(Item(f"parameter {number}", tensor, start))
        start += -(-tensor.nbytes // 8) * 8
    return found


def covered(slice_: tuple[int, int], num_bytes: int) -> set[int]:
    return {byte % num_bytes for byte in range(*slice_)}


@given(st.integers(1, 3000), st.integers(0, 500), st.lists(st.integers(1, 30), min_size=1))
def test_votes_of_a_period_cover_every_byte(num_bytes: int, place: int, pauses: list[int]) -> None:
    seen: set[int] = set()
    former = place
    while place - former < PERIOD_STEPS:
        pause = pauses[(place - former) % len(pauses)]
        seen |= covered(slice_between(place, place + pause, num_bytes), num_bytes)
        place += pause
    assert seen == set(range(num_bytes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_any_changed_number_changes_a_checksum_of_its_period(dtype: torch.dtype) -> None:
    shapes = (7,), (3, 5), (1,), (64, 9)
    tensors = [torch.ones(shape).to(dtype) for shape in shapes]

    def checksums() -> list[int]:
        there = items(*tensors)
        slices = [slice_between(step, step + 3, num_bytes_of(there)) for step in range(0, PERIOD_STEPS + 3, 3)]
        return [int(found) for each in slices if (found := checksum_of_slice(there, each)) is not None]

    before = checksums()
    assert checksums() == before
    for tensor in tensors:
        for index in (0, -1, tensor.numel() // 2):
            value = tensor.view(-1)[index].clone()
            tensor.view(-1)[index] = 0
            assert checksums() != before
            tensor.view(-1)[index] = value
    assert checksums() == before


def test_checksum_does_not_depend_on_the_number_of_threads() -> None:
    values, num_threads = torch.randn(1_000_003), torch.get_num_threads()
    found = set()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.add(int(checksum(values)))
    torch.set_num_threads(num_threads)
    assert len(found) == 1


def test_a_view_in_the_middle_of_memory_has_a_checksum() -> None:
    assert int(checksum(torch.ones(9)[1:])) != int(checksum(torch.zeros(9)[1:]))


def test_error_names_tensor_rank_and_next_move() -> None:
    text = explain_drift("parameter words.weight", 0.25, 2)
    assert "parameter words.weight on rank 2 differs from rank 0's by 25 % of its largest value" in text
    assert "on_drift='repair'" in text
    assert "not finite" in explain_drift("buffer a", float("inf"), 1)
