"""Reserved memory costs no page faults when it is allocated; page faults are counted in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lightning_dlrover.live import replica as memory

ALLOCATE = """
import resource, sys
import pytest
import torch
from lightning_dlrover.live import replica as memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

model = torch.nn.Linear(1000, 4000, bias=False)  # 16 MB
before = model.weight.clone()
print(memory.reserve(model, int(sys.argv[1])))
assert torch.equal(model.weight, before)
for _ in range(8):  # what was freed is kept, too; it takes some rounds until all sizes have found their places
    start = faults()
    blocks = [torch.ones(4_000_000) for _ in range(4)]
    print(faults() - start)
    del blocks
"""
NUM_PAGES = 4 * 16_000_000 // os.sysconf("SC_PAGE_SIZE")


def allocate(num_copies: int, **environ: str) -> tuple[str, list[int]]:
    command = [sys.executable, "-c", ALLOCATE, str(num_copies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ}, check=True)
    reserved, *faults = done.stdout.split()
    return reserved, [int(n) for n in faults]


def test_reserved_memory_is_there_when_it_is_needed() -> None:
    reserved, faults = allocate(5)
    assert reserved == "True"
    assert faults[0] < NUM_PAGES / 20
    assert faults[-1] < NUM_PAGES / 20


def test_without_a_reservation_every_page_costs() -> None:
    reserved, faults = allocate(5, MALLOC_MMAP_THRESHOLD_="100000")
    assert reserved == "False"
    assert min(faults) > NUM_PAGES * 0.8


def test_embeddings_with_sparse_gradients_are_not_touched() -> None:
    assert memory.reserve(torch.nn.Embedding(1000, 1000, sparse=True), 1_000_000, {})
    assert not memory.reserve(torch.nn.Embedding(1000, 1000), 1_000_000, {})


def test_more_than_half_of_the_available_memory_is_not_reserved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert not memory.reserve(torch.nn.Linear(1000, 1000), 1_000_000)
    assert "not enough memory" in caplog.text
