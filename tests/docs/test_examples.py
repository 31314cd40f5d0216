"""Examples in the docstrings of the package's public faces."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dlrover.tuning import StepProfile

FACES = [
    "lightning_dlrover",
    "lightning_dlrover.rdzv",
    "lightning_dlrover.data",
    "lightning_dlrover.tuning",
    "lightning_dlrover.colocate",
]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Return classes and functions that the faces export, by name."""
    for face in map(importlib.import_module, FACES):
        for name in face.__all__:
            found = getattr(face, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{face.__name__}.{name}", found


def window(num_workers: int, step_time_s: float) -> StepProfile:
    return StepProfile(
        worker_id="w0",
        round_number=num_workers,
        global_rank=0,
        num_workers=num_workers,
        num_nodes=1,
        first_step=0,
        num_steps=20,
        global_batch=512,
        local_batch=512 // num_workers,
        loader_workers=0,
        intra_op_threads=1,
        cores=1.0,
        device="cpu",
        step_time_s=step_time_s,
        data_wait_s=0.0,
        forward_s=step_time_s / 3,
        backward_s=step_time_s / 2,
        communication_s=0.0,
        optimizer_s=step_time_s / 6,
        other_s=0.0,
        samples_per_s=512 / step_time_s,
        memory_bytes=2**28,
        cpu_percent=100.0,
    )


@pytest.mark.parametrize(("name", "found"), [pytest.param(*each, id=each[0]) for each in public_objects()])
def test_example_of_a_public_name_runs(name: str, found: Any) -> None:
    names = {**vars(inspect.getmodule(found)), "windows": [window(1, 0.1), window(2, 0.06)]}
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(found, name, globs=names) if test.examples]
    assert tests, f"{name} has no example: add a few lines that begin with >>> to its docstring"
    output: list[str] = []
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    for test in tests:
        doctest.DocTestRunner(optionflags=options).run(test, out=output.append)
    if dist.is_initialized():  # the strategy leaves its group to the process
        dist.destroy_process_group()
    assert not output, "".join(output)
