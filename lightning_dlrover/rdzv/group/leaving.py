"""End a worker's process when it is asked to, or when its agent has ended."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from typing import Any

import psutil

from lightning_dlrover.rdzv.etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)
from lightning_dlrover.rdzv.live.membership import Membership

__all__ = ["drain_on_sigterm", "end_with_agent"]

log = logging.getLogger(__name__)


def drain_on_sigterm(membership: Membership, wait_timeout_s: float) -> None:
    """Let SIGTERM mean that this worker hands over and leaves; in any thread but the main one this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        return

    def leave() -> None:
        # While etcd is away training goes on, and a change of membership waits.
        deadline = time.monotonic() + wait_timeout_s
        while not membership.evicted:
            try:
                membership.drain("the worker received SIGTERM")
                return
            except (EtcdUnavailableError, LeaseLostError) as error:
                problem: EtcdError = error
            except EtcdError as error:
                problem, deadline = error, 0.0
            if time.monotonic() > deadline:
                # Nobody can be told, so nobody would ever let this worker go; the others will notice that it is gone.
                log.warning("worker %s ends at once, it cannot say that it leaves: %s", membership.worker_id, problem)
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.1)

    def drain(signum: int, frame: Any) -> None:
        # A handler must not wait for etcd: the main thread may hold a lock that the client needs.
        threading.Thread(target=leave, name="dlrover-drain", daemon=True).start()

    signal.signal(signal.SIGTERM, drain)


def end_with_agent() -> None:
    """Let this process receive SIGTERM when its agent ends: nobody would restart it, or end it with its node.

    Raises:
        SystemExit: the agent has ended already.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    agent = os.environ.get("DLROVER_AGENT_PID", "")
    if not agent:
        return
    try:
        has_ended = psutil.Process(int(agent)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        has_ended = True
    if has_ended:
        # While this process was importing torch: too early for the signal.
        raise SystemExit(f"the elastic agent of this worker, process {agent}, has ended: so does the worker")
