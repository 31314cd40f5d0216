"""Run torchrun, with one line instead of its summary for workers that were ended from outside.

A worker that was killed, or drained with all others, leaves no error of the script. Torchrun's traceback and summary of
twenty-five lines would hide what matters in the node's output.

Run as `python -m lightning_dlrover.rdzv.agents.program ARGS...`; ARGS are those of torchrun.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

__all__ = ["ended_from_outside", "main"]

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_BY_EXIT_CODE = {code: sign for sign in _SIGNALS for code in (-sign, 128 + sign)}  # as Python and as a shell report it


def main() -> None:
    try:
        run.main()
    except ChildFailedError as error:
        if not (text := ended_from_outside(error.failures)):
            raise
        print(text, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def ended_from_outside(failures: Mapping[int, ProcessFailure]) -> str:
    """One line on workers none of which ended by an error of its own; empty if one did."""
    if not failures or any(failure.exitcode not in _BY_EXIT_CODE for failure in failures.values()):
        return ""
    ends = [
        f"process {failure.pid} was ended by {_BY_EXIT_CODE[failure.exitcode].name} (exitcode: {failure.exitcode})"
        for _, failure in sorted(failures.items())
    ]
    return (
        f"no error of the script: {', '.join(ends)}; likely causes are its scheduler, a drain, and the kernel when memory was "
        "short"
    )


if __name__ == "__main__":
    main()
