"""Jobs of forked workers against the session's etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dlrover_process import Dlrover
from forked_jobs import fork_server, make_job

__all__ = ["dlrover", "fork_server", "make_job"]


@pytest.fixture
def dlrover(tmp_path: Path) -> Iterator[Dlrover]:
    """Run commands in a folder of the test's own. Every process that they start ends with the test."""
    commands = Dlrover(tmp_path)
    yield commands
    commands.end()
