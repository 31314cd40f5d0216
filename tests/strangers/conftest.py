"""Jobs of forked workers, as in `tests/e2e`."""

from __future__ import annotations

from tests.e2e.forked_jobs import make_job

__all__ = ["make_job"]
