"""The first values of embedding tables, before a job has trained them.

A table that has values when it is sharded keeps them, whatever has set them. The first worker's count, as with Lightning's DDP:
its rows are sent to their owners. A table on `meta` is initialised by its `init_fn`, from a seed that all workers share. Either
way the values depend neither on the sharding nor on the number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dlrover.tables.layout import Region

__all__ = ["drawn"]

INIT_ROWS = 4096
"""Number of rows initialised from one seed, so that a worker draws little more than the rows that it holds."""

ELEMENTWISE = (
    nn.init.constant_,
    nn.init.normal_,
    nn.init.ones_,
    nn.init.trunc_normal_,
    nn.init.uniform_,
    nn.init.zeros_,
)
"""Functions whose values do not depend on a table's shape. torchrec's default is `uniform_` with bounds."""


def drawn(config: Any, table: str, seed: int, region: Region, dtype: torch.dtype) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the first values of a region of a table, in one or more parts of whole rows.

    `init_fn` receives the whole table, unless it is known to be independent of the shape. Then blocks of rows are drawn, and a
    table may be larger than this worker's memory.
    """
    num_rows = config.num_embeddings
    size = INIT_ROWS if _is_elementwise(config.init_fn) else max(1, num_rows)
    for first in range(region.row0 // size * size, region.row1, size):
        last = min(first + size, num_rows)
        digest = hashlib.sha256(f"{seed}/{table}/{first}".encode()).digest()
        with _seeded(int.from_bytes(digest[:7], "big")), torch.no_grad():
            rows = torch.empty(last - first, config.embedding_dim, dtype=dtype)
            config.init_fn(rows)
        here = Region(first, last, 0, config.embedding_dim).overlap(region)
        assert here is not None
        yield here, rows[here.row0 - first : here.row1 - first, here.col0 : here.col1]


def _is_elementwise(init_fn: Callable[..., Any]) -> bool:
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    return init_fn in ELEMENTWISE


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that an `init_fn` may use, and restore them: workers draw different numbers of tables."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.set_state(np.random.RandomState(seed % 2**32).get_state())
            random.setstate(random.Random(seed).getstate())
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
