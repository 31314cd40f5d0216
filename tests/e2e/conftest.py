"""Jobs of forked workers against the session's etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
from dlrover_process import Dlrover

from lightning_dlrover.rdzv.server import EmbeddedEtcd

MakeJob = Callable[..., harness.Job]


@pytest.fixture
def dlrover(tmp_path: Path) -> Iterator[Dlrover]:
    """Runs commands in a folder of the test's own; what they have started ends with it."""
    commands = Dlrover(tmp_path)
    yield commands
    commands.end()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    harness.start_fork_server()
    yield
    harness.stop_fork_server()


@pytest.fixture
def make_job(fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes jobs whose workers end with the test."""
    jobs: list[harness.Job] = []

    def make(settings: Any, **kwargs: Any) -> harness.Job:
        name = f"{run_id}-{len(jobs)}"
        jobs.append(harness.Job(kwargs.pop("endpoint", etcd.endpoint), name, tmp_path / name, settings, **kwargs))
        return jobs[-1]

    yield make
    for job in jobs:
        job.__exit__()
