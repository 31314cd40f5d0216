"""Exit codes of the command line, and the error for wrong usage."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class UsageError(Exception):
    """The user asked for something impossible; the message names an alternative."""
