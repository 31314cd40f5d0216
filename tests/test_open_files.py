"""Workers may open as many files as the hard limit allows, and say so where that is too few."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.rdzv.transport.waits import ENOUGH, files_of, lack_of_files, raise_limit

RAISED = """
import resource
from lightning_dlrover.rdzv.transport.waits import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("soft, hard", [(64, 900), (900, 900)])
def test_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int) -> None:
    done = subprocess.run([sys.executable, "-c", RAISED.format(soft, hard)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({hard}, {hard})"


def test_limit_without_end_is_not_raised_beyond_what_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_limit()
    assert limits == [(ENOUGH, resource.RLIM_INFINITY)]


class Tensors(Dataset[list[torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.ones(1) for _ in range(10)]


@pytest.fixture
def few_files() -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_script_that_keeps_batches_of_loader_workers_is_told_why_no_file_can_be_opened(few_files: None) -> None:
    loader = ElasticLoader(DataLoader(Tensors(), 1, num_workers=1), 1, training=True)
    kept: list[Any] = []
    with pytest.raises(OSError, match=r"as many files open as it may: \d+, .* keep clones of the tensors") as error:
        kept.extend(loader)
    loader.close()
    assert error.value.__cause__ is not None


def test_batches_in_preparation_that_may_exceed_the_limit_are_named_at_the_first_one(
    few_files: None, caplog: pytest.LogCaptureFixture
) -> None:
    two = Subset(Tensors(), range(2))  # so that the limit is not reached here
    for prefetch_factor in (1, 8):
        loader = ElasticLoader(DataLoader(two, 1, num_workers=1, prefetch_factor=prefetch_factor), 1, training=True)
        assert len(next(iter(loader))) == 10
        loader.close()
        said = [record.message for record in caplog.records if "each in a file of its own" in record.message]
        assert len(said) == (prefetch_factor == 8)
    assert "a batch has 10 tensors, each in a file of its own, and 1 loader workers prepare 8 batches ahead each" in said[0]
    assert "set_sharing_strategy('file_system')" in said[0]


def test_files_of_a_batch_are_those_of_its_shared_tensors() -> None:
    shared = torch.ones(4).share_memory_()  # type: ignore[no-untyped-call]
    batch: dict[str, Any] = {"a": [shared, shared[1:], torch.ones(2)], "b": (torch.ones(3).share_memory_(), torch.empty(0))}  # type: ignore[no-untyped-call]
    batch["self"] = batch
    assert files_of(batch) == 2


def test_other_errors_of_batches_are_not_explained_by_files() -> None:
    assert lack_of_files(OSError(2, "No such file or directory")) is None
    assert lack_of_files(RuntimeError("received 0 items of ancdata")) is not None
