"""Distribution of a validation's samples, at its start and after a loss."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dlrover.live.validation import Positions, deal
from tests.support.live_parts import BETWEEN, a_formation, a_worker, hellos


def dealt(missing: list[int], started: list[int], samples_per_batch: int, in_step: bool) -> list[list[Positions]]:
    positions = np.array(missing, dtype=np.int64)
    return [deal(positions, started, rank, samples_per_batch, in_step) for rank in range(len(started))]


def random_case(seed: int) -> tuple[list[int], list[int], int]:
    """Samples that are left, batches that each worker has begun (within one of each other), samples per batch."""
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    begun = rng.randint(0, 3)
    started = [begun + rng.randint(0, 1) for _ in range(size)]
    missing = sorted(rng.sample(range(200), rng.randint(size, 60)))
    return missing, started, rng.randint(1, 12)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("in_step", [False, True])
def test_every_missing_sample_is_dealt_once(seed: int, in_step: bool) -> None:
    missing, started, samples_per_batch = random_case(seed)
    by_rank = dealt(missing, started, samples_per_batch, in_step)
    assert sorted(i for batches in by_rank for batch in batches for i in batch) == missing
    assert all(len(batch) for batches in by_rank for batch in batches)


@pytest.mark.parametrize("seed", range(50))
def test_workers_end_with_equal_numbers_of_batches(seed: int) -> None:
    missing, started, samples_per_batch = random_case(seed)
    by_rank = dealt(missing, started, samples_per_batch, in_step=True)
    assert len({begun + len(batches) for begun, batches in zip(started, by_rank, strict=True)}) == 1


@pytest.mark.parametrize(("in_step", "expected"), [(True, [[[5]], [[5]]]), (False, [[[5]], []])])
def test_few_samples_are_repeated_only_if_steps_have_collectives(in_step: bool, expected: list[list[list[int]]]) -> None:
    by_rank = dealt([5], [3, 3], 8, in_step)
    assert [[list(batch) for batch in batches] for batches in by_rank] == expected


def test_buffers_sent_before_a_validation_reach_all_despite_a_loss() -> None:
    live = a_worker("w1", a_formation("w1", hellos(BETWEEN, BETWEEN)))
    module = live._trainer.module
    module.register_buffer("mean", torch.zeros(3))
    live.collectives._missed = {(5, 1): {"mean": torch.arange(3.0)}}
    loop: Any = SimpleNamespace(_combined_loader=None)
    live.validation.begin_batches(loop, lambda: None)
    assert torch.equal(module.mean, torch.arange(3.0))
