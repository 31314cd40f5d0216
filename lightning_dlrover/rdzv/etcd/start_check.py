"""Warn once, when a job starts, about troubles of its etcd. Nothing waits for this, and it fails nothing.

`verdict.py` decides what is trouble, as for `dlrover doctor`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from lightning_dlrover.finding import Finding
from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.inspection import inspect
from lightning_dlrover.rdzv.etcd.verdict import judge_server

__all__ = ["troubles_of", "warn_of_troubles"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # seconds for each of a dozen requests; a server that is slower has troubles of its own


def warn_of_troubles(config: EtcdConfig, warn: Callable[[str], None]) -> threading.Thread:
    """Ask each endpoint in a thread for release, size, quota and compaction, and call `warn` at most once. Returns at once."""

    def run() -> None:
        try:
            text = troubles_of(config)
        except Exception:  # an unforeseen answer must not disturb the job
            logger.debug("etcd at %s could not be inspected", config.endpoints, exc_info=True)
            return
        if text:
            warn(text)

    thread = threading.Thread(target=run, name="dlrover-etcd-check", daemon=True)
    thread.start()
    return thread


def troubles_of(config: EtcdConfig) -> str:
    """Return a line for each trouble of the servers, with the next move; empty if there is none, or none can be found."""
    found: dict[str, tuple[str, Finding]] = {}
    for one in config.of_each_endpoint():
        endpoint = one.endpoints.removeprefix("https://")
        try:
            condition = inspect(replace(one, timeout_s=min(_TIMEOUT_S, config.timeout_s)), prefix=None)
        except EtcdError as error:  # other code finds out that it does not answer; the user may not be allowed to ask
            logger.debug("etcd at %s could not be inspected: %s", endpoint, error)
            continue
        for finding in judge_server(endpoint, condition):
            if finding.verdict != "ok":
                found.setdefault(finding.check, (endpoint, finding))  # members of a cluster mostly have the same troubles
    return "\n".join(f"{each.check} ({endpoint}): {each.text} -> {each.next_move}" for endpoint, each in found.values())
