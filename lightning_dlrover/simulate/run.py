"""Run the simulations of a study that are not on record yet, one after the other or several at a time."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from lightning_dlrover.planner.cluster.elastic import make_elastic
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings
from lightning_dlrover.simulate.records import Results, Simulated
from lightning_dlrover.simulate.study import Inputs, PolicyMaker, Question, answer

__all__ = ["registered_policy", "run_study"]

END_WITHIN_S = 60.0
"""Seconds within which a process ends that has no more to do, or was told to end. It needs a few milliseconds."""


def registered_policy(name: str, seed: int) -> Policy:
    """Return a policy of the registry without a bound on waiting. That is a rule of ours for pools, which no paper has.

    Raises:
        ValueError: there is no such policy.
    """
    return make_elastic(name, PolicySettings(max_wait_s=math.inf, seed=seed))


def run_study(
    inputs: Inputs,
    asked: Sequence[Question],
    results: Results,
    *,
    make_policy: PolicyMaker = registered_policy,
    processes: int = 1,
    ended: Callable[[Simulated], None] | None = None,
) -> list[Simulated]:
    """Answer all questions, and return the answers in their order. Each answer is on record as soon as it is known.

    Args:
        results: those of earlier runs are taken from there.
        make_policy: a function of a module, as other processes import it.
        processes: simulations at a time.
        ended: called after each new one.
    Raises:
        SimulationError: a policy exceeds a limit.
    """
    keys = [question.key(inputs) for question in asked]
    missing = [question for question, key in zip(asked, keys, strict=True) if key not in results.by_key]
    for simulated in _answers(inputs, missing, make_policy, processes):
        results.add(simulated)
        if ended is not None:
            ended(simulated)
    return [results.by_key[key] for key in keys]


def _answers(inputs: Inputs, asked: Sequence[Question], make_policy: PolicyMaker, processes: int) -> Iterator[Simulated]:
    if processes <= 1 or len(asked) <= 1:
        yield from (answer(inputs, question, make_policy) for question in asked)
        return
    # Not forked: the threads of a progress bar may hold a lock at that moment. Each process has a pipe of its own, so that it
    # can be ended at any time; a pool shares queues with locks, which a process that was ended in a write never releases.
    context = multiprocessing.get_context("spawn")
    left = deque(asked)
    workers: dict[Connection, SpawnProcess] = {}
    started: list[SpawnProcess] = []
    try:
        for _ in range(min(processes, len(asked))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(inputs, make_policy, there), daemon=True)
            process.start()
            started.append(process)
            workers[here] = process
            there.close()
            here.send(left.popleft())
        while workers:
            for ready in wait(list(workers)):
                connection = cast("Connection", ready)
                found = _received(connection, workers[connection])
                if left:
                    connection.send(left.popleft())
                else:
                    connection.send(None)
                    del workers[connection]
                yield found
    finally:
        for process in workers.values():
            process.terminate()
        _join(started)


def _join(processes: Sequence[SpawnProcess]) -> None:
    """Wait until processes have ended that have no more to do, or were told to end.

    Raises:
        RuntimeError: some did not end in time, and were killed.
    """
    killed = []
    for process in processes:
        process.join(END_WITHIN_S)
        if process.exitcode is None:
            process.kill()
            process.join(END_WITHIN_S)
            killed.append(f"{process.name} (pid {process.pid})")
    if killed:
        raise RuntimeError(
            f"simulating processes had not ended {END_WITHIN_S:g} s after they were told to, and were killed: "
            f"{', '.join(killed)}; perhaps something has stopped them, or the machine is short of memory. "
            "All finished simulations are on record: give the same command again"
        )


def _received(connection: Connection, process: SpawnProcess) -> Simulated:
    try:
        found = connection.recv()
    except EOFError:
        _join([process])
        raise RuntimeError(
            f"a simulating process has ended with exit code {process.exitcode}; if memory is short, use fewer processes"
        ) from None
    if isinstance(found, Exception):
        raise found
    return cast("Simulated", found)


def _work(inputs: Inputs, make_policy: PolicyMaker, connection: Connection) -> None:
    """Answer the questions of a connection until there is none, or the first process is gone."""
    # A terminal sends Ctrl-C to all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        while (question := connection.recv()) is not None:
            try:
                found: Simulated | Exception = answer(inputs, question, make_policy)
            except Exception as error:
                found = error
            connection.send(found)
