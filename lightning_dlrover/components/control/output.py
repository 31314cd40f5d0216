"""Show the output of a job's nodes as it arrives, line by line, and each traceback once."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.components.control.node_registry import NodeEntry, NodeRegistry
from lightning_dlrover.components.control.tracebacks import ShownTracebacks, TracebackFilter
from lightning_dlrover.components.targets.logs import LogFile
from lightning_dlrover.components.targets.target import Target

__all__ = ["Output"]

log = logging.getLogger(__name__)

_SAID_TWICE = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode: ")
"""Line of torch's agent about a failed worker; `rdzv/agents/program.py` prints one of its own."""


@dataclass
class _Files:
    """Files with one node's output and their read positions."""

    logs: dict[Path, LogFile] = field(default_factory=dict)
    filters: dict[Path, TracebackFilter] = field(default_factory=dict)
    unreadable: set[Path] = field(default_factory=set)  # files with a logged warning


class Output:
    """Forward new lines of every node's output, prefixed with the node's name.

    Args:
        interval_s: minimum interval between looks at the files, which may be on a shared file system.
    """

    def __init__(self, run_id: str, target: Target, show: Callable[[str], None], interval_s: float = 0.0) -> None:
        self._run_id = run_id
        self._target = target
        self._show = show
        self._interval_s = interval_s
        self._next_at = -float("inf")
        self._files: dict[str, _Files] = {}  # key: node
        self.tracebacks = ShownTracebacks()

    def show(self, registry: NodeRegistry, at_once: bool = False) -> None:
        """Show all new lines if a look at the files is due, or in any case with `at_once`."""
        now = time.monotonic()
        if now < self._next_at and not at_once:
            return
        self._next_at = now + self._interval_s
        for name, entry in registry.entries.items():
            if not entry.all_shown and entry.handle is not None:
                self._show_node(name, entry, entry.handle)
            if entry.all_shown:
                self._files.pop(name, None)

    def _show_node(self, name: str, entry: NodeEntry, handle: str) -> None:
        files = self._files.setdefault(name, _Files())
        # Only a node that still runs may leave an unfinished line.
        entry.all_shown = entry.has_ended
        was_adopted, entry.was_adopted = entry.was_adopted, False
        for file in self._target.logs(handle):
            if entry.cancelled and file.name.startswith("stderr"):
                continue  # the agent's traceback for our own signal
            try:
                if file not in files.logs:
                    log_file = LogFile(file)
                    if was_adopted:
                        log_file.skip()
                    files.logs[file] = log_file
                lines = list(files.logs[file].new_lines(whole=entry.has_ended))
            except OSError as error:
                # A shared file system may fail for a moment. The next step reads the rest.
                entry.all_shown, entry.was_adopted = False, was_adopted
                if file not in files.unreadable:
                    files.unreadable.add(file)
                    log.warning("run %s: the output of %s cannot be read for now: %s", self._run_id, name, error)
                continue
            once = files.filters.setdefault(file, TracebackFilter(self.tracebacks))
            shown = [each for line in lines for each in once.lines(line)]
            for line in [*shown, *(once.rest() if entry.has_ended else ())]:
                if not _SAID_TWICE.search(line):
                    self._show(f"[{name}] {line}")
