"""Operations of a worker's process for the membership protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.reach import Patrol, Reach
from lightning_dlrover.rdzv.group.reports import Reports
from lightning_dlrover.rdzv.job.records import RoundRecord, WorkerState
from lightning_dlrover.rdzv.live.member import (
    CannotMeetError,
    EvictedError,
    Formation,
    TooLateError,
    VoidRoundError,
    WorldError,
)
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.worker_view import WorkerView

__all__ = ["ProcessBackend"]

log = logging.getLogger(__name__)

T = TypeVar("T")

NEWS_S = 3.0
"""Seconds of waiting after which a worker logs the reason."""

WAIT_PROBE_S = 0.05
"""Seconds between two probes of workers during a wait."""

FULL_PAUSE_S = 0.2
"""Seconds between two attempts to write a record while etcd's database is full."""


class ProcessBackend:
    """Implementation of `MemberBackend` that blocks the worker's thread.

    Args:
        reach: finds members that do not respond.
        form, destroy: bring the round's process groups up, and tear them down.
    """

    def __init__(
        self,
        config: WorldConfig,
        membership: Membership,
        reach: Reach,
        reports: Reports,
        form: Callable[[RoundRecord, bytes], Formation],
        destroy: Callable[[], None],
    ) -> None:
        self._config = config
        self._membership = membership
        self._reach = reach
        self._reports = reports
        self._form = form
        self._destroy = destroy

    @property
    def worker_id(self) -> str:
        return self._membership.worker_id

    @property
    def view(self) -> WorkerView:
        return self._membership.view

    async def until(
        self, found: Callable[[WorkerView], T | None], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> T:
        membership = self._membership
        news_at = time.monotonic() + NEWS_S
        patrol = Patrol(membership, probe, WAIT_PROBE_S).pause()

        def tick() -> None:
            nonlocal news_at
            if time.monotonic() > news_at:
                news_at = float("inf")
                self._reports.wait(what)
            patrol.look()

        try:
            limit_s = timeout_s or self._config.wait_timeout_s
            return membership.wait_for(found, limit_s, what, tick, membership.is_being_staffed)
        except TimeoutError as error:
            raise TooLateError(str(error)) from error

    async def write(
        self, state: WorkerState, number: int, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        # While etcd is unavailable a change of membership waits.
        deadline = time.monotonic() + self._config.wait_timeout_s
        while True:
            try:
                self._membership.own.update(state, number, fingerprint, unreachable)
                return
            except EtcdUnavailableError as error:
                if time.monotonic() > deadline:
                    raise WorldError(f"worker {self.worker_id} could not publish that it is {state}: {error}") from error
                time.sleep(FULL_PAUSE_S)  # a full etcd refuses writes at once

    async def bury_the_dead(self, workers: Sequence[str]) -> None:
        Patrol(self._membership, workers, WAIT_PROBE_S).look()

    async def out_of_reach(self, workers: Sequence[str]) -> list[str]:
        return self._reach.silent(workers)

    async def form(self, target: RoundRecord, hello: bytes) -> Formation:
        try:
            formation = self._form(target, hello)
        except EvictedError:
            raise
        except (VoidRoundError, CannotMeetError, RuntimeError) as error:
            log.info("run %s: round %d did not form: %s", self._config.run_id, target.number, error or type(error).__doc__)
            raise
        self._membership.has_reached(target.members)
        return formation

    async def destroy(self) -> None:
        self._destroy()
