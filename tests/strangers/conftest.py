"""Jobs of forked workers, as in `tests/e2e`, whose modules are also importable here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from forked_jobs import fork_server, make_job

__all__ = ["fork_server", "make_job"]
