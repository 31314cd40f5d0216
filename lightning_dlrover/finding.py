"""One result of a check, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Verdict", "error", "ok", "warning", "worst"]

Verdict = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of one check, or of a part of it."""

    check: str  # short name, such as "etcd size"
    verdict: Verdict
    text: str  # one line
    next_move: str = ""  # remedy; empty if `verdict` is ok


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, next_move: str) -> Finding:
    return Finding(check, "warning", text, next_move)


def error(check: str, text: str, next_move: str) -> Finding:
    return Finding(check, "error", text, next_move)


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; ok if there are no findings."""
    verdicts = {finding.verdict for finding in findings}
    return "error" if "error" in verdicts else "warning" if "warning" in verdicts else "ok"
