"""Run torchrun, with one line instead of its own traceback and its summary of workers that failed.

A worker that was killed, or drained with all others, leaves no error of the script. One that failed has printed its error.
Torchrun's fifty lines would hide it.

Run it as `python -m lightning_dlrover.rdzv.agents.program ARGS...`, with torchrun's ARGS.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_dlrover.private_names import check_names

if TYPE_CHECKING:
    from lightning_dlrover.spares import Spares

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_BY_EXIT_CODE = {code: sign for sign in _SIGNALS for code in (-sign, 128 + sign)}  # exit codes of both Python and a shell


def main() -> None:
    try:
        run.main()
    except ChildFailedError as error:
        print(ended_from_outside(error.failures) or _failed(error.failures), file=sys.stderr, flush=True)
        raise SystemExit(exit_code(error.failures)) from None


def exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return 128 and the number of the signal that ended the only worker, as a shell does; 1 for all other failures."""
    codes = [failure.exitcode for failure in failures.values()]
    return 128 - codes[0] if len(codes) == 1 and codes[0] < 0 else 1


def ended_from_outside(failures: Mapping[int, ProcessFailure]) -> str:
    """Summarize in one line workers that were all ended from outside; empty if one ended by its own error."""
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


def _failed(failures: Mapping[int, ProcessFailure]) -> str:
    return "; ".join(
        f"process {failure.pid} has failed (exitcode: {failure.exitcode}), see its error above"
        for _, failure in sorted(failures.items())
    )


_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler"


def start_workers_from(spares: Spares) -> None:
    """Let the agent of this process start its workers by `spares`, with the files and variables that torchrun gives them.

    Raises:
        MissingNamesError: the installed torch starts workers in another way.
    """
    check_names("torch", {_HANDLER: ["_popen", "_stdout", "_stderr"]})
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return spares.start(args, env, stdout=handler._stdout, stderr=handler._stderr)

    SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    main()
