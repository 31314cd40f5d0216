"""Exit codes of the command line, and the error for wrong usage."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_LOST = 0, 1, 2, 3
"""`EXIT_USAGE`: refused before anything was started. `EXIT_LOST`: another controller acts for the job now."""


class UsageError(Exception):
    """The user asked for something impossible; the message names an alternative."""
