"""Jobs of forked workers against the session's etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked_jobs import make_job
from tests.support.dlrover_process import Dlrover

__all__ = ["dlrover", "make_job"]


@pytest.fixture
def dlrover(fork_server: None, tmp_path: Path) -> Iterator[Dlrover]:
    """Run commands in a folder of the test's own. Every process that they start ends with the test."""
    commands = Dlrover(tmp_path, is_warm=True)
    yield commands
    commands.end()


@pytest.fixture
def cold_dlrover(tmp_path: Path) -> Iterator[Dlrover]:
    """The same with fresh interpreters, for tests to which imports and memory matter."""
    commands = Dlrover(tmp_path)
    yield commands
    commands.end()
