"""Start several elastic agents on this host, each with one worker and a GPU of its own.

Run as `python -m lightning_dlrover.components.host_agents N ARGS...`; ARGS are those of torchrun, without `--nproc-per-node`.
N is a number of workers, or `gpu`: as many as GPUs are visible here. `--nnodes=MIN:MAX` counts agents, so workers.
`dlrover run --workers-per-node N` starts every node this way, through `node.py`.

A stock agent with N workers restarts all of them when one fails. Of N agents only the one that has lost its worker restarts it.
All processes are in one allocation or container, so NCCL connects their GPUs through NVLink and shared memory, even where a
process sees only its own GPU (`CUDA_VISIBLE_DEVICES`).

An agent that ends does not end the others. All of them get SIGTERM when this process does, or when it ends. The exit code is
that of the first agent that failed, after all have ended.

A node of `dlrover run` is released as a whole, and its failure is judged by its first error. On such a node:

- a worker that was killed is started again, with another agent, up to `MAX_KILLS` times an hour;
- when an agent fails for any other reason, the workers of the others hand over and leave, as they do on SIGUSR1.

    together -> leaving -> ended        leaving: each worker gets SIGTERM once; an agent that starts another one is ended
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import psutil

from lightning_dlrover import variables
from lightning_dlrover.components import LEAVE_SIGNAL
from lightning_dlrover.components.targets.machine import DEVICES_VARIABLE, visible_devices

POLL_S = 0.2

MAX_KILLS = 3
"""Times that one worker of a node may be killed within `KILLS_S`. Then its host is in trouble, or lacks memory."""

KILLS_S = 3600.0

_REQUESTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a worker to end."""

LEAVE_S = 60.0
"""Seconds that leaving workers have for their hand-over before their agents end them."""


def environments(wanted: str, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the additional environment variables of each agent; `wanted` is a number of agents, or `gpu`.

    Raises:
        ValueError: there are fewer GPUs than agents, or `wanted` is malformed.
    """
    devices = visible_devices(environ)
    if wanted != "gpu" and not (wanted.isdecimal() and int(wanted)):
        raise ValueError(f"{wanted!r} is not a number of workers, and not `gpu`")
    if wanted == "gpu" and not devices:
        raise ValueError("no GPU is visible here: give a number of workers, or check nvidia-smi and CUDA_VISIBLE_DEVICES")
    number = len(devices) if wanted == "gpu" else int(wanted)
    if 0 < len(devices) < number:
        raise ValueError(
            f"{number} workers need a GPU each, and {len(devices)} are visible here ({', '.join(devices)}): start fewer, show "
            f"more in {DEVICES_VARIABLE}, or set it to '' to train on the CPU"
        )
    parent = {variables.PARENT_PID: str(os.getpid())}
    return [{**parent, **({DEVICES_VARIABLE: devices[i]} if devices else {})} for i in range(number)]


def is_started_again(code: int, num_kills: int) -> bool:
    """Whether an ended agent's worker was killed, and not too often.

    Args:
        code: exit code of the agent. If it was killed itself (a negative one), its worker may be left, and has the GPU.
        num_kills: earlier kills of its workers within `KILLS_S`.
    """
    return code > 128 and code - 128 not in _REQUESTS and num_kills < MAX_KILLS


class _Agents:
    """The agents of this host. With `is_node`, it is a node of `dlrover run`, which ends as a whole."""

    def __init__(self, command: Sequence[str], is_node: bool) -> None:
        self._command = command
        self._is_node = is_node
        self._variables: Sequence[Mapping[str, str]] = ()  # one mapping per agent
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._killed_at: dict[int, list[float]] = {}  # keyed by agent
        self._asked: dict[int, set[psutil.Process]] = {}  # workers that were asked to leave, by agent
        self._left_at: float | None = None  # time at which the workers were first asked
        self._is_ending = False
        self._failed = 0

    def _start(self, number: int) -> None:
        self._living[number] = subprocess.Popen(self._command, env={**os.environ, **self._variables[number]})
        if self._is_ending:  # the signal may have come before the entry
            self._living[number].terminate()

    def end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        for agent in self._living.values():
            agent.send_signal(number)

    def leave(self, number: int = 0, frame: FrameType | None = None) -> None:
        if self._left_at is None:
            self._left_at = time.monotonic()

    def run(self, variables_of_each: Sequence[Mapping[str, str]]) -> int:
        """Start an agent with each of these variables. Return the exit code of the first that failed, once all have ended."""
        self._variables = variables_of_each
        for number in range(len(variables_of_each)):
            self._start(number)
        while self._living:
            time.sleep(POLL_S)
            for number, agent in list(self._living.items()):
                if (code := agent.poll()) is not None:
                    del self._living[number]
                    self._note_end(number, code)
            if self._left_at is not None:
                self._ask_to_leave(is_late=time.monotonic() - self._left_at > LEAVE_S)
        return self._failed

    def _note_end(self, number: int, code: int) -> None:
        if not code:
            return
        text = f"agent {number} has ended with {code}; {len(self._living)} others are left"
        now = time.monotonic()
        kills = [at for at in self._killed_at.get(number, ()) if now - at < KILLS_S]
        is_together = self._is_node and self._left_at is None and not self._is_ending
        if is_together and is_started_again(code, len(kills)):
            self._killed_at[number] = [*kills, now]
            text = f"agent {number}: its worker was killed and is started again"
            self._start(number)
        else:
            self._failed = self._failed or (128 - code if code < 0 else code)
            if is_together and self._living:
                text += ", whose workers hand over and leave: this node is released as a whole"
                self.leave()
        print(text, file=sys.stderr, flush=True)

    def _ask_to_leave(self, is_late: bool) -> None:
        """Send SIGTERM to each agent's worker once, and to the agent, which ends its worker at once, if that is another one."""
        for number, agent in self._living.items():
            workers: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                workers = psutil.Process(agent.pid).children()
            asked = self._asked.setdefault(number, set())
            if is_late or (asked and not asked.issuperset(workers)):
                agent.terminate()
                continue
            for worker in workers:
                if worker not in asked:
                    asked.add(worker)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        worker.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the agents and wait for them; return the exit code.

    Raises:
        ValueError: a node of `dlrover run` has too few GPUs; its controller reports the error.
    """
    wanted, *of_agents = sys.argv[1:] if arguments is None else arguments or [""]
    is_node = variables.NODE in os.environ
    agents = _Agents([sys.executable, "-m", "lightning_dlrover.components.node", "--nproc-per-node=1", *of_agents], is_node)
    signal.signal(signal.SIGTERM, agents.end)
    signal.signal(LEAVE_SIGNAL, agents.leave)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the agents, too
    try:
        each = environments(wanted, os.environ)
    except ValueError as error:
        if is_node:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return agents.run(each)


if __name__ == "__main__":
    sys.exit(main())
