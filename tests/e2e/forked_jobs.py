"""The fixture of jobs with workers forked from one warm process; a `conftest.py` imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e import harness

MakeJob = Callable[..., harness.Job]


@pytest.fixture
def make_job(fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[MakeJob]:
    """Make jobs and end their workers with the test."""
    jobs: list[harness.Job] = []

    def make(settings: Any, **kwargs: Any) -> harness.Job:
        name = f"{run_id}-{len(jobs)}"
        jobs.append(harness.Job(kwargs.pop("endpoint", etcd.endpoint), name, tmp_path / name, settings, **kwargs))
        return jobs[-1]

    yield make
    for job in jobs:
        job.__exit__()
