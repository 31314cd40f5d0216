"""Examples in the docstrings of the package's public faces."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.windows import window

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


@pytest.mark.parametrize(("name", "found"), [pytest.param(*each, id=each[0]) for each in public_objects()])
def test_example_of_a_public_name_runs(name: str, found: Any) -> None:
    names = {**vars(inspect.getmodule(found)), "windows": [window(1, 0.1, global_batch=512), window(2, 0.06, global_batch=512)]}
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(found, name, globs=names) if test.examples]
    assert tests, f"{name} has no example: add a few lines that begin with >>> to its docstring"
    output: list[str] = []
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    for test in tests:
        doctest.DocTestRunner(optionflags=options).run(test, out=output.append)
    if dist.is_initialized():  # the strategy leaves its group to the process
        dist.destroy_process_group()
    assert not output, "".join(output)
