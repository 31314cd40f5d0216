"""Reserved memory costs no page faults when it is allocated; page faults are counted in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_dlrover.live import reserve as memory
from lightning_dlrover.observe.resources import available_bytes

ALLOCATE = """
import resource, sys
import torch
from lightning_dlrover.live import reserve as memory

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


@pytest.mark.parametrize(
    "own, folder, limit, used",
    [
        ("0::/\n", "", "memory.max", "memory.current"),  # a container that sees itself as the root
        ("0::/job_1/step_0/task_0\n", "job_1/", "memory.max", "memory.current"),  # created by Slurm
        ("4:memory:/job_1\n", "memory/job_1/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limits_of_all_control_groups_count(own: str, folder: str, limit: str, used: str, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(own)
    unlimited = available_bytes(proc, cgroups)
    (cgroups / folder).mkdir(parents=True)
    (cgroups / folder / limit).write_text("max\n")
    (cgroups / folder / used).write_text("1000\n")
    assert available_bytes(proc, cgroups) > unlimited / 2
    (cgroups / folder / limit).write_text("5000\n")
    assert available_bytes(proc, cgroups) == 4000


def test_embeddings_with_sparse_gradients_are_not_touched() -> None:
    assert memory.reserve(torch.nn.Embedding(1000, 1000, sparse=True), 1_000_000, {})
    assert not memory.reserve(torch.nn.Embedding(1000, 1000), 1_000_000, {})


def test_more_than_half_of_the_available_memory_is_not_reserved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert not memory.reserve(torch.nn.Linear(1000, 1000), 1_000_000)
    assert "not enough memory" in caplog.text
