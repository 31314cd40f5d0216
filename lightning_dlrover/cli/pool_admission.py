"""The hook of `dlrover run` for pools: a job with `--pool` waits for a place in a budget that a brain divides."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_dlrover import variables
from lightning_dlrover.cli import values
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.options import flag

if TYPE_CHECKING:
    from lightning_dlrover.brain.place import Place
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.pool_records import MemberRecord, PoolKeys
    from lightning_dlrover.rdzv.job.records import Keys

PLACE_TIMEOUT_S = 7 * 24 * 3600.0
"""Seconds to wait for a place in a pool, unless --place-timeout sets another limit."""

SURPLUS_IN_POOL_S = 5.0
"""Seconds that a node of a job in a pool may outlast its place there. Another job waits for its resources."""

NEED_A_POOL = ("priority", "weight", "owner", "place_timeout")
"""Options that need a pool."""


class PoolHook:
    """Asks for a place in a pool where `dlrover run` is given `--pool`."""

    def add_options(self, run: argparse.ArgumentParser) -> None:
        group = run.add_argument_group(
            "pool", "Only with --pool: the job waits for a place in a budget that `dlrover pool run` divides."
        )
        group.add_argument("--pool", metavar="NAME", help="pool to run in; needs an etcd that its jobs share (--endpoint)")
        group.add_argument(
            "--priority",
            type=values.setting,
            metavar="N",
            help="jobs of an owner with a higher one start first (default 0)",
        )
        group.add_argument(
            "--weight",
            type=values.positive,
            metavar="X",
            help="importance of this job's speed among its owner's jobs (default 1)",
        )
        group.add_argument("--owner", metavar="NAME", help="user or team that the job counts for (default: the current user)")
        group.add_argument(
            "--place-timeout", type=values.duration, metavar="TIME", help="longest time to wait for a place (default 7d)"
        )

    def request(self, options: argparse.Namespace, endpoint: str | None, prefix: str) -> PlaceInPool | None:
        if options.pool is None:
            if given := [name for name in NEED_A_POOL if getattr(options, name) is not None]:
                raise UsageError(f"{', '.join(map(flag, given))}: only with --pool NAME")
            return None
        if (each := options.workers_per_node) > 1:
            raise UsageError(
                f"--pool {options.pool} with --workers-per-node {each}: a pool counts single workers and cannot give whole "
                "nodes; leave one of them out"
            )
        if endpoint is None:
            raise UsageError(
                f"--pool {options.pool}: a pool is in an etcd that all its jobs share; name it with --endpoint HOST:PORT, or "
                "DLROVER_ENDPOINT"
            )
        from lightning_dlrover.brain.place import MEMBER_LEASES, MEMBER_TTL_S
        from lightning_dlrover.rdzv.job.pool_records import PoolKeys

        return PlaceInPool(
            PoolKeys(options.pool, prefix),
            _member(options),
            options.place_timeout or PLACE_TIMEOUT_S,
            MEMBER_LEASES * options.lease_ttl if options.lease_ttl else MEMBER_TTL_S,
        )

    def ticket_key(self, client: EtcdClient, keys: Keys) -> str | None:
        from lightning_dlrover.brain.place import member_key

        return member_key(client, keys)


POOL = PoolHook()


class PlaceInPool:
    """The wish for a place in a pool.

    Args:
        ask: the job as the pool sees it.
        timeout_s: longest wait.
        ttl_s: seconds after which the place counts as lost if this process is killed.
    """

    surplus_s = SURPLUS_IN_POOL_S

    def __init__(self, pool: PoolKeys, ask: MemberRecord, timeout_s: float, ttl_s: float) -> None:
        self._pool = pool
        self._ask = ask
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s

    @property
    def environment(self) -> Mapping[str, str]:
        return {variables.POOL: self._pool.pool}

    def wait(self, client: EtcdClient, keys: Keys) -> Place:
        from lightning_dlrover.brain.place import Place, PlaceError
        from lightning_dlrover.output import say

        try:
            place = Place(client, self._pool, keys, self._ask, say, self._ttl_s)
            try:
                num_workers = place.wait(self._timeout_s)
            except BaseException:
                place.leave()
                raise
        except PlaceError as error:
            raise UsageError(str(error)) from error
        say(
            f"job {keys.run_id}: has a place in pool {self._pool.pool}, with {num_workers} of {self._ask.max_workers} workers "
            "at first"
        )
        return place


def _member(options: argparse.Namespace) -> MemberRecord:
    from lightning_dlrover.cli.run_options import node_sizes, num_gpus
    from lightning_dlrover.rdzv.job.pool_records import MemberRecord

    now = time.time()
    fewest, most = options.workers
    _, size = node_sizes(options)
    owner = options.owner
    if owner is None:
        with contextlib.suppress(KeyError, OSError):  # a container may have no user of this number
            owner = getpass.getuser()
    return MemberRecord(
        socket.gethostname(),
        os.getpid(),
        fewest,
        most,
        submitted_at=now,
        cores=float(max(1, size.cpus)),  # nodes on this machine share its cores, and compute with one thread each
        gpus=num_gpus(options),
        memory_mb=size.memory_mb,
        priority=options.priority or 0,
        weight=options.weight or 1.0,
        owner=owner or "",
        deadline_at=now + options.deadline if options.deadline is not None else 0.0,
    )
