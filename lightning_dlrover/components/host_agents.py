"""Start several elastic agents on this host, each with one worker and a GPU of its own.

Run as `python -m lightning_dlrover.components.host_agents N ARGS...`; ARGS are those of torchrun, without `--nproc-per-node`.
N is a number of workers, or `gpu`: as many as GPUs are visible here. `--nnodes=MIN:MAX` counts agents, so workers.

A stock agent with N workers restarts all of them when one fails. Of N agents only the one that has lost its worker restarts it.
All processes are in one allocation or container, so NCCL connects their GPUs through NVLink and shared memory: it does so also
where a process sees none but its own (`CUDA_VISIBLE_DEVICES`).

An agent that ends does not end the others. All of them get SIGTERM when this process does, or when it ends. The exit code is
that of the first agent that failed, after all have ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from lightning_dlrover import variables
from lightning_dlrover.components.targets.machine.devices import DEVICES_VARIABLE, visible_devices

__all__ = ["environments", "main"]

POLL_S = 0.2


def environments(wanted: str, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables that each agent gets in addition.

    Args:
        wanted: a number of agents, or `gpu`.

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the agents and wait for them; return the exit code."""
    wanted, *of_agents = sys.argv[1:] if arguments is None else arguments or [""]
    try:
        each = environments(wanted, os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    agents: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: FrameType | None) -> None:
        for agent in agents:
            agent.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the agents, too
    command = [sys.executable, "-m", "lightning_dlrover.components.node", "--nproc-per-node=1", *of_agents]
    for own in each:
        agents.append(subprocess.Popen(command, env={**os.environ, **own}))
    failed = 0
    left = dict(enumerate(agents))
    while left:
        time.sleep(POLL_S)
        for number, agent in list(left.items()):
            if (code := agent.poll()) is not None:
                del left[number]
                if code:
                    failed = failed or (128 - code if code < 0 else code)
                    print(f"agent {number} has ended with {code}; {len(left)} others are left", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
