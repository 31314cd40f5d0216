"""Fixtures of tests of a live fit's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_dlrover.rdzv.transport.torch_names import HashStore
from tests.support import loaders


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def loaders_are_closed() -> Iterator[None]:
    """End the loader workers of `tests.support.loaders` after each test."""
    yield
    loaders.close_all()
