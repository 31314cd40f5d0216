"""`dlrover pool run` and `dlrover pool status`: share a budget among jobs, and show the share of each."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from lightning_dlrover.brain.brain import PoolTimeouts, run_brain
from lightning_dlrover.brain.decisions import Rules
from lightning_dlrover.brain.place import wait_text
from lightning_dlrover.brain.snapshot import snapshot_of
from lightning_dlrover.brain.watch import Watch
from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import etcd_access
from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions
from lightning_dlrover.output import complain, say, show
from lightning_dlrover.planner.cluster.pool.owners import Owners
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.rdzv.job.pool_records import PoolKeys
from lightning_dlrover.report.discovery import EtcdDefaults
from lightning_dlrover.report.status import JobPlace, connect
from lightning_dlrover.report.text_table import text_table

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.etcd.client import EtcdClient


def brain_command(options: argparse.Namespace) -> int:
    """Decide on the sizes of a pool's jobs until a signal ends this process."""
    rules = Rules(
        Resources(**options.budget),
        options.policy,
        options.max_wait,
        Owners(dict(options.owner_weight), {owner: Resources(**quota) for owner, quota in options.quota}),
        counts_others=not options.ignore_unmanaged,
    )
    pool, hurry = _pool(options), threading.Event()
    with signals_as_exceptions(hurry):
        try:
            with connected_pool(options) as client:
                run_brain(client, pool, rules, options.interval, say, timeouts=PoolTimeouts.of_lease(options.lease_ttl))
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.signal_number).name
            complain(f"the brain of pool {pool.pool} was ended by {name}; its jobs keep their sizes")
            return 128 + interrupted.signal_number
    return EXIT_OK


def queue_command(options: argparse.Namespace) -> int:
    """Show the jobs of a pool: sizes of those that run, and the reason for each wait."""
    pool, now = _pool(options), time.time()
    with connected_pool(options) as client:
        view = Watch(client, pool).look(now)
    snapshot = snapshot_of(view, now)
    if options.json:
        show(json.dumps({"pool": pool.pool, **snapshot}, indent=2))
        return EXIT_OK
    show("\n".join(_queue_lines(pool.pool, snapshot, view.jobs, now)))
    return EXIT_OK


def connected_pool(options: argparse.Namespace) -> EtcdClient:
    """Return a client of the pool's etcd.

    Raises:
        UsageError: no etcd is named.
        EtcdError: etcd does not answer.
    """
    defaults = EtcdDefaults.of_this_process()
    endpoint = options.endpoint or defaults.endpoint
    if endpoint is None:
        raise UsageError("a pool is in an etcd that its jobs share: name it with --endpoint HOST:PORT, or DLROVER_ENDPOINT")
    return connect(JobPlace("pool", endpoint, options.key_prefix or defaults.prefix, etcd_access(options) or defaults.access))


def _pool(options: argparse.Namespace) -> PoolKeys:
    return PoolKeys(options.pool, options.key_prefix or EtcdDefaults.of_this_process().prefix)


def _queue_lines(pool: str, snapshot: dict[str, Any], jobs: Any, now: float) -> list[str]:
    brain = snapshot["brain"]
    lines = [
        f"pool {pool}: process {brain['pid']} on {brain['host']} decides, by policy {brain['policy']}"
        if brain
        else f"pool {pool}: no process decides; jobs keep their sizes, and waiting ones wait"
    ]
    if snapshot["budget"]:
        lines.append(f"budget: {snapshot['used']} of {snapshot['budget']} in use")
    if not snapshot["jobs"]:
        return [*lines, "no jobs"]
    rows: list[tuple[str, ...]] = [("JOB", "OWNER", "PRIORITY", "WORKERS", "HAS", "STATE")]
    for job in snapshot["jobs"]:
        size = f"{job['workers']} of {job['min_workers']} to {job['max_workers']}"
        rows.append((job["job"], job["owner"] or "-", str(job["priority"]), size, job["has"], job["state"]))
    head, *table = text_table("<<><<<", rows)
    lines.append(head)
    for job, line in zip(snapshot["jobs"], table, strict=True):
        lines.append(line)
        grant = jobs[job["job"]].grant
        if grant is not None and grant.state == "waiting":
            lines.append(f"      {wait_text(grant, now)}")
        elif job["reason"]:
            lines.append(f"      {job['reason']}")
    return lines
