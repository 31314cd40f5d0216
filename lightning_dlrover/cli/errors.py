"""Exit codes of the command line, and the error that refuses a wrong use of it."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""
