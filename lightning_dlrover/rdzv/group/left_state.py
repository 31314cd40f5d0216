"""Keep the state of a job in this host's memory while an elastic agent replaces its group of workers.

An agent of several workers ends all of them when one fails. If no worker of another node goes on, the leaving workers write the
state into a folder in shared memory. The agent's next group of workers reads it.

The folder belongs to the agent, so it holds the state of only one job. It is removed when the agent ends. The folder of a
killed agent is removed when the next agent on the host creates one. A state is complete or absent, and replaces the one before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from lightning_dlrover.rdzv.group import transfer

__all__ = ["PREFIX", "ROOT", "HostStateCache", "HostStateError", "newest", "resume"]

log = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
PREFIX = "dlrover-agent-"


class HostStateError(RuntimeError):
    """A state cannot be written to this host's memory, or read from it."""


class HostStateCache:
    """The state left by a former group of this agent, if any.

    Args:
        folder: the agent's folder for the state.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state"

    def write(self, step: int, packed: transfer.Packed) -> int:
        """Replace the kept state; return the bytes written.

        Raises:
            HostStateError: there is no room; the former state stays.
        """
        self._remove_unfinished()
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write(json.dumps({"step": step}).encode() + b"\n")
                transfer.write(packed, file)
                num_bytes = file.tell()
            unfinished.rename(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise HostStateError(
                f"the state of step {step} could not be kept in {self._file.parent}: {error}. Give the host, or its container, "
                "more shared memory (docker run --shm-size), or start one agent per worker"
            ) from error
        return num_bytes

    def remove(self) -> None:
        """Remove the state, for example if no worker can continue from it."""
        with contextlib.suppress(OSError):
            self._file.unlink()

    def _remove_unfinished(self) -> None:
        """Free the memory of unfinished states left by workers that were killed while writing."""
        for unfinished in self._file.parent.glob(f"{self._file.name}.*"):
            writer = unfinished.suffix.removeprefix(".")
            if not Path("/proc", writer).exists():
                with contextlib.suppress(OSError):
                    unfinished.unlink()

    def step(self) -> int | None:
        """Return the optimizer steps made before the state was written; None: there is no state."""
        try:
            with self._file.open("rb") as file:
                return int(json.loads(file.readline(1000))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read(self, classes: Sequence[type] = (), names: Collection[str] = ()) -> Any:
        """Return the kept object.

        Args:
            classes: classes accepted in addition to plain data.
            names: classes and functions accepted by name, see `transfer.names_in`.

        Raises:
            HostStateError: the state cannot be read.
        """
        try:
            with self._file.open("rb") as file:
                file.readline(1000)
                return transfer.read(file, classes, names)
        except (OSError, transfer.TransferError) as error:
            raise HostStateError(f"the state in {self._file} cannot be read: {error}") from error


def newest(steps: Sequence[int | None]) -> tuple[int, int]:
    """Return the largest step of the states on the members' hosts, and its rank; -1 if there is no state."""
    step = max((step for step in steps if step is not None), default=-1)
    return step, steps.index(step) if step >= 0 else 0


def resume(
    left: HostStateCache | None,
    source: int,
    rank: int,
    receivers: Collection[int],
    load: Callable[[Any], None],
    gather: Callable[[bool], list[bool]],
    is_failure: Callable[[BaseException], bool],
    classes: Sequence[type] = (),
    names: Collection[str] = (),
) -> bool:
    """Load one member's state into the receivers. All members of a round call it.

    If a receiver cannot load the state, all members remove theirs: the next group of workers would end like this one.

    Args:
        source: rank whose host has the state.
        receivers: ranks that call `load` with the state.
        gather: returns the values of all members, by rank.
        is_failure: whether an error means that the round is broken, so that the state may still be whole.
        classes, names: see `HostStateCache.read`.

    Returns:
        Whether the source could read the state.
    """
    state: Any = None
    if left is not None and rank == source:
        try:
            state = left.read(classes, names)
        except HostStateError as error:
            log.warning("%s", error)
    if not any(gather(state is not None)):
        return False
    for receiver in (each for each in receivers if each != source):
        if rank == source:
            transfer.send(state, receiver)
        elif rank == receiver:
            state = transfer.receive(source, classes, names)
    problem: Exception | None = None
    if rank in receivers:
        try:
            load(state)
        except Exception as error:  # a state of another model, for example, may raise anything
            if is_failure(error):
                raise
            problem = error
    if not all(gather(problem is None)) and left is not None:
        left.remove()
    if problem is not None:
        raise problem
    return True
