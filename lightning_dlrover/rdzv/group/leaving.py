"""End a worker's process on request, or when its agent has ended."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from typing import Any

import psutil

from lightning_dlrover.rdzv.etcd.errors import EtcdError, EtcdUnavailableError, LeaseLostError
from lightning_dlrover.rdzv.live.membership import Membership

__all__ = ["DrainOnSigterm", "end_with_agent"]

log = logging.getLogger(__name__)

AGENT_GRACE_S = 30.0
"""Seconds from SIGTERM until torchrun kills a worker. Without its agent, a worker that cannot hand over ends itself by then."""


class DrainOnSigterm:
    """Makes SIGTERM drain this worker, which hands over and leaves, beside the script's own handler of the signal.

    Args:
        wait_timeout_s: limit on trying to write the request; `AGENT_GRACE_S` if the agent has ended.
        agent_pid: process id of the agent; 0: unknown.
    """

    def __init__(self, membership: Membership, wait_timeout_s: float, agent_pid: int = 0) -> None:
        self._membership = membership
        self._wait_timeout_s = wait_timeout_s
        self._agent_pid = agent_pid
        self._pid = os.getpid()
        self._of_script: Any = None  # the script's handler; no function if it has none
        self._is_running = False
        self._is_listening = False

    def listen(self) -> None:
        """Take the place of the signal's handler, which is called, too. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._is_listening = True
            self.keep()

    def keep(self) -> None:
        """Listen again if the script has set a handler meanwhile. Call it from the main thread, now and then."""
        if self._is_listening and (found := signal.getsignal(signal.SIGTERM)) != self._handle:
            self._of_script = found
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._is_running:
            return  # the script's handler has called the one that it replaced
        is_worker = os.getpid() == self._pid
        if is_worker:
            # A handler must not wait for etcd: the main thread may hold a lock that the client needs.
            threading.Thread(target=self._leave, name="dlrover-drain", daemon=True).start()
        if callable(self._of_script):
            self._is_running = True
            try:
                self._of_script(signum, frame)
            finally:
                self._is_running = False
        elif not is_worker:  # a process that the worker has forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self) -> None:
        # While etcd is unavailable training goes on, and a change of membership waits.
        membership = self._membership
        began, is_explained = time.monotonic(), False
        deadline = began + self._wait_timeout_s
        while not membership.own.evicted:
            try:
                membership.own.drain("the worker received SIGTERM")
                return
            except (EtcdUnavailableError, LeaseLostError) as error:
                problem: EtcdError = error
            except EtcdError as error:
                problem, deadline = error, 0.0
            # An agent that is signalled twice, as by the threads of a killed parent, ends without killing its worker.
            if time.monotonic() > (min(deadline, began + AGENT_GRACE_S) if _has_ended(self._agent_pid) else deadline):
                # The request cannot be written, so no round would ever release this worker. The others will detect its end.
                log.warning("worker %s ends at once, it cannot announce that it leaves: %s", membership.worker_id, problem)
                os._exit(128 + signal.SIGTERM)
            if not is_explained and isinstance(problem, EtcdUnavailableError):
                is_explained = True
                log.warning(
                    "worker %s was asked to leave (SIGTERM), and cannot hand over because etcd does not answer. It trains on "
                    "until etcd is back, or until its agent kills it, which torchrun does after 30 s. If no other worker goes "
                    "on, start the job again with the newest checkpoint (trainer.fit(ckpt_path=...)): %s",
                    membership.worker_id,
                    problem,
                )
            time.sleep(0.1)


def end_with_agent(agent_pid: int) -> None:
    """Make this process receive SIGTERM when its agent ends: no other process would restart it, or end it with its node.

    Args:
        agent_pid: process id of the agent; 0: unknown.

    Raises:
        SystemExit: the agent has already ended.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if _has_ended(agent_pid):
        # The agent ended while this process was importing torch, too early for the signal.
        raise SystemExit(f"the elastic agent of this worker, process {agent_pid}, has ended: so does the worker")


def _has_ended(agent_pid: int) -> bool:
    """Return whether the agent is known and has ended."""
    if not agent_pid:
        return False
    try:
        return bool(psutil.Process(agent_pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
