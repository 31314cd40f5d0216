"""Jobs of forked workers, as in `tests/e2e`."""

from __future__ import annotations

from forked_jobs import fork_server, make_job

__all__ = ["fork_server", "make_job"]
