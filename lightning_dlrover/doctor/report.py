"""Run all checks, and lay their findings out for people and programs."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_dlrover.doctor.etcd import check_embedded, check_endpoints
from lightning_dlrover.doctor.host import (
    check_clock,
    check_files,
    check_interfaces,
    check_memory,
    check_name,
    check_name_server,
    check_port,
    check_processes,
    check_shared_memory,
)
from lightning_dlrover.doctor.imports import check_gpus, check_imports, import_all
from lightning_dlrover.doctor.places import check_kubernetes, check_slurm
from lightning_dlrover.doctor.script import check_script
from lightning_dlrover.doctor.versions import check_versions, installed_versions, is_safe_to_import
from lightning_dlrover.finding import Finding, worst
from lightning_dlrover.rdzv.etcd.config import EtcdConfig, parse_endpoints

__all__ = ["Case", "as_json", "examine", "lines", "summary"]

_SIGNS = {"ok": "ok", "warning": "warning", "error": "ERROR"}


@dataclass(frozen=True)
class Case:
    """Subject of an examination."""

    etcd: EtcdConfig | None = None  # None: jobs start an etcd of their own
    prefix: str = "/dlrover"
    script: Path | None = None
    arguments: Sequence[str] = ()
    deadline_s: float = 120.0  # seconds until the script's first batch


def examine(case: Case, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the findings in display order."""
    installed = installed_versions()
    yield from check_versions(installed)
    is_safe = is_safe_to_import(installed)
    if is_safe:
        imported = import_all(environ)
        yield from check_imports(imported)
        yield check_gpus(imported)
    yield from _host_and_etcd(case, environ)
    yield check_slurm(environ)
    yield check_kubernetes()
    if case.script is not None and is_safe:
        yield from check_script(case.script, case.arguments, case.deadline_s, environ)


def _host_and_etcd(case: Case, environ: Mapping[str, str]) -> Iterator[Finding]:
    endpoint = parse_endpoints(case.etcd.endpoints)[0] if case.etcd is not None else None
    condition = None
    if case.etcd is None:
        yield from check_embedded()
    else:
        findings, condition = check_endpoints(case.etcd, case.prefix)
        yield from findings
    clock = condition.clock if condition is not None else None
    single: tuple[Callable[[], Finding], ...] = (check_shared_memory, check_files, check_processes)
    yield from (check() for check in single)
    yield from check_memory()
    yield check_name(endpoint)
    yield check_name_server(endpoint)
    yield from check_interfaces(endpoint, environ)
    yield check_port(environ)
    yield check_clock(clock.ahead_s if clock is not None else None, clock.uncertain_s if clock is not None else 0.0)


def lines(finding: Finding, width: int | None = None) -> list[str]:
    """Return a finding as lines of text: the finding, and its next move below it."""
    width = width or max(60, shutil.get_terminal_size((120, 24)).columns)
    head = f"{_SIGNS[finding.verdict]:<8} {finding.check:<16} "
    shown = textwrap.wrap(finding.text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    if finding.next_move:
        lead = " " * len(head) + "-> "
        shown += textwrap.wrap(
            finding.next_move, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )
    return shown


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line of the output."""
    counts = Counter(finding.verdict for finding in findings)
    if not counts["error"] and not counts["warning"]:
        return f"{counts['ok']} checks, no trouble found"
    found = ((counts[verdict], verdict) for verdict in ("error", "warning") if counts[verdict])
    parts = [f"{count} {verdict}{'s' if count > 1 else ''}" for count, verdict in found]
    return f"{sum(counts.values())} checks: {', '.join(parts)}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all findings as plain data."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "verdict": worst(findings),
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
    }
