"""Run the simulations of a study that are not on record yet, one after the other or several at a time."""

from __future__ import annotations

import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence

from lightning_dlrover.planner.cluster.elastic import make_elastic
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings
from lightning_dlrover.simulate.records import Results, Simulated
from lightning_dlrover.simulate.study import Inputs, PolicyMaker, Question, answer

__all__ = ["registered_policy", "run_study"]


def registered_policy(name: str, seed: int) -> Policy:
    """Return a policy of the registry.

    Raises:
        ValueError: there is no such policy.
    """
    return make_elastic(name, PolicySettings(seed=seed))


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
    # Not forked: the threads of a progress bar may hold a lock at that moment.
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(asked)), _leave_interrupts) as pool:
        yield from pool.imap_unordered(functools.partial(_answer, inputs, make_policy), asked)


def _answer(inputs: Inputs, make_policy: PolicyMaker, question: Question) -> Simulated:
    return answer(inputs, question, make_policy)


def _leave_interrupts() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the first process ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
