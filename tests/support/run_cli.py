"""Run the `dlrover` command within a test."""

from __future__ import annotations

from collections.abc import Callable

RunCli = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit code, output and errors."""
